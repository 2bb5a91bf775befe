"""The agent library by itself: what its import costs, and its part of a call, beside a bare gRPC client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from bench import echo, kernels
from bench.host import Bench, BenchError, median, rank
from bench.report import Section

IMPORTS = (
    ("Python alone", "pass"),
    ("gRPC alone", "import grpc"),
    ("`from ringfence import agent`", "from ringfence import agent"),
    ("and its first use: `boot`", "from ringfence import agent; agent.boot"),
    ("`boot_async` as well", "from ringfence import agent; agent.boot; agent.boot_async"),
)

CALLS = """
import asyncio, json, os, queue, sys, time
kind, seconds = sys.argv[1], float(sys.argv[2])
spent, clock = [], time.perf_counter

def loop(call):
    for _ in range(200):
        call()
    cpu, until = time.process_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        began = clock(); call(); spent.append(clock() - began)
    return time.process_time() - cpu

if kind == "bare":
    import grpc
    from ringfence.agent import wire
    from ringfence.v1.syscalls_pb2 import Call, StreamRequest, StreamResponse
    settings, frames = wire.settings_from_environment(), queue.SimpleQueue()
    channel = grpc.insecure_channel("unix:" + settings.socket, options=(("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)))
    stream = channel.stream_stream(wire.STREAM, request_serializer=StreamRequest.SerializeToString,
                                   response_deserializer=StreamResponse.FromString)(iter(frames.get, None))
    frames.put(wire.hello_frame(settings)); next(stream)
    def bare():
        frames.put(StreamRequest(call=Call(id=1, lane="0", action="echo", arguments=b'{"key":"a"}'))); next(stream)
    cpu = loop(bare)
    print(json.dumps([cpu, spent]), flush=True); os._exit(0)
from ringfence import agent
if kind == "threads":
    with agent.boot() as rf:
        cpu = loop(lambda: rf.call("echo", {"key": "a"}))
else:
    async def main():
        async with agent.boot_async() as rf:
            for _ in range(200):
                await rf.call("echo", {"key": "a"})
            cpu, until = time.process_time(), time.monotonic() + seconds
            while time.monotonic() < until:
                began = clock(); await rf.call("echo", {"key": "a"}); spent.append(clock() - began)
            return time.process_time() - cpu
    cpu = asyncio.run(main())
print(json.dumps([cpu, spent]))
"""


def measure(bench: Bench) -> Section:
    """Imports in turn, so that a busy moment hits all of them; then one client after the other on one echo."""
    section = Section(
        name="library", title="the agent library: its import, and its part of a call on a bare echo"
    )
    times = 7 if bench.quick else 25
    taken: dict[str, list[float]] = {what: [] for what, _ in IMPORTS}
    for number in range(times):
        bench.say(f"import {number + 1} of {times}")
        for what, code in IMPORTS:
            taken[what].append(_import(code))
    alone = median(taken[IMPORTS[0][0]])
    for what, _ in IMPORTS:
        middle = median(taken[what])
        section.rows.append(
            {
                "what": what,
                "ms": middle * 1e3,
                "more ms": (middle - alone) * 1e3,
                "p50 µs": None,
                "p99 µs": None,
                "cpu µs": None,
            }
        )
    seconds = bench.seconds(1.0, 5.0)
    for kind, what in (
        ("bare", "a call by gRPC alone"),
        ("threads", "a call by `boot`"),
        ("async", "a call by `boot_async`"),
    ):
        bench.say(what)
        cpu, spent = asyncio.run(_calls(bench.directory(kind), kind, seconds))
        section.rows.append(
            {
                "what": what,
                "ms": None,
                "more ms": None,
                "p50 µs": median(spent) * 1e6,
                "p99 µs": rank(spent, 0.99) * 1e6,
                "cpu µs": cpu / len(spent) * 1e6,
            }
        )
    section.notes.append(
        "cpu µs: processor time of the client, all its threads; the echo runs in the measuring process"
    )
    return section


def _import(code: str) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], env=kernels.environment(), check=False, capture_output=True
    )
    if done.returncode:
        raise BenchError(f"`{code}` fails: {done.stderr.decode('utf-8', 'replace').strip()[-200:]}")
    return time.perf_counter() - began


async def _calls(directory: Path, kind: str, seconds: float) -> tuple[float, list[float]]:
    servers, targets = await echo.start(directory, 1)
    environment = {
        **kernels.environment(),
        "RINGFENCE_SOCKET": targets[0]["socket"],
        "RINGFENCE_TOKEN": targets[0]["token"],
    }
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            CALLS,
            kind,
            str(seconds),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), seconds + 60)
    finally:
        for server in servers:
            await server.stop(None)
    if process.returncode:
        raise BenchError(f"the client `{kind}` failed: {err.decode('utf-8', 'replace').strip()[-300:]}")
    cpu, spent = json.loads(out)
    return cpu, spent
