"""EmbeddedPostgres: starts, watches, restarts and stops the server of one data directory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from ringfence.kernel.journal import admin
from ringfence.kernel.journal.types import JournalError, Unavailable
from ringfence.kernel.postgres.cluster import ROLE, Cluster
from ringfence.kernel.postgres.errors import PostgresError, from_os_error, from_output
from ringfence.kernel.postgres.layout import PORT, Layout, Lock

if TYPE_CHECKING:
    from pathlib import Path

    from ringfence.kernel.postgres.process import Child

DATABASE = "ringfence"

_LOG = logging.getLogger(__name__)
_PROBE_S = 0.02
_PROBE_MAX_S = 0.5
_REFUSALS = 20
_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 10.0
_STEADY_S = 30.0
_TICK_S = 3600.0


class EmbeddedPostgres:
    """A PostgreSQL server of the kernel's own, below `<data_dir>/postgres`, reached by a private socket only.

    The server is a direct child. When it ends unasked it is started again, and again, with growing pauses,
    until `stop`. When the kernel itself is killed the server is told to stop; one that is still there at the
    next start is recognised by the directory it stands in and ended first.

    Use it within one event loop, whose thread must live as long as the server.

    Attributes:
        starts: how often the server was started. A growing number tells a restart.
        failure: why the server is away; None while it is not.
    """

    def __init__(self, data_dir: Path) -> None:
        self.starts = 0
        self.failure: str | None = None
        self._layout = Layout(data_dir)
        self._lock = Lock(self._layout)
        self._cluster: Cluster | None = None
        self._child: Child | None = None
        self._version = ""
        self._ready = asyncio.Event()
        self._stopped = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def version(self) -> str:
        """The server's version, as `18.6`; empty before `start`."""
        return self._version

    @property
    def pid(self) -> int | None:
        """The process id of the running server; None when there is none."""
        child = self._child
        return child.pid if child is not None and child.running else None

    @property
    def ready(self) -> bool:
        """Whether the server answered and has not ended since."""
        return self._ready.is_set()

    def dsn(self, database: str = DATABASE, user: str = ROLE) -> str:
        """The connection URL of a database, for processes of the kernel's own user.

        It holds no password: the server knows the kernel by its user id, as any role.

        Raises:
            PostgresError: the socket's path is too long and there is no private place for a shorter one.
        """
        host = quote(str(self._layout.socket_directory()), safe="")
        return f"postgresql://{quote(user, safe='')}@/{quote(database, safe='')}?host={host}&port={PORT}"

    async def create_database(self, name: str) -> bool:
        """Creates a database unless it exists, and says whether it did.

        Raises:
            JournalError: the name can't be used.
            Unavailable: the server is away.
        """
        return await admin.create_database(self.dsn("postgres"), name)

    async def start(self) -> str:
        """Starts the server, on a new cluster if there is none, and returns the DSN of the kernel's database.

        While the server recovers from a crash this waits, however long that takes.

        Raises:
            PostgresError: one line that says why not and what to do.
        """
        if self._watcher is not None:
            return self.dsn()
        self._layout.prepare()
        self._lock.take()
        try:
            await self._open()
        except OSError as error:
            await self._close()
            raise from_os_error(error, self._layout.home) from None
        except JournalError as error:
            await self._close()
            raise PostgresError(f"the embedded server can't be used: {error}") from error
        except BaseException:
            await self._close()
            raise
        return self.dsn()

    async def _open(self) -> None:
        self._cluster = cluster = await Cluster.open(self._layout)
        self._version = cluster.version
        await cluster.clear()
        await cluster.ensure()
        child = await self._launch(cluster)
        await self.create_database(DATABASE)
        self._stopped.clear()
        self._watcher = asyncio.create_task(self._watch(cluster, child), name="ringfence postgres")

    async def wait_ready(self) -> None:
        """Waits until the server answers: not at all while it runs, else through its restart.

        Raises:
            PostgresError: it was stopped, or never started.
        """
        if self._watcher is not None and not self._ready.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, self._stopped)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if not self._ready.is_set():
            raise PostgresError("the embedded server is not running: start the kernel again")

    async def stop(self) -> None:
        """Stops the server in order and gives the directory back. Does nothing when it isn't started."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        self._stopped.set()
        # A second Ctrl-C must not leave a server without its kernel.
        await asyncio.shield(self._close())

    async def _close(self) -> None:
        self._ready.clear()
        child, self._child = self._child, None
        cluster, self._cluster = self._cluster, None
        try:
            if child is not None:
                await child.stop()
            if cluster is not None:
                await cluster.clear()
        finally:
            if cluster is not None:
                cluster.close()
            self._lock.release()

    async def _launch(self, cluster: Cluster) -> Child:
        """Starts the server once and waits until it answers.

        Raises:
            PostgresError: it ended before it did.
        """
        began = time.time()
        self._child = child = cluster.spawn_server()
        self.starts += 1
        pause, refusals = _PROBE_S, 0
        while True:
            if await child.wait(pause) is not None:
                text = self._layout.last_lines(began)
                raise from_output(text, "postgres", self._layout.home, self._layout.log)
            if self._layout.server_status(child.pid) == "ready":
                try:
                    await admin.ping(self.dsn("postgres"))
                    break
                except Unavailable as error:
                    # Recovery may take any time, but a server that calls itself ready lets its owner in.
                    refusals += 1
                    if refusals >= _REFUSALS:
                        raise PostgresError(f"the embedded server refuses the kernel: {error}") from error
            pause = min(pause * 1.5, _PROBE_MAX_S)
        self.failure = None
        self._ready.set()
        return child

    async def _watch(self, cluster: Cluster, child: Child) -> None:
        """Keeps the server running until cancelled."""
        pause, began = 0.0, time.monotonic()
        while True:
            code = await child.wait(_TICK_S)
            if code is None:
                self._tidy()
                continue
            self._ready.clear()
            self.failure = f"postgres ended unasked (exit code {code})"
            _LOG.warning("%s: starting it again", self.failure)
            if time.monotonic() - began > _STEADY_S:
                pause = 0.0
            child, pause = await self._revive(cluster, pause)
            began = time.monotonic()
            _LOG.warning("the embedded server is back")

    async def _revive(self, cluster: Cluster, pause: float) -> tuple[Child, float]:
        """Starts a server that ended, as often as it takes; returns it and the pause before a next time."""
        while True:
            await asyncio.sleep(pause)
            pause = min(max(pause * 2, _BACKOFF_S), _BACKOFF_MAX_S)
            failed: Child | None = None
            try:
                await cluster.clear()
                return await self._launch(cluster), pause
            except PostgresError as error:
                self.failure, failed = str(error), self._child
            except OSError as error:
                self.failure, failed = str(from_os_error(error, self._layout.home)), self._child
            _LOG.error("the embedded server does not start, next try in %.1f s: %s", pause, self.failure)
            if failed is not None:
                await failed.stop()

    def _tidy(self) -> None:
        """Keeps the log directory small and the short way to the socket in place."""
        try:
            self._layout.prune_logs()
            self._layout.socket_directory()
        except (OSError, PostgresError) as error:
            _LOG.warning("can't tidy up after the embedded server: %s", error)
