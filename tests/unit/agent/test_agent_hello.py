"""The hello example as a process that is killed on the way: each effect happens once, whatever the moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from ringfence.v1 import syscalls_pb2 as pb

HELLO = Path(__file__).parents[3] / "examples" / "hello"


@pytest.fixture
def world(kernel, files, values):
    """What the kernel keeps: files and state; a saved checkpoint becomes the next welcome."""
    stored = {"names.txt": (HELLO / "names.txt").read_bytes()}
    state: dict[str, tuple[int, int]] = {}
    kernel.bodies |= files(stored) | values(state)
    kernel.bodies["checkpoint.save"] = lambda _: {"step": 1}
    return stored, state


def keep_checkpoint(kernel, call: pb.Call) -> None:
    arguments = json.loads(call.arguments)
    kernel.welcome = pb.Welcome(
        agent="a1", thread="t1", branch=1, restored=True, checkpoint=json.dumps(arguments["state"]).encode(),
        checkpoint_version=arguments["schema_version"], next_step=call.step + 1,
        next_child=arguments["next_child"],
    )  # fmt: skip


def start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, HELLO / "agent.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("done", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("action", ["now", "fs.append", "state.get", "state.transaction", "checkpoint.save"])
def test_killed_anywhere_nothing_is_lost_or_repeated(kernel, world, action, done):
    stored, state = world
    process: list[subprocess.Popen[str]] = []
    seen: Counter[str] = Counter()

    def intercept(_connection, call) -> bool:
        seen[call.action] += 1
        kill = call.action == action and seen[action] == 2
        if not kill or done:
            kernel.answer(call)  # the reply that follows finds it in the journal
            if call.action == "checkpoint.save":
                keep_checkpoint(kernel, call)
        if kill:
            os.kill(process[0].pid, signal.SIGKILL)
        return kill

    kernel.intercept = intercept
    process.append(start())
    assert process[0].wait(60) == -signal.SIGKILL
    process[0].communicate()
    second = start()
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    names = (HELLO / "names.txt").read_text().splitlines()
    lines = stored["out/greetings.md"].decode().splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"Hello {name}" for name in names]
    assert state["hello/greeted"] == (len(names), len(names))
    assert out.endswith(f"{len(names)} greeted in all\n")
    assert set(kernel.done.values()) == {1}


def test_a_program_that_sets_up_anew_after_a_restore_is_told(kernel, world, monkeypatch):
    """What the example's comment warns of."""
    program = """
from ringfence import agent
with agent.boot() as rf:
    rf.fs.read_text("names.txt")
    rf.checkpoint.save({"page": 1})
    rf.now()
"""
    kernel.intercept = lambda _connection, call: (
        keep_checkpoint(kernel, call) if call.action.startswith("ch") else False
    )
    for expected in (0, 1):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == expected, done.stderr
    assert "Diverged: lane `0` step 2 was `now`, now `fs.read`" in done.stderr
