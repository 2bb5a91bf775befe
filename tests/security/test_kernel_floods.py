"""What one agent may make the kernel hold, at its worst: descriptors, memory, lines of the log. Others notice nothing."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from ringfence.kernel.descriptors import CONNECTIONS_MAX
from ringfence.kernel.server.gate import STREAMS_MAX
from ringfence.v1 import syscalls_pb2 as pb
from support.kernels import eventually
from support.scenes import STREAM, Held, Scene, console, scene_of_its_own

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


def connect(held: Held) -> Any:
    """A connection of its own to an agent's door; untyped, as the library's stubs lag behind."""
    return grpc.insecure_channel(f"unix:{held.socket}", options=(("grpc.use_local_subchannel_pool", 1),))


def kernel_proc(scene: Scene) -> Path:
    assert scene.kernel.process is not None
    return Path(f"/proc/{scene.kernel.process.pid}")


def kernel_memory(scene: Scene, key: str = "VmRSS") -> int:
    """Resident bytes of the kernel process: now, or with `VmHWM` at most since `forget_peak`."""
    status = (kernel_proc(scene) / "status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(key)).split()[1]) << 10


def forget_peak(scene: Scene) -> None:
    (kernel_proc(scene) / "clear_refs").write_text("5")


def descriptors(scene: Scene) -> int:
    return sum(1 for _ in (kernel_proc(scene) / "fd").iterdir())


# -- descriptors ----------------------------------------------------------------------------------------------------------


def hung_up(raw: socket.socket) -> bool:
    try:
        return raw.recv(65536, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def few_descriptors(scene: Scene, spare: int) -> Iterator[int]:
    """The kernel may open only `spare` more: what a flood of thousands does, without the thousands."""
    pid = int(kernel_proc(scene).name)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = descriptors(scene) + spare
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_bare_connections_lock_nobody_out(scene: Scene, bystander: Held) -> None:
    held = scene.hold(name="connector", allow=FILES)
    raws: list[socket.socket] = []
    with few_descriptors(scene, CONNECTIONS_MAX + 60) as limit:
        try:
            for _ in range(600):
                raw = socket.socket(socket.AF_UNIX)
                raw.setblocking(False)
                with contextlib.suppress(OSError):
                    raw.connect(str(held.socket))
                raws.append(raw)
            eventually(
                lambda: sum(map(hung_up, raws)) >= 600 - CONNECTIONS_MAX or descriptors(scene) >= limit - 1,
                "the flood did not arrive",
            )
            assert descriptors(scene) < limit - 1
            data = str(scene.kernel.data)
            assert console("status", "--data", data).returncode == 0
            stream = bystander.stream()
            stream.close()
            killed = console("kill", held.id, "--data", data)
            assert killed.returncode == 0, killed.stderr
        finally:
            for raw in raws:
                raw.close()
    assert scene.show(held.id)["state"] == "killed"
    assert bystander.rf.state.put("after", 1) > 0


def test_a_silent_connection_gives_its_place_back(scene: Scene) -> None:
    held = scene.hold(name="silent", allow=FILES)
    raws = [socket.socket(socket.AF_UNIX) for _ in range(CONNECTIONS_MAX)]
    try:
        for raw in raws:
            raw.connect(str(held.socket))
            raw.setblocking(False)
        # The library tries again until there is room.
        assert held.rf.state.put("k", 1) > 0
    finally:
        for raw in raws:
            raw.close()


def test_streams_and_unary_calls_wait_for_their_turn(scene: Scene) -> None:
    held = scene.hold(name="many", allow=FILES)
    hello = pb.StreamRequest(hello=pb.Hello(token=held.token, protocol=1, client="test"))
    with contextlib.ExitStack() as stack:
        waiting: list[Any] = []
        for _ in range(50):
            channel = stack.enter_context(connect(held))
            open_stream = channel.stream_stream(
                STREAM,
                request_serializer=pb.StreamRequest.SerializeToString,
                response_deserializer=pb.StreamResponse.FromString,
            )
            waiting.append(open_stream(iter([hello])))
        # Each is served as soon as one before it has ended; none is refused.
        assert [[r.welcome.agent for r in answers] for answers in waiting] == [[held.id]] * 50
    with connect(held) as channel:
        call = channel.unary_unary(
            "/ringfence.v1.SyscallService/Now",
            request_serializer=pb.NowRequest.SerializeToString,
            response_deserializer=pb.NowResponse.FromString,
        )
        bearer = (("authorization", f"Bearer {held.token}"),)
        assert call(
            pb.NowRequest(), metadata=bearer, timeout=60
        ).time  # now the client knows the kernel's bounds
        calls = [call.future(pb.NowRequest(), metadata=bearer, timeout=60) for _ in range(30)]
        assert all(future.result().time for future in calls)


# -- memory ---------------------------------------------------------------------------------------------------------------


def test_padded_calls_that_wait_cost_what_they_mean(scene: Scene) -> None:
    held = scene.hold(name="padder", allow=FILES)
    held.rf.now()
    before = kernel_memory(scene)
    padded = b'{"duration_ms":600000' + b" " * (4_000_000) + b"}"
    streams = [held.stream() for _ in range(3)]
    for place, stream in enumerate(streams):
        for number in range(20):
            stream.post("sleep", padded, lane=f"0.{place}.{number}", step=0)
        # It is read after all of them.
        reply = stream.ask("now", lane=f"0.{place}", step=0)
        assert not reply.HasField("failure"), reply
    assert kernel_memory(scene) < before + (120 << 20)
    for stream in streams:
        stream.close()
    held.operator.ask("Kill", agent=held.id)


def test_large_calls_at_once_are_read_one_after_the_other(scene: Scene) -> None:
    held = scene.hold(name="writer", allow=FILES)
    held.rf.now()
    before = kernel_memory(scene)
    forget_peak(scene)
    data = json.dumps({"path": "x", "data": "QUFB" * 900_000}).encode()
    streams = [held.stream() for _ in range(4)]
    for place, stream in enumerate(streams):
        for number in range(12):
            stream.post("fs.write", data, lane=f"0.{place}.{number}", step=0)
    for stream in streams:
        for _ in range(12):
            reply = stream.receive().reply
            assert not reply.HasField("failure"), reply.failure
        stream.close()
    assert (held.live / "x").stat().st_size == 2_700_000
    assert kernel_memory(scene, "VmHWM") < before + (260 << 20)


def test_what_waits_for_its_turn_is_not_read(scene: Scene) -> None:
    held = scene.hold(name="crowd", allow=FILES)
    held.rf.now()
    before = kernel_memory(scene)
    forget_peak(scene)
    large = b"\xff" * (4 << 20)
    # Streams that say nothing have all places until they are given up; these wait behind them.
    silent = [held.stream(greet=False) for _ in range(STREAMS_MAX)]
    with contextlib.ExitStack() as stack:
        waiting: list[Any] = []
        for _ in range(6):
            channel = stack.enter_context(connect(held))
            waiting += [channel.stream_stream(STREAM)(iter([large])) for _ in range(24)]
        for answers in waiting:
            with pytest.raises(grpc.RpcError):
                list(answers)
    for stream in silent:
        stream.close()
    assert kernel_memory(scene, "VmHWM") < before + (200 << 20)


def test_what_is_refused_is_not_kept(scene: Scene) -> None:
    held = scene.hold(name="refused", allow=FILES)
    held.rf.now()
    before = kernel_memory(scene)
    forget_peak(scene)
    large = b"\xff" * (4 << 20)
    with connect(held) as channel:
        call = channel.unary_unary("/ringfence.v1.SyscallService/StatePut")
        for metadata in ((), (("authorization", f"Bearer {held.token}"),)) * 50:
            with pytest.raises(grpc.RpcError):
                call(large, metadata=metadata, timeout=20)
    assert kernel_memory(scene, "VmHWM") < before + (120 << 20)


# -- the log --------------------------------------------------------------------------------------------------------------


def log_of(scene: Scene) -> str:
    return scene.kernel.log.read_text(errors="replace")


def garbage_stream(held: Held, data: bytes) -> grpc.StatusCode:
    with connect(held) as channel:
        answers = channel.stream_stream(STREAM)(iter([data]))
        with pytest.raises(grpc.RpcError) as refused:
            list(answers)
        return refused.value.code()


def test_garbage_in_frames_is_one_line_of_the_log(scene: Scene) -> None:
    held = scene.hold(name="garbler", allow=FILES)
    before = len(log_of(scene))
    hello = pb.StreamRequest(hello=pb.Hello(token=held.token, protocol=1)).SerializeToString()
    bad = [b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", os.urandom(1 << 20), b"\x12\x05\x12\x03\xff\xfe\xfd"]
    for _ in range(10):
        for data in bad:
            assert garbage_stream(held, data) in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.UNAUTHENTICATED,
            )
    with connect(held) as channel:
        for data in bad:
            # Behind a good greeting, and as a call of its own.
            answers = channel.stream_stream(STREAM)(iter([hello, data]))
            with pytest.raises(grpc.RpcError) as refused:
                list(answers)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for data in bad[:3]:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/ringfence.v1.SyscallService/StatePut")(
                    data, metadata=(("authorization", f"Bearer {held.token}"),), timeout=20
                )
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    written = log_of(scene)[before:]
    assert "Traceback" not in written
    assert written.count("\n") <= 1, written
    assert held.rf.state.put("k", 1) > 0


def test_unary_arguments_that_no_codec_takes_are_refused_and_recorded(scene: Scene) -> None:
    held = scene.hold(name="nul", allow=FILES)
    before = len(log_of(scene))
    with connect(held) as channel:
        call = channel.unary_unary(
            "/ringfence.v1.SyscallService/StateGet",
            request_serializer=pb.StateGetRequest.SerializeToString,
            response_deserializer=pb.StateGetResponse.FromString,
        )
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as refused:
                call(pb.StateGetRequest(key="a\x00b"), metadata=(("authorization", f"Bearer {held.token}"),))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "`key` holds a NUL character" in (refused.value.details() or "")
    assert [(s["action"], s["outcome"]) for s in held.steps()] == [("state.get", "refused")] * 2
    assert "Traceback" not in log_of(scene)[before:]
