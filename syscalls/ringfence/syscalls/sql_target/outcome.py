"""Whether a transaction of ours committed: the target is asked, in the very database it ran in."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from psycopg import errors
from ringfence.syscalls.errors import CallFailed, Deadline
from ringfence.syscalls.sql_target.records import Identity
from ringfence.syscalls.sql_target.session import IDLE_TIMEOUT_S, Asked, Session, transaction
from ringfence.syscalls.sql_target.wire import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.syscalls.declared import SqlResource

SETTLE_S: Final = IDLE_TIMEOUT_S + 10
"""Longer than the target lets a transaction idle, so that one nobody continues has ended by then."""
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0

_IDENTITY: Final = """
select (select system_identifier from pg_catalog.pg_control_system())::text, d.oid::text, d.datname
from pg_catalog.pg_database d where d.datname = current_database()
"""
_STATUS: Final = "select pg_catalog.pg_xact_status($1::xid8)"

_XID: Final = "select pg_catalog.pg_current_xact_id()::text"
_DURABLE_XID: Final = """
select xid, pg_catalog.pg_logical_emit_message(true, 'ringfence', xid), pg_catalog.pg_logical_emit_message(false, 'ringfence', xid, true)
from (select pg_catalog.pg_current_xact_id()::text offset 0) own (xid)
"""
"""Beside it a message with the transaction's id, and one that is flushed, with all before it."""
_CAN_FLUSH: Final = 170000
"""First version of the server that takes such a message."""
_CHECK_NOW: Final = "set constraints all immediate"


class Status(StrEnum):
    """What the target says of a transaction."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    RUNNING = "in progress"
    UNKNOWN = "unknown"


async def identify(session: Session) -> Identity:
    """Which database this is; it stays the same one as long as a connection to it stands."""
    if _KNOWN not in session.known:
        return _identity(session, (await session.ask((_IDENTITY, ())))[0])
    return session.known[_KNOWN]


def _identity(session: Session, answer: Rows) -> Identity:
    system, oid, name = map(str, answer.rows[0])
    session.known[_KNOWN] = Identity(system=system, database_oid=oid, database=name)
    return session.known[_KNOWN]


_KNOWN: Final = "identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The id of a transaction of ours, and which database it is in."""

    xid: str
    identity: Identity


def asking_own(session: Session) -> tuple[Asked, ...]:
    """Ask for the id of the session's transaction, and which database it is in where that isn't known; `own_of` understands the answers."""
    return ((_XID, ()),) if _KNOWN in session.known else ((_XID, ()), (_IDENTITY, ()))


async def own_of(session: Session, answers: Sequence[Rows]) -> Own:
    """Understand the answers to `asking_own`."""
    xid, *told = answers
    # The question may have been put over another connection than it was made for.
    identity = _identity(session, told[0]) if told else await identify(session)
    return Own(xid=str(xid.rows[0][0]), identity=identity)


def making_durable(session: Session) -> tuple[Asked, ...]:
    """Have the target's log with the id of the session's transaction on disk, behind what is sent before.

    INVARIANT: an id is journaled only then. A server that crashed before would give it to another transaction, whose commit would
    then be taken for that of ours. Servers before version 17 can't be told to write it.
    """
    return ((_DURABLE_XID, ()),) if session.server >= _CAN_FLUSH else ()


async def check_now(session: Session) -> None:
    """Have checked now what the target would check only at the commit, while it can still be answered as an error."""
    await session.ask((_CHECK_NOW, ()))


async def transaction_id(session: Session) -> Own:
    """As `asking_own`, and durable; what would be checked only at the commit is checked first."""
    asked = asking_own(session)
    answers = await session.ask((_CHECK_NOW, ()), *asked, *making_durable(session))
    return await own_of(session, answers[1 : 1 + len(asked)])


async def status_of(session: Session, xid: str) -> Status:
    """What became of a transaction; UNKNOWN where the target no longer knows."""
    await session.execute("savepoint ringfence_status")
    try:
        found = await session.value(_STATUS, [xid])
    except errors.InvalidParameterValue:
        # An id from the future: the target was put back to an older state, so nothing can be said.
        await session.execute("rollback to savepoint ringfence_status")
        return Status.UNKNOWN
    return Status.UNKNOWN if found is None else Status(found)


async def settle(resource: SqlResource, identity: Identity, xid: str, wait_s: float) -> Status:
    """Ask until the transaction has ended, the time is over, or the target can't say.

    Args:
        resource: the target.
        identity: the database it ran in; another one knows nothing of it.
        xid: the transaction's id.
        wait_s: how long to go on asking, for a target that restarts or a transaction that is still under way.

    Returns:
        COMMITTED or ABORTED where the target says so, else RUNNING or UNKNOWN.
    """
    end = time.monotonic() + min(wait_s, SETTLE_S)
    pause_s = _PAUSE_FIRST_S
    while True:
        status = Status.UNKNOWN
        try:
            async with transaction(resource, mode="read only") as session:
                if await identify(session) != identity:
                    return Status.UNKNOWN
                status = await status_of(session, xid)
                if status is not Status.RUNNING:
                    return status
        except (CallFailed, Deadline):
            status = Status.UNKNOWN
        if time.monotonic() + pause_s > end:
            return status
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _PAUSE_MAX_S)
