"""A small operator service on a real socket, and a way to run the command line against it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
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

CONVERSATION_S = 60.0
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


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


class Terminal:
    """Runs commands with a terminal at all three ends."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def __call__(
        self,
        *words: str,
        prompt: bytes = b"",
        typed: bytes = b"",
        script: Sequence[tuple[bytes, bytes | int | Callable[[], None]]] = (),
        columns: int = 80,
        **environment: str,
    ) -> tuple[int, str]:
        """Run one; returns its exit code and what it showed.

        Each entry of `script` waits for a text in what was shown since the one before, then types bytes, makes the
        window so many columns wide, or does something. Typed earlier, a key could be lost while a mode changes.
        """
        leader, follower = pty.openpty()
        resize(leader, columns)
        base = {
            key: value
            for key, value in os.environ.items()
            if key not in ("NO_COLOR", "COLUMNS", "LINES", "TERM")
        }
        child = subprocess.Popen(
            # With a session and a terminal of its own: Ctrl-C and changes of size reach it as signals.
            ["setsid", "--ctty", sys.executable, "-m", "ringfence.console", *words, "--data", str(self.data)],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env={**base, "TERM": "xterm", **environment},
        )
        os.close(follower)
        steps = [*([(prompt, typed)] if typed else []), *script]
        try:
            shown = self._converse(leader, steps)
        except BaseException:
            child.kill()
            child.wait()
            raise
        finally:
            os.close(leader)
        return child.wait(), shown.decode().replace("\r\n", "\n")

    def _converse(self, leader: int, steps: list[Any]) -> bytes:
        shown, seen = b"", 0
        until = time.monotonic() + CONVERSATION_S
        while True:
            ready, _, _ = select.select([leader], [], [], max(0.0, until - time.monotonic()))
            if not ready or time.monotonic() > until:
                raise AssertionError(f"still waiting for {steps[:1]}, or for its end: {shown[-4000:]!r}")
            try:
                part = os.read(leader, 65536)
            except OSError:
                return shown
            if not part:
                return shown
            shown += part
            while steps and steps[0][0] in shown[seen:]:
                wanted, act = steps.pop(0)
                seen += shown[seen:].index(wanted) + len(wanted)
                if isinstance(act, bytes):
                    os.write(leader, act)
                elif isinstance(act, int):
                    resize(leader, act)
                else:
                    act()


@pytest.fixture
def terminal(door: Door) -> Terminal:
    return Terminal(door.data)
