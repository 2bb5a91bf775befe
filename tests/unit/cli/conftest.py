"""A small operator service on a real socket, and a way to run the command line against it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf.message_factory import GetMessageClass
from ringfence.console.cli import root
from ringfence.v1 import operator_pb2

SERVICE = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]


class Refusal(Exception):
    """Makes a scripted method end with a status as the kernel's door does."""

    def __init__(
        self, text: str, exit_code: int | None, reason: str = "Conflict", status: Any = None
    ) -> None:
        super().__init__(text)
        self.text, self.exit_code, self.reason = text, exit_code, reason
        self.status = status or grpc.StatusCode.FAILED_PRECONDITION

    def abort(self, context: grpc.ServicerContext) -> None:
        if self.exit_code is not None:
            facts = (("ringfence-reason", self.reason), ("ringfence-exit-code", str(self.exit_code)))
            context.set_trailing_metadata(facts)
        context.abort(self.status, self.text)


@dataclass
class Door:
    """The service. `answers` maps a method to a document, a list of documents or chunks, an error, or a function of the request."""

    data: Path
    answers: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, Any]] = field(default_factory=list)

    def asked(self, method: str) -> Any:
        """The one request of a method."""
        found = [request for name, request in self.requests if name == method]
        assert len(found) == 1, (method, self.requests)
        return found[0]

    def handler(self, method: Any) -> Any:
        parse = GetMessageClass(method.input_type).FromString

        def one(request: Any, context: grpc.ServicerContext) -> bytes:
            request = list(request) if method.client_streaming else request
            return self.parts(method, request, context)[0]

        def many(request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
            yield from self.parts(method, request, context, lazy=True)

        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(one, parse)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(many, parse)
        return grpc.unary_unary_rpc_method_handler(one, parse)

    def parts(self, method: Any, request: Any, context: grpc.ServicerContext, *, lazy: bool = False) -> Any:
        self.requests.append((method.name, request))
        answer = self.answers.get(method.name, {})
        answer = answer(request) if callable(answer) else answer
        encoded = self.encoded(answer if lazy else [answer], context)
        return encoded if lazy else list(encoded)

    def encoded(self, answers: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        for part in [answers] if isinstance(answers, Refusal) else answers:
            if isinstance(part, Refusal):
                part.abort(context)
            elif isinstance(part, bytes):
                yield operator_pb2.Chunk(data=part).SerializeToString()
            else:
                text = part if isinstance(part, str) else json.dumps(part)
                yield operator_pb2.Document(json=text.encode()).SerializeToString()


@pytest.fixture
def door() -> Iterator[Door]:
    # A socket's path has at most 107 bytes, which pytest's own directories can exceed.
    data = Path(tempfile.mkdtemp(prefix="rf-cli-"))
    made = Door(data)
    pool = ThreadPoolExecutor(4)
    server = grpc.server(pool)
    handlers = {method.name: made.handler(method) for method in SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    listen = f"unix:{data}/door.sock"
    server.add_insecure_port(listen)
    (data / "kernel.json").write_text(json.dumps({"pid": 1, "listen": listen, "version": "0"}))
    server.start()
    yield made
    server.stop(None).wait()
    pool.shutdown()
    shutil.rmtree(data)


@pytest.fixture
def run(door: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Run a command line against the door."""
    monkeypatch.setenv("RINGFENCE_DATA", str(door.data))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))

    def invoke(*words: object, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(root, [str(word) for word in words], input=stdin, prog_name="ringfence")

    return invoke


@pytest.fixture
def refusal() -> type[Refusal]:
    return Refusal
