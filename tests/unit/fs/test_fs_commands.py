"""Commands and fs.* on one workspace: one after the other, all or nothing, and only on what was looked at."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from ringfence.policy.types import Verdict
from ringfence.sandbox.tree import Tree
from ringfence.sandbox.types import CommandResult, Exit, ExitReason
from ringfence.syscalls import errors, exec_run, fs_write
from support import walker
from support.tree_world import TreeCall, TreeWorld


class Layer:
    """Leaves the upper layer that a test wants, when the test lets it end."""

    def __init__(self, fill):
        self.fill = fill
        self.running = 0
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self.goes_on.set()

    async def run_command(self, spec):
        assert self.running == 0
        self.running += 1
        upper = spec.scratch / "upper"
        upper.mkdir()
        upper.chmod(spec.lower.stat().st_mode & 0o7777)
        (spec.scratch / "format").write_text("user")
        self.fill(upper)
        for name in ("stdout", "stderr"):
            (spec.scratch / name).touch()
        self.begun.set()
        await self.goes_on.wait()
        self.running -= 1
        ended = Exit(reason=ExitReason.EXIT, code=0)
        return CommandResult(
            exit=ended, upper=upper, stdout=spec.scratch / "stdout", stderr=spec.scratch / "stderr"
        )


@pytest.fixture
def world(tmp_path):
    (tmp_path / "live").mkdir()
    (tmp_path / "live/a").write_text("a")
    made = TreeWorld(tmp_path)
    yield made
    made.env.workspace.close()


def call_of(world, step, body, **arguments):
    given = body.Arguments(**arguments)
    return TreeCall(world.env, body.plan(given, world.env), step), given


def command(world, step, fill):
    world.env.sandbox = Layer(fill)
    return call_of(world, step, exec_run, argv=["x"])


def made(upper):
    (upper / "n").mkdir(mode=0o755)
    (upper / "n/1").write_text("1")
    (upper / "n/2").write_text("2")
    (upper / "a").write_text("by a command")


async def test_changes_wait_for_a_command_and_commands_for_each_other(world):
    order = []
    first, given = command(world, 1, made)
    layer = world.env.sandbox
    layer.goes_on.clear()
    second, again = call_of(world, 2, exec_run, argv=["y"])
    write, what = call_of(world, 3, fs_write, path="a", data=b"by fs.write")
    first.hooks["after_apply"] = lambda: order.append("first applied")
    second.hooks["before_apply"] = lambda: order.append("second")
    write.hooks["before_effect"] = lambda: order.append("write")
    tasks = [asyncio.create_task(exec_run.run(first, given))]
    await layer.begun.wait()
    tasks.append(asyncio.create_task(exec_run.run(second, again)))
    tasks.append(asyncio.create_task(fs_write.run(write, what)))
    await asyncio.sleep(0)
    assert (world.base / "live/a").read_text() == "a"
    layer.goes_on.set()
    await asyncio.gather(*tasks)
    # The second command left the same content at another time, which is a change too.
    assert order == ["first applied", "second", "write"]
    [entry] = world.env.snapshots.load("p3").paths
    assert entry.inline == b"by a command"
    assert (world.base / "live/a").read_text() == "by fs.write"


async def test_changes_that_fail_in_the_middle_are_put_back_whole(world, monkeypatch):
    before = walker.look(world.base / "live")
    place = Tree.place
    placed = []

    def fail_at_the_second(self, name, path, **more):
        placed.append(path)
        if len(placed) == 3:
            raise OSError(errno.EIO, "input/output error", path)
        place(self, name, path, **more)

    monkeypatch.setattr(Tree, "place", fail_at_the_second)
    call, given = command(world, 1, made)
    with pytest.raises(errors.CallFailed, match="nothing was changed"):
        await exec_run.run(call, given)
    assert len(placed) > 3
    assert walker.differences(walker.look(world.base / "live"), before) == []
    assert world.env.snapshots.plan_restore(world.env.workspace, ["p1"]).conflicts == ()


@pytest.mark.parametrize(
    ("action", "arguments", "fails"),
    [
        ("fs.move", {"path": "d", "to": "new/er/d"}, "rename"),
        ("fs.write", {"path": "new/er/f", "data": b"x"}, "place"),
        ("fs.delete", {"path": "d", "recursive": True}, "remove_tree"),
    ],
)
async def test_a_change_that_fails_in_the_middle_leaves_nothing(
    make_world, monkeypatch, action, arguments, fails
):
    world = make_world()
    (world.live / "d/e").mkdir(parents=True)
    (world.live / "d/1").write_text("1")
    before = walker.look(world.live)
    works = Tree.remove

    def fail(tree, *_, **__):
        if fails == "remove_tree":
            works(tree, "/workspace/d/1")
        raise OSError(errno.EACCES, "permission denied")

    monkeypatch.setattr(Tree, fails, fail)
    with pytest.raises(errors.CallFailed, match="permission bits"):
        await world.run(action, **arguments)
    monkeypatch.undo()
    assert walker.differences(walker.look(world.live), before) == []


@pytest.mark.parametrize("others", ["replace", "remove", "attribute"])
async def test_staged_changes_of_which_a_path_moved_meanwhile_are_not_applied(world, others):
    """Also where the path is now as a half applied change would have left it."""

    def fill(upper):
        (upper / "a").mkdir()
        (upper / "a/1").write_text("1")

    live = world.base / "live"

    async def confirm(*_, **__):
        if others == "replace":
            (live / "a").write_text("theirs")
        elif others == "remove":
            (live / "a").unlink()
        else:
            os.setxattr(live / "a", "user.theirs", b"1")

    async def judge(questions):
        return [Verdict.ASK for _ in questions]

    call, given = command(world, 1, fill)
    call.judge, call.confirm = judge, confirm
    with pytest.raises(errors.Conflict, match="run the command again"):
        await exec_run.run(call, given)
    assert not (live / "a").is_dir()
    assert list((world.base / "scratch").iterdir()) == []


async def test_what_may_not_be_read_comes_back_with_its_parent(make_world):
    world = make_world(deny=['fs.read: "/workspace/d/secret"'])
    (world.live / "d").mkdir()
    (world.live / "d/secret").write_text("hidden")
    before = walker.look(world.live)
    with pytest.raises(errors.Denied):
        await world.run("fs.move", path="d", to="elsewhere")
    assert walker.differences(walker.look(world.live), before) == []
    world.step = 0
    await world.run("fs.delete", path="d", recursive=True)
    world.undo()
    assert walker.differences(walker.look(world.live), before) == []
