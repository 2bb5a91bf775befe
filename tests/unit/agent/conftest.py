"""A small kernel for the client's tests: a real gRPC server on a real socket, speaking the real protocol.

It journals like the real one: a call at a (lane, step) that was answered before gets the recorded answer,
and `done` counts what really ran. What it answers is each test's to say.
"""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from ringfence.v1 import syscalls_pb2 as pb

TOKEN = "token-of-this-start"
Body = Callable[[dict[str, Any]], Any]


class Refusal(Exception):
    """What a body raises to have its call fail."""

    def __init__(self, reason: str, message: str = "refused", **metadata: str) -> None:
        super().__init__(message)
        self.failure = pb.Failure(reason=reason, message=message, metadata=metadata)


class Connection:
    """One stream of a client."""

    def __init__(self) -> None:
        self.out: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, reply: pb.Reply) -> None:
        self.out.put(pb.StreamResponse(reply=reply))

    def abort(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, detail: str = "going down") -> None:
        self.out.put((code, detail))

    def end(self) -> None:
        self.out.put(None)


class TinyKernel:
    """The server. `bodies` give results by action; `intercept` sees every call first and may take it over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.welcome = pb.Welcome(agent="a1", thread="t1", branch=1)
        self.bodies: dict[str, Body] = {"now": lambda _: {"time": "2026-01-02T03:04:05.000006Z"}}
        self.intercept: Callable[[Connection, pb.Call], bool] = lambda _connection, _call: False
        self.calls: list[pb.Call] = []
        self.lanes: list[int] = []
        self.told = threading.Condition()
        self.done: Counter[tuple[str, int]] = Counter()
        self.hellos: list[pb.Hello] = []
        self.receive_bytes = 64 << 20
        self.silent = False
        self._journal: dict[tuple[str, int], pb.Reply] = {}
        self._asked: dict[tuple[str, int], tuple[str, bytes]] = {}
        self._mutex = threading.Lock()
        self._connections: list[Connection] = []
        self._server: grpc.Server | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.unary: dict[str, Callable[[bytes, grpc.ServicerContext], bytes]] = {}

    # -- life

    def start(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=8)
        self._server = grpc.server(
            self._pool,
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", self.receive_bytes),
                ("grpc.max_send_message_length", 64 << 20),
            ),
        )
        stream = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=pb.StreamRequest.FromString,
            response_serializer=pb.StreamResponse.SerializeToString,
        )
        handlers = {"Stream": stream}
        for name, function in self.unary.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(function)
        service = grpc.method_handlers_generic_handler("ringfence.v1.SyscallService", handlers)
        self._server.add_generic_rpc_handlers((service,))
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()

    def stop(self) -> None:
        """End as a killed kernel does: streams break, the journal stays."""
        if self._server is None or self._pool is None:
            return
        for connection in self._connections:
            connection.end()
        self._server.stop(None).wait()
        self._pool.shutdown()
        self._server = None
        self.path.unlink(missing_ok=True)

    # -- protocol

    def _stream(
        self, requests: Iterator[pb.StreamRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamResponse]:
        connection = Connection()
        first = next(requests)
        self.hellos.append(first.hello)
        if first.hello.token != TOKEN:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not the one of this start")
        if self.silent:
            context.add_callback(connection.end)
            connection.out.get()
            return
        self._connections.append(connection)
        reader = threading.Thread(target=self._read, args=(requests, connection), daemon=True)
        reader.start()
        yield pb.StreamResponse(welcome=self.welcome)
        while (item := connection.out.get()) is not None:
            if isinstance(item, tuple):
                context.abort(*item)
            yield item

    def _read(self, requests: Iterator[pb.StreamRequest], connection: Connection) -> None:
        # gRPC ends a broken stream's iterator with an exception that has no class of its own.
        with contextlib.suppress(Exception):
            for request in requests:
                if request.HasField("lanes"):
                    with self.told:
                        self.lanes.append(request.lanes)
                        self.told.notify_all()
                    continue
                with self._mutex:
                    self.calls.append(request.call)
                    if not self.intercept(connection, request.call):
                        connection.send(self.answer(request.call))
        connection.end()

    def answer(self, call: pb.Call) -> pb.Reply:
        """Answer from the journal, or run the body and journal what it gives."""
        place = (call.lane, call.step)
        recorded = self._journal.get(place)
        asked = (call.action, call.arguments)
        if self._asked.setdefault(place, asked) != asked:
            text = f"lane `{call.lane}` step {call.step} was `{self._asked[place][0]}`, now `{call.action}`"
            return pb.Reply(id=call.id, failure=pb.Failure(reason="Diverged", message=text))
        if recorded is not None:
            again = pb.Reply()
            again.CopyFrom(recorded)
            again.id, again.replayed = call.id, True
            return again
        reply = pb.Reply(id=call.id, step=len(self._journal) + 1)
        try:
            body = self.bodies[call.action]
            reply.result = json.dumps(body(json.loads(call.arguments))).encode()
        except Refusal as refusal:
            reply.failure.CopyFrom(refusal.failure)
        self.done[place] += 1
        self._journal[place] = reply
        return reply

    # -- what tests look at

    def wait_for_lanes(self, lanes: int) -> None:
        """Wait until the client has last said that so many lanes go on."""
        with self.told:
            assert self.told.wait_for(lambda: self.lanes[-1:] == [lanes], timeout=30), self.lanes

    def places(self) -> list[tuple[str, int]]:
        return [(call.lane, call.step) for call in self.calls]

    def arguments(self, number: int = -1) -> dict[str, Any]:
        return json.loads(self.calls[number].arguments)


def file_bodies(files: dict[str, bytes], part: int = 1 << 20) -> dict[str, Body]:
    """fs.read, fs.write and fs.append on a dict, reading at most `part` bytes a call."""

    def read(arguments: dict[str, Any]) -> Any:
        data = files.get(arguments["path"])
        if data is None:
            raise Refusal("NoSuchResource", f"`{arguments['path']}` does not exist")
        start = arguments.get("offset", 0)
        limit = min(part, arguments.get("limit") or part)
        return {
            "data": base64.b64encode(data[start : start + limit]).decode(),
            "size_bytes": len(data),
            "version": str(hash(data)),
        }

    def write(arguments: dict[str, Any]) -> Any:
        files[arguments["path"]] = base64.b64decode(arguments["data"])
        return {"size_bytes": len(files[arguments["path"]]), "version": "v"}

    def append(arguments: dict[str, Any]) -> Any:
        files[arguments["path"]] = files.get(arguments["path"], b"") + base64.b64decode(arguments["data"])
        return {"size_bytes": len(files[arguments["path"]]), "version": "v"}

    return {"fs.read": read, "fs.write": write, "fs.append": append}


def state_bodies(values: dict[str, tuple[Any, int]]) -> dict[str, Body]:
    """state.get and state.transaction on a dict of value and version."""

    def get(arguments: dict[str, Any]) -> Any:
        value, version = values.get(arguments["key"], (None, 0))
        return {"found": arguments["key"] in values, "value": value, "version": version}

    def transaction(arguments: dict[str, Any]) -> Any:
        for key, seen in arguments["reads"].items():
            if values.get(key, (None, 0))[1] != seen:
                raise Refusal("Conflict", f"`{key}` was changed", keys=key)
        versions = {}
        for key, value in arguments["puts"].items():
            versions[key] = values.get(key, (None, 0))[1] + 1
            values[key] = (value, versions[key])
        for key in arguments["deletes"]:
            values.pop(key, None)
        return {"versions": versions}

    return {"state.get": get, "state.transaction": transaction}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyKernel]:
    """A started kernel, and the environment that a sandbox would have."""
    directory = Path(tempfile.mkdtemp(prefix="rf-"))  # a short path: unix sockets take 107 bytes
    server = TinyKernel(directory / "syscall.sock")
    monkeypatch.setenv("RINGFENCE_SOCKET", str(server.path))
    monkeypatch.setenv("RINGFENCE_TOKEN", TOKEN)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(directory)


@pytest.fixture
def refusal() -> type[Refusal]:
    """The exception that fails a call."""
    return Refusal


@pytest.fixture
def files() -> Callable[..., dict[str, Body]]:
    """Maker of file bodies."""
    return file_bodies


@pytest.fixture
def values() -> Callable[..., dict[str, Body]]:
    """Maker of state bodies."""
    return state_bodies
