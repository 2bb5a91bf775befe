"""Puts back what agents did after a step: workspace, shared state, SQL targets. Never rights, spent budgets or history.

end the program     its memory is from the future
intent              the rollback itself is a step of the thread, so a crash in the middle is finished at start
point               the state from just before, so that a rollback can be undone
restore             per path, key and row: the oldest before-image after the cut; what others changed is a conflict
branch              a new branch whose prefix is the journal up to the cut; nothing is deleted

Several agents go back together: all programs are ended, one plan is made for all, all intents are recorded, and then each is
carried out. What two of them changed in turn is thereby undone in the reverse order of the changes.

What is recorded and can't be carried to its end is tried again until it is: by this kernel, and by the one after it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from ringfence.kernel.core import Core
from ringfence.kernel.handover import Handover
from ringfence.kernel.journal.types import AgentKey, JournalError
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.problems import conflict
from ringfence.kernel.processes import Processes
from ringfence.kernel.rollback_again import Again
from ringfence.kernel.rollback_begin import Beginning, goes_back, refuse_moved
from ringfence.kernel.rollback_cuts import Cut
from ringfence.kernel.rollback_finish import Finished, Finishing, held
from ringfence.kernel.rollback_plan import Member, Plans, Undo
from ringfence.kernel.rollback_restore import Restoring
from ringfence.kernel.thread import Thread
from ringfence.syscalls.errors import Fenced, JournalUnavailable

_T = TypeVar("_T")

Done = tuple[Undo, dict[str, Any]]
"""What a rollback did, and where it led."""

STOP_S: Final = 5.0
"""How long the end of the kernel waits for rollbacks that are being carried out; the next one finishes them."""

_OF_THE_KERNEL = (JournalError, JournalUnavailable, Fenced)
"""What says something about this kernel and nothing about the rollback."""


class Rollback:
    """Rollback of this kernel's agents."""

    def __init__(self, core: Core, ownership: Ownership, processes: Processes) -> None:
        self._core = core
        self._beginning = Beginning(core, processes)
        self.plans = Plans(core)
        self.handover = Handover(core, ownership, processes, self._beginning)
        restoring = Restoring(core, ownership, processes)
        self._finishing = Finishing(core, self._beginning, restoring, self.plans, self.handover)
        self._again = Again(core, processes, lambda thread: self._uncut(self._finish(thread)))
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Stop trying what could not be finished; the next kernel goes on."""
        await self._again.close()
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=STOP_S)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _uncut(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do it whatever becomes of the operator who asked: files that are being put back can't be left off in the middle."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who asked may be gone; the tries tell of it

    # -- carrying it out ------------------------------------------------------------------------------------------

    async def execute(self, thread: Thread, cut: Cut, path: str | None, operator: str) -> Done:
        """Roll one agent back; returns what was done and where it led.

        Raises:
            Problem: a point can't be verified or a target refuses; nothing is half done that is not tried again.
        """
        return await self._uncut(self._one(thread, cut, path, operator))

    async def _one(self, thread: Thread, cut: Cut, path: str | None, operator: str) -> Done:
        # INVARIANT: an older rollback that was cut short is carried to its end first, never over newer work.
        older = (await self._finish(thread)).get(thread.key)
        if older is not None and (older.undo.cut, older.path) == (cut.step, path):
            return older.undo, older.facts  # this very one
        async with thread.operation:
            return await self._execute(thread, cut, path, operator)

    async def _execute(self, thread: Thread, cut: Cut, path: str | None, operator: str) -> Done:
        refuse_moved(thread, cut)
        await self._refuse_begun(thread)
        lived = thread.program is not None
        try:
            waited = await self._beginning.still(thread, cut)
            undo = await self.plans.plan(thread, cut, path)
            undo.others[:0] = waited
        except Exception:
            # INVARIANT: whatever stands in the way, as a target that is away, its program is ended: nobody else says so.
            await self._beginning.refused([thread] if lived else [])
            raise
        members = [Member(thread=thread, cut=cut)]
        try:
            await self._beginning.announce(thread)
            steps = {thread.key: await self._beginning.intent(thread, cut, path, operator)}
            done = await self._finishing.carry_out(members, steps, path, None, [undo])
        except BaseException as error:
            self._again.begin([thread], error)
            raise
        return undo, done[thread.key].facts

    async def execute_all(self, wanted: Sequence[tuple[Thread, Cut]], operator: str) -> list[Done]:
        """Roll several agents back together, as one: what they did to the same things is undone in its reverse order.

        Raises:
            Problem: as for `execute`, of any of them; where nothing was recorded, nothing was changed.
        """
        return await self._uncut(self._several(wanted, operator))

    async def _several(self, wanted: Sequence[tuple[Thread, Cut]], operator: str) -> list[Done]:
        older: dict[AgentKey, Finished] = {}
        for thread, _ in wanted:
            older |= await self._finish(thread)
        async with held(thread for thread, _ in wanted):
            lived = [thread for thread, _ in wanted if thread.program is not None]
            members = [Member(thread=thread, cut=cut) for thread, cut in wanted]
            waited: list[list[dict[str, Any]]] = []
            try:
                for member in members:
                    before = older.get(member.thread.key)
                    if before is not None and before.undo.cut == member.cut.step:
                        # That very one, cut short: what is left of it, if anything, is planned with the others.
                        member.cut = replace(member.cut, seen=member.thread.branch)
                    refuse_moved(member.thread, member.cut)
                    await self._refuse_begun(member.thread)
                    waited.append(await self._beginning.still(member.thread, member.cut))
                undos = await self.plans.plan_all(members)
            except Exception:
                await self._beginning.refused(lived)
                raise
            for undo, before in zip(undos, waited, strict=True):
                undo.others[:0] = before
            return await self._together(members, undos, operator)

    async def _together(self, members: Sequence[Member], undos: Sequence[Undo], operator: str) -> list[Done]:
        group: dict[str, Any] = {"id": secrets.token_hex(8), "head": members[0].thread.key}
        listed = [
            {"key": m.thread.key, "cut": m.cut.step, "parent": m.cut.parent, "seen": m.cut.seen}
            for m in members
        ]
        steps: dict[AgentKey, int] = {}
        try:
            for member in members:
                await self._beginning.announce(member.thread)
            for nr, member in enumerate(members):
                told = group if nr else {**group, "members": listed}
                thread, cut = member.thread, member.cut
                steps[thread.key] = await self._beginning.intent(thread, cut, None, operator, told)
            done = await self._finishing.carry_out(members, steps, None, group, undos)
        except BaseException as error:
            self._again.begin([member.thread for member in members], error)
            raise
        return [(undo, done[m.thread.key].facts) for m, undo in zip(members, undos, strict=True)]

    async def _refuse_begun(self, thread: Thread) -> None:
        if await self._finishing.open_intent(thread) is not None:
            raise conflict(f"another rollback of `{thread.id}` is under way; look again when it is done")

    # -- what was cut short ---------------------------------------------------------------------------------------

    async def finish_interrupted(self, thread: Thread) -> bool:
        """Carry a rollback to its end that was cut short; restoring is idempotent. Returns whether there was one.

        Raises:
            Problem: it can't be finished now; it is tried again by itself.
        """
        begun = goes_back(thread) or await self._finishing.open_intent(thread) is not None
        await self._uncut(self._finish(thread))
        return begun

    async def _finish(self, thread: Thread) -> dict[AgentKey, Finished]:
        done = await self._finishing.finish(thread)
        await self.handover.give_back_rested()
        return done

    async def take_up(self, thread: Thread) -> bool:
        """The same for an agent that was just taken over: where it can't be finished, it is tried again until it is.

        Returns:
            Whether a rollback was or is under way: nobody starts the agent then.

        Raises:
            JournalError, JournalUnavailable, Fenced, Problem: this kernel can't take it over now.
        """
        try:
            return await self.finish_interrupted(thread)
        except _OF_THE_KERNEL:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, half of the agent's work is undone
            self._again.begin([thread], error)
            return True
