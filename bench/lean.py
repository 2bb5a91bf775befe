"""The lean generator: many streams, sequential calls on each, as little work of its own as the protocol allows.

It writes and reads HTTP/2 frames itself (`bench.frames`); with `--grpc` gRPC's own client does, which takes two to four
times the processor time. It opens one stream per target, waits until all are welcomed, then drives each as fast as its answers come:
80 % `fs.read` of one small file, 20 % `state.put`. Frames are put together from bytes serialised
beforehand, answers are parsed just enough to see that they are results. Prints one JSON document; exit
status 1 if any call failed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import uvloop
from ringfence.v1.syscalls_pb2 import Call, Hello, StreamRequest, StreamResponse

from bench.frames import Frames

if TYPE_CHECKING:
    from collections.abc import Sequence

METHOD = "/ringfence.v1.SyscallService/Stream"
OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20))
ID_TAG = b"\x08"  # Call.id, field 1, varint
STEP_TAG = b"\x18"  # Call.step, field 3, varint
CALL_TAG = b"\x12"  # StreamRequest.call, field 2, length-delimited


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What each stream sends: the constant part of both calls, and how often the second comes."""

    read: bytes
    write: bytes
    write_every: int

    def frame(self, number: int, step: int) -> tuple[bytes, bool]:
        """Give the bytes of call `number` at `step`, and whether it is the write."""
        writes = self.write_every > 0 and number % self.write_every == self.write_every - 1
        body = ID_TAG + _varint(number + 1) + STEP_TAG + _varint(step) + (self.write if writes else self.read)
        return CALL_TAG + _varint(len(body)) + body, writes


def workload(path: str, key: str, write_every: int, lane: str) -> Workload:
    """Serialise what doesn't change between calls."""
    read = json.dumps({"path": path}).encode()
    write = json.dumps({"key": key, "value": {"page": 7, "note": "as an agent would keep it"}}).encode()
    return Workload(
        read=Call(lane=lane, action="fs.read", arguments=read).SerializeToString(),
        write=Call(lane=lane, action="state.put", arguments=write).SerializeToString(),
        write_every=write_every,
    )


@dataclass(slots=True)
class Tally:
    """What came out, over all streams."""

    reads: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    answered: list[str] | None = None
    failures: collections.Counter[str] = field(default_factory=collections.Counter)


class GrpcStream:
    """One stream to one target, by gRPC's own client."""

    def __init__(self, target: dict[str, str]) -> None:
        self._token = target["token"]
        self._chain = target.get("chain", "0")
        self._channel = grpc.aio.insecure_channel(f"unix:{target['socket']}", options=OPTIONS)
        self._call: Any = None
        self._step = 0

    async def open(self, lane: str) -> None:
        """Say hello and wait for the welcome; lane `0` continues where the agent is, another one starts at 0."""
        self._call = self._channel.stream_stream(METHOD)()  # raw bytes both ways
        hello = Hello(token=self._token, protocol=1, client="bench.lean")
        await self._call.write(StreamRequest(hello=hello).SerializeToString())
        answer = await self._call.read()
        if answer is grpc.aio.EOF:
            code, details = await self._call.code(), await self._call.details()
            raise SystemExit(f"no welcome: {code.name}: {details}")
        self._step = StreamResponse.FromString(answer).welcome.next_step if lane == "0" else 0

    async def drive(self, work: Workload, calls: int, until: float, tally: Tally) -> None:
        """Send calls one after the other: `calls` of them, or until a time of `time.perf_counter`."""
        write, read, clock, parse = (
            self._call.write,
            self._call.read,
            time.perf_counter,
            StreamResponse.FromString,
        )
        number = 0
        now = clock()
        while (calls and number < calls) or (not calls and now < until):
            data, writes = work.frame(number, self._step)
            began = clock()
            await write(data)
            answer = await read()
            now = clock()
            if answer is grpc.aio.EOF:
                tally.failures[f"stream ended: {await self._call.details()}"] += 1
                return
            reply = parse(answer).reply
            if reply.HasField("failure"):
                tally.failures[f"{reply.failure.reason}: {reply.failure.message}"] += 1
            elif tally.answered is not None:
                tally.answered.append(f"{self._chain} {reply.step}")
            (tally.writes if writes else tally.reads).append(now - began)
            number += 1
            self._step += 1

    async def close(self) -> None:
        """End the stream and its channel."""
        await self._call.done_writing()
        await self._channel.close()


class Stream:
    """One stream to one target, by frames."""

    def __init__(self, target: dict[str, str], method: str = METHOD) -> None:
        self._target = target
        self._chain = target.get("chain", "0")
        self._frames = Frames(method, self._greeted, self._ended)
        self._welcome: asyncio.Future[bytes] | None = None
        self._end: asyncio.Future[None] | None = None
        self._step = self._number = self._calls = 0
        self._began = self._until = 0.0
        self._writes = False
        self._work: Workload | None = None
        self._tally: Tally | None = None

    async def open(self, lane: str) -> None:
        """As `GrpcStream.open`."""
        loop = asyncio.get_running_loop()
        self._welcome = loop.create_future()
        await loop.create_unix_connection(lambda: self._frames, self._target["socket"])
        hello = Hello(token=self._target["token"], protocol=1, client="bench.lean")
        self._frames.send(StreamRequest(hello=hello).SerializeToString())
        answer = StreamResponse.FromString(await self._welcome)
        self._step = answer.welcome.next_step if lane == "0" else 0

    def _greeted(self, data: bytes) -> None:
        assert self._welcome is not None
        self._welcome.set_result(data)

    def _ended(self, why: str) -> None:
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(SystemExit(f"no welcome: {why}"))
        elif self._end is not None and not self._end.done() and self._tally is not None:
            self._tally.failures[f"stream ended: {why}"] += 1
            self._end.set_result(None)

    async def drive(self, work: Workload, calls: int, until: float, tally: Tally) -> None:
        """As `GrpcStream.drive`."""
        self._end = asyncio.get_running_loop().create_future()
        self._work, self._calls, self._until, self._tally = work, calls, until, tally
        self._frames.on_message = self._answered
        self._next()
        await self._end

    def _next(self) -> None:
        assert self._work is not None
        data, self._writes = self._work.frame(self._number, self._step)
        self._began = time.perf_counter()
        self._frames.send(data)

    def _answered(self, data: bytes) -> None:
        reply = StreamResponse.FromString(data).reply
        now = time.perf_counter()
        tally = self._tally
        assert tally is not None
        if reply.HasField("failure"):
            tally.failures[f"{reply.failure.reason}: {reply.failure.message}"] += 1
        elif tally.answered is not None:
            tally.answered.append(f"{self._chain} {reply.step}")
        (tally.writes if self._writes else tally.reads).append(now - self._began)
        self._number += 1
        self._step += 1
        if (self._calls and self._number < self._calls) or (not self._calls and now < self._until):
            self._next()
        elif self._end is not None:
            self._end.set_result(None)

    async def close(self) -> None:
        """End the stream and its connection."""
        self._frames.close()


def summary(latencies: Sequence[float]) -> dict[str, float | int]:
    """Percentiles in milliseconds by the nearest-rank method."""
    ordered = sorted(latencies)
    if not ordered:
        return {"calls": 0}

    def rank(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 4)

    return {
        "calls": len(ordered),
        "p50_ms": rank(0.5),
        "p90_ms": rank(0.9),
        "p99_ms": rank(0.99),
        "max_ms": rank(1.0),
    }


async def run(
    targets: Sequence[dict[str, str]], works: Sequence[Workload], options: argparse.Namespace
) -> dict[str, Any]:
    """Drive all targets at once, each with its own workload, and report."""
    calls, seconds = options.calls, options.seconds
    kind = GrpcStream if options.grpc else Stream
    streams = [kind(target) for target in targets]
    await asyncio.gather(*(stream.open(options.lane) for stream in streams))
    tally = Tally(answered=None if options.answered is None else [])
    gc.collect()
    gc.freeze()
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(
        *(
            stream.drive(work, calls, began + seconds, tally)
            for stream, work in zip(streams, works, strict=True)
        )
    )
    elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
    await asyncio.gather(*(stream.close() for stream in streams))
    if tally.answered is not None:
        options.answered.write_text("\n".join([*tally.answered, ""]))
    total = len(tally.reads) + len(tally.writes)
    return {
        "streams": len(streams),
        "seconds": round(elapsed, 4),
        "calls_per_s": round(total / elapsed, 1),
        "generator_cpu_share": round(cpu / elapsed, 3),
        **summary([*tally.reads, *tally.writes]),
        "fs.read": summary(tally.reads),
        "state.put": summary(tally.writes),
        "failed": tally.failures.total(),
        "failures": dict(tally.failures.most_common(5)),
    }


def main() -> int:
    """Parse the command line, run, print one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m bench.lean", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--targets", required=True, help='JSON file or - : [{"socket": PATH, "token": TOKEN}, …]'
    )
    parser.add_argument("--calls", type=int, default=0, help="calls per stream; 0: for --seconds")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long, where --calls is 0")
    parser.add_argument("--path", default="bench.txt", help="file to read")
    parser.add_argument("--key", default="bench/{n}", help="state key to write; {n} is the stream's number")
    parser.add_argument("--write-every", type=int, default=5, help="every n-th call writes; 0: none does")
    parser.add_argument("--lane", default="0", help="lane of all calls; one run takes one of its own")
    parser.add_argument("--streams", type=int, default=0, help="use only the first so many targets; 0: all")
    parser.add_argument(
        "--answered", type=Path, help="write `CHAIN STEP` of every call answered with a result"
    )
    parser.add_argument("--grpc", action="store_true", help="drive by gRPC's own client")
    parser.add_argument("--cpu", type=int, help="pin the generator to this CPU")
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    text = sys.stdin.read() if options.targets == "-" else Path(options.targets).read_text()
    targets = json.loads(text)
    targets = targets[: options.streams or len(targets)]
    works = [
        workload(options.path, options.key.replace("{n}", str(number)), options.write_every, options.lane)
        for number in range(len(targets))
    ]
    report = uvloop.run(run(targets, works, options))
    print(json.dumps(report))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
