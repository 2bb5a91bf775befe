"""What makes and watches sandboxes dies at the worst moment: nothing stays, it is told from a refusal, the next start works."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.types import Exit, ExitReason, ProgramSpec, SandboxLostError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.sandbox

KILLED = "import os, signal, sys; sys.stdin.read(1); os.kill(os.getpid(), signal.SIGKILL)"
BOX_UID = 247113 if os.geteuid() == 0 else None


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for directory in [tmp_path, *tmp_path.parents][:4]:
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o055)
    return tmp_path


@pytest.fixture
async def native(place: Path) -> AsyncIterator[NativeSandbox]:
    box = NativeSandbox(place / "data")
    yield box
    await box.close()
    assert list((place / "data" / "sandboxes").glob("*.json*")) == []


def killed_at_once(*_: str) -> list[str]:
    return [sys.executable, "-I", "-c", KILLED]


def spec_of(place: Path, *argv: str) -> ProgramSpec:
    return ProgramSpec(
        agent="a",
        argv=argv or ("true",),
        env={"PATH": "/usr/bin:/bin"},
        image=place,
        socket_dir=place,
        uid=BOX_UID,
        stdout_fd=SINK,
        stderr_fd=SINK,
    )


SINK = os.open(os.devnull, os.O_WRONLY)


def lives(pid: object) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def end(pid: int) -> None:
    """Kill it and wait until it is dead: before, it may still take orders that it can't follow."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)


async def runs(box: NativeSandbox, place: Path) -> bool:
    return await (await box.start(spec_of(place))).wait() == Exit(reason=ExitReason.EXIT, code=0)


def zygotes_of(warden: int) -> list[int]:
    """Children of the warden in its own pid namespace; first processes of sandboxes look the same otherwise."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"import zygote" in path.read_bytes():
                status = dict(line.split(":\t") for line in (path.parent / "status").read_text().splitlines())
                outside = len(status["NSpid"].split()) == 1
                found += [int(path.parent.name)] if outside and int(status["PPid"]) == warden else []
        except OSError:
            continue
    return found


async def test_a_warden_killed_on_its_way_leaves_nothing(
    native: NativeSandbox, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "ringfence.sandbox.native.launcher.command",
            killed_at_once,
        )
        with pytest.raises(
            SandboxLostError, match=r"before its program ran: .*it was killed; start it again"
        ):
            await native.start(spec_of(place))
    assert list((place / "data" / "sandboxes").glob("*.json*")) == []
    assert await native.sweep() == []
    # The next start finds it dead and makes another.
    assert await runs(native, place)


async def test_a_dead_warden_ends_all_its_sandboxes_and_is_replaced(
    native: NativeSandbox, place: Path
) -> None:
    programs = [await native.start(spec_of(place, "sleep", "1000")) for _ in range(3)]
    first = native.warden_pid
    os.kill(first, signal.SIGKILL)
    for program in programs:
        assert await program.wait() == Exit(reason=ExitReason.KILLED, code=-9)
        assert not lives(program.identity["pid"])
        await program.kill()
        await program.pause()
    assert list((place / "data" / "sandboxes").glob("*.json*")) == []
    assert await runs(native, place)
    assert native.warden_pid not in (0, first)


async def test_a_dead_zygote_is_replaced_and_its_sandboxes_live_on(
    native: NativeSandbox, place: Path
) -> None:
    program = await native.start(spec_of(place, "sleep", "1000"))
    [zygote] = zygotes_of(native.warden_pid)
    end(zygote)
    assert await runs(native, place)
    assert not lives(zygote)
    assert lives(program.identity["pid"])
    await program.kill()
    assert await program.wait() == Exit(reason=ExitReason.KILLED, code=-9)


async def test_starts_in_flight_are_lost_with_their_zygote(native: NativeSandbox, place: Path) -> None:
    assert await runs(native, place)
    [zygote] = zygotes_of(native.warden_pid)
    # It takes the orders and can do nothing about them.
    os.kill(zygote, signal.SIGSTOP)
    starts = [asyncio.create_task(native.start(spec_of(place))) for _ in range(3)]
    await asyncio.wait(starts, timeout=0.2)
    os.kill(zygote, signal.SIGKILL)
    ends = await asyncio.gather(*starts, return_exceptions=True)
    # One of them may have had the spare first process.
    lost = [end for end in ends if isinstance(end, BaseException)]
    assert len(lost) >= 2
    for each in lost:
        with pytest.raises(SandboxLostError, match="start it again"):
            raise each
    assert await runs(native, place)


async def test_a_start_that_is_cancelled_leaves_nothing(native: NativeSandbox, place: Path) -> None:
    assert await runs(native, place)
    start = asyncio.create_task(native.start(spec_of(place, "sleep", "1000")))
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert list((place / "data" / "sandboxes").glob("*.json*")) == []
