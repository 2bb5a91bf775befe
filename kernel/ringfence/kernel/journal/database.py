"""The way to the database: named statements, the pool, and errors turned into the journal's own."""

from __future__ import annotations

import asyncio
import functools
import re
import select
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString, TypeAlias, cast

import psycopg
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout, TooManyRequests
from ringfence.kernel.journal.types import BadRow, JournalError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Generator

SQL_DIRECTORY = Path(__file__).with_name("sql")
CONNECT_TIMEOUT_S = 5
POOL_SIZE_MAX = 8
POOL_WAIT_S = 10.0
CHANNEL_EPOCH = "ringfence_epoch"
CHANNEL_ACK = "ringfence_ack"

Connection: TypeAlias = psycopg.AsyncConnection[TupleRow]
Pool: TypeAlias = AsyncConnectionPool[Connection]

# A dead peer is noticed within these bounds instead of the system's two hours.
KEEPALIVE: dict[str, Any] = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "connect_timeout": CONNECT_TIMEOUT_S,
}

_NAME = re.compile(r"^-- name: ([a-z_]+)$", re.MULTILINE)


@functools.cache
def statements(file: str) -> dict[str, LiteralString]:
    """Read the named statements of one file below `sql/queries`.

    Args:
        file: its name without `.sql`.

    Returns:
        Statement text by name.
    """
    text = (SQL_DIRECTORY / "queries" / f"{file}.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    # The files are part of the program, so their text is as literal as a string in it.
    return {name: cast("LiteralString", body.strip()) for name, body in pairs}


def one_line(error: BaseException) -> str:
    """Cut a driver's message to its first line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def unread_dsn(error: BaseException) -> str:
    """Say why a DSN can't be read, without the parts of it that libpq quotes: they may be a password."""
    return re.sub(r'[\s:]*"[^"]*"?', " …", one_line(error)).strip()


@contextmanager
def journal_errors() -> Generator[None]:
    """Turn the driver's errors into the journal's.

    Raises:
        Unavailable: the database is away or can't commit.
        BadRow: a value can't be stored.
        JournalError: any other refusal of the database.
    """
    try:
        yield
    except (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        PoolTimeout,
        PoolClosed,
        TooManyRequests,
    ) as error:
        raise Unavailable(f"the database is not available: {one_line(error)}") from error
    except psycopg.errors.ReadOnlySqlTransaction as error:
        raise Unavailable("the database is read-only") from error
    except psycopg.DataError as error:
        raise BadRow(f"a value can't be stored: {one_line(error)}") from error
    except psycopg.Error as error:
        raise JournalError(one_line(error)) from error


async def _look(connection: Connection) -> None:
    """Ask a server whether it is there, but only where a round trip may tell more than its socket.

    A server that ended a session said so, or its host did: then there is something to read. One that can't be reached any
    more without a word is found out by the statement itself, as soon as by a question before it.

    Raises:
        psycopg.OperationalError: it is gone.
    """
    there = select.poll()
    there.register(connection.fileno(), select.POLLIN | select.POLLERR | select.POLLHUP)
    if there.poll(0):
        await AsyncConnectionPool.check_connection(connection)


async def connect_pool(dsn: str, *, size_max: int = POOL_SIZE_MAX) -> Pool:
    """Open a pool and wait for its first connection.

    Args:
        dsn: libpq connection string or URL.
        size_max: most connections.

    Raises:
        Unavailable: no connection within a few seconds, or the DSN can't be read.
    """
    with journal_errors():
        # A pool repeats a failing connect silently; the first one says why in its own words.
        try:
            probe = await psycopg.AsyncConnection.connect(dsn, autocommit=True, **KEEPALIVE)
        except psycopg.ProgrammingError as error:
            raise Unavailable(f"the database's DSN can't be read: {unread_dsn(error)}") from None
        await probe.close()
        pool: Pool = AsyncConnectionPool(
            dsn,
            min_size=1,
            max_size=size_max,
            timeout=POOL_WAIT_S,
            open=False,
            check=_look,
            kwargs={"autocommit": True, "application_name": "ringfence store", **KEEPALIVE},
            name="ringfence",
        )
        await pool.open(wait=True, timeout=POOL_WAIT_S)
    return pool


@asynccontextmanager
async def borrowed(pool: Pool) -> AsyncGenerator[Connection]:
    """Lend a connection in autocommit mode.

    Raises:
        Unavailable: the database is away.
        JournalError: the database refused a statement.
    """
    task = asyncio.current_task()
    cancelled = task.cancelling() if task is not None else 0
    with journal_errors():
        async with pool.connection() as connection:
            yield connection
    # Python 3.11's wait_for, on which the driver waits, drops a cancellation that comes together with the answer.
    # Without this a task that asks the store in a loop could not be ended.
    if task is not None and task.cancelling() > cancelled:
        raise asyncio.CancelledError
