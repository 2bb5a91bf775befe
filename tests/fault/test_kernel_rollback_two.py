"""Rollbacks of several agents that one crash cut short are all finished at the next start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.kernels import Refused, eventually, running

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: pair}
spec:
  run: {command: [python, agent.py]}
  permissions: {allow: [{fs.*: "/workspace/**"}]}
"""

PROGRAM = """
import os
import time

from ringfence import agent

with agent.boot() as rf:
    rf.fs.write_text("a.txt", "new")
    if "stay.txt" in os.listdir():
        time.sleep(100000)
"""


@pytest.mark.parametrize("point", ["after_restore"])
def test_all_rollbacks_cut_short_are_finished(tmp_path: Path, point: str) -> None:
    with running(tmp_path / "d") as kernel:
        agents = [
            kernel.operator.submit(MANIFEST, {"agent.py": PROGRAM, "a.txt": "old", **more})
            for more in ({}, {}, {"stay.txt": ""}, {"stay.txt": ""})
        ]
        files = {a: Path(kernel.operator.ask("Show", agent=a)["workspace"]) / "a.txt" for a in agents}
        for agent in agents[:2]:
            assert kernel.operator.wait(agent)["state"] == "done"
        eventually(lambda: all(f.read_text() == "new" for f in files.values()), "not all was written")
        kernel.operator.ask("Kill", agent=agents[3])
        kernel.arm(f"rollback:{point}")
        operator = kernel.operator

        def roll_back(agent: str) -> None:
            with pytest.raises(Refused):
                operator.ask("Rollback", agent=agent, to="0")

        asking = [threading.Thread(target=roll_back, args=(agent,)) for agent in agents]
        for thread in asking:
            thread.start()
        hit = kernel.failpoints / f"rollback:{point}.hit"
        eventually(
            lambda: hit.exists() and len(hit.read_text().split()) == len(agents),
            "not every rollback was under way",
        )
        kernel.kill()
        for thread in asking:
            thread.join()
        kernel.disarm(f"rollback:{point}")
        kernel.start()

        def finished(agent: str) -> bool:
            done = [s["outcome"] for s in kernel.operator.steps(agent) if s["action"] == "rollback"]
            return done == ["ok"] and files[agent].read_text() == "old"

        eventually(lambda: all(finished(agent) for agent in agents), "a rollback was not finished", 20)
        for agent in agents:
            assert kernel.operator.ask("Show", agent=agent)["waiting_for"] == "an operator, after a rollback"
            # The point from just before is not lost, also where the crash came after the files were put back.
            rolled = [
                p
                for p in kernel.operator.ask("Points", agent=agent, verify=True)["points"]
                if p["kind"] == "rollback"
            ]
            assert [(p["covers"], p["verified"]) for p in rolled] == [(["/workspace/a.txt"], True)]
            kernel.operator.ask("Rollback", agent=agent, to=rolled[0]["id"])
            assert files[agent].read_text() == "new"
