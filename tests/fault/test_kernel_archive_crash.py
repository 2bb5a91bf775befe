"""A kernel that dies in the middle of moving steps to the archive, or of giving them up, has lost nothing and repeats nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import KernelProcess, Refused, eventually

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

KERNEL = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  retention: {journals: {keep: 3650d, steps: 0, archive: ARCHIVE}}
"""

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: long}
spec:
  run: {command: [python, agent.py]}
  permissions: {allow: [now, checkpoint.save, {state.*: "**"}]}
"""

PROGRAM = """
from ringfence import agent

with agent.boot() as rf:
    state = rf.checkpoint.restored or {"at": 0}
    for at in range(state["at"], 10):
        for nr in range(12):
            rf.now()
        rf.state.put("long/count", at)
        rf.checkpoint.save({"at": at + 1})
    raise SystemExit(3)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[KernelProcess]:
    process = KernelProcess(tmp_path / "d", config=KERNEL.replace("ARCHIVE", "3650d"))
    process.start()
    yield process
    process.stop()


def past(kernel: KernelProcess, agent: str) -> tuple[list[Any], list[Any]]:
    ask = kernel.operator
    steps = [{k: v for k, v in step.items() if k != "archived"} for step in ask.steps(agent)]
    rows = [row for row in ask.stream("Audit", agent=agent) if row["kind"] != "event"]
    return steps, rows


def pruned_until(kernel: KernelProcess, agent: str, point: str) -> None:
    """Have the kernel prune, and kill it at a failpoint."""
    kernel.arm(point)
    operator = kernel.operator

    def prune() -> None:
        with pytest.raises(Refused):
            operator.ask("Prune", agent=agent, older_than_ms=0)

    asking = threading.Thread(target=prune)
    asking.start()
    kernel.await_hit(point)
    kernel.kill()
    asking.join()
    kernel.disarm(point)
    kernel.start()


def test_a_kernel_that_dies_in_the_middle_has_lost_nothing(kernel: KernelProcess) -> None:
    agent = kernel.operator.submit(MANIFEST, {"agent.py": PROGRAM})
    assert kernel.operator.wait(agent)["state"] == "failed"
    before = past(kernel, agent)
    assert len(before[0]) == 140
    for point in ("archive:written", "archive:recorded", "archive:moved", "prune:checkpoints"):
        pruned_until(kernel, agent, point)
        assert past(kernel, agent) == before
        report = kernel.operator.ask("AuditVerify")
        assert report["ok"], report
    assert report["archived"] > 130
    (done,) = kernel.operator.ask("Prune", agent=agent, older_than_ms=0)["agents"]
    # Each second one rests on the one before it.
    assert (done["archived_rows"], done["checkpoints"]) == (0, 8)
    assert kernel.operator.ask("Prune", agent=agent, older_than_ms=0)["agents"] == []
    shown = kernel.operator.steps(agent)
    assert [step["step"] for step in shown if not step["archived"]] == [140]

    # The files are given up a year later; what stays is enough to go on from.
    kernel.config.write_text(KERNEL.replace("ARCHIVE", "1ms"))
    kernel.operator.ask("Reload")
    pruned_until(kernel, agent, "prune:recorded")
    assert kernel.operator.ask("AuditVerify")["ok"]
    pruned_until(kernel, agent, "prune:given_up")
    report = kernel.operator.ask("AuditVerify")
    assert report["ok"], report
    assert report["pruned"] > 130
    kernel.operator.ask("Prune", agent=agent, older_than_ms=0)
    assert not list((kernel.data / "archive" / agent).glob("*.zst"))
    kernel.operator.ask("Start", agent=agent)
    eventually(lambda: kernel.operator.wait(agent)["state"] == "failed", "it did not go on")
    assert kernel.operator.steps(agent)[-1]["step"] == 140  # it had nothing left to do
    assert kernel.operator.ask("AuditVerify")["ok"]
