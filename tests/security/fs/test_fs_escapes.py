"""Cases C08, C14, C15, C43 and C44, tried against the bodies of fs.* with a real policy."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest
from ringfence.syscalls import errors
from support.fs_world import picture

REFUSALS = (errors.InvalidRequest, errors.Denied, errors.Conflict, errors.NoSuchResource)


@pytest.fixture
def outside(tmp_path):
    place = tmp_path / "outside"
    place.mkdir()
    (place / "secret").write_text("canary")
    return place


def exchange(one: Path, other: Path) -> None:
    """Swap two names in one step."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, exchanging = -100, 2
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchanging) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


async def refused(world, action, **arguments):
    with pytest.raises(REFUSALS) as caught:
        await world.run(action, **arguments)
    assert "canary" not in caught.value.message


async def test_c08_a_sibling_does_not_share_the_prefix(make_world):
    world = make_world(allow=['fs.*: "/workspace/share/**"'])
    for name in ("share", "share-secret"):
        (world.live / name).mkdir()
        (world.live / name / "a").write_text("x")
    assert (await world.run("fs.read", path="share/a")).data == b"x"
    for action, more in (
        ("fs.read", {}),
        ("fs.write", {"data": b"x"}),
        ("fs.append", {"data": b"x"}),
        ("fs.delete", {}),
        ("fs.move", {"to": "share/b"}),
        ("fs.stat", {}),
    ):
        await refused(world, action, path="share-secret/a", **more)
    await refused(world, "fs.move", path="share/a", to="share-secret/b")
    await refused(world, "fs.read", path="share/../share-secret/a")


@pytest.mark.parametrize("kind", ["dangling", "file", "directory", "relative", "chain"])
async def test_c14_links_out(world, outside, kind):
    link = world.live / "l"
    if kind == "dangling":
        link.symlink_to(outside / "new")
    elif kind == "file":
        link.symlink_to(outside / "secret")
    elif kind == "directory":
        link.symlink_to(outside)
    elif kind == "relative":
        link.symlink_to(os.path.relpath(outside / "secret", world.live))
    else:
        (world.live / "m").symlink_to(outside)
        link.symlink_to("m/secret")
    before = picture(outside)
    for path in ("l", "l/new"):
        await refused(world, "fs.write", path=path, data=b"x")
        await refused(world, "fs.append", path=path, data=b"x")
        await refused(world, "fs.read", path=path)
        await refused(world, "fs.list", path=path)
        await refused(world, "fs.search", path=path, text="canary")
    await refused(world, "fs.stat", path="l/secret")
    await refused(world, "fs.delete", path="l/secret")
    await refused(world, "fs.move", path="l/secret", to="mine")
    (world.live / "mine").write_text("x")
    await refused(world, "fs.move", path="mine", to="l/mine")
    assert picture(outside) == before
    # The link itself goes, and nothing behind it.
    await world.run("fs.delete", path="l", recursive=True)
    assert picture(outside) == before
    world.undo()
    assert link.is_symlink()
    assert picture(outside) == before


async def test_c14_hard_links_from_outside(world, outside):
    (world.live / "h").hardlink_to(outside / "secret")
    await refused(world, "fs.read", path="h")
    await refused(world, "fs.append", path="h", data=b"x")
    await refused(world, "fs.write", path="h", data=b"x")
    assert (await world.run("fs.search", text="canary")).matches == []
    assert (outside / "secret").read_text() == "canary"
    assert (outside / "secret").stat().st_nlink == 2


@pytest.mark.parametrize("action", ["fs.read", "fs.write", "fs.append", "fs.delete", "fs.list", "fs.search"])
async def test_c14_a_parent_swapped_while_calls_run(world, outside, action):
    """A second thread swaps a directory for a link to outside, over and over; no call ever gets through it."""
    target = world.live / "d"
    link = world.live / "link"
    target.mkdir()
    link.symlink_to(outside)
    before = picture(outside)
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            exchange(target, link)

    swapper = threading.Thread(target=swap)
    swapper.start()
    more = {
        "fs.write": {"data": b"mine"},
        "fs.append": {"data": b"mine"},
        "fs.search": {"text": "canary"},
        "fs.delete": {"recursive": True},
    }.get(action, {})
    path = {"fs.list": "d", "fs.search": "d"}.get(action, "d/secret")
    try:
        for _ in range(300 if action in {"fs.read", "fs.list"} else 60):
            try:
                result = await world.run(action, path=path, **more)
            except errors.SyscallError:
                continue
            if action == "fs.read":
                assert result.data != b"canary"
            elif action == "fs.list":
                assert result.entries == []
            elif action == "fs.search":
                assert result.matches == []
    finally:
        stop.set()
        swapper.join()
    assert picture(outside) == before


@pytest.mark.parametrize(
    "path",
    [
        "/proc/self/environ",
        "/proc/1/environ",
        pytest.param(f"/proc/{os.getpid()}/environ", id="own"),
        "/proc/self/root/etc/hostname",
        "/proc/self/cwd",
        "/proc/self/fd/0",
        "/sys/kernel/notes",
        "/dev/zero",
        "/dev/fd/3",
        "/workspace/../proc/self/environ",
        "proc/../../../proc/self/environ",
    ],
)
async def test_c15_the_kernel_s_own_files(world, path):
    for action, more in (("fs.read", {}), ("fs.write", {"data": b"x"}), ("fs.list", {}), ("fs.stat", {})):
        await refused(world, action, path=path, **more)


@pytest.mark.parametrize("target", ["/proc/self", "/proc/self/root", "/dev", "/proc/self/fd"])
async def test_c15_links_to_them(world, target):
    (world.live / "p").symlink_to(target)
    for below in ("", "/environ", "/etc/hostname", "/zero", "/0"):
        await refused(world, "fs.read", path=f"p{below}")
    found = await world.run("fs.search", path="/workspace", text="PATH=")
    assert found.matches == []
    assert (await world.run("fs.stat", path="p")).info.target == target


async def test_c15_device_nodes_in_the_workspace(world):
    if os.geteuid() != 0:
        pytest.skip("making device nodes takes root")
    os.mknod(world.live / "zero", 0o666 | 0o020000, os.makedev(1, 5))
    os.mkfifo(world.live / "pipe")
    for name in ("zero", "pipe"):
        await refused(world, "fs.read", path=name)
        await refused(world, "fs.write", path=name, data=b"x")
        with pytest.raises(errors.SnapshotFailed):
            await world.run("fs.delete", path=name)


async def test_c43_new_files_go_and_others_files_stay(world):
    (world.live / "a").write_text("tracked")
    (world.live / "ignored").mkdir()
    (world.live / "ignored/i").write_text("ignored")
    await world.run("fs.write", path="a", data=b"changed")
    await world.run("fs.write", path="n", data=b"new")
    await world.run("fs.write", path="made/by/agent", data=b"new")
    (world.live / "u").write_text("another program")
    (world.live / "made/u").write_text("another program")
    plan = world.snapshots.plan_restore(world.workspace, ["p3", "p2", "p1"])
    assert {item.path: item.action for item in plan.items} == {
        "/workspace/a": "restore",
        "/workspace/n": "remove",
        "/workspace/made/by": "remove",
        "/workspace/made/by/agent": "remove",
    }
    assert plan.conflicts == ("/workspace/made",)
    assert plan.reasons["/workspace/made"].startswith("holds `/workspace/made/u`")
    world.snapshots.restore(world.workspace, plan.items)
    assert sorted(str(path.relative_to(world.live)) for path in world.live.rglob("*")) == [
        "a",
        "ignored",
        "ignored/i",
        "made",
        "made/u",
        "u",
    ]
    assert (world.live / "a").read_text() == "tracked"


async def test_c44_everything_comes_back_as_it_was(world):
    (world.live / "file").write_text("x")
    (world.live / "empty").mkdir()
    (world.live / "full/deep/empty").mkdir(parents=True)
    (world.live / "full/f").write_text("x")
    (world.live / "full/deep/run").write_text("#!/bin/sh\n")
    (world.live / "full/deep/run").chmod(0o755)
    (world.live / "full/l").symlink_to("deep/run")
    (world.live / "full/dangling").symlink_to("nowhere")
    before = picture(world.live)
    for path in ("file", "empty", "full"):
        await world.run("fs.delete", path=path, recursive=True)
    # A directory where the file was, and a file where the directory was.
    await world.run("fs.write", path="file/inner", data=b"x")
    await world.run("fs.write", path="full", data=b"x")
    assert world.undo().conflicts == ()
    assert picture(world.live) == before


async def test_no_message_shows_where_things_lie_on_this_host(world):
    place = str(Path(world.live).parent)
    for action, arguments in (
        ("fs.read", {"path": "none"}),
        ("fs.write", {"path": "none/", "data": b"", "mode": 0o10000}),
        ("fs.list", {"path": "none/deeper"}),
        ("fs.delete", {"path": "none"}),
        ("fs.move", {"path": "none", "to": "x"}),
    ):
        with pytest.raises(errors.SyscallError) as caught:
            await world.run(action, **arguments)
        assert place not in caught.value.message
