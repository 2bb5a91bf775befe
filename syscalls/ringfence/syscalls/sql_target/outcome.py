"""Whether a transaction of ours committed: the target is asked, in the very database it ran in."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from psycopg import errors
from ringfence.syscalls.errors import CallFailed, Deadline
from ringfence.syscalls.sql_target.records import Identity
from ringfence.syscalls.sql_target.session import IDLE_TIMEOUT_S, Session, transaction

if TYPE_CHECKING:
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

_DURABLE: Final = """
select pg_catalog.pg_logical_emit_message(true, 'ringfence', '')::text, pg_catalog.pg_logical_emit_message(false, 'ringfence', '', true)::text
"""
"""A message with the transaction's id, and one that is flushed, with all before it."""
_CAN_FLUSH: Final = "select (pg_catalog.current_setting('server_version_num')::int >= 170000)::text"


class Status(StrEnum):
    """What the target says of a transaction."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    RUNNING = "in progress"
    UNKNOWN = "unknown"


async def identify(session: Session) -> Identity:
    """Which database this is."""
    system, oid, name = map(str, (await session.query(_IDENTITY)).rows[0])
    return Identity(system=system, database_oid=oid, database=name)


async def transaction_id(session: Session) -> str:
    """The id of the session's transaction, which no other one gets, even if the target crashes now.

    INVARIANT: an id is journaled only once the target's log has it on disk. A server that crashed before would give it to another
    transaction, whose commit would then be taken for that of ours. Servers before version 17 can't be told to write it.
    """
    xid = str(await session.value("select pg_catalog.pg_current_xact_id()"))
    if await session.value(_CAN_FLUSH) == "true":
        await session.query(_DURABLE)
    return xid


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
