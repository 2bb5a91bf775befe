"""Where output goes: never over what is no regular file, and nowhere at all where the caller closed it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

RECORD = {"chain": 1, "pos": 1, "kind": "outcome", "action": "now"}
COMMANDS = {"audit": ("audit", "--export"), "export": ("export", "bot", "--to")}


def answer(door) -> None:
    door.answers["Audit"] = lambda _: [RECORD]
    door.answers["Export"] = lambda _: [b"whole"]


def make(kind: str, path: Path) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("elsewhere" if kind == "dangling" else "/dev/null")


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "dangling"])
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_what_is_no_regular_file_is_not_replaced(words, kind, door, run, tmp_path) -> None:
    answer(door)
    target = tmp_path / "there"
    make(kind, target)
    before = target.lstat()
    result = run(*words, target)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "is not replaced" in result.stderr
    after = target.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_regular_file_is_replaced(words, door, run, tmp_path) -> None:
    answer(door)
    target = tmp_path / "there"
    target.write_text("old")
    assert run(*words, target).exit_code == 0
    assert target.read_bytes() in (b"whole", json.dumps(RECORD).encode() + b"\n")
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_dash_is_standard_output(door, run, tmp_path, monkeypatch) -> None:
    answer(door)
    monkeypatch.chdir(tmp_path)
    assert run("export", "bot", "--to", "-").stdout_bytes == b"whole"
    assert json.loads(run("audit", "--export", "-").stdout) == RECORD
    assert list(tmp_path.glob("-")) == []


def test_an_agent_is_not_written_to_a_terminal(door, terminal) -> None:
    answer(door)
    code, shown = terminal("export", "bot", "--to", "-")
    assert (code, "redirect it" in shown) == (2, True)


def test_pull_replaces_no_pipe_and_needs_a_directory(door, run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a"), BytesIO())
    door.answers["Pull"] = lambda _: [out.getvalue()]
    os.mkfifo(tmp_path / "a")
    result = run("pull", "bot", "--to", tmp_path, "--force")
    assert (result.exit_code, "it is a named pipe" in result.stderr) == (5, True)
    assert (tmp_path / "a").is_fifo()
    assert run("pull", "bot", "--to", "-").exit_code == 2
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_closed_stream_is_no_bug(closed, door, tmp_path) -> None:
    door.answers["List"] = {"agents": []}
    line = f'exec "$0" -m ringfence.console ps --data "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable, str(door.data)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert (done.returncode, "bug" in done.stdout + done.stderr) == (0, False)
    assert list(tmp_path.iterdir()) == []
