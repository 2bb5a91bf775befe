"""Wakes agents whose time has come, and begins the runs of those that have a schedule.

Each fire is a run of its own: a new thread on a branch without a parent, so that nothing is replayed, effect ids are new and
totals are counted afresh; the workspace and the history stay. Between runs the agent is `sleeping` without a process.

INVARIANT: one fire, one run. The row of the schedule moves on in the transaction that begins the run.

What the times that are due come to is reckoned in `fires`. A stored time is the schedule's own; its jitter is added where the
clock is watched, so that every kernel adds the same.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from ringfence.kernel import fires
from ringfence.kernel.journal.types import AgentKey, JournalError, ScheduleRecord
from ringfence.kernel.moments import short_time
from ringfence.kernel.recovery import close_let_go
from ringfence.kernel.replay import NO_CUT, Lineage, Replay
from ringfence.kernel.resting import clock_set
from ringfence.kernel.revocation import cancel
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.kernel.timers import Purpose, Timers, steady_clock, wall_clock
from ringfence.policy.schedule import delay_of, next_fire
from ringfence.syscalls.errors import Fenced, JournalUnavailable, Killed

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.processes import Processes

log = logging.getLogger(__name__)

RETRY_S: Final = 2.0
PAUSED: Final = "schedule, which is paused"
NEVER: Final = "schedule, which fires no more"
ASKS: Final = "a2a.get"
"""The call that goes on asking while its agent sleeps."""
AT_ONCE: Final = datetime.min.replace(tzinfo=UTC)
REPLACED: Final = "replaced"
AHEAD_S: Final = 60.0
"""A call that began further ahead of the clock than this says that the clock was put back since."""


def waiting_text(schedule: ScheduleRecord) -> str:
    """What a scheduled agent waits for between runs, as `waiting_for` shows it."""
    if schedule.next_at is None:
        return PAUSED if schedule.paused else NEVER
    return f"schedule {short_time(schedule.next_at)}"


class Scheduler:
    """Timers and schedules of this kernel's agents."""

    def __init__(
        self,
        core: Core,
        processes: Processes,
        *,
        wall: Callable[[], datetime] = wall_clock,
        steady: Callable[[], float] = steady_clock,
    ) -> None:
        self._core = core
        self._processes = processes
        self._now = wall
        self.timers = Timers(self._due, wall=wall, steady=steady)
        self.timers.on_step, self.timers.early = self._stepped, self._early
        processes.on_end, processes.linger.alarm = self.ended, self._alarm

    # -- timers ---------------------------------------------------------------------------------------------------

    def adopt(self, thread: Thread) -> None:
        """Watch the clock for an agent that this kernel has taken over or submitted."""
        if thread.asleep:
            at = thread.record.wake_at
            if at is not None and self._began_ahead(thread):
                at = AT_ONCE  # it asks anew, and waits for no longer than it said
            if any(call.intent.action == ASKS for call in thread.replay.unfinished.values()):
                at = AT_ONCE  # nobody asks after its task elsewhere until its program does
            self.timers.set("wake", thread.key, at)
        self._arm(thread)

    def _alarm(self, thread: Thread, at: datetime | None) -> None:
        """Wake an agent then whose waits nobody keeps; None: its calls wake it, or it is awake."""
        self.timers.set("wake", thread.key, at)

    def _began_ahead(self, thread: Thread) -> bool:
        """Whether the clock was put back since an agent fell asleep: its waits would take that much longer."""
        newest_us = max((call.intent.started_us for call in thread.replay.unfinished.values()), default=0)
        return newest_us / 1e6 > self._now().timestamp() + AHEAD_S

    def _arm(self, thread: Thread) -> None:
        schedule, asked = thread.schedule, thread.manifest.schedule
        at = None
        if schedule is not None and asked is not None:
            waits = schedule.queued and not schedule.running
            if waits or fires.after_step_back(asked, schedule, self._now()) is not None:
                at = AT_ONCE
            elif schedule.next_at is not None:
                at = self.starts_at(thread)
        self.timers.set("fire", thread.key, at)

    def starts_at(self, thread: Thread) -> datetime | None:
        """When the next time has its run begun: its jitter later."""
        schedule, asked = thread.schedule, thread.manifest.schedule
        if schedule is None or asked is None or schedule.next_at is None:
            return None
        return schedule.next_at + delay_of(asked, thread.id, schedule.next_at)

    def _stepped(self, by: timedelta) -> None:
        """The clock was set: what it was set over is looked at now, whatever it would have waited for."""
        for thread in self._core.threads.values():
            clock_set(thread, by)
            if by < timedelta(0):
                self._arm(thread)

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

    async def _early(self, key: AgentKey, at: datetime) -> None:
        thread = self._core.threads.get(key)
        if thread is not None and not thread.fenced and not self._core.stopping:
            await self._processes.linger.wake_early(thread, at)

    def next_of(self, thread: Thread, after: datetime | None = None) -> datetime | None:
        """When the manifest's schedule fires after a time; after now if none is given."""
        schedule = thread.manifest.schedule
        if schedule is None:
            return None
        # Intervals are counted from fire to fire, so that no rounding lets two fall together.
        last = None if thread.schedule is None else thread.schedule.next_at
        return next_fire(schedule, after or self._now(), last or thread.record.created_at)

    # -- a fire ---------------------------------------------------------------------------------------------------

    async def _fire(self, thread: Thread) -> None:
        async with thread.operation:
            await self._mind_the_clock(thread)
            schedule, asked = thread.schedule, thread.manifest.schedule
            if schedule is None or asked is None:
                return
            if thread.state in FINAL_STATES:
                return  # killed, or it could not be started: an operator starts it again
            found = fires.plan(asked, thread.id, schedule, thread.state, self._now())
            if found is None:
                self._arm(thread)
                return
            # The event first: a fire that was passed by and not told of would be worse than one told of twice.
            await self._tell_passed(thread, found)
            if found.run is None:
                thread.schedule = await self._core.store.move_schedule(
                    thread.key,
                    found.next_at,
                    paused=schedule.paused,
                    queued=found.queued,
                    settled_at=found.settled_at,
                )
                self._arm(thread)
                return
            if found.replaces:
                await self._end_run(thread, found)
            await self._begin(thread, found, "schedule")

    async def _mind_the_clock(self, thread: Thread) -> None:
        """Begin a schedule anew whose clock was put back so far that it would stand still. The caller holds `thread.operation`."""
        schedule, asked, now = thread.schedule, thread.manifest.schedule, self._now()
        if schedule is None or asked is None:
            return
        anew = fires.after_step_back(asked, schedule, now)
        if anew is None or schedule.next_at is None:
            return
        before, after = short_time(schedule.next_at), short_time(anew)
        await self._core.event(thread.key, "schedule.clock", thread.id, fire=before, next=after)
        thread.schedule = await self._core.store.move_schedule(
            thread.key, anew, paused=schedule.paused, queued=schedule.queued, settled_at=now
        )
        if thread.state == "sleeping" and not schedule.running and thread.schedule is not None:
            await self._processes.set_state(
                thread, "sleeping", waiting_for=waiting_text(thread.schedule), error=thread.error
            )

    async def _tell_passed(self, thread: Thread, found: fires.Plan) -> None:
        if found.beyond is not None:
            many = {"first": short_time(found.beyond), "because": f"more than {fires.MISSED_MAX} were missed"}
            await self._core.event(thread.key, "schedule.skip", thread.id, **many)
        if not found.passed:
            return
        live = thread.schedule is not None and thread.schedule.running
        missed = not live and thread.state == "sleeping"
        await self._core.event(
            thread.key,
            "schedule.skip",
            thread.id,
            fire=short_time(found.passed[-1]),
            because="nobody could begin a run then" if missed else f"the agent is {thread.state}",
            **(
                {"first": short_time(found.passed[0]), "times": len(found.passed)} if found.passed[1:] else {}
            ),
        )

    async def _end_run(self, thread: Thread, found: fires.Plan) -> None:
        """End the run under way for the next one. The caller holds `thread.operation`."""
        fire = None if found.run is None else short_time(found.run)
        await self._core.event(thread.key, "schedule.replace", thread.id, fire=fire, was=thread.state)
        await self._processes.end_program(thread)
        # INVARIANT: whoever still watches the program's end, or waits to start it again, comes too late.
        thread.generation += 1
        thread.asleep, thread.shown = False, None
        self._processes.turns.ended(thread)
        await self._processes.insist(
            lambda: self.ended(thread, REPLACED, error="the next run began before this one was over")
        )

    async def run_now(self, thread: Thread) -> bool:
        """Begin a run that an operator asks for; the next fire stays where it is. The caller holds `thread.operation`.

        Returns:
            False where a run is under way.
        """
        schedule = thread.schedule
        if schedule is None or schedule.running:
            return False
        asked = fires.Plan(queued=schedule.queued, next_at=schedule.next_at, settled_at=schedule.settled_at)
        return await self._begin(thread, asked, "operator")

    async def _begin(self, thread: Thread, found: fires.Plan, asked_by: str) -> bool:
        before = thread.schedule
        assert before is not None  # noqa: S101 - asked by the callers
        begun = await self._core.store.begin_run(
            thread.key,
            kernel=self._core.kernel,
            fence=self._core.fence,
            thread=f"t-{secrets.token_hex(8)}",
            last_step=thread.last_step,
            before=before,
            next_at=found.next_at,
            queued=found.queued,
            settled_at=found.settled_at,
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
        fire = None if found.run is None else short_time(found.run)
        if found.missed:
            facts["missed"] = found.missed
        # From here on the run is there: whatever the database does, it is told of and started.
        await self._processes.insist(
            lambda: self._core.event(
                thread.key, "schedule.run", thread.id, asked_by=asked_by, fire=fire, **facts
            )
        )
        await self._processes.start_or_fail(thread)
        return True

    async def tell_again(self, thread: Thread) -> None:
        """Tell of a run that is under way and that the kernel which began it died too early to tell of."""
        schedule, run = thread.schedule, thread.record.thread
        if schedule is None or not schedule.running or await self._core.store.run_told(thread.key, run):
            return
        facts = {"run": schedule.runs, "thread": run, "branch": thread.branch, "fire": None}
        await self._core.event(
            thread.key, "schedule.run", thread.id, asked_by="a kernel that died meanwhile", **facts
        )

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
        await close_let_go(self._core, thread, over)
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
        if outcome != REPLACED:
            thread.ended_runs += 1  # whoever waits for the end of a run waits for that of the next one
        self._arm(thread)
        await thread.announce()

    # -- operators ------------------------------------------------------------------------------------------------

    async def move(self, thread: Thread, *, paused: bool) -> None:
        """Pause the schedule, or let it fire again from now on. A run under way goes on."""
        async with thread.operation:
            following = None if paused else self.next_of(thread)
            # What waits for a run is forgotten by a pause alone: to resume what goes on already changes nothing.
            kept = thread.schedule is not None and not paused and not thread.schedule.paused
            thread.schedule = await self._core.store.move_schedule(
                thread.key,
                following,
                paused=paused,
                queued=thread.schedule.queued if thread.schedule is not None and kept else (),
                settled_at=self._now(),
            )
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
        now = self._now()
        if schedule.next_at is None or schedule.next_at <= now or schedule.queued:
            following = None if schedule.paused else self.next_of(thread)
            schedule = await self._core.store.move_schedule(
                thread.key, following, paused=schedule.paused, settled_at=now
            )
        if schedule is None:
            return False
        thread.schedule = schedule
        await self._processes.set_state(
            thread, "sleeping", waiting_for=waiting_text(schedule), error=thread.error
        )
        self._arm(thread)
        return True
