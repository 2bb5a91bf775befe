"""Binds approvals to what a call's arguments only point to: a person has seen one content, and no other is sent for it.

INVARIANT: what a call under an approval sends for a pointer is what the pointer named when the person was asked. It is held
against the records of the approvals, when it has been found for the last time and is kept by its hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from ringfence.syscalls.errors import Conflict

if TYPE_CHECKING:
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.journal.types import ApprovalRecord
    from ringfence.syscalls.approving import Pointed

POINTER = "ringfence://"
"""What the key of a pointer begins with among the versions of an approval."""


async def pointed_by(flight: Flight) -> Sequence[Pointed]:
    """What the arguments of a call point to now.

    Raises:
        SyscallError: a pointer names nothing, or what it names can't be read.
    """
    return await flight.row.body.pointed(flight, flight.arguments) if flight.row.points else ()


def fingerprints(pointed: Sequence[Pointed]) -> dict[str, str]:
    """What an approval is bound to, by pointer."""
    return {one.pointer: one.fingerprint for one in pointed}


def shown(pointed: Sequence[Pointed]) -> dict[str, Any]:
    """The same for people."""
    return {"pointed": [msgspec.to_builtins(one) for one in pointed]} if pointed else {}


def without(versions: Mapping[str, str]) -> dict[str, str]:
    """Versions of the targets alone: one of these that is another one is asked about anew."""
    return {name: version for name, version in versions.items() if not name.startswith(POINTER)}


def changed(record: ApprovalRecord, pointed: Sequence[Pointed], *, edited: bool = False) -> list[Pointed]:
    """What an approval does not speak of.

    Args:
        record: the approval.
        pointed: what the call would send.
        edited: a person put other arguments in place of the agent's: what these alone point to is as it is when they run.
    """
    return [
        one
        for one in pointed
        if record.versions.get(one.pointer) != one.fingerprint
        and not (edited and one.pointer not in record.versions)
    ]


async def hold_to_approvals(flight: Flight) -> None:
    """Hold what a call is about to send against what persons approved for it.

    Raises:
        Conflict: it is something else.
        Unavailable: the database is away, which has the approvals.
    """
    pointed = flight.plan.pointed
    if not pointed or not (flight.approved or flight.approval):
        return
    records = await flight.core.store.granted_approvals(flight.thread.key, flight.step)
    if flight.approval is not None and all(flight.approval.key != record.key for record in records):
        records.append(flight.approval)
    edited = any(record.edited is not None for record in records)
    for record in records:
        for one in changed(record, pointed, edited=edited):
            seen = one.pointer in record.versions
            why = (
                "changed since the person was asked"
                if seen
                else "was not looked at when the person was asked"
            )
            raise Conflict(
                f"approval {record.id} no longer holds: what `{one.pointer}` names {why}; "
                "make the call again to ask about it as it is now",
                approval=record.id,
                pointer=one.pointer,
                audit_id=flight.audit_id,
            )
