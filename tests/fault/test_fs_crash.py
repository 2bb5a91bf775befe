"""fs.* killed by SIGKILL in the middle, then recovered by a process that knows no more than the disk."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ringfence.syscalls.base import Rerun
from support import fs_world as fs

pytestmark = pytest.mark.fault

_HELPERS = Path(__file__).parents[1]

_PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, {helpers!r})
from support.fs_world import World

world = World(Path({base!r}))
left = {unlinks}
if {freeing}:
    # Dies while the content of what has vanished already is freed.
    unlink = os.unlink
    def unlink_and_die(*place, **options):
        unlink(*place, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    os.unlink = unlink_and_die
elif left:
    # Dies in the middle of the removal itself, after so many names: no failpoint of ours lies there.
    world.workspace.tree.remove_tree = lambda path: world.workspace.remove_each(
        [name for name, _ in reversed([(path, True), *world.workspace.names(path)])]
    )
    remove = world.workspace.tree.remove
    def remove_and_die(path, **options):
        global left
        remove(path, **options)
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    world.workspace.tree.remove = remove_and_die

body, given, call = world.call({action!r}, **{arguments!r})
call.kill_at = {kill_at!r}
asyncio.run(body.run(call, given))
"""


@pytest.fixture
def world(tmp_path):
    made = fs.World(tmp_path)
    (made.live / "d/e/f").mkdir(parents=True)
    for name in ("d/1", "d/2", "d/e/3", "d/e/f/4"):
        (made.live / name).write_text(name)
    (made.live / "file").write_text("before")
    yield made
    made.close()


def killed(base: Path, action: str, arguments: dict, **where) -> None:
    where = {"kill_at": "", "unlinks": 0, "freeing": False} | where
    program = _PROGRAM.format(
        helpers=str(_HELPERS), base=str(base), action=action, arguments=arguments, **where
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


CHANGES = [
    ("fs.write", "/workspace/new/x", {"path": "new/x", "data": b"after"}),
    ("fs.append", "/workspace/file", {"path": "file", "data": b"after"}),
    ("fs.move", "/workspace/d", {"path": "d", "to": "new/d"}),
    ("fs.delete", "/workspace/d", {"path": "d", "recursive": True}),
]


@pytest.mark.parametrize(("action", "resource", "arguments"), CHANGES)
@pytest.mark.parametrize("kill_at", ["before_effect", "after_effect"])
def test_killed_around_the_effect(world, tmp_path, action, resource, arguments, kill_at):
    before = fs.picture(world.live)
    killed(tmp_path, action, arguments, kill_at=kill_at)
    after = fs.picture(world.live)
    settled = asyncio.run(world.recover(action, 1, resource, **arguments))
    assert fs.picture(world.live) == after
    if kill_at == "before_effect":
        assert after == before
        assert settled is Rerun.RERUN
        asyncio.run(world.run(action, **arguments))
    else:
        assert after != before
        assert settled is not Rerun.RERUN
        world.step = 1
    world.undo()
    assert fs.picture(world.live) == before


@pytest.mark.parametrize("unlinks", range(1, 8))
def test_killed_inside_a_removal(world, tmp_path, unlinks):
    before = fs.picture(world.live)
    arguments = {"path": "d", "recursive": True}
    killed(tmp_path, "fs.delete", arguments, unlinks=unlinks)
    assert fs.picture(world.live) != before
    settled = asyncio.run(world.recover("fs.delete", 1, "/workspace/d", **arguments))
    assert settled.removed == 7
    assert not (world.live / "d").exists()
    world.step = 1
    world.undo()
    assert fs.picture(world.live) == before


def test_killed_while_freeing_what_has_gone(world, tmp_path):
    before = fs.picture(world.live)
    arguments = {"path": "d", "recursive": True}
    killed(tmp_path, "fs.delete", arguments, freeing=True)
    assert not (world.live / "d").exists()
    assert list((tmp_path / ".tmp-live").iterdir()) != []
    assert asyncio.run(world.recover("fs.delete", 1, "/workspace/d", **arguments)).removed == 7
    world.workspace.sweep()
    assert list((tmp_path / ".tmp-live").iterdir()) == []
    world.step = 1
    world.undo()
    assert fs.picture(world.live) == before
