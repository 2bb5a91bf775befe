"""Control groups of version 2 beside those of version 1: freezing and thawing, and places where nothing is permitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ringfence.sandbox.native.cgroups import Groups

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
