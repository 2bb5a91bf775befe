"""A separate process that plays an HTTP target with moods: it echoes, redirects, sets cookies, or hangs up in mid-call.

The last segment of the path is the mood. Every request is a line of a file before it is answered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


class Target:
    """The target as a test sees it."""

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
        return [line for line in lines if path is None or line["path"].partition("?")[0] == path]

    def go(self) -> None:
        """Let what is held be answered, and hold nothing any more."""
        Path(f"{self._journal}.go").touch()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        line = {
            "method": self.command,
            "path": self.path,
            "headers": {name.lower(): value for name, value in self.headers.items()},
            "body": self.rfile.read(size).decode("utf-8", "replace"),
        }
        fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
        os.write(fd, json.dumps(line).encode() + b"\n")
        os.fsync(fd)
        os.close(fd)
        mood = self.path.partition("?")[0].rpartition("/")[2]
        token = self.headers.get("authorization", "").partition(" ")[2]
        if mood == "drop":
            self.close_connection = True
        elif mood == "redirect" or mood.startswith("30"):
            self._lead_on(mood)
        elif mood == "echo":
            body = json.dumps({"seen": dict(self.headers.items()), "token": token}).encode()
            self._answer(200, body, x_echo=token, set_cookie="session=1")
        elif mood == "torn":
            # A stream of small chunks: the token as it is, then in base64 behind one more character, then in hex.
            coded = b64encode(f"u{token}".encode())
            self._stream(b"\n".join((token.encode(), coded, token.encode().hex().encode())))
        elif mood == "seen":
            # What other callers sent, as a page with the server's log would show it.
            self._answer(200, Path(sys.argv[1]).read_bytes())
        elif mood in ("say", "complain"):
            words = unquote(self.path.partition("?")[2])
            self._answer(200 if mood == "say" else 404, words.encode())
        elif mood == "hold":
            # No answer until the test says so, or this process is ended.
            while not Path(f"{sys.argv[1]}.go").exists():
                time.sleep(0.01)
            self._answer(200, b"")
        elif mood in ("big", "cut"):
            # So many bytes; `cut` tells of twice as many and hangs up.
            self._send(int(self.path.partition("?")[2]), times=2 if mood == "cut" else 1)
        else:
            self._answer(*((500, b"broken") if mood == "fail" else (200, b'{"ok":true}')))

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, size: int, times: int) -> None:
        self.send_response(200)
        self.send_header("content-length", str(times * size))
        self.end_headers()
        self.wfile.write(b"x" * size)
        self.close_connection = True

    def _lead_on(self, mood: str) -> None:
        """A redirect of some status to wherever the query says."""
        if mood == "redirect":
            self._answer(302, b"", location=f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere")
        else:
            self._answer(int(mood), b"", location=unquote(self.path.partition("?")[2]))

    def _stream(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for at in range(0, len(data), 3):
            part = data[at : at + 3]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # Kernels are killed in mid-call: that is no news.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def main() -> None:
    server = _Server(("127.0.0.1", 0), _Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
