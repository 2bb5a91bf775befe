"""Makes the parked calls of an agent again that an earlier kernel held, from their approvals.

The kernel itself runs an approved call, once, whether or not a process of its agent lives: so the flights are here before
any program is. A program that is started later and asks for the same place joins them.
"""

from __future__ import annotations

import asyncio
import logging

from ringfence.kernel.admission import Admission
from ringfence.kernel.approvals import approved_before, known
from ringfence.kernel.config import DEADLINE_MS_MAX
from ringfence.kernel.core import Core
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.types import ApprovalRecord
from ringfence.kernel.replay import Unfinished
from ringfence.kernel.thread import Thread
from ringfence.syscalls.codec import decode_arguments
from ringfence.syscalls.errors import SyscallError

log = logging.getLogger(__name__)

EARLIER = -1
"""Generation of a call that no program of this kernel made: whoever asks for its place later finds its outcome."""


class Revival:
    """Starts the parked calls of adopted agents."""

    def __init__(self, core: Core, dispatcher: Dispatcher) -> None:
        self._core = core
        self._dispatcher = dispatcher
        self._tasks: set[asyncio.Task[object]] = set()

    async def revive(self, thread: Thread) -> None:
        """Make the flights of everything that waits, or was approved and has not come to its end.

        Raises:
            Unavailable: the database is away.
        """
        flights: list[Flight] = []
        for record in known(thread, await self._core.store.unfinished_approvals(thread.key)):
            if record.step not in thread.flights:
                flight = await self._flight(thread, record)
                if flight is not None:
                    flights.append(flight)
        # INVARIANT: none flies before all are made: whoever adopts the agent again, for the database went away in the
        # middle, would have them fly twice.
        for flight in flights:
            unfinished = thread.replay.unfinished.get((flight.lane, flight.lane_step))
            task = asyncio.create_task(self._fly(flight, unfinished))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # Its place is taken before anyone else can ask for it.
            await asyncio.sleep(0)

    async def _fly(self, flight: Flight, unfinished: Unfinished | None) -> None:
        await self._dispatcher.fly(flight, unfinished)
        if self._core.wake is not None:
            # One that was decided before this kernel came never waited, so nothing else tells a sleeper that it is done.
            await self._core.wake(flight.thread)

    async def _flight(self, thread: Thread, record: ApprovalRecord) -> Flight | None:
        row = self._core.table.get(record.action)
        if row is None:
            log.error("%s: this release has no syscall `%s`; deny it", record.id, record.action)
            return None
        try:
            arguments, canonical, _ = decode_arguments(row, record.arguments.encode())
        except SyscallError as error:
            log.error("%s can't be read any more: %s; deny it", record.id, error.message)  # noqa: TRY400 - the text says all
            return None
        flight = Flight(
            core=self._core,
            thread=thread,
            row=row,
            arguments=arguments,
            canonical=canonical,
            digest=record.digest,
            lane=record.lane,
            lane_step=record.lane_step,
            step=record.step,
            span_s=DEADLINE_MS_MAX / 1000,
        )
        flight.generation = EARLIER
        flight.waits_for = record
        flight.approved = await approved_before(self._core, thread, record.step, record.key)
        unfinished = thread.replay.unfinished.get((record.lane, record.lane_step))
        if unfinished is not None and unfinished.intent.step == record.step:
            Admission.resume(flight, unfinished)
            flight.staged = unfinished.progress is not None and hasattr(row.body, "resume")
        return flight
