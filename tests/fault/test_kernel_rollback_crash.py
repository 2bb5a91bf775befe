"""A rollback that a crash cut short is finished at the next start, also of an agent that had ended, and never later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kernels import KernelProcess, Refused, eventually

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: ended}
spec:
  run: {command: [python, agent.py]}
  permissions: {allow: [{fs.*: "/workspace/**"}]}
"""

PROGRAM = """
from ringfence import agent

with agent.boot() as rf:
    rf.fs.write_text("a.txt", "new")
    rf.fs.delete("b.txt")
    rf.fs.write_text("c.txt", "made")
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[KernelProcess]:
    process = KernelProcess(tmp_path / "d")
    process.start()
    yield process
    process.stop()


def tree(live: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in live.iterdir() if p.suffix == ".txt"}


@pytest.mark.parametrize("point", ["after_restore"])
def test_a_rollback_cut_short_is_finished_before_anything_else(kernel: KernelProcess, point: str) -> None:
    files = {"agent.py": PROGRAM, "a.txt": "old", "b.txt": "kept"}
    agent = kernel.operator.submit(MANIFEST, files)
    assert kernel.operator.wait(agent)["state"] == "done"
    live = Path(kernel.operator.ask("Show", agent=agent)["workspace"])
    assert tree(live) == {"a.txt": "new", "c.txt": "made"}

    kernel.arm(f"rollback:{point}")
    operator = kernel.operator

    def roll_back() -> None:
        with pytest.raises(Refused):
            operator.ask("Rollback", agent=agent, to="0")

    asking = threading.Thread(target=roll_back)
    asking.start()
    kernel.await_hit(f"rollback:{point}")
    kernel.kill()
    asking.join()
    kernel.disarm(f"rollback:{point}")
    kernel.start()

    def restored() -> bool:
        shown = kernel.operator.ask("Show", agent=agent)
        return shown["state"] == "paused" and tree(live) == {"a.txt": "old", "b.txt": "kept"}

    eventually(restored, "the rollback was not finished")
    outcomes = [s["outcome"] for s in kernel.operator.steps(agent) if s["action"] == "rollback"]
    assert outcomes == ["ok"]

    # What comes after is not rolled back again by a further start.
    kernel.operator.ask("Start", agent=agent)
    assert kernel.operator.wait(agent)["state"] == "done"
    kernel.kill()
    kernel.start()
    assert kernel.operator.wait(agent)["state"] == "done"
    assert tree(live) == {"a.txt": "new", "c.txt": "made"}
    assert kernel.operator.ask("AuditVerify")["ok"]
