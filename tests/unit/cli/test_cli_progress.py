"""Progress is for people at a terminal: nowhere else is there a trace of it, and nothing of it stays."""

from __future__ import annotations

import io
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from ringfence.console.pack import pack, packed_bytes
from ringfence.console.progress import Progress


def test_a_line_says_how_far_it_is() -> None:
    progress = Progress("uploading", total=4096)
    assert progress.line().startswith("uploading  ")
    progress.add(1024)
    assert "[#####...............]  25%  1.0 KiB of 4.0 KiB" in progress.line()
    progress.add(8192)
    assert "100%  9.0 KiB" in progress.line()
    progress.now("starting\x1b[2J")
    assert "%" not in progress.line()
    assert "\x1b" not in progress.line()
    counted = Progress("exporting", unit="records")
    counted.add()
    assert "1 records" in counted.line()


def test_the_announced_size_is_that_of_the_tar(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/large").write_bytes(b"x" * 1_000_000)
    (tmp_path / "a/link").symlink_to("b/large")
    (tmp_path / "empty").touch()
    made = b"".join(pack(tmp_path, left_out=lambda *_: None))
    assert abs(packed_bytes(tmp_path) - len(made)) < tarfile.RECORDSIZE


def tarred(content: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("file")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture
def slow(door: Any) -> threading.Event:
    """A pull that goes on only when its progress was seen."""
    seen = threading.Event()

    def chunks(_: Any) -> Any:
        made = tarred(b"x" * 3000)
        yield made[:2048]
        seen.wait(30)
        yield made[2048:]

    door.answers["Pull"] = chunks
    return seen


def test_a_terminal_sees_it_and_nothing_stays(slow: threading.Event, terminal: Any, tmp_path: Path) -> None:
    code, shown = terminal("pull", "bot", "--to", str(tmp_path / "out"), script=[(b"2.0 KiB", slow.set)])
    assert code == 0
    assert "pulling" in shown
    assert shown.rpartition("\r\x1b[K")[2].startswith("1 file, 2.9 KiB in ")


@pytest.mark.parametrize(("words", "environment"), [(("--json",), {}), ((), {"TERM": "dumb"})])
def test_no_trace_of_it(
    words: tuple[str, ...], environment: dict[str, str], door: Any, terminal: Any, tmp_path: Path
) -> None:
    shown_late = threading.Event()
    threading.Timer(0.9, shown_late.set).start()  # longer than a line would need to show

    def chunks(_: Any) -> Any:
        shown_late.wait(30)
        yield tarred(b"x")

    door.answers["Pull"] = chunks
    code, shown = terminal("pull", "bot", "--to", str(tmp_path / "out"), *words, **environment)
    assert code == 0
    assert "pulling" not in shown
    assert "\x1b" not in shown


def test_none_in_a_pipe(door: Any, run: Any, tmp_path: Path) -> None:
    door.answers["Pull"] = lambda _: [tarred(b"x")]
    done = run("pull", "bot", "--to", tmp_path / "out")
    assert (done.exit_code, done.stderr) == (0, "")
    assert not Progress("anything").shown
