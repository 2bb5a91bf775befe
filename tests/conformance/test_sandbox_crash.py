"""kill -9 of the kernel at each point of start and stop: the next one's sweep leaves nothing, and works on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Box, Host

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import Traces, eventually
from workspace_kit import facts_of, workspace_of

POINTS_MOST = 2000


def spec_of(box: Box, op: str) -> dict[str, Any]:
    """A program that stays, or one that ends; or a command that has forked and then ends."""
    if op == "command":
        script = "python3 -c 'import time; time.sleep(1000)' $0 & echo new > made; rm -r dir"
        return box.command_spec(["/bin/sh", "-c", script, box.token], workspace_of(box))
    script = "true" if op == "end" else "sleep 1000 & wait"
    words, needed = ["/bin/sh", "-c"], {}
    if box.kind.warm:
        words, needed = box.interpreter()
        script = "" if op == "end" else "import os, signal; os.fork(); signal.pause()"
    return {
        "agent": "agent-1",
        "argv": [*words, script, box.token],
        "env": {"PATH": "/usr/bin:/bin"},
        **needed,
        "image": str(box.directory(box.fresh("image"))),
        "socket_dir": str(box.directory(box.fresh("sockets"))),
        "uid": box.uid,
    }


@pytest.mark.fault
@pytest.mark.parametrize("alone", [True, False], ids=["kernel", "kernel and helpers"])
@pytest.mark.parametrize("op", ["start", "kill", "pause", "end", "command"])
def test_a_crash_at_each_point_leaves_nothing(box: Box, op: str, alone: bool) -> None:
    host = box.another_host("crash_host.py")
    before = Traces(box)
    spec = spec_of(box, op)
    workspace = Path(spec["lower"]) if op == "command" else None
    untouched = workspace and facts_of(workspace)
    cut = 0
    stride = max(1 if alone and op in ("start", "kill") else 4, box.kind.stride)
    for at in range(1, POINTS_MOST, stride):
        if op == "command":
            spec["scratch"] = str(box.directory(box.fresh("scratch"), owner=box.kind.kernel_uid))
        life = host.call("live", op=op, at=at, spec=spec, alone=alone)
        assert "error" not in life, life
        swept = host.call("live", op="sweep", at=0, spec={})
        assert set(swept.get("result", swept)) <= {"agent-1"}, swept
        eventually(lambda: box.left() == [], lambda at=at: f"left after a crash at point {at}: {box.left()}")
        if not life["cut"]:
            break
        cut += stride
    assert 5 < cut < POINTS_MOST - 10 * stride
    eventually(lambda: before.new() == [], lambda: f"left behind: {before.new()}")
    assert (workspace and facts_of(workspace)) == untouched
    still_works(box, host)


MOMENTS = 20
SPREAD_MS = 60.0


@pytest.mark.fault
@pytest.mark.parametrize("alone", [True, False], ids=["kernel", "kernel and helpers"])
def test_a_crash_at_any_moment_of_a_start_leaves_nothing(box: Box, alone: bool) -> None:
    """Points are the kernel's; its helpers work between them."""
    host = box.another_host("crash_host.py")
    before = Traces(box)
    spec = spec_of(box, "start")
    moments = max(5, MOMENTS // box.kind.stride)
    # A warm interpreter takes longer until it is there.
    spread_ms = SPREAD_MS * box.kind.pace * (4 if box.kind.warm else 1)
    for moment in range(moments):
        after_ms = (moment + 1) * spread_ms / moments
        life = host.call("live", op="stay", at=0, spec=spec, alone=alone, after_ms=after_ms)
        assert life["cut"], life
        assert "result" in host.call("live", op="sweep", at=0, spec={})
        eventually(lambda: box.left() == [], lambda ms=after_ms: f"left after {ms} ms: {box.left()}")
    eventually(lambda: before.new() == [], lambda: f"left behind: {before.new()}")
    still_works(box, host)


@pytest.mark.fault
def test_a_crash_at_each_point_of_a_sweep_is_made_good_by_the_next(box: Box) -> None:
    host = box.another_host("crash_host.py")
    before = Traces(box)
    for at in range(1, POINTS_MOST, box.kind.stride):
        host.call("live", op="start", at=0, spec=spec_of(box, "start"))
        life = host.call("live", op="sweep", at=at, spec={})
        again = host.call("live", op="sweep", at=0, spec={})
        assert "result" in again, again
        eventually(lambda: box.left() == [], lambda at=at: f"left after a crash at point {at}: {box.left()}")
        if not life["cut"]:
            break
    assert 1 < at < POINTS_MOST - 2 * box.kind.stride
    eventually(lambda: before.new() == [], lambda: f"left behind: {before.new()}")
    still_works(box, host)


def still_works(box: Box, host: Host) -> None:
    assert "result" in host.call("live", op="end", at=0, spec=spec_of(box, "end"))
    assert box.another_host().call("sweep") == []
    box.renew()
    assert box.program(["/bin/sh", "-c", "exit 7"]).wait() == ("exit", 7)
    assert box.left() == []
