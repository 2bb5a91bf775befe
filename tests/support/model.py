"""A model's host over real HTTP: what it answers is a script, what reaches it is kept.

Chat completions as the OpenAI protocol has them, whole or in parts. A script is a list of turns; the last one stays.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """A tool that a model asks for.

    Attributes:
        arguments: by name; or the text that a tool without a schema takes (the responses protocol has such).
        namespace: that of the tool, where the protocol has them.
    """

    name: str
    arguments: dict[str, Any] | str
    id: str = "c1"
    namespace: str = ""

    @property
    def text(self) -> str:
        """The arguments as they are written in a reply."""
        return (
            self.arguments
            if isinstance(self.arguments, str)
            else json.dumps(self.arguments, separators=(",", ":"))
        )


LOOK = Call(name="look", arguments={"a": 1})


@dataclass
class Turn:
    """One answer.

    Attributes:
        words: the reply, a part of a stream each.
        usage: (prompt, completion) tokens; None: none is sent.
        status: anything but 200 sends `body` instead of a reply.
        cut_after: parts after which the connection is torn; None: it ends well.
        garbage_after: parts of a stream after which one comes that is no JSON; None: none does.
        hold: waits for `go` after the first part, or before a whole reply.
        tool: asks for the tool `look`, after a thought where the protocol has them.
        calls: asks for these.
    """

    words: tuple[str, ...] = ("Good ", "day.")
    usage: tuple[int, int] | None = (11, 7)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    cut_after: int | None = None
    hold: bool = False
    finish: str | None = "stop"
    tool: bool = False
    calls: tuple[Call, ...] = ()
    last_error: str = ""
    garbage_after: int | None = None

    @property
    def called(self) -> tuple[Call, ...]:
        return self.calls or ((LOOK,) if self.tool else ())


@dataclass
class Asked:
    """One request."""

    at: float
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int


class ModelHost:
    """The server; it lives in the test's process and outlives kernels."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.turns: list[Turn] = [Turn()]
        self.storm_until: float | None = None
        self.storm: Turn = Turn(
            status=429, headers={"Retry-After": "2"}, body={"error": {"message": "slow down"}}
        )
        self.storm_s = 0.0
        self.go = threading.Event()
        self.holding = threading.Event()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length", 0)))
                turn = outer._turn(self, raw)
                with contextlib.suppress(OSError):
                    outer._answer(self, turn, json.loads(raw or b"{}"))

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, *_args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_args: Any) -> None: ...

        self.server = Server(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server.server_port}/v1"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def script(self, *turns: Turn) -> None:
        """What is answered from now on; forgets what was asked."""
        self.turns = list(turns) or [Turn()]
        self.asked = []
        self.go.clear()
        self.holding.clear()
        self.storm_until, self.storm_s = None, 0.0

    def statuses(self) -> list[int]:
        return [asked.status for asked in self.asked]

    def _turn(self, handler: BaseHTTPRequestHandler, raw: bytes) -> Turn:
        now = time.monotonic()
        body = json.loads(raw) if raw else {}
        with self._lock:
            if self.storm_s and self.storm_until is None:
                self.storm_until = now + self.storm_s
            raging = self.storm_until is not None and now < self.storm_until
            turn = self.storm if raging else self._next(body)
            headers = {name.lower(): value for name, value in handler.headers.items()}
            self.asked.append(Asked(now, handler.path, headers, body, turn.status))
        return turn

    def _next(self, body: dict[str, Any]) -> Turn:
        """What answers a request; here the next of the script, whatever it asks."""
        del body
        return self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]

    def _answer(self, handler: BaseHTTPRequestHandler, turn: Turn, body: dict[str, Any]) -> None:
        if turn.status != 200 or turn.body is not None:
            self._send(handler, turn, json.dumps(turn.body).encode(), "application/json")
        elif body.get("stream"):
            self._stream(handler, turn, body)
        else:
            self._wait(turn)
            if turn.cut_after is not None:
                handler.connection.shutdown(2)
                return
            self._send(handler, turn, json.dumps(self._whole(turn, body)).encode(), "application/json")

    def _send(self, handler: BaseHTTPRequestHandler, turn: Turn, data: bytes, kind: str) -> None:
        handler.send_response_only(turn.status)
        for name, value in {**turn.headers, "Content-Type": kind, "Content-Length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    def _wait(self, turn: Turn) -> None:
        if turn.hold:
            go = self.go  # whoever sees that it holds may let it go at once
            self.holding.set()
            go.wait(60)

    def release(self) -> None:
        """Give out what is held back, and hold the next one that is to be."""
        held, self.go = self.go, threading.Event()
        self.holding.clear()
        held.set()

    def _whole(self, turn: Turn, body: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(turn.words)}
        if turn.called:
            message = {"role": "assistant", "content": None, "tool_calls": _tool_calls(turn)}
        reply: dict[str, Any] = {
            "id": "r1",
            "object": "chat.completion",
            "created": 1,
            "model": body.get("model"),
            "choices": [{"index": 0, "message": message, "finish_reason": turn.finish}],
        }
        if turn.usage is not None:
            prompt, completion = turn.usage
            reply["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            }
        return reply

    def _stream(self, handler: BaseHTTPRequestHandler, turn: Turn, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        chunks = [
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": w}}]} for w in turn.words
        ]
        if turn.called:
            deltas = _call_parts(turn)
            chunks = [
                *(chunks if turn.calls else []),
                *({"choices": [{"index": 0, "delta": {"tool_calls": [d]}}]} for d in deltas),
            ]
        for number, chunk in enumerate(chunks):
            if turn.cut_after == number:
                self._tear(handler)
                return
            garbage = "{not json\n\ndata: " if turn.garbage_after == number else ""
            head = {"id": "r1", "object": "chat.completion.chunk", "created": 1, "model": body.get("model")}
            self._event(handler, garbage + json.dumps({**head, **chunk}))
            if number == 0:
                self._wait(turn)
        if turn.last_error:
            self._event(handler, json.dumps({"error": {"message": turn.last_error}}))
        elif turn.finish is not None:
            self._event(
                handler, json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": turn.finish}]})
            )
        if turn.usage is not None and body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": turn.usage[0], "completion_tokens": turn.usage[1]}
            self._event(handler, json.dumps({"choices": [], "usage": usage}))
        if turn.cut_after == len(chunks):
            self._tear(handler)
            return
        if turn.finish is not None:
            self._event(handler, "[DONE]")
        handler.wfile.write(b"0\r\n\r\n")

    @staticmethod
    def _tear(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.flush()
        handler.close_connection = True
        handler.connection.shutdown(2)

    @staticmethod
    def _event(handler: BaseHTTPRequestHandler, data: str) -> None:
        part = f"data: {data}\n\n".encode()
        handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        handler.wfile.flush()

    def close(self) -> None:
        self.go.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


def _tool_calls(turn: Turn) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        for call in turn.called
    ]


def _call_parts(turn: Turn) -> Iterator[dict[str, Any]]:
    for index, call in enumerate(_tool_calls(turn)):
        text = call["function"]["arguments"]
        head, tail = text[: len(text) // 2], text[len(text) // 2 :]
        yield {**call, "index": index, "function": {**call["function"], "arguments": head}}
        yield {"index": index, "function": {"arguments": tail}}
