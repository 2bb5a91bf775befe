"""A host of models and a server of MCP that answer as they should not, over HTTP, and the server over a stream of lines, too.

What is asked for says how: the name of a model, or of a tool. Standard library alone, so that it runs as a command in a sandbox.
"""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = 50 << 20
PART = b"x" * (64 << 10)
TOOLS = ("fine", "large", "garbage", "surrogate", "html", "cut", "other")
KNOWN = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "rude", "version": "1"},
}


def text(words: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}]}


def result_of(said: dict[str, Any]) -> Any:
    """The result of a request as it should be; None: there is no such method."""
    match said["method"]:
        case "initialize":
            return KNOWN
        case "tools/list":
            return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
        case "tools/call":
            return text(str(said["params"]["arguments"].get("word", "")))
        case _:
            return None


def envelope(said: dict[str, Any], result: Any) -> bytes:
    if result is None:
        error = {"code": -32601, "message": "no such method"}
        return json.dumps({"jsonrpc": "2.0", "id": said["id"], "error": error}).encode()
    return json.dumps({"jsonrpc": "2.0", "id": said["id"], "result": result}).encode()


def wrong(said: dict[str, Any], kind: str) -> bytes:
    """The answer to a call, spoilt."""
    good = envelope(said, text("all of it"))
    if kind == "surrogate":
        return good.replace(b"all of it", rb"half \ud83d of it")
    return good[: len(good) // 2] if kind == "garbage" else good


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._say(405, b"", "text/plain")

    do_DELETE = do_GET

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with contextlib.suppress(OSError):
            if self.path.endswith("/mcp"):
                self._tool(said)
            else:
                self._model(said)

    def _say(self, status: int, body: bytes, kind: str, size: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body) if size is None else size))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _flood(self, before: bytes, after: bytes, kind: str) -> None:
        """Say a lot, for as long as somebody listens."""
        self._say(200, before, kind, len(before) + LARGE + len(after))
        for _ in range(LARGE // len(PART)):
            self.wfile.write(PART)
        self.wfile.write(after)

    def _tool(self, said: dict[str, Any]) -> None:
        if "id" not in said:
            self._say(202, b"", "text/plain")
            return
        kind = said["params"]["name"] if said["method"] == "tools/call" else "fine"
        if kind == "large":
            before, after = envelope(said, text("CUT HERE")).split(b"CUT HERE")
            self._flood(before, after, "application/json")
        elif kind == "cut":
            body = envelope(said, text("all of it"))
            self._say(200, body[:30], "application/json", len(body))
            self.close_connection = True
        elif kind == "fine":
            self._say(200, envelope(said, result_of(said)), "application/json")
        else:
            self._say(
                200, wrong(said, kind), "text/html" if kind in ("html", "other") else "application/json"
            )

    def _model(self, said: dict[str, Any]) -> None:
        kind = said["model"].removeprefix("gpt-")
        reply = {
            "id": "r",
            "object": "chat.completion",
            "model": said["model"],
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "CUT HERE"}, "finish_reason": "stop"}
            ],
            "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
        }
        good = json.dumps(reply).encode()
        if said.get("stream"):
            self._stream(kind)
        elif kind == "large":
            before, after = good.split(b"CUT HERE")
            self._flood(before, after, "application/json")
        elif kind == "cut":
            self._say(200, good[:30], "application/json", len(good))
            self.close_connection = True
        elif kind == "garbage":
            self._say(200, good[: len(good) // 2], "application/json")
        elif kind == "html":
            self._say(200, b"<html>Sign in to this network</html>", "text/html")
        else:
            self._say(200, good, "application/json")

    def _stream(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html" if kind in ("html", "other") else "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        if kind == "html":
            self.wfile.write(b"<html>Sign in to this network</html>")
            return
        if kind == "garbage":
            self._event(b'{"id": "r", "choices": [{"delta": {"content": "all of')
            return
        size = LARGE if kind == "large" else 10 << 20
        word = b'{"id":"r","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":"%s"}}]}'
        for _ in range(size // len(PART)):
            self._event(word % PART)
        self._event(
            b'{"id":"r","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
        )
        self._event(b"[DONE]")

    def _event(self, data: bytes) -> None:
        self.wfile.write(b"data: " + data + b"\n\n")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served() -> Iterator[int]:
    """Listens at a port of its own."""
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def lines() -> None:
    """The server over standard input and output."""
    for line in sys.stdin.buffer:
        said = json.loads(line)
        if "id" not in said:
            continue
        kind = said["params"]["name"] if said["method"] == "tools/call" else "fine"
        out = sys.stdout.buffer
        if kind == "large":
            before, after = envelope(said, text("CUT HERE")).split(b"CUT HERE")
            out.write(before)
            for _ in range(LARGE // len(PART)):
                out.write(PART)
            out.write(after + b"\n")
        elif kind == "cut":
            out.write(envelope(said, text("all of it"))[:30])
            sys.exit(3)
        elif kind == "html":
            out.write(b"<html>what a program prints</html>\n" + envelope(said, text("after that")) + b"\n")
        else:
            good = kind == "fine"
            out.write((envelope(said, result_of(said)) if good else wrong(said, kind)) + b"\n")
        out.flush()


if __name__ == "__main__":
    lines()
