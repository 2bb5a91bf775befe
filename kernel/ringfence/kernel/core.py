"""What the parts of one kernel share: the journal, the store, artifacts, the lease, the table."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ringfence.kernel.approvals import Approvals
from ringfence.kernel.config import LEASE_S
from ringfence.kernel.failpoints import Failpoints
from ringfence.kernel.journal.blobs import Blobs
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import (
    AgentKey,
    AgentRecord,
    BadRow,
    Entry,
    KernelKey,
    OwnerMoved,
    Phase,
    Row,
    Unavailable,
)
from ringfence.kernel.journal.writer import Journal
from ringfence.kernel.mailboxes import Mailboxes
from ringfence.kernel.pools import Pools
from ringfence.kernel.thread import Thread
from ringfence.syscalls.base import Atomic
from ringfence.syscalls.errors import Fenced, InvalidRequest, JournalUnavailable
from ringfence.syscalls.table import Row as TableRow

if TYPE_CHECKING:
    from ringfence.kernel.outcomes import Request
    from ringfence.kernel.settled import Answer
    from ringfence.kernel.telemetry.recorder import Recorder


class Lease:
    """This kernel's lease by its own monotonic clock. It ends for us no later than it ends in the database."""

    def __init__(self) -> None:
        self._until = 0.0

    def extend(self, asked_at: float, seconds: float) -> None:
        """Count from when the heartbeat was sent, never from when it was answered."""
        self._until = asked_at + seconds

    @property
    def expired(self) -> bool:
        """Whether nothing may start any more."""
        return time.monotonic() >= self._until


AWAY = "the journal can't commit, so nothing was done; the database is away, the call may be made again"


@dataclass(slots=True, kw_only=True)
class Core:
    """Shared parts, wired once by `main`.

    Attributes:
        on_rest: told when all of an agent waits, or no longer.
        wake: `Processes.wake`, for what may not know the processes.
        over: whether the journal takes no more rows.
        adopt: `Ownership.adopt`, likewise.
        boundary: `Boundaries.before`, likewise.
    """

    journal: Journal
    store: Store
    blobs: Blobs
    failpoints: Failpoints
    table: Mapping[str, TableRow]
    kernel: KernelKey
    fence: int
    lease: Lease = field(default_factory=Lease)
    threads: dict[AgentKey, Thread] = field(default_factory=dict[AgentKey, Thread])
    mailboxes: Mailboxes = field(init=False)
    on_rest: Callable[[Thread, bool], None] | None = None
    wake: Callable[[Thread], Awaitable[None]] | None = None
    adopt: Callable[[AgentRecord], Awaitable[Thread]] | None = None
    boundary: Callable[[Thread, Request], Awaitable[Answer | None]] | None = None
    stopping: bool = False
    over: bool = False
    telemetry: Recorder | None = None
    approvals: Approvals = field(init=False)
    pools: Pools = field(init=False)

    def __post_init__(self) -> None:
        """Make what follows from the other parts."""
        self.approvals = Approvals(self)
        self.pools = Pools(self.store, self.kernel)
        self.mailboxes = Mailboxes(self.store, self.kernel)

    async def append(self, entry: Entry) -> Any:
        """Append before an effect: nothing may run if it does not commit.

        Raises:
            JournalUnavailable: the database can't commit.
            Fenced: another kernel owns the agent.
            EpochMoved: the caller decides again.
        """
        for last in (False, True):
            try:
                return await self.journal.append(entry)
            except BadRow as error:
                raise InvalidRequest(f"the call can't be recorded, so it was not made: {error}") from error
            except Unavailable as error:
                raise JournalUnavailable(AWAY) from error
            except OwnerMoved as error:
                # After an outage the lease may only be overdue: renew it and try once more.
                if last or not await self.keep_lease():
                    raise Fenced(
                        "another kernel owns this agent now; nothing was done, and that kernel runs the agent on: connect to it"
                    ) from error
        raise AssertionError

    async def keep_lease(self) -> bool:
        """Renew the lease for a call that needs it now.

        Returns:
            False where another kernel has taken over.

        Raises:
            JournalUnavailable: the database is away: nobody knows.
        """
        try:
            return await self.renew_lease()
        except Unavailable as error:
            raise JournalUnavailable(AWAY) from error

    async def renew_lease(self) -> bool:
        """Renew this kernel's lease.

        Returns:
            False where another kernel has taken over.

        Raises:
            Unavailable: the database is away.
        """
        asked_at = time.monotonic()
        lapsed = self.lease.expired
        renewed = await self.store.heartbeat(self.kernel, self.fence, LEASE_S)
        if renewed and lapsed:
            self.pools.distrust()
            # A revocation does not wait for a kernel without a lease: nothing may start before the epochs are read again.
            for thread in list(self.threads.values()):
                await thread.refresh(None)
        if renewed:
            self.lease.extend(asked_at, LEASE_S)
        return renewed

    async def append_outcome(self, row: Row, atomic: Atomic | None = None) -> None:
        """Append what has happened, with work that belongs to it: waits for the database as long as this kernel lives.

        Raises:
            Fenced: another kernel owns the agent; it reports the call as unknown or finishes it.
            JournalUnavailable: this kernel is at its end; the next one settles the call.
        """
        while True:
            try:
                await self.journal.append(Entry(row=row, atomic=atomic))
            except Unavailable as error:
                if self.over:
                    raise JournalUnavailable(AWAY) from error
                # The effect is done: giving up would lose its record. A kernel that dies here leaves an intent.
                await asyncio.sleep(0.2)
            except OwnerMoved as error:
                try:
                    # A slow disk may let the lease run out again and again: only another owner is a reason to give up.
                    if not await self.renew_lease() or not await self.owns(row.chain):
                        raise Fenced(
                            "another kernel owns this agent now; it settles this call: see `ringfence steps` there"
                        ) from error
                except Unavailable:
                    await asyncio.sleep(0.2)
            else:
                return

    async def close(self) -> None:
        """Write what is queued, and end the calls that are left; what they have begun in a thread is waited for."""
        # INVARIANT: when another kernel may own its agents, nothing of this one changes a file any more.
        self.over = True
        await self.journal.stop()
        flights = [flight for thread in self.threads.values() for flight in thread.flights.values()]
        tasks = [flight.task for flight in flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def owns(self, chain: int) -> bool:
        """Whether this kernel may write a chain: its own, or an agent's that the database says is its.

        Raises:
            Unavailable: the database is away.
        """
        if chain not in self.journal.heads():
            return False
        if chain < 0:
            return chain == -self.kernel
        record = await self.store.agent_by_key(AgentKey(chain))
        return record is not None and record.owner == self.kernel

    async def event(self, chain: int, action: str, resource: str = "", **facts: Any) -> None:
        """Record what an operator or the kernel itself did."""
        body = json.dumps(facts, sort_keys=True, default=str).encode()
        row = Row(
            chain=chain,
            phase=Phase.EVENT,
            action=action,
            resource=resource,
            started_us=time.time_ns() // 1000,
            body=body,
        )
        await self.append(Entry(row=row))

    async def operator_event(self, action: str, resource: str = "", **facts: Any) -> None:
        """Record an operator's action on this kernel's own chain."""
        await self.event(-self.kernel, action, resource, **facts)
