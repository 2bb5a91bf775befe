"""A bare echo over the protocol of the kernel: the most that this machine's gRPC gives.

The reference of `bench.lean`. One process, one server and socket per stream, no policy, no journal: every
call is answered at once with its own arguments. `python -m bench.echo` serves, runs `bench.lean` against
itself and prints its figures as JSON. With `--door` it is not gRPC's server that answers but the one of the kernel's
doors, which tells what of a call is the door and what lies behind it; with `--answer N` every answer has N bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import uvloop
from ringfence.kernel.server.connection import Connection
from ringfence.kernel.server.gate import Bounds
from ringfence.kernel.server.stream import Stream
from ringfence.v1.syscalls_pb2 import Reply, StreamRequest, StreamResponse, Welcome

SERVICE = "ringfence.v1.SyscallService"
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20))


def _answered(data: bytes, size: int) -> bytes | None:
    """The answer to a frame, as bytes; None: it asks for none."""
    frame = StreamRequest.FromString(data)
    if frame.HasField("hello"):
        return StreamResponse(welcome=Welcome(agent="echo", thread="echo")).SerializeToString()
    if frame.HasField("lanes"):
        return None
    call = frame.call
    result = bytes(size) if size else call.arguments
    return StreamResponse(reply=Reply(id=call.id, step=call.step, result=result)).SerializeToString()


class _Echo:
    """Answers one stream of a door."""

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream, self._size = stream, size

    def begin(self) -> None:
        self._stream.serve()

    def message(self, data: bytes) -> None:
        answer = _answered(data, self._size)
        if answer is not None and not self._stream.send_now(answer):
            self._stream.send(answer)

    def ended(self) -> None:
        self._stream.end(0)

    def gone(self) -> None:
        pass


class _Door:
    """Takes the streams of one socket, with the bounds that an agent's door has."""

    def __init__(self, size: int) -> None:
        self.bounds = Bounds()
        self._size = size
        self._server: asyncio.Server | None = None
        self._lost: dict[Connection, asyncio.Future[None]] = {}

    async def listen(self, path: Path) -> None:
        """Serve a socket."""
        self._server = await asyncio.get_running_loop().create_unix_server(self._connection, str(path))

    def _connection(self) -> Connection:
        connection = Connection(self)
        self._lost[connection] = asyncio.get_running_loop().create_future()
        return connection

    async def stop(self) -> None:
        """Serve nobody any more, and wait until those who were served have gone."""
        assert self._server is not None
        self._server.close()
        for connection in [*self._lost]:
            connection.shut(0)
        await asyncio.gather(*self._lost.values())

    def accept(self, stream: Stream, headers: Mapping[str, str]) -> None:
        del headers
        echo = _Echo(stream, self._size)
        stream.attend(echo)
        self.bounds.streams.take(echo, echo.begin)

    def lost(self, connection: Connection) -> None:
        self._lost.pop(connection).set_result(None)


async def start(
    directory: Path, streams: int, *, door: bool = False, size: int = 0
) -> tuple[list[Any], list[dict[str, str]]]:
    """Serve one socket per stream in a directory.

    Args:
        directory: where the sockets are.
        streams: how many.
        door: by the server of the kernel's doors instead of gRPC's.
        size: bytes of each answer; 0: the call's own arguments.

    Returns:
        The servers, and the targets for `bench.lean`.
    """

    async def stream(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            answer = _answered(data, size)
            if answer is not None:
                await context.write(answer)

    handler = grpc.stream_stream_rpc_method_handler(stream)  # bytes both ways, as at the door
    servers: list[Any] = []
    targets: list[dict[str, str]] = []
    for index in range(streams):
        path = directory / f"{index}.sock"
        if door:
            host = _Door(size)
            await host.listen(path)
            servers.append(host)
        else:
            server = grpc.aio.server(options=OPTIONS)
            methods = grpc.method_handlers_generic_handler(SERVICE, {"Stream": handler})
            server.add_generic_rpc_handlers((methods,))
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            servers.append(server)
        targets.append({"socket": str(path), "token": "echo"})
    return servers, targets


async def stop(server: Any) -> None:
    """Stop one of the servers that `start` gave."""
    if isinstance(server, grpc.aio.Server):
        await server.stop(None)
    else:
        await server.stop()


async def _until_stopped() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


async def _drive(directory: Path, targets: list[dict[str, str]], options: argparse.Namespace) -> int:
    listing = directory / "targets.json"
    listing.write_text(json.dumps(targets))
    generator = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.lean", "--targets", str(listing), "--calls", str(options.calls)
    )
    try:
        return await generator.wait()
    finally:
        if generator.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                generator.kill()


async def _main(options: argparse.Namespace) -> int:
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    with tempfile.TemporaryDirectory(prefix="rf-echo-") as name:
        directory = Path(name)
        servers, targets = await start(directory, options.streams, door=options.door, size=options.answer)
        try:
            if not options.serve:
                return await _drive(directory, targets, options)
            print(json.dumps({"targets": targets, "pid": os.getpid()}), flush=True)
            await _until_stopped()
            return 0
        finally:
            await asyncio.gather(*map(stop, servers))


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.echo", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="servers and sockets, one stream each")
    parser.add_argument("--calls", type=int, default=1000, help="calls per stream")
    parser.add_argument("--cpu", type=int, help="pin the server to this CPU")
    parser.add_argument("--door", action="store_true", help="answer by the kernel's own server")
    parser.add_argument("--answer", type=int, default=0, help="bytes of an answer; 0: the call's arguments")
    parser.add_argument(
        "--serve", action="store_true", help="only serve: print the targets as JSON, stop on SIGTERM"
    )
    options = parser.parse_args()
    return uvloop.run(_main(options))


if __name__ == "__main__":
    sys.exit(main())
