"""A PostgreSQL of a test's own, which it stops, starts and kills as it likes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from ringfence.kernel.journal.targets import ensure_target
from ringfence.kernel.postgres import EmbeddedPostgres
from support.kernels import eventually
from support.scenes import short_directory


class Server:
    """One server; its supervisor brings it back when it was killed."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.directory = directory
        self._postgres = EmbeddedPostgres(directory)
        self.dsn = self._do(self._postgres.start())

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def target(self, name: str) -> str:
        """The connection URL of a database that agents work on; made where there is none."""
        self._do(ensure_target(self._postgres.dsn("postgres"), name))
        return self._postgres.dsn(name, name)

    def stop(self) -> None:
        self._do(self._postgres.stop())

    def start(self) -> None:
        self._do(self._postgres.start())

    def kill(self) -> None:
        """SIGKILL from outside; returns when a new server answers."""
        kill_postgres(self.directory)
        eventually(self._answers, "PostgreSQL did not come back")

    def _answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.dsn):
            return True
        return False

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def kill_postgres(data: Path) -> None:
    """SIGKILL from outside to the embedded server below a directory."""
    pid = int(next((data / "postgres").rglob("postmaster.pid")).read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the server does not die")


@contextlib.contextmanager
def server() -> Iterator[Server]:
    with short_directory() as directory:
        made = Server(directory)
        try:
            yield made
        finally:
            made.close()
