"""A fork whose child is its parent's sibling: it can do all that ours does there, and what it forks is a process as any other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, os, sys, threading
sys.path.insert(0, sys.argv[1])
from ringfence.sandbox.native import linux
reading, writing = os.pipe()
middle = os.fork()
if middle == 0:
    if linux.fork_beside(0) == 0:
        hooks = []
        worker = threading.Thread(target=lambda: hooks.append(threading.get_native_id()))
        worker.start(); worker.join()
        os.register_at_fork(after_in_child=lambda: hooks.append(0))
        inner = os.fork()
        if inner == 0:
            os._exit(threading.get_native_id() != os.getpid() or hooks[-1] != 0)
        facts = {"parent": os.getppid(), "main": threading.get_native_id() == os.getpid(), "threads": sum(map(bool, hooks)),
                 "inner": os.waitpid(inner, 0)[1], "random": os.urandom(4) != b""}
        os.write(writing, json.dumps(facts).encode())
        os._exit(7)
    os._exit(0)
os.waitpid(middle, 0)
facts = json.loads(os.read(reading, 4096))
pid, status = os.waitpid(-1, 0)
print(json.dumps({**facts, "ours": facts["parent"] == os.getpid(), "status": os.waitstatus_to_exitcode(status)}))
"""


def test_the_child_is_a_whole_process_and_its_grandparents() -> None:
    from ringfence.sandbox.native import launcher, linux

    if not linux.supported():
        pytest.skip("the numbers of this machine's system calls are not known")
    done = subprocess.run(
        [sys.executable, "-c", CODE, launcher.SOURCE], capture_output=True, text=True, check=True, timeout=60
    )
    told = json.loads(done.stdout)
    assert told == {**told, "ours": True, "status": 7, "main": True, "threads": 1, "inner": 0}
