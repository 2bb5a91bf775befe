"""A hostile program on a sandbox host: it can't use up the memory of that host's process, nor of the kernel's."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.sandbox.remote import RemoteSandbox, RemoteSettings
from ringfence.sandbox.remote.channels import BULK_WINDOW, RELAY_WINDOW
from ringfence.sandbox.remote.relays import CONNECTIONS_MAX
from ringfence.sandbox.remote.session import UNSEEN_BYTES_MAX
from ringfence.sandbox.types import ExitReason, Limits, ProgramSpec
from support import elsewhere
from support.elsewhere import Elsewhere

pytestmark = pytest.mark.sandbox

PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""
FLOOD = """
import os, select, socket, sys
held, sent, refused = [], 0, 0
for _ in range(200):
    one = socket.socket(socket.AF_UNIX)
    one.connect("/run/ringfence/syscall.sock")
    one.setblocking(False)
    held.append(one)
quiet = 0
while quiet < 20 and held:
    _, ready, _ = select.select([], held, [], 0.1)
    quiet = 0 if ready else quiet + 1
    for one in ready:
        try:
            sent += one.send(b"x" * 65536)
        except BlockingIOError:
            pass
        except OSError:
            held.remove(one)
print(len(held), sent, flush=True)
"""
TALK = "import os\nwhile True: os.write(1, b'y' * 65536)"
CHURN = """
import socket
for _ in range(5000):
    one = socket.socket(socket.AF_UNIX)
    one.connect("/run/ringfence/syscall.sock")
    try:
        one.send(b"x")
    except OSError:
        pass
    one.close()
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: Any) -> Iterator[Elsewhere]:
    with elsewhere.running(tmp_path_factory.mktemp("elsewhere")) as machine:
        yield machine


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def spec(place: Path, code: str, out: int) -> ProgramSpec:
    for name in ("image", "sockets"):
        (place / name).mkdir(exist_ok=True)
    place.chmod(0o755)
    return ProgramSpec(
        agent="hostile",
        argv=[PYTHON, "-I", "-S", "-c", code],
        env={"PATH": "/usr/bin:/bin"},
        image=place / "image",
        socket_dir=place / "sockets",
        uid=247110 if os.geteuid() == 0 else None,
        limits=Limits(pids=16),
        stdout_fd=out,
        stderr_fd=out,
    )


class Deaf(asyncio.Protocol):
    """A socket of the kernel's that never reads."""

    def connection_made(self, transport: Any) -> None:
        # Not yet: reading begins only after this callback.
        asyncio.get_running_loop().call_soon(transport.pause_reading)
        self.transport = transport
        made.append(self)


made: list[Deaf] = []


async def test_connections_that_nobody_reads(machine: Elsewhere, tmp_path: Path) -> None:
    sandbox = RemoteSandbox(tmp_path / "data", RemoteSettings(address=machine.address, certs=machine.certs))
    reading, writing = os.pipe()
    wanted = spec(tmp_path, FLOOD, writing)
    server = await asyncio.get_running_loop().create_unix_server(Deaf, tmp_path / "sockets/syscall.sock")
    before = resident(machine.pid), resident(os.getpid())
    program = await sandbox.start(wanted)
    os.close(writing)
    ended = await program.wait()
    assert ended.reason is ExitReason.EXIT
    held, sent = map(int, os.read(reading, 100).split())
    os.close(reading)
    assert held <= CONNECTIONS_MAX
    # What a connection holds: a window at either end, and what the sockets at both ends take.
    assert sent <= CONNECTIONS_MAX * (4 * RELAY_WINDOW + 1_000_000)
    most = 4 * CONNECTIONS_MAX * RELAY_WINDOW + 2 * UNSEEN_BYTES_MAX + (32 << 20)
    assert resident(machine.pid) - before[0] < most
    assert resident(os.getpid()) - before[1] < most
    server.close()
    await sandbox.close()
    for connection in made:
        connection.transport.abort()
    await asyncio.sleep(0)


async def test_output_that_nobody_reads(machine: Elsewhere, tmp_path: Path) -> None:
    sandbox = RemoteSandbox(tmp_path / "data", RemoteSettings(address=machine.address, certs=machine.certs))
    reading, writing = os.pipe()
    before = resident(machine.pid), resident(os.getpid())
    program = await sandbox.start(spec(tmp_path, TALK, writing))
    os.close(writing)
    await asyncio.sleep(1)  # as long as it writes without being held up
    most = 4 * BULK_WINDOW + 2 * UNSEEN_BYTES_MAX + (16 << 20)
    assert resident(machine.pid) - before[0] < most
    assert resident(os.getpid()) - before[1] < most
    await program.kill()
    assert (await program.wait()).reason is ExitReason.KILLED
    os.close(reading)
    await sandbox.close()


async def test_connections_that_come_and_go(machine: Elsewhere, tmp_path: Path) -> None:
    sandbox = RemoteSandbox(tmp_path / "data", RemoteSettings(address=machine.address, certs=machine.certs))
    reading, writing = os.pipe()
    wanted = spec(tmp_path, CHURN, writing)
    server = await asyncio.start_unix_server(
        lambda _, writer: writer.close(), tmp_path / "sockets/syscall.sock"
    )
    before = resident(machine.pid), resident(os.getpid())
    program = await sandbox.start(wanted)
    os.close(writing)
    await program.wait()
    assert os.read(reading, 100) == b"done\n"
    os.close(reading)
    assert resident(machine.pid) - before[0] < 32 << 20
    assert resident(os.getpid()) - before[1] < 32 << 20
    calls = await sandbox._link.calls()
    assert calls.session.lost is None
    server.close()
    await sandbox.close()
