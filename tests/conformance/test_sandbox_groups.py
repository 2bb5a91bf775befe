"""Control groups of version 2 beside those of version 1: freezing and thawing, and places where nothing is permitted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ringfence.sandbox.native import cgroups
from ringfence.sandbox.native.cgroups import Groups

# The directory of all groups is one of the machine: what is taken away from it here, other kernels lack.
pytestmark = pytest.mark.alone

VERSION_2 = next(
    (
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if " - cgroup2 " in line
    ),
    "",
)


def test_the_freezer_of_version_2(tmp_path: Path) -> None:
    place = Path(VERSION_2) / f"ringfence-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError:
        pytest.skip("this user may not make control groups of version 2 here")
    child = subprocess.Popen(
        [sys.executable, "-c", "while True: input(); print('answer', flush=True)"], stdin=-1, stdout=-1
    )
    assert child.stdin is not None
    assert child.stdout is not None
    groups = Groups({"freezer": (str(place), 2)})
    try:
        groups.attach(child.pid)
        groups.freeze(True)
        assert "frozen 1" in (place / "cgroup.events").read_text()
        child.stdin.write(b"question\n")
        child.stdin.flush()
        groups.freeze(False)
        assert child.stdout.readline() == b"answer\n"
    finally:
        child.kill()
        child.communicate()
        groups.remove()
    assert not place.exists()


@pytest.mark.parametrize("frozen", [False, True])
def test_everything_in_a_group_of_version_2_is_killed_at_once(frozen: bool) -> None:
    place = Path(VERSION_2) / f"ringfence-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError:
        pytest.skip("this user may not make control groups of version 2 here")
    code = "import os, signal, time\nfor number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)\n"
    code += "for _ in range(3):\n  if os.fork() == 0: os.setsid(); os.write(1, b'x'); time.sleep(1000)\n"
    code += "os.write(1, b'x'); time.sleep(1000)"
    groups = Groups({"freezer": (str(place), 2)})
    child = subprocess.Popen(
        ["/bin/sh", "-c", 'read x; exec "$0" -c "$1"', sys.executable, code], stdin=-1, stdout=-1
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        groups.attach(child.pid)
        child.stdin.write(b"go\n")
        child.stdin.flush()
        assert child.stdout.read(4) == b"xxxx"
        if frozen:
            groups.freeze(True)
        groups.kill()
        assert child.wait() == -signal.SIGKILL
        assert child.stdout.read() == b""  # nobody holds the other end any more
    finally:
        child.kill()
        child.communicate()
        groups.remove()
    assert not place.exists()


def test_groups_that_no_record_names_are_swept(tmp_path: Path) -> None:
    other = tmp_path / "other"
    left = Groups.create(cgroups.label(str(tmp_path), "left"))
    lives = Groups.create(cgroups.label(str(tmp_path), "lives"))
    foreign = Groups.create(cgroups.label(str(other), "left"))
    if not left.where:
        pytest.skip("this user may not make control groups here")
    child = subprocess.Popen(["sleep", "1000"])
    try:
        left.attach(child.pid)
        cgroups.sweep(str(tmp_path), frozenset({"lives"}))
        assert child.wait() == -signal.SIGKILL
        assert [one for one in left.directories() if Path(one).exists()] == []
        for kept in (lives, foreign):
            assert [one for one in kept.directories() if not Path(one).exists()] == []
    finally:
        child.kill()
        child.wait()
        for groups in (left, lives, foreign):
            groups.remove()
        cgroups.remove_shared()


def test_a_shared_group_of_another_user_stops_no_sweep(tmp_path: Path) -> None:
    """A kernel of root's on the same host; whoever is not root can't look into its group."""
    top = Path(tempfile.gettempdir())
    for place in (tmp_path, *tmp_path.parents):
        if place.is_relative_to(top) and place != top:
            place.chmod(0o755)  # a kernel can always look into its own data directory
    mine = Groups.create(cgroups.label(str(tmp_path), "mine"))
    shared = [Path(one).parent for one in mine.directories()]
    if not shared or os.geteuid() != 0:
        pytest.skip("only root can make a group that others can't look into")
    modes = [one.stat().st_mode for one in shared]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for one in shared:
                one.chmod(0o700)
            os.setgroups([])
            os.setresgid(47110, 47110, 47110)
            os.setresuid(47110, 47110, 47110)
            cgroups.sweep(str(tmp_path), frozenset())
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    for one, mode in zip(shared, modes, strict=True):
        one.chmod(mode & 0o777)
    mine.remove()
    cgroups.remove_shared()
    assert status == 0


def test_groups_have_limits_or_are_not_there() -> None:
    groups = Groups.create(f"test-{os.getpid()}")
    groups.limit(64 << 20, 9, 0.5)
    try:
        for controller, (directory, version) in groups.where.items():
            assert Path(directory).is_dir()
            if controller == "pids":
                assert (Path(directory) / "pids.max").read_text().strip() == "9"
            if controller == "memory":
                file = "memory.limit_in_bytes" if version == 1 else "memory.max"
                assert int((Path(directory) / file).read_text()) == 64 << 20
        assert groups.oom_kills() == 0
    finally:
        groups.remove()
    assert not any(Path(directory).exists() for directory in groups.directories())
