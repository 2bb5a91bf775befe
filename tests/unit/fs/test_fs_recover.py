"""What recovery makes of a change that a crash cut off: done, not begun, finished, or honestly unknown."""

from __future__ import annotations

import pytest
from ringfence.syscalls import errors
from ringfence.syscalls.base import Rerun
from support.fs_world import picture

CHANGES = {
    "fs.write": {"path": "a/b/f", "data": b"new"},
    "fs.append": {"path": "f", "data": b"more"},
    "fs.move": {"path": "d", "to": "new/d"},
    "fs.delete": {"path": "d", "recursive": True},
}


@pytest.fixture(params=sorted(CHANGES))
def action(request):
    return request.param


@pytest.fixture
def world(make_world):
    world = make_world()
    (world.live / "d/e").mkdir(parents=True)
    (world.live / "d/x").write_text("x")
    (world.live / "d/l").symlink_to("x")
    (world.live / "f").write_text("f")
    return world


async def cut_off(world, action, at, **arguments):
    """Run a call up to a failpoint and no further; returns its step and resource."""

    def crash():
        raise RuntimeError("cut off")

    body, given, call = world.call(action, **arguments)
    call.hooks[at] = crash
    with pytest.raises(RuntimeError, match="cut off"):
        await body.run(call, given)
    return call.step, call.plan.resource


async def test_without_a_point_nothing_happened(world, action):
    before = picture(world.live)
    assert await world.recover(action, 1, "/workspace/x", **CHANGES[action]) is Rerun.RERUN
    assert picture(world.live) == before


async def test_with_a_point_and_no_effect_it_runs_again(world, action):
    before = picture(world.live)
    step, resource = await cut_off(world, action, "before_effect", **CHANGES[action])
    assert await world.recover(action, step, resource, **CHANGES[action]) is Rerun.RERUN
    assert picture(world.live) == before


async def test_after_the_effect_it_is_done_and_not_done_again(world, action):
    step, resource = await cut_off(world, action, "after_effect", **CHANGES[action])
    after = picture(world.live)
    result = await world.recover(action, step, resource, **CHANGES[action])
    assert picture(world.live) == after
    twin = {"fs.write": 3, "fs.append": 5}.get(action)
    if twin is not None:
        path = CHANGES[action]["path"]
        assert result.size_bytes == twin
        assert result.version == (await world.run("fs.read", path=path)).version
    elif action == "fs.move":
        assert result.path == "/workspace/new/d"
    else:
        assert result.removed == 4


async def test_what_is_neither_before_nor_after_is_unknown_and_left_alone(world, action):
    step, resource = await cut_off(world, action, "after_effect", **CHANGES[action])
    target = world.live / {"fs.move": "new/d/x", "fs.delete": "d"}.get(action, CHANGES[action]["path"])
    target.write_text("somebody else's")
    now = picture(world.live)
    with pytest.raises(errors.OutcomeUnknown) as caught:
        await world.recover(action, step, resource, **CHANGES[action])
    assert "/workspace/" in caught.value.message
    assert caught.value.message.endswith(f"settle it: ringfence resolve a1 {step} --as done|not-done")
    assert caught.value.metadata["path"].startswith("/workspace/")
    assert picture(world.live) == now


async def test_a_damaged_point_is_unknown(world, action):
    step, resource = await cut_off(world, action, "after_effect", **CHANGES[action])
    (world.points / f"p{step}.json").write_text("{}")
    with pytest.raises(errors.OutcomeUnknown, match=r"damaged.*; settle it: ringfence resolve a1 \d+ --as"):
        await world.recover(action, step, resource, **CHANGES[action])


async def test_half_a_removal_is_finished(world):
    step, resource = await cut_off(world, "fs.delete", "before_effect", path="d", recursive=True)
    (world.live / "d/x").unlink()
    (world.live / "d/e").rmdir()
    assert (await world.recover("fs.delete", step, resource, path="d", recursive=True)).removed == 4
    assert not (world.live / "d").exists()
    world.undo()
    assert sorted(path.name for path in (world.live / "d").iterdir()) == ["e", "l", "x"]


async def test_half_a_removal_with_something_new_in_it_is_unknown(world):
    step, resource = await cut_off(world, "fs.delete", "before_effect", path="d", recursive=True)
    (world.live / "d/x").unlink()
    (world.live / "d/e/theirs").write_text("x")
    now = picture(world.live)
    with pytest.raises(errors.OutcomeUnknown, match=r"theirs.*ringfence resolve a1 \d+ --as"):
        await world.recover("fs.delete", step, resource, path="d", recursive=True)
    assert picture(world.live) == now


@pytest.mark.parametrize("action", ["fs.write", "fs.append"])
async def test_made_parents_alone_are_finished(world, action):
    step, resource = await cut_off(world, action, "before_effect", path="a/b/f", data=b"new")
    (world.live / "a").mkdir()
    result = await world.recover(action, step, resource, path="a/b/f", data=b"new")
    assert result.size_bytes == 3
    assert (world.live / "a/b/f").read_bytes() == b"new"


async def test_a_move_with_only_its_parents_made_is_finished(world):
    step, resource = await cut_off(world, "fs.move", "before_effect", path="d", to="new/deep/d")
    (world.live / "new").mkdir()
    await world.recover("fs.move", step, resource, path="d", to="new/deep/d")
    assert (world.live / "new/deep/d/x").read_text() == "x"
    assert not (world.live / "d").exists()


async def test_a_file_with_both_names_keeps_the_new_one(world):
    step, resource = await cut_off(world, "fs.move", "before_effect", path="f", to="g")
    (world.live / "g").hardlink_to(world.live / "f")
    await world.recover("fs.move", step, resource, path="f", to="g")
    assert not (world.live / "f").exists()
    assert (world.live / "g").read_text() == "f"


async def test_writing_what_is_there_already_is_done(world):
    step, resource = await cut_off(world, "fs.write", "before_effect", path="f", data=b"f")
    assert (await world.recover("fs.write", step, resource, path="f", data=b"f")).size_bytes == 1
