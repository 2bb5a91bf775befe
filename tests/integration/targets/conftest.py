"""Calls as the kernel would make them, over real parts: policy, snapshot store, database, HTTP server."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import threading
import uuid
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.syscalls.http_client import close_clients
from ringfence.syscalls.sql_target.session import close_targets
from support.targets import Call, Database, Killed, policy_of

__all__ = ["Call", "Database", "Killed", "policy_of"]

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


class Given:
    """A server of another version, named by `RINGFENCE_SQL_SERVER`: the URL of one of its databases, as its superuser `ringfence`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def create(self) -> str:
        name = f"test_{uuid.uuid4().hex}"
        self._run(sql.SQL("create database {}").format(sql.Identifier(name)))
        return name

    def drop(self, name: str) -> None:
        self._run(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def dsn(self, database: str) -> str:
        return f"{self._url.rpartition('/')[0]}/{database}"

    def _run(self, statement: sql.Composed) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(statement)


@pytest.fixture(scope="session")
def target_server(request: pytest.FixtureRequest) -> Any:
    """Where databases of targets are: the embedded server, or the given one."""
    given = os.environ.get("RINGFENCE_SQL_SERVER")
    return Given(given) if given else request.getfixturevalue("postgres_server")


@pytest.fixture
async def crm(target_server: Any, tmp_path: Path) -> AsyncIterator[Database]:
    """An empty database that is declared as `crm`."""
    name = target_server.create()
    try:
        yield Database(target_server.dsn(name), SnapshotStore(tmp_path / "points"))
    finally:
        await close_targets()
        target_server.drop(name)


@pytest.fixture
def stock(crm: Database) -> Database:
    """The same with one table of three rows."""
    crm.run("create table stock (id int primary key, name text not null, n int, price numeric(8,2))")
    crm.run("insert into stock values (1, 'nut', 5, 0.10), (2, 'bolt', 7, 0.20), (3, 'cog', null, 3)")
    return crm


@pytest.fixture
def make_call() -> Callable[..., Call]:
    """Makes calls of any kind."""
    return Call


@dataclass
class Received:
    """One request as the server saw it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    peer: Any


class Upstream:
    """A real HTTP server; each path does what its name says."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = self.rfile.read(length)
                outer.received.append(
                    Received(
                        self.command,
                        self.path,
                        {name.lower(): value for name, value in self.headers.items()},
                        body,
                        self.client_address,
                    )
                )
                outer.answer(self, body)

            def log_message(self, *_args: Any) -> None: ...

        for verb in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
            setattr(Handler, f"do_{verb}", Handler._handle)

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_args: Any) -> None: ...

        self.server = Server(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server.server_port}/v1"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        name = handler.path.split("?")[0].rsplit("/", 1)[-1]
        if name == "hang":
            self.release.wait(30)
            return
        if name == "drop":
            handler.close_connection = True
            with contextlib.suppress(OSError):
                handler.connection.shutdown(2)
            return
        answers: dict[str, tuple[int, dict[str, str], bytes]] = {
            "redirect": (302, {"Location": "http://127.0.0.1:1/elsewhere"}, b""),
            "busy": (429, {"Retry-After": "2"}, b"slow down"),
            "cookie": (200, {"Set-Cookie": "session=abc; Path=/"}, b"hello"),
            "huge": (200, {}, b"x" * ((16 << 20) + 1)),
            "odd": (200, {"Content-Encoding": "br"}, b"hello"),
            "gzip": (200, {"Content-Encoding": "gzip"}, gzip.compress(b"squeezed")),
            "broken": (200, {"Content-Encoding": "gzip"}, b"not squeezed"),
            "echo": (
                200,
                {"X-Echo": handler.headers.get("Authorization", "")},
                json.dumps({"headers": dict(handler.headers.items()), "body": body.decode()}).encode(),
            ),
        }
        status, headers, content = answers.get(name, (200, {"X-Answer": "yes"}, b"hello"))
        handler.send_response(status)
        for key, value in headers.items():
            handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            with contextlib.suppress(OSError):
                handler.wfile.write(content)

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    """A running HTTP server."""
    server = Upstream()
    try:
        yield server
    finally:
        await close_clients()
        server.close()
