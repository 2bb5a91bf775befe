"""Going back beyond an earlier rollback ends where the files stood then, not at the end of the branch that was left."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kernels import running

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(120)]

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: again}
spec:
  run: {command: [python, agent.py]}
  permissions: {allow: [{fs.*: "/workspace/**"}]}
"""

PROGRAM = """
from ringfence import agent

with agent.boot() as rf:
    rf.fs.write_text("f.txt", "first")
    rf.fs.write_text("f.txt", "second")
"""


def test_every_rollback_to_the_same_step_ends_at_the_same_files(tmp_path: Path) -> None:
    with running(tmp_path / "d") as kernel:
        agent = kernel.operator.submit(MANIFEST, {"agent.py": PROGRAM, "f.txt": "ORIGINAL"})
        assert kernel.operator.wait(agent)["state"] == "done"
        file = Path(kernel.operator.ask("Show", agent=agent)["workspace"]) / "f.txt"
        for _ in range(3):
            kernel.operator.ask("Rollback", agent=agent, to="0")
            assert file.read_text() == "ORIGINAL"
        kernel.operator.ask("Start", agent=agent)
        assert kernel.operator.wait(agent)["state"] == "done"
        assert file.read_text() == "second"
        point = kernel.operator.ask("Rollback", agent=agent, to="0")["point"]
        assert file.read_text() == "ORIGINAL"
        kernel.operator.ask("Rollback", agent=agent, to=point)
        assert file.read_text() == "second"
