"""Many agents that wake at once are admitted gradually; and who only waits gives its slot to whoever is next by priority."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from ringfence.kernel.operations import deciding
from ringfence.kernel.thread import Thread
from ringfence.sandbox.types import ExitReason, ProgramSpec
from ringfence.syscalls.errors import Denied
from support.heart import URL, Hand, HandProgram, Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

CONFIG = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  scheduler: {%s}\n"
STARTS = 5
STORM = 60
POST = 'http.post: "http://pay.test/**"'


@pytest.fixture
def directory() -> Any:
    with short_directory() as directory:
        yield directory


@pytest.fixture
async def storm(dsn: str, directory: Any) -> AsyncIterator[Heart]:
    async with heart_on(dsn, directory, CONFIG % f"starts: {STARTS}") as heart:
        yield heart


@pytest.fixture
async def narrow(dsn: str, directory: Any) -> AsyncIterator[Heart]:
    async with heart_on(dsn, directory, CONFIG % "agents: 1") as heart:
        yield heart


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not met():
            await asyncio.sleep(0.002)


class Gate:
    """Sandboxes that are being made stand still until the test lets one go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = self.most = self.made = 0
        self.go = asyncio.Semaphore(0)
        make = Hand.start

        async def start(hand: Hand, spec: ProgramSpec) -> HandProgram:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await self.go.acquire()
            self.under_way -= 1
            self.made += 1
            return await make(hand, spec)

        monkeypatch.setattr(Hand, "start", start)


async def asleep(heart: Heart, number: int, **more: Any) -> Thread:
    thread = await heart.agent(name=f"a{number}", allow=['messages.*: "*"'])
    await heart.processes.set_state(thread, "sleeping", waiting_for="a message", asleep=True, **more)
    thread = await heart.adopted_again(thread)
    heart.kernel.scheduler.adopt(thread)
    return thread


async def test_sixty_that_wake_at_once_are_started_a_few_at_a_time(
    storm: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them by their timers, half by messages that come together."""
    gate = Gate(monkeypatch)
    soon = datetime.now(UTC) + timedelta(seconds=1)
    threads = [
        await asleep(storm, number, **({"wake_at": soon} if number % 2 else {})) for number in range(STORM)
    ]
    storm.kernel.scheduler.timers.start()
    for thread in threads[::2]:
        storm.core.mailboxes.wake(thread.key)
    try:
        await until(lambda: gate.under_way == STARTS)
        view = storm.processes.turns.view()
        assert view["live"] == STARTS
        for left in range(STORM - 1, -1, -1):
            gate.go.release()
            await until(lambda left=left: gate.made == STORM - left)
            await until(lambda left=left: gate.under_way == min(STARTS, left))
        await until(lambda: all(thread.state == "running" for thread in threads))
        assert gate.most == STARTS
        assert len(storm.hand.programs) == STORM
        assert storm.processes.turns.view()["waiting"] == 0
    finally:
        await storm.kernel.scheduler.timers.stop()


async def test_who_lingers_is_not_put_to_sleep_for_starts_that_only_come_one_after_the_other(
    storm: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = await waiting(storm, "message", linger="1h")
    gate = Gate(monkeypatch)
    threads = [await asleep(storm, number) for number in range(STARTS + 3)]
    for thread in threads:
        storm.core.mailboxes.wake(thread.key)
    await until(lambda: storm.processes.turns.view()["waiting"] == 3)
    assert not storm.processes.turns.pressed
    for _ in threads:
        gate.go.release()
    await until(lambda: all(thread.state == "running" for thread in threads))
    assert (rests.asleep, rests.program is None) == (False, False)


async def waiting(heart: Heart, kind: str, *, linger: str = "1h", more: str = "") -> Thread:
    """An agent with a live program, all of whose lanes wait for something."""
    thread = await heart.agent(
        name=kind,
        allow=['messages.*: "*"', "sleep", "ask"],
        ask=[POST],
        more=f"approvals: {{linger: {linger}}}\n{more}",
        started=True,
    )
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "message": ("messages.receive", {"timeout_ms": 86_400_000}),
        "timer": ("sleep", {"duration_ms": 3_600_000}),
        "short": ("sleep", {"duration_ms": 60_000}),
        "approval": ("http.post", {"url": URL}),
        "question": ("ask", {"question": "May I?"}),
    }
    action, arguments = calls[kind]
    thread.live_lanes = 1
    heart.begin(thread, 0, action, **arguments)
    await until(lambda: thread.state in ("sleeping", "parked"))
    return thread


@pytest.mark.parametrize("kind", ["message", "timer", "approval", "question"])
async def test_who_only_waits_gives_its_slot_to_the_next_by_priority(narrow: Heart, kind: str) -> None:
    rests = await waiting(narrow, kind)
    low, high = [
        await narrow.agent(name=name, more=f"priority: {name}\nrestart: {{policy: never}}")
        for name in ("low", "high")
    ]
    # Both ask while the one that waits is busy with something else, so both are queued when its slot is free.
    async with rests.operation:
        for thread in (low, high):
            await narrow.processes.start_or_fail(thread)
        assert [thread.state for thread in (rests, low, high)][1:] == ["pending", "pending"]
        assert rests.program is not None
    await until(lambda: high.state == "running")
    assert (rests.asleep, rests.program, low.state) == (True, None, "pending")
    # Nothing rings any more for who sleeps: with hundreds of them each end of a program would look at all.
    linger: Any = narrow.processes
    assert linger.linger._alarms == {}
    # Its wait goes on without a process; when it is over it queues behind the other, by the same rules.
    await wake(narrow, rests, kind)
    await until(lambda: rests.state == "pending")
    high.program.end(ExitReason.EXIT, 0)  # type: ignore[union-attr]
    await until(lambda: rests.program is not None)
    assert low.state == "pending"
    rests.program.end(ExitReason.EXIT, 0)  # type: ignore[union-attr]
    await until(lambda: low.state == "running")


async def test_what_nobody_answered_in_time_is_denied_to_whoever_wakes(storm: Heart, dsn: str) -> None:
    """C32: also where another lane of it waits on, and under the next kernel."""
    thread = await waiting(storm, "approval")
    other = storm.begin(thread, 0, "ask", lane="0.0", question="And this?")
    await until(lambda: len(thread.waits) == 2)
    await storm.processes.set_state(thread, "parked", waiting_for="an approval", asleep=True)
    await storm.processes.end_program(thread)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        late = "update approvals set expires_at = clock_timestamp() - interval '1 second' where action = 'http.post'"
        await connection.execute(late)
    flight = thread.by_lane["0", 0]
    assert flight.answer is not None
    storm.core.approvals.notice(thread.key)
    assert isinstance((await flight.answer).failure, Denied)
    await until(lambda: thread.program is not None and thread.state != "pending")
    await denied_again(storm, thread)
    assert not other.done()
    await storm.processes.end_program(thread)
    await denied_again(storm, await storm.adopted_again(thread))
    assert len(await storm.core.store.approvals(thread.key, everything=True)) == 2


async def denied_again(heart: Heart, thread: Thread) -> None:
    answer = await heart.call(thread, 0)
    assert (answer.replayed, type(answer.failure)) == (True, Denied)
    assert answer.failure is not None
    assert "nobody answered" in answer.failure.message
    assert [flight.lane for flight in thread.flights.values()] == ["0.0"]


async def wake(heart: Heart, thread: Thread, kind: str) -> None:
    if kind in ("approval", "question"):
        (record,) = await heart.core.store.approvals(thread.key, everything=False)
        await deciding.approve(heart.kernel, record.id, b"", "yes", 0, "root")
    else:
        await heart.processes.wake(thread)


async def test_a_wait_that_ends_within_a_second_keeps_its_slot(
    narrow: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To end a process and start it again would take longer."""
    monkeypatch.setattr("ringfence.kernel.linger.PRESSED_S", 61.0)
    rests = await waiting(narrow, "short")
    other = await narrow.agent(name="other")
    await narrow.processes.start_or_fail(other)
    async with rests.operation:
        assert (other.state, rests.asleep, rests.program is None) == ("pending", False, False)


async def test_who_has_spent_its_budget_holds_no_slot(narrow: Heart) -> None:
    thread = await narrow.agent(
        name="spent", allow=['fs.*: "/workspace/**"'], more="budgets: {total: {calls: 1}}", started=True
    )
    other = await narrow.agent(name="other")
    await narrow.processes.start_or_fail(other)
    assert other.state == "pending"
    await narrow.call(thread, 0, "fs.read")
    answer = await narrow.call(thread, 1, "fs.read")
    # As the agent's door does with such an answer.
    await narrow.parker(thread)(thread, answer)
    await until(lambda: other.state == "running")
    assert (thread.state, thread.program) == ("parked", None)
