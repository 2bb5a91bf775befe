"""A bare echo over the protocol of the kernel: the most that this machine's gRPC gives.

The reference of `bench.lean`. One process, one server and socket per stream, no policy, no journal: every
call is answered at once with its own arguments. `python -m bench.echo` serves, runs `bench.lean` against
itself and prints its figures as JSON.
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
from pathlib import Path
from typing import Any

import grpc
import uvloop
from ringfence.v1.syscalls_pb2 import Reply, StreamRequest, StreamResponse, Welcome

SERVICE = "ringfence.v1.SyscallService"
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20))


async def _stream(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    while True:
        frame = await context.read()
        if frame is grpc.aio.EOF:
            return
        if frame.HasField("hello"):
            answer = StreamResponse(welcome=Welcome(agent="echo", thread="echo"))
        elif frame.HasField("lanes"):
            continue
        else:
            call = frame.call
            answer = StreamResponse(reply=Reply(id=call.id, step=call.step, result=call.arguments))
        await context.write(answer)


async def start(directory: Path, streams: int) -> tuple[list[grpc.aio.Server], list[dict[str, str]]]:
    """Serve one socket per stream in a directory; gives the servers and the targets for `bench.lean`."""
    handler = grpc.stream_stream_rpc_method_handler(
        _stream,
        request_deserializer=StreamRequest.FromString,
        response_serializer=StreamResponse.SerializeToString,
    )
    servers: list[grpc.aio.Server] = []
    targets: list[dict[str, str]] = []
    for index in range(streams):
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Stream": handler}),))
        path = directory / f"{index}.sock"
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        servers.append(server)
        targets.append({"socket": str(path), "token": "echo"})
    return servers, targets


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
        servers, targets = await start(directory, options.streams)
        try:
            if not options.serve:
                return await _drive(directory, targets, options)
            print(json.dumps({"targets": targets, "pid": os.getpid()}), flush=True)
            await _until_stopped()
            return 0
        finally:
            await asyncio.gather(*(server.stop(None) for server in servers))


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.echo", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="servers and sockets, one stream each")
    parser.add_argument("--calls", type=int, default=1000, help="calls per stream")
    parser.add_argument("--cpu", type=int, help="pin the server to this CPU")
    parser.add_argument(
        "--serve", action="store_true", help="only serve: print the targets as JSON, stop on SIGTERM"
    )
    options = parser.parse_args()
    return uvloop.run(_main(options))


if __name__ == "__main__":
    sys.exit(main())
