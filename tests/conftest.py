"""PostgreSQL for tests: one embedded server a process of pytest, one migrated database a test."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Iterator

    from support.workers import Files
    from xdist.remote import Producer

T = TypeVar("T")

# A machine that is busy with other things makes no test fail: no time is bounded but the whole of a test.
settings.register_profile(
    "unhurried", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")

_TEMPLATE = "ringfence_template"
_WHO_ONE_IS = re.compile(r"\broot\b|\buser\b|^(Skipped: )?does not apply: ")
_FIXTURES = frozenset({"postgres_server", "template_database", "dsn"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test that needs the server, whether or not it says so itself."""
    for item in items:
        if _FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.postgres)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Files:
    """With `-n` the tests of a file stay together, since they share kernels."""
    # Only here: without `-n` nothing of it is needed.
    from support.workers import Files

    return Files(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test that is skipped for want of something fails; only who one is may be a reason, or that a backend has no such thing."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if _WHO_ONE_IS.search(reason) is None:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped in CI, where everything has to be there: {reason}"
    return report


class Server:
    """The embedded server in an event loop and thread of its own: usable from any test."""

    def __init__(self, data_dir: Path) -> None:
        # Only here: tests without a database don't wait for the kernel's imports.
        from ringfence.kernel.postgres import EmbeddedPostgres

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postgres", daemon=True)
        self._thread.start()
        self.postgres = EmbeddedPostgres(data_dir)
        try:
            self.run(self.postgres.start())
        except BaseException:
            self._end_loop()
            raise

    def run(self, work: Coroutine[None, None, T]) -> T:
        """Runs a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def dsn(self, database: str = "ringfence", user: str = "ringfence") -> str:
        """The connection URL of one of its databases."""
        return self.postgres.dsn(database, user)

    def execute(self, statement: sql.Composed) -> None:
        """Runs one statement outside of any test's database."""
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def create(self, template: str = "template1") -> str:
        """Creates a database and returns its name."""
        name = f"test_{uuid.uuid4().hex}"
        words = sql.SQL("create database {} template {} strategy file_copy")
        self.execute(words.format(sql.Identifier(name), sql.Identifier(template)))
        return name

    def drop(self, name: str) -> None:
        """Drops a database with everyone in it."""
        self.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def close(self) -> None:
        """Stops the server."""
        self.run(self.postgres.stop())
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _fast_place() -> str:
    """Memory where there is plenty: each test's database is copied and dropped, and both wait for the disk."""
    memory = Path("/dev/shm")
    plenty = 2 << 30
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > plenty else "/tmp"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """One embedded PostgreSQL for the session, in a directory with a short path."""
    directory = Path(tempfile.mkdtemp(prefix="rf-pg-", dir=_fast_place()))
    try:
        server = Server(directory)
        yield server
        server.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def template_database(postgres_server: Server) -> str:
    """The name of a migrated database that no one uses: others are cloned from it."""
    from ringfence.kernel.journal.migrate import migrate

    postgres_server.run(postgres_server.postgres.create_database(_TEMPLATE))
    postgres_server.run(migrate(postgres_server.dsn(_TEMPLATE)))
    return _TEMPLATE


@pytest.fixture
def dsn(postgres_server: Server, template_database: str) -> Iterator[str]:
    """The connection URL of a fresh, migrated database; dropped after the test."""
    name = postgres_server.create(template_database)
    try:
        yield postgres_server.dsn(name)
    finally:
        postgres_server.drop(name)
