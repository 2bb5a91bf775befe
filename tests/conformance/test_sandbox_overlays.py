"""Programs that work on an overlay of their own: what they see, what they leave, and that a frozen one can be looked at."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Box

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import listen, says, silent

FILES = {"kept": "k", "gone": "g", "dir/a": "a", "dir/b": "b"}
ANSWERS = """
import os, socket, subprocess
s = socket.socket(socket.AF_UNIX); s.connect("/run/ringfence/syscall.sock")
while order := s.recv(1000):
    done = subprocess.run(["sh", "-c", order.decode()], capture_output=True)
    s.sendall(done.stdout + done.stderr or b"-")
"""


def overlay_of(box: Box) -> Path:
    return box.directory(box.fresh("overlay"), owner=box.kind.kernel_uid)


def changed(box: Box, overlay: Path, lower: Path) -> set[tuple[str, str]]:
    found = json.loads(box.host.call("changes", upper=str(overlay / "upper"), lower=str(lower)))
    return {(row[1], row[0].removeprefix("/workspace/")) for row in found["changes"]}


def test_a_program_works_on_an_overlay_and_is_looked_at_while_it_is_frozen(box: Box) -> None:
    overlay, sockets = overlay_of(box), box.directory(box.fresh("sockets"))
    argv = ["python3", "-c", ANSWERS]
    if box.kind.backend != "native":
        with pytest.raises(Exception, match="has no overlay for a program"):
            box.program(argv, files=FILES, overlay=str(overlay), socket_dir=sockets)
        return
    with listen(sockets) as server:
        program = box.program(argv, files=FILES, overlay=str(overlay), socket_dir=sockets)
        connection, _ = server.accept()
    image = next(path for path in box.place.iterdir() if path.name.endswith("-image"))
    with contextlib.closing(connection):
        assert says(connection, b"pwd; ls; ls /program 2>&1 | head -c 10").split()[:4] == [
            b"/workspace",
            b"dir",
            b"gone",
            b"kept",
        ]
        assert (
            says(connection, b"rm -r gone dir; mkdir dir; echo x >> kept; ln -s kept l; mv kept moved")
            == b"-"
        )
        program.call("pause")
        assert changed(box, overlay, image) == {
            ("remove", "gone"),
            ("remove", "kept"),
            ("create", "moved"),
            ("create", "l"),
            ("remove", "dir/a"),
            ("remove", "dir/b"),
        }
        connection.sendall(b"touch while-frozen; cat moved")
        assert silent(connection)
        assert not (overlay / "upper/while-frozen").exists()
        program.call("resume")
        assert connection.recv(100) == b"kx\n"
        # Nothing of it reaches what lies below.
        assert sorted(str(p.relative_to(image)) for p in image.rglob("*") if p.is_file()) == sorted(FILES)
        assert (image / "kept").read_text() == "k"
    assert program.wait() == ("exit", 0)
    assert box.left() == []


def test_what_an_overlay_holds_is_bounded(box: Box) -> None:
    if box.kind.backend != "native":
        pytest.skip("does not apply: it has no overlays for programs")
    program = box.program(
        ["sh", "-c", "n=0; while :; do n=$((n + 1)); head -c 1000000 /dev/zero > big-$n; done"],
        overlay=str(overlay_of(box)),
        limits={"disk_bytes": 8 << 20, "timeout_s": 60},
    )
    assert program.wait()[0] == "disk"
