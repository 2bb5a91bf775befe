"""From `revoke` to the first refusal, while an agent calls in a loop; two kernels share the database and revoke by turns."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.host import Bench, BenchError, eventually, median, rank
from bench.kernels import Kernel
from bench.report import Section, Target

TRIALS, QUICK_TRIALS = 1000, 100
WANTED_MS = 20
USED_S = 0.03
"""How long the agent may use the right in each trial, and a little more, different each time."""

RULE = 'state.put: "bench/**"'
MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: looping}
spec:
  run: {command: [python, agent.py]}
  permissions: {allow: []}
"""

PROGRAM = b"""
import json, time
from ringfence import agent

# One clock for all processes of the machine: what began after revoke returned can be told from outside.
clock, allowed = time.monotonic, []
with agent.boot() as rf:
    print("[[], 0]", flush=True)
    while True:
        began = clock()
        try:
            rf.state.put("bench/key", 1)
            allowed.append(began)
        except (agent.Denied, agent.Revoked):
            if allowed:
                print(json.dumps([allowed, clock()]), flush=True)
                allowed = []
            time.sleep(0.002)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """When the right was given, and taken: asked for, and answered; through which kernel."""

    by: str
    granting: float
    asked: float
    returned: float


def measure(bench: Bench) -> Section:
    """One trial after the other, revoked through the kernel that owns the agent and through the other one by turns."""
    section = Section(
        name="revoke",
        title="revoke to first refusal while an agent calls in a loop; two kernels on one database",
    )
    count = QUICK_TRIALS if bench.quick else TRIALS
    with contextlib.ExitStack() as stack:
        owner, other = _kernels(bench.directory("revoke"), stack)
        agent = owner.submit(MANIFEST, {"agent.py": PROGRAM})
        eventually(lambda: "\n" in owner.output(agent), "the agent did not begin")
        kernels = itertools.cycle((("its own kernel", owner), ("the other kernel", other)))
        trials: list[Trial] = []
        for number in range(count):
            bench.say(f"trial {number + 1} of {count}")
            trials.append(_trial(agent, number, *next(kernels)))
        seen = _seen(owner, agent)
    _report(section, trials, seen)
    return section


def _trial(agent: str, number: int, by: str, kernel: Kernel) -> Trial:
    granting = time.monotonic()
    grant = kernel.operator.call("Grant", agent=agent, rule=RULE)["id"]
    time.sleep(USED_S + number % 17 / 1000)
    asked = time.monotonic()
    kernel.operator.call("Revoke", agent=agent, rule_or_grant=grant)
    return Trial(by=by, granting=granting, asked=asked, returned=time.monotonic())


def _seen(owner: Kernel, agent: str) -> list[tuple[list[float], float]]:
    """What the agent told: when calls began that were allowed, and when the first refusal after them came."""
    owner.operator.call("Kill", agent=agent)
    return [(allowed, refused) for allowed, refused in map(json.loads, owner.output(agent).splitlines()[1:])]


def _report(section: Section, trials: list[Trial], seen: list[tuple[list[float], float]]) -> None:
    """Hold both sides against each other."""
    taken: dict[str, list[tuple[float, float]]] = {"its own kernel": [], "the other kernel": []}
    calls = sorted(began for allowed, _ in seen for began in allowed)
    late = 0
    for trial, after in itertools.zip_longest(trials, trials[1:]):
        until = float("inf") if after is None else after.asked
        mine = [one for one in seen if trial.asked <= one[1] < until]
        given = float("inf") if after is None else after.granting
        late += bisect.bisect_left(calls, given) - bisect.bisect_right(calls, trial.returned)
        if mine:
            taken[trial.by].append((trial.returned - trial.asked, mine[0][1] - trial.asked))
    if not all(taken.values()):
        raise BenchError("no trial had a call that succeeded: the machine is too busy")
    for by, pairs in taken.items():
        section.rows.append(_row(by, pairs))
    refusals = [refused for pairs in taken.values() for _, refused in pairs]
    section.targets.append(
        Target(
            name="revoke to refusal, p99 ms", got=rank(refusals, 0.99) * 1e3, wanted=WANTED_MS, at_least=False
        )
    )
    what = f"no call that started after revoke returned was allowed ({len(calls)} calls in {len(refusals)} of {len(trials)} trials)"
    section.checks[what] = late == 0
    section.notes.append(
        "the agent is a process of its own, in its sandbox; a trial without a call that was allowed counts for nothing"
    )


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
