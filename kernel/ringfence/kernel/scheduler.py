"""Wakes agents whose time has come, and begins the runs of those that have a schedule.

Each fire is a run of its own: a new thread on a branch without a parent, so that nothing is replayed, effect ids are new and
totals are counted afresh; the workspace and the history stay. Between runs the agent is `sleeping` without a process.

INVARIANT: one fire, one run. The row of the schedule moves on in the transaction that begins the run.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from ringfence.kernel.journal.types import AgentKey, JournalError, ScheduleRecord
from ringfence.kernel.moments import short_time
from ringfence.kernel.replay import NO_CUT, Lineage, Replay
from ringfence.kernel.revocation import cancel
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.kernel.timers import Purpose, Timers
from ringfence.policy.schedule import next_fire
from ringfence.syscalls.errors import Fenced, JournalUnavailable, Killed

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.processes import Processes

log = logging.getLogger(__name__)

RETRY_S: Final = 2.0
PAUSED: Final = "schedule, which is paused"
NEVER: Final = "schedule, which fires no more"


def waiting_text(schedule: ScheduleRecord) -> str:
    """What a scheduled agent waits for between runs, as `waiting_for` shows it."""
    if schedule.next_at is None:
        return PAUSED if schedule.paused else NEVER
    return f"schedule {short_time(schedule.next_at)}"


class Scheduler:
    """Timers and schedules of this kernel's agents."""

    def __init__(self, core: Core, processes: Processes) -> None:
        self._core = core
        self._processes = processes
        self.timers = Timers(self._due)
        processes.on_end = self.ended

    # -- timers ---------------------------------------------------------------------------------------------------

    def adopt(self, thread: Thread) -> None:
        """Watch the clock for an agent that this kernel has taken over or submitted."""
        if thread.asleep:
            self.timers.set("wake", thread.key, thread.record.wake_at)
        self._arm(thread)

    def _arm(self, thread: Thread) -> None:
        schedule = thread.schedule
        self.timers.set("fire", thread.key, None if schedule is None else schedule.next_at)

    async def _due(self, purpose: Purpose, key: AgentKey) -> None:
        thread = self._core.threads.get(key)
        if thread is None or thread.fenced or self._core.stopping:
            return
        if purpose == "wake":
            await self._processes.wake(thread)
            return
        try:
            await self._fire(thread)
        except Fenced:
            log.warning("%s is another kernel's now: its schedule fires there", thread.id)
        except (JournalError, JournalUnavailable) as error:
            log.warning("the schedule of %s can't fire now: %s; trying again", thread.id, error)
            await asyncio.sleep(RETRY_S)
            self._arm(thread)

    def next_of(self, thread: Thread, after: datetime | None = None) -> datetime | None:
        """When the manifest's schedule fires after a time; after now if none is given."""
        schedule = thread.manifest.schedule
        if schedule is None:
            return None
        # Intervals are counted from fire to fire, so that no rounding lets two fall together.
        last = None if thread.schedule is None else thread.schedule.next_at
        return next_fire(schedule, after or datetime.now(UTC), last or thread.record.created_at)

    # -- a fire ---------------------------------------------------------------------------------------------------

    async def _fire(self, thread: Thread) -> None:
        async with thread.operation:
            schedule = thread.schedule
            now = datetime.now(UTC)
            if schedule is None or schedule.next_at is None or schedule.next_at > now:
                self._arm(thread)
                return
            if thread.state in FINAL_STATES:
                return  # killed, or it could not be started: an operator starts it again
            following = self.next_of(thread, now)
            if schedule.running or thread.state != "sleeping":
                # The event first: a fire that was passed by and not told of would be worse than one told of twice.
                await self._core.event(
                    thread.key,
                    "schedule.skip",
                    thread.id,
                    fire=short_time(schedule.next_at),
                    because=f"the agent is {thread.state}",
                )
                thread.schedule = await self._core.store.move_schedule(
                    thread.key, following, paused=schedule.paused
                )
                self._arm(thread)
                return
            await self._begin(thread, schedule, following, "schedule")

    async def run_now(self, thread: Thread) -> bool:
        """Begin a run that an operator asks for; the next fire stays where it is. The caller holds `thread.operation`.

        Returns:
            False where a run is under way.
        """
        schedule = thread.schedule
        if schedule is None or schedule.running:
            return False
        return await self._begin(thread, schedule, schedule.next_at, "operator")

    async def _begin(
        self, thread: Thread, schedule: ScheduleRecord, following: datetime | None, asked_by: str
    ) -> bool:
        begun = await self._core.store.begin_run(
            thread.key,
            kernel=self._core.kernel,
            fence=self._core.fence,
            thread=f"t-{secrets.token_hex(8)}",
            last_step=thread.last_step,
            expected=schedule.next_at,
            next_at=following,
        )
        if begun is None:
            thread.schedule = await self._core.store.schedule(thread.key)
            self._arm(thread)
            return False
        thread.record, branch, thread.schedule = begun
        thread.branch = branch.branch
        thread.lineage = Lineage(branch=branch.branch, parts=((branch.branch, NO_CUT),))
        thread.replay, thread.loaded = Replay(), False
        thread.lanes.clear()
        thread.restarts = 0
        thread.state, thread.waiting_for, thread.error, thread.asleep = "pending", "", "", False
        thread.budgets.begin_run()
        self._arm(thread)
        facts = {"run": thread.schedule.runs, "thread": thread.record.thread, "branch": thread.branch}
        fire = None if schedule.next_at is None or asked_by == "operator" else short_time(schedule.next_at)
        # From here on the run is there: whatever the database does, it is told of and started.
        await self._processes.insist(
            lambda: self._core.event(
                thread.key, "schedule.run", thread.id, asked_by=asked_by, fire=fire, **facts
            )
        )
        await self._processes.start_or_fail(thread)
        return True

    # -- the end of a run -----------------------------------------------------------------------------------------

    async def ended(
        self,
        thread: Thread,
        outcome: str,
        *,
        error: str = "",
        exit_code: int | None = None,
        ended_at: datetime | None = None,
    ) -> None:
        """A run is over: the agent sleeps until the next one, and shows why this one failed."""
        # What it left under way belongs to this run; the next one's calls have the same places.
        over = Killed("the run has ended")
        await asyncio.gather(*(cancel(flight, over) for flight in list(thread.flights.values())))
        schedule = thread.schedule
        assert schedule is not None  # noqa: S101 - asked by the caller
        text = waiting_text(schedule)
        thread.state, thread.waiting_for, thread.error = "sleeping", text, error
        async with thread.storing:
            finished = await self._core.store.end_run(
                thread.key,
                outcome,
                error,
                state="sleeping",
                waiting_for=text,
                error=error,
                exit_code=exit_code,
                ended_at=ended_at,
                asleep=False,
                wake_at=None,
            )
        thread.schedule = finished or await self._core.store.schedule(thread.key)
        thread.ended_runs += 1
        await thread.announce()

    # -- operators ------------------------------------------------------------------------------------------------

    async def move(self, thread: Thread, *, paused: bool) -> None:
        """Pause the schedule, or let it fire again from now on. A run under way goes on."""
        async with thread.operation:
            following = None if paused else self.next_of(thread)
            thread.schedule = await self._core.store.move_schedule(thread.key, following, paused=paused)
            self._arm(thread)
            if thread.schedule is not None and not thread.schedule.running and thread.state == "sleeping":
                await self._processes.set_state(
                    thread, "sleeping", waiting_for=waiting_text(thread.schedule), error=thread.error
                )

    async def rest_again(self, thread: Thread) -> bool:
        """Let an agent wait for its schedule again that was paused or killed between runs.

        The caller holds `thread.operation`.

        Returns:
            False where it has no schedule, or a run to go on with.
        """
        schedule = thread.schedule
        if schedule is None or schedule.running:
            return False
        if schedule.next_at is None or schedule.next_at <= datetime.now(UTC):
            following = None if schedule.paused else self.next_of(thread)
            schedule = await self._core.store.move_schedule(thread.key, following, paused=schedule.paused)
        if schedule is None:
            return False
        thread.schedule = schedule
        await self._processes.set_state(
            thread, "sleeping", waiting_for=waiting_text(schedule), error=thread.error
        )
        self._arm(thread)
        return True
