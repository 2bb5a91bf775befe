"""Case C46: a store that is full or read-only refuses the call, and nothing is lost. Real file systems of a few KiB."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_WORLD = Path(__file__).parents[2]

_PROGRAM = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {helpers!r})
from support.fs_world import World, picture
from ringfence.syscalls import errors

world = World(Path({base!r}))
before = picture(world.live)

async def main():
    for action, more in (("fs.write", {{"data": b"x"}}), ("fs.append", {{"data": b"x"}}),
                         ("fs.delete", {{}}), ("fs.move", {{"to": "elsewhere"}})):
        try:
            await world.run(action, path="big", **more)
        except errors.SnapshotFailed as error:
            print("SnapshotFailed", error.message)
        except errors.SyscallError as error:
            print(type(error).__name__, error.message)
        else:
            print("ran", action)

asyncio.run(main())
if {commands}:
    from support.tree_world import TreeWorld
    change = {{"mutations": [("write", ("big", b"x", 0o644)), ("write", ("new/file", b"x", 0o644))]}}
    print(asyncio.run(TreeWorld(Path({base!r})).call("exec.run", 9, change)).replace(":", ""))
print("untouched" if picture(world.live) == before else "CHANGED")
print("points", world.snapshots.points())
"""


# A command's overlay within mounts of its own is root's here; an ordinary user's kernel makes it in a user namespace.
CALLS = 5 if os.geteuid() == 0 else 4


def in_private_mounts(base: Path, *commands: str, run_commands: bool = True) -> list[str]:
    """Mount things where nobody else sees them, then run the program there, with a command on an overlay if that is wanted."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        pytest.skip("util-linux is not installed")
    as_root = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    program = base / "program.py"
    program.write_text(
        _PROGRAM.format(helpers=str(_WORLD), base=str(base), commands=run_commands and CALLS > 4)
    )
    script = " && ".join([*commands, f"exec {sys.executable} {program}"])
    done = subprocess.run(
        ["unshare", *as_root, "sh", "-c", script], capture_output=True, text=True, check=False
    )
    if done.stderr.startswith(("unshare: ", "mount: ")) and "not permitted" in done.stderr:
        pytest.skip("this host allows no private mounts")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def base(tmp_path):
    (tmp_path / "live").mkdir()
    (tmp_path / "live/big").write_bytes(os.urandom(200_000))
    (tmp_path / "points").mkdir()
    return tmp_path


def test_c46_a_full_store(base):
    lines = in_private_mounts(base, f"mount -t tmpfs -o size=64k none {base}/points")
    assert [line.split()[0] for line in lines[:CALLS]] == ["SnapshotFailed"] * CALLS
    assert all("is full; free space" in line for line in lines[:CALLS])
    assert lines[CALLS:] == ["untouched", "points []"]


def test_c46_a_read_only_store(base):
    lines = in_private_mounts(
        base,
        f"mount --bind {base}/points {base}/points",
        f"mount -o remount,bind,ro {base}/points",
    )
    assert [line.split()[0] for line in lines[:CALLS]] == ["SnapshotFailed"] * CALLS
    assert all("is read-only" in line for line in lines[:CALLS])
    assert lines[CALLS:] == ["untouched", "points []"]


def test_c46_a_full_workspace_disk_changes_nothing_either(base):
    """The point is kept, the effect has no room: the call fails and the point undoes nothing."""
    lines = in_private_mounts(
        base,
        f"cp {base}/live/big {base}/keep",
        f"mkdir {base}/disk",
        f"mount -t tmpfs -o size=300k none {base}/disk",
        f"mkdir {base}/disk/live {base}/disk/points",
        f"mount -t tmpfs none {base}/disk/points",
        f"cp {base}/keep {base}/disk/live/big",
        f"sed -i 's#{base}\\b#{base}/disk#' {base}/program.py",
        f'sed -i \'s#data": b"x"#data": bytes(200000)#\' {base}/program.py',
        run_commands=False,
    )
    assert lines[0].startswith("CallFailed no space left")
    assert lines[1].startswith("CallFailed no space left")
    assert lines[2:] == [
        "ran fs.delete",
        "NoSuchResource `/workspace/big` does not exist; list its directory to see what does",
        "CHANGED",
        "points ['p1', 'p2', 'p3']",
    ]
