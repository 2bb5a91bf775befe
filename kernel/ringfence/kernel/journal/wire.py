"""One connection of the journal's writer, driven by hand.

It runs prepared statements, pipelines and COPY, with one reader callback for all. psycopg opens and secures the connection; its own waiting costs more than the journal's whole work on a lone
row. An answer is told from the callback that read it: a task between them would be one more turn of the event loop for each commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import pq
from psycopg.pq import DiagnosticField, ExecStatus
from ringfence.kernel.journal.database import KEEPALIVE, Connection, journal_errors, one_line, statements

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

Statement = tuple[bytes, Sequence[bytes | None]]
"""Name of a prepared statement and its parameters in binary form."""


class Lost(Exception):
    """The connection is gone; the fate of what was sent last is open."""


Done = Callable[["list[PGresult]", Exception | None], None]
"""Gets the results of an exchange, or Lost or Refused. It must not raise."""

LOOK_AGAIN_S = 0.5
"""How long an exchange waits for the event loop, at least, before it looks at the socket itself; at most twice that."""

# Plain numbers: to look a member of an enum up runs Python, and these are asked for with every exchange.
_BINARY: Final = int(pq.Format.BINARY)
_BAD: Final = int(pq.ConnStatus.BAD)
_SYNC: Final = int(ExecStatus.PIPELINE_SYNC)
_COPY_IN: Final = int(ExecStatus.COPY_IN)
_FAILED: Final = frozenset({int(ExecStatus.FATAL_ERROR), int(ExecStatus.PIPELINE_ABORTED)})


class Refused(Exception):
    """The server refused a statement; nothing of its transaction is committed.

    Attributes:
        sqlstate: PostgreSQL's five-letter code.
        constraint: the constraint it broke, as one that keeps rows unique; or empty.
    """

    def __init__(self, message: str, sqlstate: str, constraint: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.constraint = constraint

    @property
    def passing(self) -> bool:
        """Whether the same again will do: a serialization failure, a deadlock."""
        return self.sqlstate in {"40001", "40P01"}

    @property
    def not_the_row(self) -> bool:
        """Whether no single row is to blame: resources, operator, system, read-only, no such table."""
        return self.sqlstate.startswith(("53", "55", "57", "58", "25", "42", "08", "XX"))


class Wire:
    """A connection on which one exchange happens at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pg: PGconn = connection.pgconn
        self._loop = asyncio.get_running_loop()
        self._fd = self._pg.socket
        self._results: list[PGresult] = []
        self._done: Done | None = None
        self._until_sync = False
        self._writing = False
        self._error: str | None = None
        self._look: asyncio.TimerHandle | None = None
        self.pid = self._pg.backend_pid
        self._loop.add_reader(self._fd, self._on_readable)

    @classmethod
    async def connect(cls, dsn: str) -> Wire:
        """Connect, and set the session up.

        Raises:
            Unavailable: the database is away.
        """
        with journal_errors():
            connection = await psycopg.AsyncConnection.connect(
                dsn, autocommit=True, application_name="ringfence journal", **KEEPALIVE
            )
            try:
                await connection.execute(statements("writer")["session"])
            except BaseException:
                await connection.close()
                raise
        return cls(connection)

    @property
    def lost(self) -> bool:
        """Whether the connection is known to be gone."""
        return self._error is not None

    @property
    def waits(self) -> bool:
        """Whether an answer is waited for."""
        return self._done is not None

    async def close(self) -> None:
        """Close the connection."""
        self._fail("closed")
        await self._connection.close()

    async def prepare(self, texts: Mapping[bytes, bytes]) -> None:
        """Prepare statements for this connection, by name.

        Raises:
            Lost, Refused: as for every exchange.
        """

        def say() -> None:
            self._pg.enter_pipeline_mode()
            for name, text in texts.items():
                self._pg.send_prepare(name, text)
            self._pg.pipeline_sync()

        await self._exchange(say, until_sync=True)

    async def run(self, statement: Statement) -> PGresult:
        """Run one prepared statement in a transaction of its own, or in the open one.

        Returns:
            Its result, in binary, once the server is ready for the next: so what committed has committed.

        Raises:
            Lost: the connection is gone; it may or may not have committed.
            Refused: the server refused it.
        """
        return (await self.pipeline((statement,)))[-1]

    async def pipeline(self, statements: Sequence[Statement]) -> list[PGresult]:
        """Run prepared statements in one round trip.

        Raises:
            Lost: the connection is gone.
            Refused: the first refusal; the statements after it did not run.
        """
        return await self._exchange(partial(self._say_all, statements), until_sync=True)

    def send(self, statements: Sequence[Statement], done: Done) -> None:
        """Run prepared statements in one round trip as `pipeline` does; `done` hears of it, perhaps before this returns."""
        self._begin(partial(self._say_all, statements), done, until_sync=True)

    async def copy(self, text: bytes, data: bytes) -> None:
        """Send data with COPY; `text` may go on with a further statement, as a commit.

        Raises:
            Lost: the connection is gone; a commit in `text` may or may not have happened.
            Refused: the server refused it.
        """

        def ask() -> None:
            # A pipeline takes no COPY.
            self._pg.exit_pipeline_mode()
            self._pg.send_query(text)

        def say() -> None:
            self._pg.put_copy_data(data)
            self._pg.put_copy_end()

        await self._exchange(ask, until_sync=False)
        await self._exchange(say, until_sync=False)

    def _say_all(self, statements: Sequence[Statement]) -> None:
        pg = self._pg
        pg.enter_pipeline_mode()
        for name, values in statements:
            pg.send_query_prepared(name, values, param_formats=[_BINARY] * len(values), result_format=_BINARY)
        pg.pipeline_sync()

    async def _exchange(self, say: Callable[[], None], *, until_sync: bool) -> list[PGresult]:
        future: asyncio.Future[list[PGresult]] = self._loop.create_future()
        self._begin(say, partial(_tell, future), until_sync=until_sync)
        try:
            return await future
        except asyncio.CancelledError:
            # Answers would come to the wrong question after this.
            self._fail("cancelled")
            raise

    def _begin(self, say: Callable[[], None], done: Done, *, until_sync: bool) -> None:
        """Hand something to libpq, and wait for what comes back."""
        if self._error is not None:
            done([], Lost(self._error))
            return
        self._results, self._until_sync, self._done = [], until_sync, done
        try:
            say()
        except psycopg.Error as error:
            self._fail(one_line(error))
            return
        self._flush()
        if self._look is None:
            self._look = self._loop.call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        """Read without being told to: an event loop may drop a socket at its first error and never report its end."""
        self._look = None
        if self._done is not None and self._error is None:
            # Not set and cancelled with each exchange: that costs more than to look once in vain.
            self._look = self._loop.call_later(LOOK_AGAIN_S, self._look_again)
            self._on_readable()

    def _on_readable(self) -> None:
        try:
            self._pg.consume_input()
            if self._writing:
                self._flush()
            while not self._pg.is_busy():
                result = self._pg.get_result()
                if result is None:
                    # In a pipeline it only parts one statement's results from the next one's.
                    if self._until_sync and self._pg.status != _BAD:
                        continue
                    self._finish()
                    return
                if result.status == _SYNC:
                    self._until_sync = False
                    self._finish()
                    return
                self._results.append(result)
                if result.status == _COPY_IN:
                    self._finish()
                    return
        except psycopg.Error as error:
            self._fail(one_line(error))
            return
        if self._pg.status == _BAD:
            self._fail("the server closed the connection")

    def _finish(self) -> None:
        if self._pg.status == _BAD:
            self._fail("the server closed the connection")
            return
        done, self._done = self._done, None
        if done is None:
            return
        results = self._results
        for result in results:
            if result.status in _FAILED:
                error = _refusal(result)
                if isinstance(error, Lost):
                    self._fail(str(error))
                done([], error)
                return
        done(results, None)

    def _flush(self) -> None:
        try:
            pending = self._pg.flush()
        except psycopg.Error as error:
            self._fail(one_line(error))
            return
        if pending and not self._writing:
            self._writing = True
            self._loop.add_writer(self._fd, self._flush)
        elif not pending and self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)

    def _fail(self, why: str) -> None:
        if self._error is None:
            self._error = why
            self._loop.remove_reader(self._fd)
            if self._writing:
                self._writing = False
                self._loop.remove_writer(self._fd)
        done, self._done = self._done, None
        if done is not None:
            done([], Lost(self._error))


def _tell(future: asyncio.Future[list[PGresult]], results: list[PGresult], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(results)
    else:
        future.set_exception(error)


def _refusal(result: Any) -> Exception:
    state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
    constraint = (result.error_field(DiagnosticField.CONSTRAINT_NAME) or b"").decode()
    message = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
    # Classes 57P0x: the server is going down or threw this session out; it closes the connection next.
    if state.startswith("57P0") or state in {"25P03", ""}:
        return Lost(message or "the connection was lost")
    return Refused(message, state, constraint)
