"""A connection to a target, and one round trip over it: statements sent together, their answers read as they come.

It speaks to the driver's own layer below cursors: a cursor for each statement takes several times what the target does for a
small one. What is cancelled is cancelled at the target too, by the driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg
from psycopg import capabilities
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.waiting import Wait

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from psycopg import AsyncConnection
    from psycopg.abc import PQGen
    from psycopg.abc import Transformer as Values
    from psycopg.pq.abc import PGconn, PGresult

_KEPT_MAX: Final = 96
"""Statements of our own that a connection keeps prepared; later ones are sent whole."""
_PART_ROWS: Final = 8
"""Rows that come from the driver at once, before their size is looked at."""

RawRow: TypeAlias = tuple[str | None, ...]


class LimitReached(Exception):
    """More rows or bytes than asked for."""


@dataclass(frozen=True, slots=True)
class Rows:
    """An answer: names and type oids of the columns, and the rows."""

    columns: tuple[str, ...]
    oids: tuple[int, ...]
    rows: list[RawRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A single statement, with its parameters `$1`, `$2` and so on.

    Attributes:
        keep: whether the target keeps it prepared; what agents wrote is never kept.
    """

    text: str
    parameters: Sequence[Any] = ()
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Most rows, and bytes of them, that the first statement of a round trip may answer with."""

    rows: int
    size: int


_Key: TypeAlias = tuple[str, tuple[int, ...]]


class Wire:
    """A connection, and what is known of its other end as long as it stands.

    Attributes:
        connection: the driver's.
        known: what those who ask keep for later: facts that can't change while the connection stands.
    """

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        self.connection = connection
        self.known: dict[str, Any] = {}
        self._kept: dict[_Key, bytes] = {}
        self._named = 0

    @property
    def broken(self) -> bool:
        """Whether nothing more can be asked."""
        return self.connection.closed or self.connection.broken

    async def exchange(self, sent: Sequence[Sent], bounds: Bounds | None = None) -> list[Rows]:
        """Send statements in order and read their answers. None is run after one that failed.

        Args:
            sent: the statements.
            bounds: of the first one's answer, which comes in parts then; it is none that is kept.

        Raises:
            psycopg.Error: the first failure.
            LimitReached: the answer is larger; the connection is closed.
        """
        async with self.connection.lock:
            try:
                return await self.connection.wait(self._together(sent, bounds))
            except LimitReached:
                await self.connection.cancel_safe(timeout=5.0)
                await self.connection.close()
                raise

    def _together(self, sent: Sequence[Sent], bounds: Bounds | None) -> PQGen[list[Rows]]:
        conn = self.connection.pgconn
        values: Values = Transformer(self.connection)
        conn.enter_pipeline_mode()
        made = [self._send(conn, values, one) for one in sent]
        conn.pipeline_sync()
        if bounds is not None:
            if capabilities.has_stream_chunked():
                conn.set_chunked_rows_mode(min(_PART_ROWS, bounds.rows + 1))
            else:
                conn.set_single_row_mode()
        yield from _flush(conn)
        answers: list[Rows] = []
        failure: psycopg.Error | None = None
        for at, key in enumerate(made):
            if key is not None:
                _, failed = yield from _answer(conn, values, None)
                if failed is not None:
                    failure = failure or failed
                if failure is not None:
                    self._kept.pop(key, None)
            rows, failed = yield from _answer(conn, values, None if at else bounds)
            failure = failure or failed
            answers.append(rows)
        yield from _next(conn)  # that the target is through with all of them
        if conn.status == ConnStatus.BAD:
            raise (
                failure
                if failure is not None and failure.sqlstate
                else psycopg.OperationalError(str(failure or "the connection is lost"))
            )
        conn.exit_pipeline_mode()
        if failure is not None:
            raise failure
        return answers

    def _send(self, conn: PGconn, values: Values, one: Sent) -> _Key | None:
        """Send a statement; returns by what it is kept where it is prepared with it."""
        given = values.dump_sequence(one.parameters, [PyFormat.AUTO] * len(one.parameters))
        types, formats = values.types or (), values.formats
        key = (one.text, tuple(types))
        name = self._kept.get(key) if one.keep else None
        fresh = None
        if name is None and one.keep and len(self._kept) < _KEPT_MAX:
            self._named += 1
            name = self._kept[key] = b"ringfence_%d" % self._named
            fresh = key
            conn.send_prepare(name, one.text.encode(), types)
        if name is not None:
            conn.send_query_prepared(name, given, formats)
        else:
            conn.send_query_params(one.text.encode(), given, types, formats)
        return fresh


def _flush(conn: PGconn) -> Generator[Wait, int]:
    """Send what is left, and take meanwhile what comes: else both ends could wait for each other."""
    while conn.flush():
        if ((yield Wait.RW) or 0) & Wait.R:  # None where the driver goes on after a cancellation
            conn.consume_input()


def _next(conn: PGconn) -> Generator[Wait, int, PGresult | None]:
    while conn.is_busy():
        if (yield Wait.R):
            conn.consume_input()
    return conn.get_result()


def _answer(
    conn: PGconn, values: Values, bounds: Bounds | None
) -> Generator[Wait, int, tuple[Rows, psycopg.Error | None]]:
    """One statement's answer, whether it comes whole or in parts."""
    columns: tuple[str, ...] = ()
    oids: tuple[int, ...] = ()
    rows: list[RawRow] = []
    size = 0
    failure: psycopg.Error | None = None
    described = False
    while (result := (yield from _next(conn))) is not None:
        if result.status in _TOLD:
            if not described:
                described = True
                places = range(result.nfields)
                columns = tuple((result.fname(place) or b"").decode() for place in places)
                oids = tuple(map(result.ftype, places))
            if not result.ntuples:
                continue
            values.set_pgresult(result)
            part: list[RawRow] = values.load_rows(0, result.ntuples, tuple)
            rows += part
            if bounds is not None:
                size += sum(len(value) for row in part for value in row if value)
                if len(rows) > bounds.rows or size > bounds.size:
                    raise LimitReached
        elif result.status in _COPIES:
            raise psycopg.InterfaceError("copying is not supported")
        elif result.status == ExecStatus.FATAL_ERROR:
            failure = failure or error_from_result(result)
    return Rows(columns, oids, rows), failure


_TOLD: Final = frozenset({ExecStatus.TUPLES_OK, ExecStatus.TUPLES_CHUNK, ExecStatus.SINGLE_TUPLE})
_COPIES: Final = frozenset({ExecStatus.COPY_IN, ExecStatus.COPY_OUT, ExecStatus.COPY_BOTH})
