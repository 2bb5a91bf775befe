"""Approvals: a call that a rule asks about waits for a person, however long that takes and whatever dies meanwhile.

A parked call is a flight that waits. The row in `approvals` is written together with the call's `parked` row; the next
kernel makes the same flight from it again (`revive`). When a person has approved, the call is put to the policy in force
once more: a deny wins, a rule that did not ask before asks anew, and so does a target that changed meanwhile.

INVARIANT: a call runs under an approval only if everything that asks now was asked about then, with these arguments and
this target; and its outcome names the approval.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from ringfence.kernel.asking import Asked, describe, storable, versions_of
from ringfence.kernel.journal.types import ApprovalRecord, Entry, JournalError, Phase
from ringfence.kernel.people import Needs, needs_of
from ringfence.kernel.pointing import changed, fingerprints, pointed_by, shown, without
from ringfence.policy.types import Verdict
from ringfence.syscalls.base import Work
from ringfence.syscalls.errors import Denied, JournalUnavailable, SyscallError

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.thread import Thread

log = logging.getLogger(__name__)

KERNEL = "the kernel"
RETRY_S = 1.0

Ask: TypeAlias = tuple[Any, ...]
"""(rule id, action, resource): one thing that asks."""


class Approvals:
    """The parked calls of one kernel's agents."""

    def __init__(self, core: Core) -> None:
        self._core = core

    # -- a call that asks -----------------------------------------------------------------------------------------

    async def park(self, flight: Flight, asked: Asked | None = None) -> ApprovalRecord | None:
        """Hold a call until policy lets it run, or a person does.

        Args:
            flight: its questions are put to the rights in force.
            asked: what the body itself asks a person, beside the rules; None: the rules alone.

        Returns:
            The approval it goes on under; None: nothing asks any more.

        Raises:
            Denied: a person denied it, nobody answered in time, or a rule denies it now.
            Killed, Revoked: what ended it meanwhile.
        """
        record = flight.waits_for
        while True:
            # INVARIANT: cleared before anything is looked at: what changes after that wakes the wait.
            flight.look = asyncio.Event()
            if record is not None and record.state == "approved" and record.edited is not None:
                flight.replace_arguments(record.edited.encode())
            judgement = await flight.judge_again()
            if judgement.verdict is Verdict.DENY:
                raise flight.denial(judgement)
            asks = flight.asks(judgement, asked)
            if not asks:
                await self._close(record, "no rule asks any more")
                flight.waits_for = None
                return None
            if record is not None and not await self._covers(flight, record, asks):
                await self._close(
                    record, "other rules ask now, or more people, or the target changed since it was asked"
                )
                record = None
            if record is None and (standing := await self._standing(flight, asks, asked)) is not None:
                flight.approve(asks, standing)
                return standing
            if record is None:
                record = await self._open(flight, asks, asked)
            elif record.state == "approved":
                flight.approve(asks, record)
                return record
            elif record.state != "pending":
                flight.waits_for = None
                raise self._refusal(flight, record)
            flight.waits_for = record
            async with parking(flight):
                record = await self._decided(flight, record)

    async def _standing(
        self, flight: Flight, asks: frozenset[Ask], asked: Asked | None
    ) -> ApprovalRecord | None:
        """What a person approved for the same call of the same agent, for longer than once; None: nothing that holds.

        It is no longer bound to how the target stood: the call itself changes that each time.
        """
        if asked is not None and asked.question:
            return None  # a question is asked each time
        found = await self._core.store.standing_approvals(flight.thread.key, flight.row.action, flight.digest)
        fitting = [record for record in found if asks <= frozenset(record.asks)]
        if fitting and (pointed := await pointed_by(flight)):
            # A call does not change what it points to: this stays bound.
            fitting = [record for record in fitting if not changed(record, pointed)]
        if not fitting:
            return None
        needs, submitter = await self._needs(flight, asks)
        return next((record for record in fitting if needs.met_by(record, submitter)), None)

    async def _needs(self, flight: Flight, asks: frozenset[Ask]) -> tuple[Needs, str]:
        """Who has to approve, and who submitted the agent where that matters."""
        needs = needs_of(flight.rights or flight.thread.rights, asks)
        if not needs.not_submitter:
            return needs, ""
        while True:
            try:
                return needs, await self._core.store.submitter(flight.thread.key)
            except JournalError as error:
                log.warning("who submitted %s can't be read now: %s", flight.thread.id, error)
                await asyncio.sleep(RETRY_S)

    async def _open(self, flight: Flight, asks: frozenset[Ask], asked: Asked | None) -> ApprovalRecord:
        """Write the parked row and the approval in one transaction."""
        row = flight.journal_row(Phase.OUTCOME)
        row.outcome, row.verdict = "parked", Verdict.ASK.value
        expires = datetime.now(UTC) + timedelta(seconds=flight.thread.manifest.approvals.expire_s)
        needs, submitter = await self._needs(flight, asks)
        pointed = await pointed_by(flight)
        values: dict[str, Any] = {
            "people": needs.people,
            "not_by": submitter,
            "lane": flight.lane,
            "lane_step": flight.lane_step,
            "action": flight.row.action,
            "resource": flight.plan.resource,
            "effect": flight.effect.name,
            "arguments": flight.canonical.decode(),
            "digest": flight.digest.hex(),
            "asks": sorted(asks, key=repr),
            "versions": {**await versions_of(flight), **fingerprints(pointed)},
            "detail": storable({**await describe(flight, asked), **shown(pointed)}),
            "expires_at": expires.isoformat(),
        }
        keys: list[int] = []

        def finish(done: Any) -> bytes:
            keys[:] = [int(done["key"])]
            row.body = (
                b'{"arguments":'
                + flight.canonical
                + b',"approval":{"id":"a%d"},' % keys[0]
                + flight.explain()
            )
            return row.body

        await self._core.append(
            Entry(row=row, atomic=Work(statement="approval_open", values=values), finish=finish)
        )
        log.info("%s waits for approval a%d", flight.audit_id, keys[0])
        return await self._read(keys[0])

    async def _decided(self, flight: Flight, record: ApprovalRecord) -> ApprovalRecord:
        """Wait until it was decided, by a person or by time, or until the policy moved."""
        left = max(0.0, (record.expires_at - datetime.now(UTC)).total_seconds())
        until_us = time.time_ns() // 1000 + int(left * 1_000_000)
        look = flight.look or asyncio.Event()
        async with flight.waiting("approval", f"approval {record.id}", until_us):
            now = await self._read(record.key)
            if now.state == "pending":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await look.wait()
                now = await self._read(record.key)
        if now.state == "pending" and now.expires_at <= datetime.now(UTC):
            await self._core.store.decide_approval(record.key, "expired", KERNEL, "nobody answered in time")
            now = await self._read(record.key)
        return now

    async def _read(self, key: int) -> ApprovalRecord:
        while True:
            try:
                record = await self._core.store.approval(key)
            except JournalError as error:
                # A parked call outlives an outage of the database.
                log.warning("approval a%d can't be read now: %s", key, error)
                await asyncio.sleep(RETRY_S)
                continue
            if record is None:
                raise JournalUnavailable(
                    f"approval a{key} is gone from the database; restore it from a backup"
                )
            return record

    async def _covers(self, flight: Flight, record: ApprovalRecord, asks: frozenset[Ask]) -> bool:
        """Whether an approval speaks of all that asks now, on a target that is as it was when it was asked, and asked enough people."""
        needs, submitter = await self._needs(flight, asks)
        if not needs.met_by(record, submitter):
            return False
        if record.edited is not None:
            # Whoever edited the arguments has seen what they name: only another rule asks anew.
            return {ask[0] for ask in asks} <= {ask[0] for ask in record.asks}
        if record.state == "pending":
            return asks == frozenset(record.asks)
        # What pointers name is held against it when the call runs, and is refused there: see `pointing`.
        versions = without(record.versions)
        same = record.state != "approved" or await versions_of(flight, list(versions)) == versions
        return same and asks <= frozenset(record.asks)

    async def _close(self, record: ApprovalRecord | None, why: str) -> None:
        if record is not None and record.state in ("pending", "approved"):
            # INVARIANT: one that no longer covers its call loses its force for good: no later kernel may find it approved.
            await self._core.store.withdraw_approval(record.key, why)

    @staticmethod
    def _refusal(flight: Flight, record: ApprovalRecord) -> SyscallError:
        rules = ",".join(dict.fromkeys(str(ask[0]) for ask in record.asks))
        facts = {"rule": rules, "audit_id": flight.audit_id, "verdict": "ask", "approval": record.id}
        if record.state == "denied":
            text = f"{record.decided_by} denied approval {record.id}: {' '.join(record.reason.split())}"
            return Denied(text, **facts, answer=record.reason, by=record.decided_by or "")
        if record.state == "expired":
            until = f"{record.expires_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
            return Denied(
                f"nobody answered approval {record.id} until {until}; make the call again to ask anew",
                **facts,
                expired=until,
            )
        return Denied(f"approval {record.id} was closed: {record.reason}", **facts)

    # -- the end of a parked call ---------------------------------------------------------------------------------

    @staticmethod
    def ending(flight: Flight, error: SyscallError) -> Work | None:
        """What closes the approval of a call in the transaction that records its end; None: it waits for none."""
        record = flight.waits_for
        if record is None:
            return None
        return Work(statement="approval_close", values={"key": record.key, "reason": error.message})

    async def supersede(self, flight: Flight) -> None:
        """End a parked call whose place is now another call's: its program made other arguments there."""
        if flight.task is not None and not flight.ending:
            flight.fate = Denied(
                "the program made another call in its place, so this one is void", audit_id=flight.audit_id
            )
            flight.task.cancel()
        await asyncio.wait([flight.answer])

    # -- notice ---------------------------------------------------------------------------------------------------

    def notice(self, agent: int | None) -> None:
        """Something was decided: let the parked calls of an agent, or of all, look."""
        for thread in list(self._core.threads.values()):
            if agent is None or thread.key == agent:
                for flight in list(thread.flights.values()):
                    if flight.waits_for is not None and flight.look is not None:
                        flight.look.set()


@contextlib.asynccontextmanager
async def parking(flight: Flight) -> AsyncGenerator[None]:
    """Turn the end that somebody set for a parked call into its error: a bare cancellation is the kernel's own stop."""
    try:
        yield
    except asyncio.CancelledError:
        if flight.fate is None:
            raise
        raise flight.fate from None


def known(thread: Thread, records: Sequence[ApprovalRecord]) -> list[ApprovalRecord]:
    """Those of the branch that the thread is on."""
    return [record for record in records if thread.lineage.holds(record.branch, record.step)]


async def approved_before(core: Core, thread: Thread, step: int, before: int | None = None) -> frozenset[Ask]:
    """Everything that persons approved for a step, up to an approval that is looked at anew."""
    records = await core.store.granted_approvals(thread.key, step)
    return frozenset(ask for r in records if before is None or r.key < before for ask in r.asks)


async def staged_steps(core: Core, thread: Thread) -> frozenset[int]:
    """Steps whose call goes on by itself when its approval is decided: recovery leaves them alone."""
    records = known(thread, await core.store.unfinished_approvals(thread.key))
    return frozenset(
        r.step for r in records if r.action in core.table and hasattr(core.table[r.action].body, "resume")
    )
