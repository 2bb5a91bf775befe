"""A launcher that is killed before the program runs is told from one that refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.types import ProgramSpec, SandboxLostError

pytestmark = pytest.mark.sandbox

KILLED = "import os, signal, sys; sys.stdin.read(1); os.kill(os.getpid(), signal.SIGKILL)"


async def test_a_launcher_killed_on_its_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(entry: str, label: str) -> list[str]:
        return [sys.executable, "-I", "-c", KILLED, entry, label]

    monkeypatch.setattr("ringfence.sandbox.native.program.launcher_command", command)
    box = NativeSandbox(tmp_path / "data")
    sink = os.open(os.devnull, os.O_WRONLY)
    spec = ProgramSpec(
        agent="a",
        argv=["true"],
        env={},
        image=tmp_path,
        socket_dir=tmp_path,
        stdout_fd=sink,
        stderr_fd=sink,
    )
    with pytest.raises(SandboxLostError, match=r"before the program ran: it was killed; start it again"):
        await box.start(spec)
    os.close(sink)
    assert list((tmp_path / "data" / "sandboxes").glob("*.json*")) == []
    assert await box.sweep() == []
