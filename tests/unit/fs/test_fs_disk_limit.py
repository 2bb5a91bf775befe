"""The size of a workspace: the running total is what a count finds, and nothing grows it beyond its limit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from ringfence.sandbox.usage import Meter, Usage, tree_usage
from ringfence.sandbox.workspace import Workspace
from ringfence.syscalls import errors
from support.fs_world import World

LIMIT = 100_000


@pytest.fixture
def world(tmp_path: Path):
    made = World(tmp_path)
    made.env.disk_bytes = LIMIT
    made.env.meter = Meter(made.workspace, LIMIT)
    yield made
    made.close()


def counted(world: World) -> Usage:
    assert world.env.meter.known is not None
    assert world.env.meter.known == tree_usage(world.live)
    return world.env.meter.known


async def attempt(world: World, action: str, **arguments) -> bool:
    try:
        await world.run(action, **arguments)
    except errors.SyscallError:
        return False
    return True


@pytest.mark.parametrize("seed", range(6))
async def test_the_running_total_is_what_a_count_finds(world: World, seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - a test that can be repeated
    world.env.meter.used()
    names = ["a", "b", "d/a", "d/e/a", "d/e/b", "f/a"]
    done = 0
    for _ in range(60):
        path = f"/workspace/{dice.choice(names)}"
        action = dice.choice(["fs.write", "fs.append", "fs.move", "fs.delete", "fs.delete"])
        more = {
            "fs.write": {"data": bytes(dice.choice([0, 1, 5000, 40_000]))},
            "fs.append": {"data": bytes(dice.choice([0, 700, 20_000]))},
            "fs.move": {"to": f"/workspace/{dice.choice(['m', 'd/m', 'n/o/m'])}"},
            "fs.delete": {"recursive": True},
        }[action]
        if action == "fs.delete" and dice.random() < 0.5:
            path = dice.choice(["/workspace/d", "/workspace/d/e", "/workspace/n"])
        done += await attempt(world, action, path=path, **more)
        assert counted(world).content_bytes <= LIMIT
    assert done > 10


async def test_what_does_not_fit_is_refused_and_changes_nothing(world: World) -> None:
    await world.run("fs.write", path="/workspace/a", data=bytes(60_000))
    for action, path in (("fs.write", "/workspace/b"), ("fs.append", "/workspace/a")):
        with pytest.raises(errors.CallFailed) as refused:
            await world.run(action, path=path, data=bytes(40_001))
        said = str(refused.value)
        assert "holds 60000 bytes" in said
        assert "may hold 100000 (`sandbox.disk`)" in said
        assert "40001 more" in said
        assert "delete what is not needed" in said
    assert [path.name for path in world.live.iterdir()] == ["a"]
    assert counted(world) == Usage(content_bytes=60_000, entries=1)
    # To the last byte, and in place of what is there.
    await world.run("fs.append", path="/workspace/a", data=bytes(40_000))
    await world.run("fs.write", path="/workspace/a", data=bytes(100_000))
    await world.run("fs.write", path="/workspace/empty", data=b"")


async def test_a_workspace_over_its_limit_can_only_shrink(world: World) -> None:
    (world.live / "big").write_bytes(bytes(LIMIT + 5000))
    assert not await attempt(world, "fs.append", path="/workspace/big", data=b"x")
    assert not await attempt(world, "fs.write", path="/workspace/new", data=b"x")
    assert await attempt(world, "fs.write", path="/workspace/big", data=bytes(LIMIT + 4000))
    assert await attempt(world, "fs.move", path="/workspace/big", to="/workspace/moved")
    assert await attempt(world, "fs.delete", path="/workspace/moved", recursive=False)
    assert await attempt(world, "fs.write", path="/workspace/new", data=bytes(LIMIT))
    counted(world)


async def test_there_are_only_so_many_files_and_directories(world: World) -> None:
    world.env.meter.limit = Usage(content_bytes=LIMIT, entries=4)
    await world.run("fs.write", path="/workspace/d/e/a", data=b"")
    assert not await attempt(world, "fs.write", path="/workspace/f/a", data=b"")
    assert not await attempt(world, "fs.move", path="/workspace/d/e/a", to="/workspace/f/g/a")
    assert await attempt(world, "fs.write", path="/workspace/b", data=b"")
    assert not await attempt(world, "fs.append", path="/workspace/c", data=b"")
    assert await attempt(world, "fs.append", path="/workspace/b", data=b"more")
    assert counted(world).entries == 4


async def test_a_rollback_is_refused_for_no_size(world: World) -> None:
    await world.run("fs.write", path="/workspace/a", data=bytes(90_000))
    await world.run("fs.delete", path="/workspace/a", recursive=False)
    await world.run("fs.write", path="/workspace/b", data=bytes(90_000))
    step = world.step
    world.env.meter.limit = Usage(content_bytes=10, entries=1000)
    await world.run("fs.delete", path="/workspace/b", recursive=False)
    world.undo(step)
    assert (world.live / "b").stat().st_size == 90_000
    world.env.meter.forget()
    assert world.env.meter.used() == Usage(content_bytes=90_000, entries=1)


def test_holes_count_and_links_are_not_followed(tmp_path: Path) -> None:
    live = tmp_path / "live"
    (live / "d").mkdir(parents=True)
    with (live / "d" / "hole").open("wb") as file:
        file.truncate(1 << 40)
    (live / "link").symlink_to("/usr")
    workspace = Workspace(live)
    meter = Meter(workspace, 1 << 20)
    assert meter.used() == Usage(content_bytes=1 << 40, entries=3)
    assert meter.limit.entries == 1024
    assert Meter(workspace, 1 << 10).limit.entries == 1000
    workspace.close()
