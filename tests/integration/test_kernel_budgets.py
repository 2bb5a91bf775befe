"""Budgets of a real agent: reserved before the spend, exact under parallel calls, kept over restarts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import BudgetExhausted, Denied, RingfenceError
from support.scenes import Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec: {ceilings: {budgets: {total: {destructive: 2}}}}
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database, config=CONFIG) as scene:
        yield scene


def view(held: Held, name: str) -> dict[str, Any]:
    return next(b for b in held.operator.ask("Show", agent=held.id)["budgets"] if b["name"] == name)


def test_a_spent_total_refuses_and_says_so(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {total: {calls: 3}}")
    for number in range(3):
        held.rf.state.put("spent/x", number)
    error = held.refused(BudgetExhausted, lambda: held.rf.state.put("spent/x", 9))
    assert error.metadata["budget"] == "calls"
    assert (error.metadata["limit"], error.metadata["used"]) == ("3", "3")
    assert scene.sql("select value from state where key = 'spent/x'") == [(b"2",)]
    assert (view(held, "calls")["used"], view(held, "calls")["left"]) == (3, 0)
    assert [(s["outcome"], s["reason"]) for s in held.steps()][-1] == ("refused", "BudgetExhausted")


def test_parallel_calls_never_pass_a_total(scene: Scene) -> None:
    """C49: eight at once against four that are left."""
    held = scene.hold(allow=['fs.*: "/workspace/**"'], more="budgets: {total: {calls: 4}}")
    outcomes: list[str] = []
    lock = threading.Lock()

    def append() -> None:
        try:
            held.rf.fs.append_text("count.txt", "x")
            word = "ok"
        except RingfenceError as error:
            word = error.reason
        with lock:
            outcomes.append(word)

    held.rf.parallel([append] * 8)
    assert sorted(outcomes) == ["BudgetExhausted"] * 4 + ["ok"] * 4
    assert (held.live / "count.txt").read_text() == "xxxx"


def test_a_refused_call_spends_nothing(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {total: {calls: 2}}")
    for _ in range(5):
        held.refused(Denied, lambda: held.rf.fs.write_text("a", "a"))
    assert view(held, "calls")["used"] == 0
    held.rf.state.put("refused/a", 1)
    held.rf.state.put("refused/a", 2)
    held.refused(BudgetExhausted, lambda: held.rf.state.put("refused/a", 3))


def test_what_is_spent_stays_spent_over_restarts(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {total: {calls: 3}}")
    held.rf.state.put("restarts/a", 1)
    held.rf.state.put("restarts/a", 2)
    held.disconnect()
    scene.operator.ask("Kill", agent=held.id)
    scene.kernel.kill()
    scene.kernel.start()
    scene.operator.ask("Start", agent=held.id)
    held.again()
    held.socket = scene.socket_of(held.id)
    assert view(held, "calls")["used"] == 2
    # Replay is free: the first two are answered from the journal.
    assert [held.rf.state.put("restarts/a", number) for number in (1, 2, 3)] == [1, 2, 3]
    held.refused(BudgetExhausted, lambda: held.rf.state.put("restarts/a", 4))
    assert view(held, "calls")["used"] == 3


def test_the_operators_ceiling_bounds_what_a_manifest_asks_for(scene: Scene) -> None:
    files = {name: name for name in "abcd"}
    held = scene.hold(
        allow=['fs.*: "/workspace/**"'], files=files, more="budgets: {total: {destructive: 100}}"
    )
    for name in "ab":
        held.rf.fs.delete(name)
    error = held.refused(BudgetExhausted, lambda: held.rf.fs.delete("c"))
    assert error.metadata["budget"] == "destructive"
    assert (held.live / "c").exists()
    # What isn't destructive goes on.
    held.rf.fs.write_text("c", "changed")
    assert view(held, "destructive") == {
        "name": "destructive",
        "kind": "total",
        "limit": 2,
        "used": 2,
        "left": 0,
    }


def test_a_command_that_removes_is_destructive_by_what_it_did(scene: Scene) -> None:
    held = scene.hold(allow=['fs.*: "/workspace/**"', 'exec.run: "*"'], files={name: name for name in "abcd"})
    held.rf.exec.run(["rm", "a"])
    held.rf.exec.run(["touch", "new"])
    held.rf.exec.run(["rm", "b", "new"])
    held.refused(BudgetExhausted, lambda: held.rf.exec.run(["rm", "c"]))
    assert (held.live / "c").exists()
    assert [s["effect"] for s in held.steps()] == ["DESTROY", "WRITE", "DESTROY", "WRITE"]


def test_a_rate_makes_a_call_wait(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {rate: {state.put: 2/s}}")
    for number in range(4):
        held.rf.state.put("rate/a", number)
    # The journal's own times: two tokens at once, then half a second for each further one.
    rows = scene.sql(
        "select started_us, duration_us from journal where chain = %s and phase = 1 order by step",
        scene.key_of(held.id),
    )
    assert sum(rows[3]) - rows[0][0] >= 950_000
    assert [s["outcome"] for s in held.steps()] == ["ok"] * 4
    # Other actions don't wait for it.
    assert held.rf.state.get("rate/a") == 3


def test_a_rate_that_is_full_for_longer_than_the_deadline_refuses_at_once(scene: Scene) -> None:
    from ringfence.v1 import syscalls_pb2 as pb

    held = scene.hold(allow=['state.*: "**"'], more="budgets: {rate: {state.*: 1/h}}")
    stream = held.stream()
    assert stream.ask("state.put", b'{"key":"rate/h","value":1}', step=0).failure.reason == ""
    call = pb.Call(
        id=9, lane="0", step=1, action="state.put", arguments=b'{"key":"rate/h","value":2}', deadline_ms=1000
    )
    stream.send(pb.StreamRequest(call=call))
    reply = stream.receive().reply
    assert reply.failure.reason == "QuotaExceeded"
    assert int(reply.failure.metadata["retry_after_ms"]) > 3_000_000
    stream.close()
    assert [(s["outcome"], s["reason"]) for s in held.steps()] == [("ok", None), ("refused", "QuotaExceeded")]
