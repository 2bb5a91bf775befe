"""Rules that bound signals keep who holds to them from signalling its parent and its sibling, and leave it its descendants."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ringfence.sandbox.native import landlock, launcher

SIGNALS_SINCE = 6
CODE = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from ringfence.sandbox.native import landlock, linux

def reach(pid):
    try:
        os.kill(pid, 0)
    except PermissionError:
        return "refused"
    return "reached"

rules = landlock.Rules(signals=sys.argv[2] == "bound")
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
sibling = os.fork()  # as the program is of the first process: forked before either is confined
if sibling == 0:
    signal.pause()
if os.fork() == 0:
    rules.restrict()
    child = os.fork()
    if child == 0:
        signal.pause()
    print(reach(os.getppid()), reach(sibling), reach(child), flush=True)
    os.kill(child, signal.SIGKILL)
    os._exit(0)
os.waitpid(-1, 0)
os.kill(sibling, signal.SIGKILL)
"""


@pytest.mark.skipif(landlock.version() < SIGNALS_SINCE, reason="Landlock bounds signals since Linux 6.12")
@pytest.mark.parametrize(
    ("bound", "found"), [("bound", "refused refused reached"), ("free", "reached reached reached")]
)
def test_only_descendants_are_reached(bound: str, found: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, launcher.SOURCE, bound],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == found.split()
