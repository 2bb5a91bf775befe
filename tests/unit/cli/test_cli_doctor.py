"""doctor: exit 1 when a required wall is missing, and every missing piece with its fix."""

from __future__ import annotations

import json

import pytest
from ringfence.sandbox.native import backend
from ringfence.sandbox.types import Wall

WALLS = [
    Wall(name="namespaces", ok=True, detail="user, mount, pid"),
    Wall(name="cgroups", ok=False, detail="not writable", fix="run as root", required=False),
]


@pytest.fixture
def walls(monkeypatch) -> list[Wall]:
    made = list(WALLS)
    monkeypatch.setattr(backend.NativeSandbox, "walls", lambda _self: made)
    return made


def test_all_that_is_required(walls, run, tmp_path) -> None:
    result = run("doctor", "--data", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert "ok       namespaces" in result.stdout
    assert "without  cgroups" in result.stdout
    assert "fix: run as root" in result.stdout
    assert "PostgreSQL 18" in result.stdout
    assert not (tmp_path / "new").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_required_wall_is_missing(walls, run, tmp_path) -> None:
    walls.append(Wall(name="landlock", ok=False, detail="the kernel has none", fix="use Linux 5.13 or newer"))
    result = run("doctor", "--data", tmp_path / "new")
    assert result.exit_code == 1
    assert "missing  landlock" in result.stdout
    assert "fix: use Linux 5.13 or newer" in result.stdout
    assert result.stderr == "ringfence: 1 required piece missing: landlock; mend them as listed\n"
    report = run("doctor", "--json", "--data", tmp_path / "new")
    assert report.exit_code == 1
    document = json.loads(report.stdout)
    assert document["ok"] is False
    assert {
        "name": "landlock",
        "ok": False,
        "required": True,
        "detail": "the kernel has none",
        "fix": "use Linux 5.13 or newer",
        "form": "",
    } in document["checks"]


def test_a_wall_in_its_weakest_form_is_said_to_be_weaker(walls, run, tmp_path) -> None:
    walls += [
        Wall(name="memory", ok=True, detail="from outside", fix="be root", required=False, form="measured"),
        Wall(name="pids", ok=True, detail="a group", required=False, form="cgroup-v1"),
    ]
    result = run("doctor", "--data", tmp_path / "new")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[lines.index("weaker memory measured: from outside") + 1] == "stronger: be root"
    assert "ok pids cgroup-v1: a group" in lines
    report = run("doctor", "--json", "--data", tmp_path / "new")
    forms = {check["name"]: check["form"] for check in json.loads(report.stdout)["checks"]}
    assert (forms["memory"], forms["pids"], forms["host"]) == ("measured", "cgroup-v1", "")


def test_a_data_directory_open_to_others(walls, run, tmp_path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    result = run("doctor", "--data", data)
    assert result.exit_code == 1
    assert f"fix: chmod 7" in result.stdout  # noqa: F541
    data.chmod(0o700)
    assert run("doctor", "--data", data).exit_code == 0


def test_a_data_directory_that_is_a_file(walls, run, tmp_path) -> None:
    (tmp_path / "data").write_text("")
    assert run("doctor", "--data", tmp_path / "data").exit_code == 1


def test_this_host(run, tmp_path) -> None:
    """Every wall is really tried; whatever this host has, the answer is whole."""
    result = run("doctor", "--json", "--data", tmp_path / "new")
    document = json.loads(result.stdout)
    assert result.exit_code == (0 if document["ok"] else 1)
    assert {"postgres", "disk", "data directory", "host"} < {check["name"] for check in document["checks"]}
    assert all(check["fix"] for check in document["checks"] if not check["ok"])
