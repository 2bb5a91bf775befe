"""Connections to SQL targets, and transactions in them with every setting pinned that matters.

Values come back as the text that the type's own output function wrote, which is lossless under the pinned
settings, so that a row can be put back byte for byte. What agents wrote is sent by the extended protocol
only: one statement, never two.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import psycopg
from psycopg import AsyncConnection, AsyncRawCursor, errors
from psycopg.adapt import AdaptersMap, Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from ringfence.syscalls.errors import CallFailed, Conflict, Deadline, InvalidRequest, SyscallError
from ringfence.syscalls.redaction import redactor_of
from ringfence.syscalls.refusals import refuse_unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from psycopg.abc import Buffer
    from ringfence.syscalls.declared import SqlResource

CONNECTIONS_MAX: Final = 4
CONNECT_TIMEOUT_S: Final = 10
LOCK_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_S: Final = 60
IDLE_TIMEOUT_S: Final = 30
"""A transaction that nobody continues is ended by the target after this; recovery waits a little longer."""
_UNUSED_S: Final = 300

RawRow: TypeAlias = tuple[str | None, ...]

_log = logging.getLogger("ringfence.syscalls.sql")

_PINS: Final = """
set local search_path = pg_catalog, public, pg_temp;
set local standard_conforming_strings = on;
set local datestyle = 'ISO, YMD';
set local intervalstyle = 'postgres';
set local timezone = 'UTC';
set local extra_float_digits = 1;
set local bytea_output = 'hex';
set local xmloption = 'content';
set local lc_monetary = 'C';
set local array_nulls = on;
set local transform_null_equals = off;
set local jit = off;
"""


class LimitReached(Exception):
    """More rows or bytes than asked for."""


class _RawLoader(Loader):
    """Leaves a value as its text."""

    def load(self, data: Buffer) -> str:
        return bytes(data).decode()


def _raw_adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    oids = {0}
    for info in psycopg.adapters.types:
        oids |= {info.oid, info.array_oid}
    for oid in oids:
        adapters.register_loader(oid, _RawLoader)
    return adapters


@dataclass(frozen=True, slots=True)
class _Context:
    """What a new connection takes its adapters from."""

    adapters: AdaptersMap
    connection: None = None


_CONTEXT: Final = _Context(_raw_adapters())


@dataclass(frozen=True, slots=True)
class Rows:
    """An answer: names and type oids of the columns, and the rows."""

    columns: tuple[str, ...]
    oids: tuple[int, ...]
    rows: list[RawRow]


class Session:
    """One transaction in a target."""

    def __init__(self, connection: AsyncConnection[Any], timeout_ms: int) -> None:
        self._connection = connection
        self._timeout_ms = timeout_ms

    async def execute(self, query: str) -> None:
        """Run statements of our own that take no parameters and whose answer doesn't matter."""
        await self._connection.execute(query.encode())

    @contextlib.asynccontextmanager
    async def at_most(self, seconds: float) -> AsyncGenerator[None]:
        """A shorter limit on single statements inside."""
        await self.execute(_limit(min(int(seconds * 1000), self._timeout_ms)))
        yield
        # An error inside has ended the transaction, and the setting with it.
        await self.execute(_limit(self._timeout_ms))

    async def query(
        self,
        query: str,
        parameters: Sequence[Any] = (),
        *,
        rows_max: int = 1_000_000,
        bytes_max: int = 1 << 30,
    ) -> Rows:
        """Run one statement that answers with rows, with parameters `$1`, `$2`, …, and fetch row by row.

        Raises:
            LimitReached: there are more rows or bytes; the transaction can't go on then.
        """
        cursor = AsyncRawCursor[RawRow](self._connection)
        rows: list[RawRow] = []
        size = 0
        # `stream` always speaks the extended protocol, which takes a single statement.
        stream = cast("AsyncGenerator[RawRow]", cursor.stream(query.encode(), parameters))
        async with contextlib.aclosing(stream):
            async for row in stream:
                size += sum(len(value) for value in row if value is not None)
                if len(rows) >= rows_max or size > bytes_max:
                    raise LimitReached
                rows.append(row)
        description = cursor.description or []
        return Rows(
            tuple(column.name for column in description),
            tuple(column.type_code for column in description),
            rows,
        )

    async def value(self, query: str, parameters: Sequence[Any] = ()) -> str | None:
        """The first column of the first row; None where there is none."""
        found = (await self.query(query, parameters)).rows
        return found[0][0] if found else None


@dataclass(slots=True)
class _Pool:
    """The connections to one target in one event loop."""

    loop: asyncio.AbstractEventLoop
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECTIONS_MAX))
    idle: list[tuple[float, AsyncConnection[Any]]] = field(
        default_factory=list[tuple[float, AsyncConnection[Any]]]
    )


_pools: Final[dict[str, _Pool]] = {}


async def close_targets() -> None:
    """Close every idle connection of this process; the kernel calls it last. Later calls open new ones."""
    while _pools:
        _, pool = _pools.popitem()
        for _, connection in pool.idle:
            await connection.close()


@contextlib.asynccontextmanager
async def transaction(
    resource: SqlResource, *, mode: str, timeout_s: float = STATEMENT_TIMEOUT_S
) -> AsyncGenerator[Session]:
    """A transaction with its settings pinned. Rolled back at the end unless `commit` was run in it.

    Args:
        resource: the target.
        mode: `read only`, `read write` or `isolation level …`, as BEGIN takes it.
        timeout_s: longest single statement.

    Raises:
        NoSuchResource: the target is unavailable.
        CallFailed: the target can't be reached, or answered with an error.
        Deadline: a statement took too long.
        Conflict: another transaction is in the way.
        InvalidRequest: the statement would write and this transaction only reads.
    """
    # INVARIANT: an unavailable target has an empty DSN, with which the driver would connect wherever its defaults lead.
    refuse_unavailable(resource)
    timeout_ms = max(1, int(min(timeout_s, STATEMENT_TIMEOUT_S) * 1000))
    async with _lease(resource, _begin(mode, timeout_ms)) as connection:
        try:
            with target_errors(resource):
                yield Session(connection, timeout_ms)
        finally:
            if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
                await _roll_back(connection)


def _limit(timeout_ms: int) -> str:
    return f"set local statement_timeout = {timeout_ms};"


def _begin(mode: str, timeout_ms: int) -> str:
    return (
        f"begin {mode};{_PINS}{_limit(timeout_ms)}"
        f"set local lock_timeout = {LOCK_TIMEOUT_S * 1000};"
        f"set local idle_in_transaction_session_timeout = {IDLE_TIMEOUT_S * 1000}"
    )


async def _roll_back(connection: AsyncConnection[Any]) -> None:
    """End what was left open; a connection that can't do so is closed, which ends it too."""
    try:
        if connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            await connection.execute(b"rollback")
            return
    except psycopg.Error:
        _log.debug("rollback failed; closing the connection", exc_info=True)
    await connection.close()


@contextlib.asynccontextmanager
async def _lease(resource: SqlResource, begin: str) -> AsyncGenerator[AsyncConnection[Any]]:
    loop = asyncio.get_running_loop()
    pool = _pools.get(resource.dsn)
    if pool is None or pool.loop is not loop:
        pool = _pools[resource.dsn] = _Pool(loop)
    async with pool.room:
        connection = await _started(resource, pool, begin)
        try:
            yield connection
        finally:
            if connection.closed or connection.info.transaction_status != TransactionStatus.IDLE:
                await connection.close()
            else:
                pool.idle.append((time.monotonic(), connection))


async def _started(resource: SqlResource, pool: _Pool, begin: str) -> AsyncConnection[Any]:
    """A connection in a transaction: one that is kept, if it still works, else a new one."""
    while pool.idle:
        since, connection = pool.idle.pop()
        try:
            if time.monotonic() - since < _UNUSED_S:
                await connection.execute(begin.encode())
                return connection
        except psycopg.Error:
            _log.debug("a kept connection to `%s` is gone", resource.name, exc_info=True)
        except BaseException:
            await connection.close()
            raise
        await connection.close()
    with target_errors(resource):
        connection = await AsyncConnection.connect(
            resource.dsn,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            client_encoding="UTF8",
            application_name="ringfence",
            context=_CONTEXT,
        )
        try:
            await connection.execute(begin.encode())
        except BaseException:
            await connection.close()
            raise
        return connection


@contextlib.asynccontextmanager
async def within(resource: SqlResource, timeout_s: float) -> AsyncGenerator[asyncio.Timeout]:
    """A limit on everything inside, waiting for a connection included; the work may lift it by `reschedule(None)`.

    Raises:
        Deadline: the time is over.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield limit
    except TimeoutError:
        raise _too_long(resource.name) from None


def _too_long(name: str) -> Deadline:
    return Deadline(f"`{name}` took too long; ask for less, or give the call a longer deadline")


@contextlib.contextmanager
def target_errors(resource: SqlResource) -> Generator[None]:
    """Turn the driver's errors into typed ones, without address, role or anything else of the operator's."""
    name = resource.name
    try:
        yield
    except errors.QueryCanceled:
        raise _too_long(name) from None
    except errors.ReadOnlySqlTransaction:
        raise InvalidRequest("the statement would write; make a sql.write call for it") from None
    except (errors.SerializationFailure, errors.DeadlockDetected):
        raise Conflict(
            f"another transaction in `{name}` changed the same rows; try again", retry="yes"
        ) from None
    except errors.LockNotAvailable:
        raise Conflict(f"another transaction in `{name}` holds a lock; try again later") from None
    except (psycopg.InterfaceError, psycopg.OperationalError) as error:
        raise _unreachable(resource, error) from None
    except psycopg.Error as error:
        raise answered(resource, error) from None
    except UnicodeDecodeError:
        raise CallFailed(
            f"`{name}` answered with a text that is no UTF-8; leave that column out, or encode it in the statement"
        ) from None


def _unreachable(resource: SqlResource, error: psycopg.Error) -> SyscallError:
    if error.sqlstate is not None and not error.sqlstate.startswith(("08", "57P")):
        return answered(resource, error)
    said = redactor_of(resource.secrets).text(" ".join(str(error).split()))
    _log.warning("sql target %s: %s", resource.name, said)
    return CallFailed(
        f"database `{resource.name}` can't be reached, or broke the connection; the operator can check it"
    )


def answered(resource: SqlResource, error: psycopg.Error) -> CallFailed:
    """An error of the statement, in the target's own words on one line, without the target's credential."""
    text = redactor_of(resource.secrets).text(" ".join((error.diag.message_primary or str(error)).split()))
    return CallFailed(f"`{resource.name}` answered: {text}", sqlstate=error.sqlstate or "")


def secrets_of(dsn: str) -> tuple[str, ...]:
    """What of a connection string must never show: the password, and a whole string that holds one.

    Raises:
        ValueError: it is no connection string. The text quotes nothing of it.
    """
    try:
        found = conninfo_to_dict(dsn)
    except psycopg.Error:
        raise ValueError(
            "it is no connection string such as `postgresql://user:password@host/name`"
        ) from None
    # Of a key too the file's name alone shows, but not what opens it.
    return tuple(filter(None, (str(found.get(name) or "") for name in ("password", "sslpassword"))))


def quoted(*names: str) -> str:
    """A possibly qualified name for a statement of ours."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)
