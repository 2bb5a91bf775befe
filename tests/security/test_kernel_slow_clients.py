"""Clients that speak HTTP/2 by hand: half-open, slow, resetting, flooding. The kernel holds little for them, others are served."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.kernel.descriptors import CONNECTIONS_MAX
from ringfence.v1 import syscalls_pb2 as pb
from support.scenes import STREAM, Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

FILES = ['fs.*: "/workspace/**"', 'state.*: "**"']
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
ROOM = 120 << 20


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


@pytest.fixture(scope="module")
def bystander(scene: Scene) -> Held:
    """An honest agent of the same kernel."""
    return scene.hold(name="bystander", allow=FILES)


@pytest.fixture
def bounded(scene: Scene, bystander: Held) -> Iterator[None]:
    """What the test does costs the kernel little memory, and nobody else anything."""
    bystander.rf.state.put("before", 1)
    before = memory(scene, "VmRSS")
    assert scene.kernel.process is not None
    Path(f"/proc/{scene.kernel.process.pid}/clear_refs").write_text("5")
    yield
    assert bystander.rf.state.put("after", 1) > 0
    assert scene.operator.ask("Status", timeout=20)["database"]["state"] == "ok"
    assert memory(scene, "VmHWM") < before + ROOM


def memory(scene: Scene, key: str) -> int:
    assert scene.kernel.process is not None
    lines = Path(f"/proc/{scene.kernel.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """One header field, neither compressed nor remembered."""
    words = [word.encode() for word in (name, value)]
    return b"\x00" + b"".join(bytes([len(word)]) + word for word in words)


FIELDS = b"".join(
    literal(name, value)
    for name, value in {
        ":method": "POST",
        ":scheme": "http",
        ":path": STREAM,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }.items()
)


@contextlib.contextmanager
def raw(held: Held, *first: bytes) -> Generator[socket.socket]:
    """A connection that has said hello as HTTP/2 does."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(held.socket))
        client.settimeout(20)
        client.sendall(PREFACE + frame(SETTINGS, 0) + b"".join(first))
        yield client


def push(client: socket.socket, data: bytes) -> bool:
    """Send as long as the kernel takes it without waiting for ever; False: it has hung up or stopped reading."""
    client.settimeout(2)
    try:
        client.sendall(data)
    except OSError:
        return False
    return True


def greeting(held: Held) -> bytes:
    hello = pb.StreamRequest(hello=pb.Hello(token=held.token, protocol=1, client="raw")).SerializeToString()
    return b"\x00" + struct.pack(">I", len(hello)) + hello


@pytest.mark.usefixtures("bounded")
def test_streams_that_are_reset_as_soon_as_they_are_open(scene: Scene) -> None:
    """Rapid reset, CVE-2023-44487."""
    held = scene.hold(name="resetter", allow=FILES)
    with raw(held) as client:
        for base in range(1, 4_001, 200):
            part = b"".join(
                frame(HEADERS, number, FIELDS, END_HEADERS) + frame(RESET, number, struct.pack(">I", 8))
                for number in range(base, base + 200, 2)
            )
            if not push(client, part):
                break
    assert held.rf.state.put("k", 1) > 0


@pytest.mark.usefixtures("bounded")
def test_headers_that_never_end(scene: Scene) -> None:
    """CONTINUATION flood, CVE-2024-27316 and its like."""
    held = scene.hold(name="continuer", allow=FILES)
    part = frame(CONTINUATION, 1, literal("x-a", "a" * 100) * 150)
    with raw(held, frame(HEADERS, 1, FIELDS)) as client:
        # Three hundred megabytes, if it takes them: it may hold on to no more than the bound.
        for _ in range(20_000):
            if not push(client, part):
                break
    assert held.rf.state.put("k", 1) > 0


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(
    "part",
    [
        frame(PING, 0, b"12345678"),
        frame(SETTINGS, 0, struct.pack(">HI", 3, 100)),
        frame(WINDOW, 0, b"\x00\x00\x00\x01"),
    ],
    ids=["ping", "settings", "window"],
)
def test_frames_whose_answers_nobody_reads(scene: Scene, part: bytes) -> None:
    held = scene.hold(name="pinger", allow=FILES)
    with raw(held) as client:
        for _ in range(300):
            if not push(client, part * 1000):
                break
    assert held.rf.state.put("k", 1) > 0


@pytest.mark.usefixtures("bounded")
def test_a_message_in_frames_of_one_byte(scene: Scene) -> None:
    held = scene.hold(name="crumbler", allow=FILES)
    declared = b"\x00" + struct.pack(">I", 4 << 20)
    with raw(
        held, frame(HEADERS, 1, FIELDS, END_HEADERS), frame(DATA, 1, greeting(held)), frame(DATA, 1, declared)
    ) as client:
        for _ in range(30):
            if not push(client, frame(DATA, 1, b"x") * 1000):
                break
    assert held.rf.state.put("k", 1) > 0


@pytest.mark.usefixtures("bounded")
def test_a_reader_that_grants_no_room(scene: Scene) -> None:
    """Flow control at zero: answers are made and can't be sent."""
    held = scene.hold(name="stingy", allow=FILES)
    held.rf.fs.write_bytes("big", b"A" * 2_000_000)
    nothing = frame(SETTINGS, 0, struct.pack(">HI", 4, 0))
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(raw(held, nothing))
            for number in range(1, 9, 2):
                push(
                    client, frame(HEADERS, number, FIELDS, END_HEADERS) + frame(DATA, number, greeting(held))
                )
                for step in range(8):
                    call = pb.Call(
                        id=step + 1,
                        lane=f"0.{number}.{step}",
                        step=0,
                        action="fs.read",
                        arguments=b'{"path":"big"}',
                    )
                    data = pb.StreamRequest(call=call).SerializeToString()
                    push(client, frame(DATA, number, b"\x00" + struct.pack(">I", len(data)) + data))
        assert scene.operator.ask("Status", timeout=20)["agents"]["running"] >= 1


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(
    "half",
    [b"", frame(HEADERS, 1, FIELDS)[:20], frame(HEADERS, 1, FIELDS), frame(DATA, 1, b"")[:5]],
    ids=["hello", "cut", "open", "header"],
)
def test_half_open_connections_cost_only_their_own_agent(scene: Scene, bystander: Held, half: bytes) -> None:
    held = scene.hold(name="half", allow=FILES)
    with contextlib.ExitStack() as stack:
        for _ in range(2 * CONNECTIONS_MAX):
            with contextlib.suppress(OSError):
                stack.enter_context(raw(held, half))
        assert bystander.rf.state.put("meanwhile", 1) > 0
    # With them go their places.
    assert held.rf.state.put("k", 1) > 0


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("field", [b"v" * 3900, b""], ids=["long", "empty"])
@pytest.mark.parametrize("acknowledged", [False, True], ids=["stranger", "acknowledged"])
def test_headers_that_are_larger_than_they_look(scene: Scene, field: bytes, acknowledged: bool) -> None:
    """A compression bomb: one field in the table, referred to thousands of times, on as many connections as there are."""
    held = scene.hold(name="bomber", allow=FILES)
    size = len(field) - 127
    length = bytes([len(field)]) if size < 0 else b"\x7f" + bytes([size & 127 | 128, size >> 7])
    entry = b"\x40\x06x-long" + length + field
    settled = frame(SETTINGS, 0, flags=1) if acknowledged else b""
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS_MAX):
            try:
                client = stack.enter_context(raw(held, settled))
            except OSError:
                continue  # closed for the one before it, whose place is not yet free
            for number in range(1, 40, 2):
                block = FIELDS + (entry if number == 1 else b"") + b"\xbe" * 8000
                if not push(client, frame(HEADERS, number, block, END_HEADERS)):
                    break
    assert held.rf.state.put("k", 1) > 0
