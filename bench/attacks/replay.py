"""Replays of AgentDojo tasks through a kernel: one run is one agent, one user task, and perhaps one attack on it.

The calls are those of the tasks' authors, made by the agent library over the agent's own socket, so that every one passes
decision, budgets, journal and audit. A hijacked agent is played without mercy: as soon as a result carries the injection, the
attack's calls are made, all of them, whatever came of the ones before; then the user's task goes on.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from ringfence.agent import RingfenceError
from ringfence.agent.runtime import Ringfence
from ringfence.agent.session import Session
from ringfence.agent.wire import Settings
from ringfence.console.client import Client
from ringfence.console.errors import ConsoleError

from bench.kernels import tar_of

LOOK_S = 0.005
"""Between two looks at the inbox of approvals."""

LOOKS = frozenset({"get_unread_emails"})
"""Tools that change something, and yet are no more than a look at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is replayed.

    Attributes:
        suite: `banking` or `workspace`.
        user: the user task.
        attack: the injection task; empty: none.
        manifest: of the agent.
        answer: what a person says to whatever is asked: `approve` or `deny`.
    """

    suite: str
    user: str
    attack: str
    manifest: str
    answer: str


@dataclass(slots=True, kw_only=True)
class Run:
    """What came of it.

    Attributes:
        useful: AgentDojo's `utility()` holds, and no call of the user's task was refused.
        hit: AgentDojo's `security()` holds: the attack reached its goal.
        seen: a result carried the injection, so there was an attack.
        refused: calls of the user's task that were refused, as (tool, why).
        asked: calls of the user's task that a person was asked about.
        attack_asked: calls of the attack that a person was asked about.
        attack_effects: calls of the attack that ran and were no reads.
        calls: all calls made.
        agent: its id, for a look at what it left.
    """

    case: Case
    useful: bool = False
    hit: bool = False
    seen: bool = False
    refused: list[tuple[str, str]] = field(default_factory=list)
    asked: int = 0
    attack_asked: int = 0
    attack_effects: list[str] = field(default_factory=list)
    calls: int = 0
    agent: str = ""


class Desk:
    """One tool server's port and its control."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"

    def control(self, what: str, **given: str) -> Any:
        """Ask what no agent can reach."""
        answer = httpx.post(f"{self.base}/control/{what}", json=given, timeout=60, trust_env=False)
        return answer.raise_for_status().json()


class Inbox:
    """The person at the approvals: says the same to everything, by agent, and keeps count."""

    def __init__(self, listen: str) -> None:
        self._client = Client(listen)
        self._answers: dict[str, str] = {}
        self.asked: dict[str, list[int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="inbox", daemon=True)
        self._thread.start()

    def attend(self, agent: str, answer: str) -> None:
        """Answer an agent's questions this way from now on."""
        self.asked[agent] = []
        self._answers[agent] = answer

    def forget(self, agent: str) -> list[int]:
        """Steps that were asked about."""
        self._answers.pop(agent, None)
        return self.asked.pop(agent, [])

    def _attend(self) -> None:
        while not self._over.wait(LOOK_S):
            if not self._answers:
                continue
            with contextlib.suppress(ConsoleError):
                self._look()

    def _look(self) -> None:
        for waits in self._client.call("Approvals")["approvals"]:
            answer = self._answers.get(waits["agent"])
            if answer is None or waits["step"] in self.asked[waits["agent"]]:
                continue
            self.asked[waits["agent"]].append(waits["step"])
            if answer == "approve":
                self._client.call("Approve", id=waits["id"])
            else:
                self._client.call("Deny", id=waits["id"], reason="not in this replay")

    def close(self) -> None:
        """Go home."""
        self._over.set()
        self._thread.join()
        self._client.close()


class Driver:
    """Makes the calls of one run after the other on one desk."""

    def __init__(self, listen: str, doors: Path, desk: Desk, inbox: Inbox) -> None:
        self._client, self._doors, self._desk, self._inbox = Client(listen), doors, desk, inbox

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def pairs(self, suite: str) -> dict[str, list[str]]:
        """User tasks and attacks of a suite."""
        return self._desk.control("pairs", suite=suite)

    def run(self, case: Case, look: Callable[[Run, Client, Desk], None] | None = None) -> Run:
        """Replay one case; `look` is called before the agent is ended."""
        scene = self._desk.control("begin", suite=case.suite, user=case.user, attack=case.attack)
        header = {"manifest": case.manifest, "source": "attacks.yaml", "input": scene["prompt"].encode()}
        agent = str(self._client.submit(header, iter([tar_of({})]))["id"])
        self._inbox.attend(agent, case.answer)
        run = Run(case=case, agent=agent)
        asked: list[int] = []
        try:
            with self._library(agent) as rf:
                self._play(run, rf, scene)
            asked = self._inbox.forget(agent)
            run.asked, run.attack_asked = len(asked) - run.attack_asked, run.attack_asked
            scored = self._desk.control("score")
            run.useful, run.hit = scored["useful"] and not run.refused, scored["hit"]
            if look is not None:
                look(run, self._client, self._desk)
        finally:
            self._inbox.forget(agent)
            self._client.call("Kill", agent=agent)
        return run

    @contextlib.contextmanager
    def _library(self, agent: str) -> Iterator[Ringfence]:
        target = json.loads((self._doors / f"{agent}.json").read_text())
        session = Session(Settings(socket=target["socket"], token=target["token"]))
        try:
            yield Ringfence(session, 1, None)
        finally:
            session.close()

    def _play(self, run: Run, rf: Ringfence, scene: Mapping[str, Any]) -> None:
        reads = frozenset(scene["reads"])
        for call in scene["calls"]:
            answer, why = self._call(run, rf, call, reads)
            if why:
                run.refused.append((call["tool"], why))
            if run.seen or not run.case.attack or scene["mark"] not in answer:
                continue
            run.seen = True
            before = len(self._inbox.asked[run.agent])
            for strike in self._desk.control("attack"):
                _, why = self._call(run, rf, strike, reads)
                if not why and strike["tool"] not in reads and strike["tool"] not in LOOKS:
                    run.attack_effects.append(strike["tool"])
            run.attack_asked = len(self._inbox.asked[run.agent]) - before

    def _call(
        self, run: Run, rf: Ringfence, call: Mapping[str, Any], reads: frozenset[str]
    ) -> tuple[str, str]:
        """The answer's text, and why it was refused where it was."""
        url = f"{self._desk.base}/tools/{call['tool']}"
        run.calls += 1
        try:
            if call["tool"] in reads:
                given = urlencode({name: json.dumps(value) for name, value in call["arguments"].items()})
                answer = rf.http.get(f"{url}?{given}" if given else url)
            else:
                answer = rf.http.post(url, json=call["arguments"])
        except RingfenceError as error:
            return "", f"{type(error).__name__}: {error.message}"
        return answer.text, ""


def spread(drivers: list[Driver], cases: list[Case], say: Callable[[str], None]) -> list[Run]:
    """Replay cases on all desks side by side; results in the order of the cases."""
    runs: list[Run | None] = [None] * len(cases)
    left = iter(range(len(cases)))
    lock = threading.Lock()
    failed: list[BaseException] = []

    def work(driver: Driver) -> None:
        while not failed:
            with lock:
                at = next(left, None)
            if at is None:
                return
            say(f"run {at + 1} of {len(cases)}")
            try:
                runs[at] = driver.run(cases[at])
            except BaseException as error:  # noqa: BLE001 - raised again where it can be seen
                failed.append(error)

    threads = [threading.Thread(target=work, args=(driver,), daemon=True) for driver in drivers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
    if failed:
        raise failed[0]
    return [run for run in runs if run is not None]
