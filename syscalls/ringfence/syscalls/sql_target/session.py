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
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg
from psycopg import AsyncConnection
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.types.string import TextLoader
from ringfence.syscalls.refusals import refuse_unavailable
from ringfence.syscalls.sql_target.failures import target_errors, too_long
from ringfence.syscalls.sql_target.wire import Bounds, Rows, Sent, Wire

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from ringfence.syscalls.declared import SqlResource

CONNECTIONS_MAX: Final = 4
CONNECT_TIMEOUT_S: Final = 10
LOCK_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_S: Final = 60
IDLE_TIMEOUT_S: Final = 30
"""A transaction that nobody continues is ended by the target after this; recovery waits a little longer."""
_UNUSED_S: Final = 300
_TEXTS_MAX: Final = 1024

Asked: TypeAlias = "tuple[str, Sequence[Any]]"  # a statement of our own, with its parameters

_log = logging.getLogger("ringfence.syscalls.sql")

_SETTINGS: Final = (
    ("search_path", "pg_catalog, public, pg_temp"),
    ("standard_conforming_strings", "on"),
    ("datestyle", "ISO, YMD"),
    ("intervalstyle", "postgres"),
    ("timezone", "UTC"),
    ("extra_float_digits", "1"),
    ("bytea_output", "hex"),
    ("xmloption", "content"),
    ("lc_monetary", "C"),
    ("array_nulls", "on"),
    ("transform_null_equals", "off"),
    ("jit", "off"),
    ("idle_in_transaction_session_timeout", str(IDLE_TIMEOUT_S * 1000)),
)
# What commits is on the target's disk, whatever its role or database is set to.
_DURABLY: Final = "case pg_catalog.current_setting('synchronous_commit') when 'off' then 'on' else pg_catalog.current_setting('synchronous_commit') end"
_SET: Final = "pg_catalog.set_config('{}', {}, true)"
_LIMIT: Final = f"select {_SET.format('statement_timeout', '$1')}"
_PINS: Final = ", ".join(
    (
        _LIMIT,
        _SET.format("synchronous_commit", _DURABLY),
        *(_SET.format(name, f"'{value}'") for name, value in _SETTINGS),
    )
)
_WAITS: Final = Sent(text=f"set local lock_timeout = {LOCK_TIMEOUT_S * 1000}")


def _raw_adapters() -> AdaptersMap:
    """Adapters that leave every value as its text; the driver's own loader of texts does so without a call for each."""
    adapters = AdaptersMap(psycopg.adapters)
    oids = {0}
    for info in psycopg.adapters.types:
        oids |= {info.oid, info.array_oid}
    for oid in oids:
        adapters.register_loader(oid, TextLoader)
    return adapters


@dataclass(frozen=True, slots=True)
class _Context:
    """What a new connection takes its adapters from."""

    adapters: AdaptersMap
    connection: None = None


_CONTEXT: Final = _Context(_raw_adapters())


@dataclass(slots=True)
class Pool:
    """The connections to one target in one event loop, and what its answers taught.

    Attributes:
        known: what those who ask keep for later; a hint, which the target confirms each time.
    """

    loop: asyncio.AbstractEventLoop
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECTIONS_MAX))
    idle: list[tuple[float, Wire]] = field(default_factory=list[tuple[float, Wire]])
    known: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def learn(self, key: Any, value: Any) -> None:
        """Keep something for later; what is kept has a bound."""
        if len(self.known) >= _TEXTS_MAX:
            self.known.clear()
        self.known[key] = value


class Session:
    """One transaction in a target. It begins with the first statement, in the same round trip."""

    def __init__(
        self, resource: SqlResource, pool: Pool, mode: str, timeout_ms: int, lock: Asked | None
    ) -> None:
        self._resource = resource
        self._pool = pool
        # INVARIANT: neither BEGIN nor SET nor LOCK takes a snapshot, so that one which stays is from after the lock.
        locks = [] if lock is None else [_sent(lock)]
        pins = Sent(text=_PINS, parameters=[str(timeout_ms)], keep=True)
        self._begin = (Sent(text=f"begin {mode}"), _WAITS, *locks, pins)
        self._opening = self._begin
        self._timeout_ms = timeout_ms
        self._kept = True
        self._wire: Wire

    async def start(self) -> None:
        """Take a connection: one that is kept, else a new one."""
        now = time.monotonic()
        while self._pool.idle:
            since, wire = self._pool.idle.pop()
            if now - since < _UNUSED_S and not wire.broken:
                self._wire, self._kept = wire, True
                return
            await wire.connection.close()
        self._wire, self._kept = await _connect(self._resource), False

    async def finish(self) -> None:
        """End what was left open, without effect, and give the connection back."""
        connection = self._wire.connection
        if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
            await _end(self._wire)
        if connection.closed or connection.info.transaction_status != TransactionStatus.IDLE:
            await connection.close()
        else:
            self._pool.idle.append((time.monotonic(), self._wire))

    @property
    def server(self) -> int:
        """The target's version, such as 150004."""
        return self._wire.connection.info.server_version

    @property
    def known(self) -> dict[str, Any]:
        """What is known of the other end of this very connection."""
        return self._wire.known

    @property
    def pool(self) -> Pool:
        """What the target's answers taught, in whatever transaction."""
        return self._pool

    async def again(self) -> None:
        """Begin anew, after a failure: nothing of what was done so far stays."""
        if not self._opening:
            await self._wire.exchange([Sent(text="rollback")])
            self._opening = self._begin

    async def execute(self, query: str) -> None:
        """Run statements of our own that take no parameters and whose answer doesn't matter."""
        if self._opening:
            await self._exchange()
        await self._wire.connection.execute(query.encode())

    async def ask(self, *queries: Asked | Sent) -> list[Rows]:
        """Run statements of our own in order, each with its parameters, for one round trip in all.

        None is run after one that failed; the first failure is raised. Their answers are small.
        """
        return await self._exchange(*map(_sent, queries))

    async def once(self, query: str) -> None:
        """Run one statement by the extended protocol, which takes a single one, and keep nothing prepared of it."""
        await self._exchange(Sent(text=query))

    def limits(self, seconds: float) -> tuple[Asked, Asked]:
        """Statements that set a shorter limit for what is run after them, and the transaction's own again."""
        # An error ends the transaction, and the setting with it.
        return (_LIMIT, [str(min(int(seconds * 1000), self._timeout_ms))]), (_LIMIT, [str(self._timeout_ms)])

    async def at_most(self, seconds: float, query: str, parameters: Sequence[Any]) -> Rows:
        """Run one statement with a shorter limit."""
        short, usual = self.limits(seconds)
        return (await self.ask(short, Sent(text=query, parameters=parameters), usual))[1]

    async def query(
        self,
        query: str,
        parameters: Sequence[Any] = (),
        *,
        rows_max: int = 1_000_000,
        bytes_max: int = 1 << 30,
        also: Sequence[Asked] = (),
        last: bool = False,
    ) -> Rows:
        """Run one statement that answers with rows, with parameters `$1`, `$2`, …, and fetch them in parts.

        Args:
            query: the statement; the extended protocol takes a single one.
            parameters: its parameters.
            rows_max: most rows.
            bytes_max: most bytes of them.
            also: statements of our own that are run behind it, in the same round trip.
            last: whether it is the transaction's last, which commits with it.

        Raises:
            LimitReached: there are more rows or bytes; the transaction has ended then.
        """
        if self._opening:
            await self._exchange()
        end = [Sent(text="commit")] if last else []
        bounds = Bounds(rows=rows_max, size=bytes_max)
        sent = [Sent(text=query, parameters=parameters), *map(_sent, also), *end]
        return (await self._wire.exchange(sent, bounds))[0]

    async def value(self, query: str, parameters: Sequence[Any] = ()) -> str | None:
        """The first column of the first row; None where there is none."""
        found = (await self.ask((query, parameters)))[0].rows
        return found[0][0] if found else None

    async def _exchange(self, *sent: Sent) -> list[Rows]:
        opening, self._opening = self._opening, ()
        while True:
            try:
                return (await self._wire.exchange((*opening, *sent)))[len(opening) :]
            except psycopg.Error:
                # INVARIANT: only with a transaction's first statements, of which none has an effect that outlives it.
                if not (opening and self._kept and self._wire.broken):
                    raise
                _log.debug("a kept connection to `%s` is gone", self._resource.name, exc_info=True)
                await self._wire.connection.close()
                await self.start()


def _sent(asked: Asked | Sent) -> Sent:
    if isinstance(asked, Sent):
        return asked
    text, parameters = asked
    return Sent(text=text, parameters=parameters, keep=text.lstrip().startswith(("select", "with")))


_pools: Final[dict[str, Pool]] = {}


async def close_targets() -> None:
    """Close every idle connection of this process; the kernel calls it last. Later calls open new ones."""
    while _pools:
        _, pool = _pools.popitem()
        for _, wire in pool.idle:
            await wire.connection.close()


@contextlib.asynccontextmanager
async def transaction(
    resource: SqlResource, *, mode: str, timeout_s: float = STATEMENT_TIMEOUT_S, lock: Asked | None = None
) -> AsyncGenerator[Session]:
    """A transaction with its settings pinned. Rolled back at the end unless `commit` was run in it.

    Args:
        resource: the target.
        mode: `read only`, `read write` or `isolation level …`, as BEGIN takes it.
        timeout_s: longest single statement.
        lock: a statement that locks a table, before anything is looked at.

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
    loop = asyncio.get_running_loop()
    pool = _pools.get(resource.dsn)
    if pool is None or pool.loop is not loop:
        pool = _pools[resource.dsn] = Pool(loop)
    async with pool.room:
        session = Session(resource, pool, mode, timeout_ms, lock)
        with target_errors(resource):
            await session.start()
            try:
                yield session
            finally:
                await session.finish()


async def _end(wire: Wire) -> None:
    """End what was left open, without effect; a connection that can't do so is closed, which ends it too."""
    status = wire.connection.info.transaction_status
    try:
        if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            await wire.exchange([Sent(text="rollback")])
            return
    except psycopg.Error:
        _log.debug("ending a transaction failed; closing the connection", exc_info=True)
    await wire.connection.close()


async def _connect(resource: SqlResource) -> Wire:
    return Wire(
        await AsyncConnection.connect(
            resource.dsn,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            client_encoding="UTF8",
            application_name="ringfence",
            context=_CONTEXT,
            # INVARIANT: the driver itself prepares nothing, or it would throw away what is kept here with what it forgets.
            prepare_threshold=None,
        )
    )


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
        raise too_long(resource.name) from None


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
