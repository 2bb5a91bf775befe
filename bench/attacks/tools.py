"""A real HTTP server in front of AgentDojo's environments: every tool is `POST /tools/NAME`, a reading one `GET` as well.

`python -m bench.attacks.tools --desks N` prints one line of JSON with the ports and serves until its input ends. Each desk is
a port with one environment of its own, so that desks serve runs side by side. What the driver asks stands below `/control`,
which no kernel file declares: no agent gets there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from bench.attacks.dojo import MARK, Scene, pairs

READS = {
    "banking": frozenset(
        {
            *("get_iban", "get_balance", "get_most_recent_transactions", "get_scheduled_transactions"),
            *("read_file", "get_user_info"),
        }
    ),
    # `get_unread_emails` is none: it marks what it gives as read.
    "workspace": frozenset(
        {
            *("get_sent_emails", "get_received_emails", "get_draft_emails", "search_emails"),
            *("search_contacts_by_name", "search_contacts_by_email", "get_current_day"),
            *("search_calendar_events", "get_day_calendar_events", "search_files_by_filename"),
            *("get_file_by_id", "list_files", "search_files"),
        }
    ),
    # `get_webpage` is none: it sends an address to whoever serves it.
    "slack": frozenset({"get_channels", "read_channel_messages", "read_inbox", "get_users_in_channel"}),
}
"""Tools that only read."""


class Desk(ThreadingHTTPServer):
    """One port, one environment."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scene: Scene | None = None
        self.lock = threading.Lock()

    def control(self, what: str, given: dict[str, Any]) -> Any:
        """Answer the driver."""
        if what == "pairs":
            return dict(zip(("users", "attacks"), pairs(given["suite"]), strict=True))
        if what == "begin":
            self.scene = Scene(suite=given["suite"], user=given["user"], attack=given["attack"])
            return {
                "prompt": self.scene.prompt,
                "calls": self.scene.task_calls(),
                "mark": MARK,
                "reads": sorted(READS[given["suite"]]),
            }
        if self.scene is None:
            raise LookupError(what)
        if what == "attack":
            return self.scene.attack_calls()
        if what == "score":
            return {**self.scene.score(), "executed": len(self.scene.executed)}
        raise LookupError(what)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Desk

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        given = json.loads(self.rfile.read(size) or b"{}")
        path = urlsplit(self.path).path
        with self.server.lock:
            if path.startswith("/control/"):
                self._answer(200, self.server.control(path.removeprefix("/control/"), given))
            else:
                self._tool(path, given)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        given = {name: json.loads(value) for name, value in parse_qsl(parts.query)}
        name = parts.path.removeprefix("/tools/")
        with self.server.lock:
            scene = self.server.scene
            if scene is None or name not in READS[scene.suite]:
                self._answer(405, {"error": f"`{name}` changes something: use POST"})
            else:
                self._tool(parts.path, given)

    def do_PUT(self) -> None:
        """Put a file back as it was: no tool of AgentDojo, and no role reaches it; a rollback does."""
        size = int(self.headers.get("content-length") or 0)
        given = json.loads(self.rfile.read(size))
        with self.server.lock:
            scene = self.server.scene
            if scene is None or not self.path.startswith("/tools/files/"):
                self._answer(404, {"error": "there is nothing here"})
            else:
                scene.put_back(given["result"])
                self._answer(200, {})

    def _tool(self, path: str, given: dict[str, Any]) -> None:
        scene = self.server.scene
        if scene is None or not path.startswith("/tools/"):
            self._answer(404, {"error": "there is nothing here"})
            return
        result, error = scene.run(path.removeprefix("/tools/"), given)
        wrong = 404 if self.command == "GET" else 422
        self._answer(200 if error is None else wrong, {"result": result, "error": error})

    def _answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.attacks.tools", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--desks", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    desks = [Desk() for _ in range(options.desks)]
    pairs("banking")
    for desk in desks:
        threading.Thread(target=desk.serve_forever, daemon=True).start()
    print(json.dumps({"ports": [desk.server_address[1] for desk in desks]}), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()


if __name__ == "__main__":
    main()
