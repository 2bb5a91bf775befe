"""A separate process that counts what reaches it over HTTP: every delivery is a line of a file before it is answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Counter:
    """The counting process as a test sees it."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        journal.touch()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(journal)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deliveries(self, path: str | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._journal.read_text().splitlines()]
        return [line for line in lines if path is None or line["path"] == path]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(size).decode("utf-8", "replace")
        line = {
            "method": self.command,
            "path": self.path,
            "key": self.headers.get("idempotency-key"),
            "authorization": self.headers.get("authorization"),
            "body": body,
        }
        fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
        os.write(fd, json.dumps(line).encode() + b"\n")
        os.fsync(fd)
        os.close(fd)
        answer = b'{"ok":true}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def log_message(self, *_args: object) -> None:
        pass


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
