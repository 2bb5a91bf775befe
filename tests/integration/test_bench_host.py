"""Children of measurements: made without a fork of this process, and gone when it is."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from bench.host import child

ROOT = Path(__file__).parents[2]
PARENT = """
import sys
from bench.host import child
print(child([sys.executable, "-c", "print(1, flush=True); import time; time.sleep(600)"], stdout=sys.stderr).pid)
"""


def test_no_handler_of_a_library_runs_on_the_way_to_a_child() -> None:
    """Those of gRPC start its threads anew there, which ended one kernel of a replay in three before it ran."""
    ran: list[str] = []
    os.register_at_fork(before=lambda: ran.append("before"))
    done = child([sys.executable, "-c", "print('there')"], stdout=subprocess.PIPE)
    assert done.communicate(timeout=60)[0] == "there\n"
    assert done.returncode == 0
    assert ran == []


def test_a_child_is_told_to_end_when_its_parent_does() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        pid = int(parent.stdout.readline())
        parent.wait(60)
        # It holds the other end: this is over when it has ended.
        assert select.select([parent.stderr], [], [], 60)[0]
        assert parent.stderr.read() in {"", "1\n"}
    assert not Path(f"/proc/{pid}/fd/2").exists()
