"""What a hostile program can do at its own door: nobody else notices, and nothing it does is missing from the evidence."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from ringfence.agent import InvalidRequest, NoSuchSyscall, RingfenceError
from ringfence.v1 import syscalls_pb2 as pb
from support.scenes import Held, Scene, Stream, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

FILES = ['fs.*: "/workspace/**"', 'state.*: "**"']


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


@pytest.fixture(scope="module")
def bystander(scene: Scene) -> Held:
    """An honest agent of the same kernel."""
    return scene.hold(name="bystander", allow=FILES)


@pytest.fixture(autouse=True)
def unharmed(scene: Scene, bystander: Held) -> Iterator[None]:
    """After each attack the others are served: the honest agent, the operator, and the next submission."""
    yield
    assert bystander.rf.state.put("bystander", 1) > 0
    assert scene.operator.ask("Status", timeout=20)["database"]["state"] == "ok"


def kernel_memory(scene: Scene) -> int:
    """Resident bytes of the kernel process."""
    assert scene.kernel.process is not None
    status = Path(f"/proc/{scene.kernel.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) << 10


# -- bytes on the socket ------------------------------------------------------------------------------------------------

GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00" * 100_000,
    os.urandom(100_000),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(20_000),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x04\x00\x00\x00\x00\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 20_000,
    b"",
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_on_the_socket(scene: Scene, bystander: Held, data: bytes) -> None:
    for held in (bystander, scene.hold(allow=FILES)):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(held.socket))
            raw.settimeout(20)
            with contextlib.suppress(OSError):
                raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while raw.recv(65536):
                    pass
        assert held.rf.state.put("after", 1) > 0


def test_a_thousand_connections_and_streams(scene: Scene, bystander: Held) -> None:
    held = scene.hold(name="many", allow=FILES)
    held.rf.state.put("many", 1)
    before = kernel_memory(scene)
    raws: list[socket.socket] = []
    streams: list[Stream] = []
    try:
        # Streams that never say who they are, and streams that do and then say nothing.
        streams += [held.stream() for _ in range(8)]
        streams += [held.stream(greet=False) for _ in range(40)]
        for _ in range(1000):
            raw = socket.socket(socket.AF_UNIX)
            raw.setblocking(False)
            with contextlib.suppress(OSError):
                raw.connect(str(held.socket))
            raws.append(raw)
        assert bystander.rf.state.put("many/bystander", 1) > 0
        assert scene.operator.ask("Status", timeout=20)["agents"]["running"] >= 2
        other = scene.hold(name="meanwhile", allow=FILES)
        assert other.rf.state.put("many/other", 1) > 0
    finally:
        for stream in streams:
            stream.close()
        for raw in raws:
            raw.close()
    assert held.rf.state.put("many", 2) > 0
    assert kernel_memory(scene) < before + (300 << 20)


def test_a_hundred_megabytes_in_one_message(scene: Scene) -> None:
    held = scene.hold(allow=FILES)
    before = kernel_memory(scene)
    stream = held.stream()
    stream.post("fs.write", b'{"path":"x","data":"' + b"A" * (100 << 20) + b'"}', step=0)
    with pytest.raises(grpc.RpcError) as refused:
        stream.receive()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    stream.close()
    # The library says it in its own words, and goes on.
    held.refused(InvalidRequest, lambda: held.rf.fs.write_bytes("x", b"A" * (30 << 20)))
    held.rf.fs.write_bytes("x", b"A" * (1 << 20))
    assert (held.live / "x").stat().st_size == 1 << 20
    assert kernel_memory(scene) < before + (200 << 20)


def test_arguments_above_the_limit_are_refused_and_recorded(scene: Scene) -> None:
    held = scene.hold(allow=FILES)
    error = held.refused(InvalidRequest, lambda: held.rf.fs.write_bytes("x", b"A" * (4 << 20)))
    assert "the limit is" in error.message
    assert [(s["action"], s["outcome"]) for s in held.steps()] == [("fs.write", "refused")]


# -- credentials ----------------------------------------------------------------------------------------------------------


def refused_hello(held: Held, token: str, protocol: int = 1) -> grpc.StatusCode:
    stream = held.stream(greet=False)
    stream.send(pb.StreamRequest(hello=pb.Hello(token=token, protocol=protocol, client="test")))
    with pytest.raises(grpc.RpcError) as refused:
        stream.receive()
    stream.close()
    return refused.value.code()


def test_wrong_and_old_tokens(scene: Scene, bystander: Held) -> None:
    held = scene.hold(allow=FILES)
    for token in ("", "wrong", bystander.token, held.token[:-1], held.token + "x", "\x00" * 1000):
        assert refused_hello(held, token) is grpc.StatusCode.UNAUTHENTICATED
    assert refused_hello(held, held.token, protocol=2) is grpc.StatusCode.INVALID_ARGUMENT
    old = held.token
    held.operator.ask("Kill", agent=held.id)
    held.operator.ask("Start", agent=held.id)
    held.again()
    assert old != held.token
    assert refused_hello(held, old) is grpc.StatusCode.UNAUTHENTICATED
    assert held.rf.state.put("token", 1) > 0
    # A stream that begins with a call has no identity.
    stream = held.stream(greet=False)
    stream.post("now", step=0)
    with pytest.raises(grpc.RpcError) as refused:
        stream.receive()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    stream.close()


def test_unary_calls_need_the_token_too(scene: Scene) -> None:
    held = scene.hold(allow=FILES)
    with grpc.insecure_channel(f"unix:{held.socket}") as channel:
        call = channel.unary_unary(
            "/ringfence.v1.SyscallService/Now",
            request_serializer=pb.NowRequest.SerializeToString,
            response_deserializer=pb.NowResponse.FromString,
        )
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", held.token),)):
            with pytest.raises(grpc.RpcError) as refused:
                call(pb.NowRequest(), metadata=metadata, timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert call(pb.NowRequest(), metadata=(("authorization", f"Bearer {held.token}"),), timeout=20).time
    assert [(s["action"], s["outcome"]) for s in held.steps()] == [("now", "ok")]


def test_the_sockets_belong_to_their_owners_alone(scene: Scene) -> None:
    held = scene.hold(allow=FILES)
    run = held.socket.parent.parent
    assert run.stat().st_mode & 0o077 == 0
    assert (run / "operator.sock").stat().st_mode & 0o777 == 0o600
    # Inside: its own socket, and no other.
    agent = scene.run(
        "import os, json\nprint(json.dumps([sorted(os.listdir('/run/ringfence')), os.path.exists('"
        + str(run)
        + "')]))"
    )
    assert scene.said(agent) == [[["syscall.sock"], False]]


# -- calls that are none, and what the audit says of them (C60) -----------------------------------------------------------


def outcome_rows(held: Held) -> list[dict[str, Any]]:
    return [row for row in held.operator.stream("Audit", agent=held.id) if row["kind"] == "outcome"]


BAD_CALLS: list[tuple[str, bytes, str]] = [
    ("no.such", b"{}", "NoSuchSyscall"),
    ("", b"{}", "NoSuchSyscall"),
    ("x" * 100_000, b"{}", "NoSuchSyscall"),
    ("fs.read\n\x1b[31mfs.write", b"{}", "NoSuchSyscall"),
    ("fs.read", b"", "InvalidRequest"),
    ("fs.read", b"{", "InvalidRequest"),
    ("fs.read", b"[]", "InvalidRequest"),
    ("fs.read", b'{"path": 7}', "InvalidRequest"),
    ("fs.read", b'{"path": "a", "extra": 1}', "InvalidRequest"),
    # The last of two counts, for the kernel and for the journal alike.
    ("fs.read", b'{"path": "forbidden", "path": "missing"}', "NoSuchResource"),
    ("fs.read", b'{"path": "\\u0000"}', "InvalidRequest"),
    ("fs.read", b'{"path": "\\ud800"}', "InvalidRequest"),
    ("fs.read", b'{"path": "../../etc/passwd"}', "InvalidRequest"),
    ("fs.read", b'{"path": "/etc/passwd"}', "InvalidRequest"),
    ("fs.read", b'{"path": "a", "offset": -1}', "InvalidRequest"),
    ("fs.read", b'{"path": "a", "offset": 99999999999999999999999999}', "InvalidRequest"),
    ("fs.write", b'{"path": "a", "data": "no base64!"}', "InvalidRequest"),
    ("state.put", b"\xff\xfe", "InvalidRequest"),
    ("state.put", b'{"key": "k", "value": NaN}', "InvalidRequest"),
    ("state.put", b'{"key": "k", "value": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "InvalidRequest"),
    ("exec.run", b'{"argv": []}', "InvalidRequest"),
    ("sql.read", b'{"database": "none", "statement": "select 1"}', "NoSuchResource"),
    ("http.get", b'{"url": "http://169.254.169.254/"}', "NoSuchResource"),
    ("fs.read", b'{"path": "missing"}', "NoSuchResource"),
    ("state.put", b'{"key": "k", "value": 1}', ""),
    ("fs.delete", b'{"path": "forbidden"}', "Denied"),
]


def test_every_call_at_the_door_is_one_decision_in_the_audit(scene: Scene) -> None:
    held = scene.hold(
        allow=[
            'fs.read: "/workspace/**"',
            'fs.write: "/workspace/**"',
            'state.*: "**"',
            'exec.run: "*"',
            "sql.*: {database: none}",
            'http.get: "**"',
        ],
        files={"forbidden": "x"},
    )
    stream = held.stream()
    for number, (action, arguments, reason) in enumerate(BAD_CALLS):
        reply = stream.ask(action, arguments, step=number)
        assert reply.failure.reason == reason, (action[:40], arguments[:60], reply.failure)
        assert "\n" not in reply.failure.message
        assert "\x1b" not in reply.failure.message
        assert len(reply.failure.message) < 2000
        assert reply.step == number + 1
    stream.close()
    rows = outcome_rows(held)
    assert [row["step"] for row in rows] == list(range(1, len(BAD_CALLS) + 1))
    assert {row["verdict"] for row in rows if row["outcome"] == "denied"} == {"deny"}
    assert all(row["digest"] for row in rows)
    for row, (action, _, reason) in zip(rows, BAD_CALLS, strict=True):
        assert (row["outcome"] == "ok") == (reason == ""), (action[:40], row)
    assert (held.live / "forbidden").exists()
    assert scene.operator.ask("AuditVerify")["ok"]


def test_lanes_have_no_gaps(scene: Scene) -> None:
    held = scene.hold(allow=FILES)
    stream = held.stream()
    for lane, step in (("0", 1), ("0", 4_000_000_000), ("0.7", 3)):
        reply = stream.ask("now", lane=lane, step=step)
        assert reply.failure.reason == "InvalidRequest"
        assert "come in order" in reply.failure.message
    for lane in ("", "x" * 300, "0\x00", "0 1", "0\n", "\u0660", "op"):
        assert stream.ask("now", lane=lane, step=0).failure.reason == "InvalidRequest", lane
    assert stream.ask("now", step=0).failure.reason == ""
    assert stream.ask("now", step=2).failure.reason == "InvalidRequest"
    assert stream.ask("now", step=1).failure.reason == ""
    stream.close()
    assert [s["action"] for s in held.steps()] == ["now", "now"]


def test_a_flood_that_is_never_read(scene: Scene, bystander: Held) -> None:
    held = scene.hold(name="flood", allow=FILES, files={"big": "b" * 200_000})
    before = kernel_memory(scene)
    stream = held.stream()
    read = json.dumps({"path": "big"}).encode()
    for number in range(3000):
        stream.post("fs.read", read, lane=f"0.{number}", step=0)
    # The honest agent is served while the flood stands in the pipes.
    for number in range(50):
        assert bystander.rf.state.put("flood/bystander", number) > 0
    assert scene.operator.ask("Status", timeout=30)["database"]["state"] == "ok"
    assert kernel_memory(scene) < before + (400 << 20)
    stream.close()
    assert held.rf.fs.stat("big").size_bytes == 200_000


# -- output (C55) ---------------------------------------------------------------------------------------------------------


def test_huge_output_of_a_command_keeps_both_ends(scene: Scene) -> None:
    held = scene.hold(allow=['exec.run: "*"', 'fs.*: "/workspace/**"'], more="sandbox: {disk: 1Gi}")
    before = kernel_memory(scene)
    result = held.rf.exec.run(
        ["sh", "-c", "echo first; yes | head -c 200M; echo last; echo oops >&2; exit 3"]
    )
    assert result.exit_code == 3
    assert result.stdout.startswith("first\n")
    assert result.stdout.endswith("last\n")
    assert result.stderr == "oops\n"
    assert result.stdout_bytes == (200 << 20) + 11
    assert len(result.stdout) < 100_000
    one_line = held.rf.exec.run(["sh", "-c", "head -c 50M /dev/zero | tr '\\0' x"])
    assert one_line.stdout_bytes == 50 << 20
    assert kernel_memory(scene) < before + (100 << 20)


def test_huge_output_of_a_program_is_kept_in_bounds(scene: Scene) -> None:
    before = kernel_memory(scene)
    program = "import sys\nblock = 'y' * 1023 + '\\n'\nfor _ in range(200 << 10): sys.stdout.write(block)\nprint('last')"
    agent = scene.run(program)
    logs = scene.kernel.data / "agents" / agent / "logs"
    assert sum(path.stat().st_size for path in logs.iterdir()) <= (17 << 20)
    assert scene.output(agent).endswith("last\n")
    assert kernel_memory(scene) < before + (100 << 20)


def test_an_answer_that_is_too_large_is_a_lasting_error(scene: Scene) -> None:
    held = scene.hold(allow=FILES, files={"large": b"l" * (40 << 20)})
    assert len(held.rf.fs.read_bytes("large")) == 40 << 20
    listed = [s for s in held.steps() if s["outcome"] == "ok"]
    assert len(listed) > 1  # in parts: one call never carries more than its limit


def each(*calls: Callable[[], Any]) -> list[type[RingfenceError]]:
    kinds: list[type[RingfenceError]] = []
    for call in calls:
        with pytest.raises(RingfenceError) as caught:
            call()
        kinds.append(type(caught.value))
    return kinds


def test_the_library_says_the_same(scene: Scene) -> None:
    held = scene.hold(allow=FILES)
    assert each(
        lambda: held.rf.call("no.such"),
        lambda: held.rf.call("fs.read", {"path": "a", "wrong": 1}),
        lambda: held.rf.fs.read_text("/etc/shadow"),
        lambda: held.rf.call(
            "fs.write", {"path": "a", "data": base64.b64encode(b"x").decode(), "mode": 0o104777}
        ),
    ) == [NoSuchSyscall, InvalidRequest, InvalidRequest, InvalidRequest]
