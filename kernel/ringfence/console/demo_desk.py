"""The desk of the demo: a process of its own that takes notices over HTTP and counts what reaches it.

`python -m ringfence.console.demo_desk DIRECTORY [ORDINAL …]`. It is no part of Ringfence, so its count is evidence:
every delivery is a line of `deliveries.jsonl` before it is answered. Files in the directory steer it:

    go-PHASE          `GET /may/PHASE` answers yes from now on
    held-N, release-N delivery N (one of the ordinals given) is held, unanswered, from the first to the second
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DELIVERIES = "deliveries.jsonl"
POLL_S = 0.01


class Desk(ThreadingHTTPServer):
    """The server and its count."""

    daemon_threads = True

    def __init__(self, directory: Path, held: frozenset[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.held = held
        self.count = 0
        self.lock = threading.Lock()
        self.file = (directory / DELIVERIES).open("ab", buffering=0)

    def deliver(self, line: dict[str, Any]) -> None:
        """Count a delivery durably; returns when it may be answered."""
        with self.lock:
            self.count += 1
            ordinal = self.count
            self.file.write(json.dumps({"ordinal": ordinal, **line}).encode() + b"\n")
            os.fsync(self.file.fileno())
        if ordinal in self.held:
            (self.directory / f"held-{ordinal}").touch()
            while not (self.directory / f"release-{ordinal}").exists():
                time.sleep(POLL_S)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Desk  # pyright: ignore[reportIncompatibleVariableOverride] - always served by a Desk

    def do_GET(self) -> None:
        """Say whether a phase may begin."""
        phase = self.path.rpartition("/")[2]
        asked = self.server.directory / f"asked-{phase}"
        if not asked.exists():
            asked.touch()
        self._answer({"go": (self.server.directory / f"go-{phase}").exists()})

    def do_POST(self) -> None:
        """Take a notice."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode("utf-8", "replace")
        authorization = self.headers.get("authorization")
        key = self.headers.get("idempotency-key")
        line = {"path": self.path, "key": key, "authorization": authorization, "body": body}
        if self.path == "/v1/chat/completions":
            reply = _complete(body)
            usage = reply["usage"]
            self.server.deliver(
                {**line, "usage": {k: usage[k] for k in ("prompt_tokens", "completion_tokens")}}
            )
            self._answer(reply)
            return
        self.server.deliver(line)
        self._answer({"ok": True})

    def _answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        """Serve one connection; a client that was killed is no error."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Say nothing: the count is the log."""


def _complete(body: str) -> dict[str, Any]:
    """What a model's host would say: scripted, but its tokens are counted from what it was really sent."""
    asked = json.loads(body)
    words = " ".join(str(message["content"]) for message in asked["messages"]).split()
    text = f"A look at {len(words)} words of inventory: every file is accounted for."
    usage = {"prompt_tokens": len(words), "completion_tokens": len(text.split())}
    return {
        "id": "reply-1",
        "object": "chat.completion",
        "model": asked["model"],
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }


def main() -> None:
    """Serve until killed; the first line of output is the port."""
    directory, *ordinals = sys.argv[1:]
    desk = Desk(Path(directory), frozenset(map(int, ordinals)))
    sys.stdout.write(f"{desk.server_address[1]}\n")
    sys.stdout.flush()
    desk.serve_forever()


if __name__ == "__main__":
    main()
