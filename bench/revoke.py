"""From `revoke` to the first refusal, while an agent calls in a loop; two kernels share the database and revoke by turns."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence.agent import Denied, Revoked, RingfenceError
from ringfence.agent.runtime import Ringfence
from ringfence.agent.session import Session
from ringfence.agent.wire import Settings

from bench.host import Bench, BenchError, eventually, median, rank
from bench.kernels import Kernel
from bench.report import Section, Target

TRIALS, QUICK_TRIALS = 1000, 100
WANTED_MS = 20
CALLS_BEFORE = 3
"""Calls that have to succeed in a trial before the right is taken."""

RULE = 'state.put: "bench/**"'
MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: looping}
spec:
  run: {command: [sh, -c, "printf '%s\\\\n' \\"$RINGFENCE_TOKEN\\"; exec sleep infinity"]}
  permissions: {allow: []}
"""


@dataclass(slots=True)
class Loop:
    """An agent that makes one call after the other until one is refused; then it waits for the next trial."""

    rf: Ringfence
    began: list[float] = field(default_factory=list)
    refused_at: float = 0.0
    over: bool = False
    failure: RingfenceError | None = None
    go: threading.Event = field(default_factory=threading.Event)
    refused: threading.Event = field(default_factory=threading.Event)
    warm: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until `over`."""
        clock = time.monotonic
        while True:
            self.go.wait()
            if self.over:
                return
            began = clock()
            try:
                self.rf.state.put("bench/key", 1)
            except (Denied, Revoked):
                self.refused_at = clock()
                self.go.clear()
                self.refused.set()
            except RingfenceError as error:
                self.failure = error
                self.warm.set()
                self.refused.set()
                return
            else:
                self.began.append(began)
                if len(self.began) >= CALLS_BEFORE:
                    self.warm.set()

    def begin(self) -> None:
        """Start a trial; returns when calls succeed."""
        self.began = []
        self.refused.clear()
        self.warm.clear()
        self.go.set()
        self._expect(self.warm, "no call succeeded")

    def refusal(self) -> float:
        """When the refusal of this trial came."""
        self._expect(self.refused, "no call was refused")
        return self.refused_at

    def _expect(self, event: threading.Event, otherwise: str) -> None:
        if not event.wait(60):
            raise BenchError(otherwise)
        if self.failure is not None:
            raise BenchError(f"a call failed: {self.failure}")


def measure(bench: Bench) -> Section:
    """One trial after the other, revoked through the kernel that owns the agent and through the other one by turns."""
    section = Section(
        name="revoke",
        title="revoke to first refusal while an agent calls in a loop; two kernels on one database",
    )
    trials = QUICK_TRIALS if bench.quick else TRIALS
    home = bench.directory("revoke")
    taken: dict[str, list[tuple[float, float]]] = {"its own kernel": [], "the other kernel": []}
    late = calls = 0
    with contextlib.ExitStack() as stack:
        owner, other = _kernels(home, stack)
        agent, loop = _agent(owner, stack)
        for number in range(trials):
            bench.say(f"trial {number + 1} of {trials}")
            by, kernel = (("its own kernel", owner), ("the other kernel", other))[number % 2]
            grant = kernel.operator.call("Grant", agent=agent, rule=RULE)["id"]
            loop.begin()
            began = time.monotonic()
            kernel.operator.call("Revoke", agent=agent, rule_or_grant=grant)
            returned = time.monotonic()
            refused = loop.refusal()
            taken[by].append((returned - began, refused - began))
            late += sum(start > returned for start in loop.began)
            calls += len(loop.began)
    for by, pairs in taken.items():
        section.rows.append(_row(by, pairs))
    refusals = [refused for pairs in taken.values() for _, refused in pairs]
    section.targets.append(
        Target(
            name="revoke to refusal, p99 ms", got=rank(refusals, 0.99) * 1e3, wanted=WANTED_MS, at_least=False
        )
    )
    section.checks[
        f"no call that started after revoke returned was allowed ({calls} calls in {trials} trials)"
    ] = not late
    return section


def _row(by: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    returned, refused = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return {
        "revoked through": by,
        "trials": len(pairs),
        "refused p50 ms": median(refused) * 1e3,
        "refused p99 ms": rank(refused, 0.99) * 1e3,
        "refused max ms": max(refused) * 1e3,
        "returned p50 ms": median(returned) * 1e3,
        "returned p99 ms": rank(returned, 0.99) * 1e3,
    }


def _kernels(home: Path, stack: contextlib.ExitStack) -> tuple[Kernel, Kernel]:
    owner = Kernel(home / "a")
    stack.callback(owner.stop)
    owner.start()
    other = Kernel(home / "b", dsn=owner.dsn)
    stack.callback(other.stop)
    other.start()
    return owner, other


def _agent(owner: Kernel, stack: contextlib.ExitStack) -> tuple[str, Loop]:
    agent = owner.submit(MANIFEST, {})
    eventually(lambda: "\n" in owner.output(agent), "the agent gave no token")
    facts = json.loads((owner.data / "kernel.json").read_text())
    run = Path(facts["listen"].removeprefix("unix:")).parent
    found = list(run.glob("a*/syscall.sock"))
    if len(found) != 1:
        raise BenchError("the agent's socket is not where it is expected")
    session = Session(Settings(socket=str(found[0]), token=owner.output(agent).strip()))
    stack.callback(session.close)
    loop = Loop(Ringfence(session, 1, None))
    worker = loop.rf.thread(loop.run)

    def end() -> None:
        loop.over = True
        loop.go.set()
        with contextlib.suppress(RingfenceError):
            worker.result()

    stack.callback(end)
    return agent, loop
