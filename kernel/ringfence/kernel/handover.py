"""Agents of one database that go back together, on whichever kernels they are: brought under one kernel, and given back after it.

wanted     a row for each says which kernel has it go back; no other may meanwhile
handed     a living owner ends the program and makes that kernel the owner: one commit, behind which nothing of its own counts
taken      of a dead owner, as takeover does; its data directory is locked as long as files in it are worked on
given back once the agent rests: the kernel that has its files claims it, as it claims what a dead kernel left

INVARIANT: who works on files owns the agent, and no other process can: its kernel let it go, or is dead by its directory's lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ringfence.kernel.core import Core
from ringfence.kernel.journal.store_handovers import Wanted
from ringfence.kernel.journal.types import AgentKey, AgentRecord, JournalError, OwnerMoved
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.problems import Problem, conflict
from ringfence.kernel.processes import Processes
from ringfence.kernel.reach import Place, Reach, silent
from ringfence.kernel.rollback_begin import SETTLE_S, Beginning, goes_back
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.syscalls.errors import SyscallError

if TYPE_CHECKING:
    from ringfence.kernel.timers import Timers

log = logging.getLogger(__name__)

WAIT_S: Final = SETTLE_S + 15.0
"""How long an owner may take to let an agent go: for calls that have begun, and for its lease to run out where it is dead."""

LOOK_S: Final = 0.1
REFUSED: Final = "an operator, after a refused rollback"


class Handover:
    """This kernel's side of it, both ways."""

    def __init__(self, core: Core, ownership: Ownership, processes: Processes, beginning: Beginning) -> None:
        self._core = core
        self._ownership = ownership
        self._processes = processes
        self._beginning = beginning
        self._places: dict[AgentKey, Place] = {}
        self._wanted: Counter[AgentKey] = Counter()
        self._giving: set[AgentKey] = set()
        self.reach = Reach(core, ownership)
        self.timers: Timers | None = None

    # -- to have them ---------------------------------------------------------------------------------------------

    async def gather(self, keys: Sequence[AgentKey]) -> list[Thread]:
        """Bring agents under this kernel: all of them, or none.

        Whoever calls this calls `let_go` with the same keys at the end.

        Raises:
            Problem: one can't be had; those that were brought are given back.
            Unavailable: the database is away.
        """
        held = await self._core.store.reserve_agents(self._core.kernel, keys)
        for key, by in held.items():
            record = await self._core.store.agent_by_key(key)
            name = key if record is None else record.id
            raise conflict(
                f"`{name}` goes back together with others under kernel {by}; look again when that is done"
            )
        self._wanted.update(keys)
        try:
            return [await self._have(key) for key in keys]
        except BaseException:
            await asyncio.shield(self.let_go(keys, refused=True))
            raise

    async def _have(self, key: AgentKey) -> Thread:
        store, loop = self._core.store, asyncio.get_running_loop()
        until, name = loop.time() + WAIT_S, str(key)
        while loop.time() < until:
            thread = self._core.threads.get(key)
            if thread is not None and not thread.fenced:
                return thread
            record = await store.agent_by_key(key)
            if record is None:
                raise conflict("an agent that goes back was removed meanwhile; look again")
            name = record.id
            if record.owner == self._core.kernel:
                return await self._adopt(record)
            alive = {k.key for k in await store.kernels() if k.alive and k.fence > 0}
            if record.owner not in alive:
                if key in self._core.threads or not await self._take(record):
                    await asyncio.sleep(LOOK_S)
                continue
            if key not in self._places:
                self._places[key] = await self.reach.place_of(record)
            _, why = await store.handover_answer(self._core.kernel, key)
            if why:
                raise conflict(why)
            await asyncio.sleep(LOOK_S)
        raise conflict(
            f"`{name}` could not be had from its kernel within {WAIT_S:.0f} seconds; see how that kernel does, and try again"
        )

    async def _take(self, record: AgentRecord) -> bool:
        """Take over an agent of a kernel that is dead; False: another kernel may just do so."""
        place = await self.reach.place_of(record)
        if place.beside is not None and not self.reach.locks.take(place.beside):
            if place.lender is None:
                raise silent(record.id, place.beside)
            return False  # its kernel has started again, and claims it
        self._places[record.key] = place
        store, me = self._core.store, self._core.kernel
        if record.state in FINAL_STATES:
            return await store.take_agent(record.key, me)
        try:
            return bool(await store.claim_agents(me, self._core.fence, [record.id]))
        except OwnerMoved as error:
            raise conflict("this kernel's lease has run out; look again") from error

    async def _adopt(self, record: AgentRecord) -> Thread:
        place = self._places.get(record.key)
        if place is None:
            place = self._places[record.key] = await self.reach.place_of(record)
        if place.beside is not None:
            self._ownership.elsewhere[record.id] = place.beside
        return await self._ownership.adopt(record)

    # -- to be done with them -------------------------------------------------------------------------------------

    async def let_go(self, keys: Iterable[AgentKey], *, refused: bool = False) -> None:
        """Want agents no longer; those that rest go back to the kernels that have their files.

        Args:
            keys: which.
            refused: whether nothing came of it.
        """
        keys = list(keys)
        self._wanted.subtract(keys)
        over = [key for key in keys if self._wanted[key] <= 0]
        for key in over:
            del self._wanted[key]
        try:
            for key in over:
                await self._give_back(key, refused=refused)
            stay = {thread.key for thread in self._core.threads.values() if thread.borrowed}
            await self._core.store.drop_handovers(self._core.kernel, [key for key in over if key not in stay])
        except JournalError as error:
            # They stay this kernel's: who asks for them next finds them so, and after its end their own kernel does.
            log.warning("agents that went back can't be given back now: %s", error)

    async def give_back_rested(self) -> None:
        """Give back what this kernel has borrowed and finished by itself."""
        rested = [t.key for t in self._core.threads.values() if t.borrowed and not self._wanted[t.key]]
        await self.let_go(rested)

    async def _give_back(self, key: AgentKey, *, refused: bool) -> None:
        thread = self._core.threads.get(key)
        lived, _ = await self._core.store.handover_answer(self._core.kernel, key)
        if thread is None or thread.fenced:
            self._places.pop(key, None)
            return
        async with thread.operation:
            if goes_back(thread):
                return  # it is tried again, and given back then
            if refused and lived and thread.state not in FINAL_STATES:
                await self._processes.set_state(thread, "paused", waiting_for=REFUSED)
            if not thread.borrowed:
                self._places.pop(key, None)
                return
            place = self._places.pop(key, Place())
            await self._core.store.give_back_agent(key, self._core.kernel, place.lender)
            await self._drop(thread, "the kernel that has its files")
            self._ownership.elsewhere.pop(thread.id, None)
        if place.beside is not None and place.beside not in self._ownership.elsewhere.values():
            self.reach.locks.release(place.beside)

    # -- to give them ---------------------------------------------------------------------------------------------

    async def give(self) -> None:
        """Hand over the agents of this kernel that others want. Each is looked at again until it is done."""
        try:
            wanted = await self._core.store.wanted_agents(self._core.kernel)
        except JournalError as error:
            log.warning("what other kernels want can't be looked up now: %s", error)
            return
        fresh = [one for one in wanted if one.agent not in self._giving]
        self._giving.update(one.agent for one in fresh)
        await asyncio.gather(*(self._give_one(one) for one in fresh))

    async def _give_one(self, wanted: Wanted) -> None:
        try:
            await self._hand_over(wanted)
        except (JournalError, SyscallError, Problem, OSError) as error:
            log.warning("an agent can't be handed over now: %s", error)
        finally:
            self._giving.discard(wanted.agent)

    async def _hand_over(self, wanted: Wanted) -> None:
        store, me, key = self._core.store, self._core.kernel, wanted.agent
        thread = self._core.threads.get(key)
        if thread is None:
            record = await store.agent_by_key(key)
            if record is not None and record.state in FINAL_STATES and key not in self._ownership.adopting:
                await store.hand_over(key, me, wanted.asker, lived=False)
            return
        if thread.borrowed or self._wanted[key]:
            why = f"`{thread.id}` goes back together with others under another kernel; look again when that is done"
            await store.refuse_handover(key, wanted.asker, why)
            return
        async with thread.operation:
            if self._core.threads.get(key) is not thread:
                return
            lived = thread.program is not None
            await self._processes.end_program(thread)
            try:
                await self._beginning.end_calls(thread)
            except Problem as problem:
                await self._keep(thread, lived=lived)
                await store.refuse_handover(key, wanted.asker, problem.message)
                return
            await self._core.failpoints.reach("handover:before", thread.id)
            # INVARIANT: nothing is begun between here and the commit that makes the other kernel the owner.
            thread.fenced = True
            given = False
            try:
                given = await store.hand_over(key, me, wanted.asker, lived=lived)
            finally:
                thread.fenced = given
            if given:
                await self._drop(thread, "the kernel that rolls it back together with others")
            else:
                await self._keep(thread, lived=lived)

    async def _keep(self, thread: Thread, *, lived: bool) -> None:
        if lived and not goes_back(thread):
            await self._processes.set_state(thread, "paused", waiting_for=REFUSED)

    async def _drop(self, thread: Thread, holder: str) -> None:
        """Know an agent no longer: it is another kernel's."""
        core, key = self._core, thread.key
        thread.fenced = True
        thread.generation += 1  # who waits to start it again comes too late
        core.threads.pop(key, None)
        core.journal.forget(key)
        core.pools.members.pop(key, None)
        if self.timers is not None:
            self.timers.set("wake", key, None)
            self.timers.set("fire", key, None)
        self._processes.turns.ended(thread)
        if thread.state not in FINAL_STATES:
            thread.state, thread.waiting_for, thread.asleep = "paused", holder, False
        await thread.announce()
