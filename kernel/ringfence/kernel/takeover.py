"""Takes over agents that no living kernel owns, and follows policy epochs that other kernels move."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ringfence.kernel.homes import own_home
from ringfence.kernel.journal.store_approvals import CHANNEL_APPROVAL
from ringfence.kernel.journal.store_handovers import ASKED, CHANNEL_HANDOVER
from ringfence.kernel.journal.store_pools import CHANNEL_POOL
from ringfence.kernel.journal.types import AgentKey, AgentRecord, JournalError, OwnerMoved
from ringfence.kernel.problems import Problem, StoreAway, StoreLacks, lost_files
from ringfence.kernel.resting import fold
from ringfence.kernel.revocation import apply_epoch
from ringfence.kernel.thread import FINAL_STATES
from ringfence.policy.problems import ManifestError
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.sandbox.types import SandboxError
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls.errors import Fenced, JournalUnavailable, SyscallError

if TYPE_CHECKING:
    from ringfence.kernel.journal.store_notify import Listener
    from ringfence.kernel.operations.kernel import Kernel

log = logging.getLogger(__name__)

EPOCH_CHANNEL = "ringfence_epoch"
STARTED_STATES = frozenset({"pending", "running", "waiting"})
CLAIM_EVERY_S = 5.0


class Takeover:
    """The part of a kernel that looks at the database for agents and epochs."""

    def __init__(self, kernel: Kernel, fence: int) -> None:
        self._kernel = kernel
        self._fence = fence
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        kernel.ownership.nurseries.begin = self.take_up

    def take_up(self, record: AgentRecord) -> None:
        """Adopt an agent that this kernel owns from its birth, and start it."""
        self._spawn(self._continue(record))

    async def open(self) -> None:
        """Listen first, then take over what is there: nothing is missed in between."""
        self._listener = self._kernel.core.store.listen(
            [EPOCH_CHANNEL, CHANNEL_APPROVAL, CHANNEL_POOL, CHANNEL_HANDOVER], self._notified
        )
        await self._listener.ready()
        await self.claim()
        await self._give_up_lost()
        self._spawn(self._claim_again())

    async def close(self) -> None:
        """Stop looking."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._kernel.rollback.close()
        if self._listener is not None:
            await self._listener.stop()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- agents ---------------------------------------------------------------------------------------------------

    async def _claim_again(self) -> None:
        while True:
            await asyncio.sleep(CLAIM_EVERY_S)
            await self._look()
            await self._kernel.rollback.handover.give()

    async def _look(self) -> None:
        try:
            await self.claim()
        except OwnerMoved:
            log.warning("this kernel's lease has run out; it claims nothing")
        except (JournalError, OSError) as error:
            # INVARIANT: it is looked again: an agent of a kernel that dies has nobody else.
            log.warning("looking for agents failed: %s", error)

    async def claim(self) -> None:
        """Take over agents whose kernel is gone, settle their calls, and start again what was running.

        Only those whose files are here: the others wait for a kernel that has them.
        """
        core = self._kernel.core
        here = await self._here()
        here += await asyncio.to_thread(self._kernel.ownership.nurseries.here)
        for record in await core.store.claim_agents(core.kernel, self._fence, here):
            self._spawn(self._continue(record))
        await self._kernel.ownership.nurseries.sweep_late()
        trees = [(t, t.workspace.tree) for t in core.threads.values() if t.state not in FINAL_STATES]
        for thread in await asyncio.to_thread(lambda: [one for one, tree in trees if tree.gone()]):
            self._spawn(self._kernel.processes.lose(thread))
        for thread in core.threads.values():
            fold(thread)

    async def _here(self) -> list[str]:
        """Agents whose newest files are in this data directory, or can be brought from the shared store."""
        kernel = self._kernel
        local = set(await asyncio.to_thread(kernel.layout.agents_here))
        homes = await kernel.core.store.homes()
        shared = kernel.ownership.homes is not None
        own = own_home(kernel.layout)
        stale = {agent for agent, home in homes.items() if home != own}
        return sorted(local | homes.keys() if shared else local - stale)

    async def _give_up_lost(self) -> None:
        """Agents of an earlier kernel of this directory whose files were removed: no kernel can go on with them."""
        kernel = self._kernel
        here = await asyncio.to_thread(kernel.layout.agents_here)
        here += await kernel.core.store.homes()
        borrowed = await kernel.core.store.handed_agents()
        for record in await kernel.core.store.agents():
            if record.key in borrowed:
                continue  # an earlier kernel had it from another directory, which has its files
            owned = record.key in kernel.core.threads or record.owner == kernel.core.kernel
            if record.id not in here and not owned and await kernel.had_files_here(record):
                home = kernel.layout.agent(record.id)
                await kernel.core.store.set_agent(
                    record.key, state="failed", error=lost_files(home), ended_at=datetime.now(UTC)
                )

    async def _continue(self, record: AgentRecord) -> None:
        try:
            await self._take_over(record)
        except (JournalError, JournalUnavailable, OSError) as error:
            # INVARIANT: it is this kernel's already, so nobody else looks for it. Descriptors and disks may come free.
            log.warning("%s can't be taken over now: %s; trying again", record.id, error)
            await asyncio.sleep(1.0)
            self._spawn(self._continue(record))

    async def _take_over(self, record: AgentRecord) -> None:
        kernel = self._kernel
        try:
            thread = await kernel.ownership.adopt(record)
            await kernel.scheduler.tell_again(thread)
            rolled = await kernel.rollback.take_up(thread)
            async with thread.operation:
                # An operator may have been faster. What its calls wait for says nothing about its process.
                shown = thread.shown is not None and thread.shown == (thread.state, thread.waiting_for)
                lived = shown or thread.state in STARTED_STATES
                if not rolled and thread.program is None and lived and not thread.asleep:
                    try:
                        await kernel.processes.start(thread)
                    except SandboxError as error:
                        log.warning("%s can't be started again: %s", record.id, error)
                        await kernel.processes.not_started(thread, str(error))
                await kernel.processes.boundaries.drop(thread)
            kernel.scheduler.adopt(thread)
        except JournalUnavailable:
            raise
        except StoreAway as error:
            raise JournalUnavailable(str(error)) from error
        except StoreLacks as error:
            log.warning("%s can't be taken over: %s", record.id, error)
            await self._give_up(record, str(error))
            await kernel.core.store.release_agent(record.key, kernel.core.kernel)
        except Fenced as error:
            if await kernel.core.owns(record.key):
                raise JournalUnavailable(
                    error.message
                ) from error  # a lease that was overdue, so it is tried again
            log.warning("%s is another kernel's now: %s", record.id, error.message)
        except (ManifestError, KeyError) as error:
            log.exception("%s can't be taken over", record.id)
            await self._give_up(record, f"its manifest can't be used: {error}")
        except (Problem, SyscallError, SnapshotError, WorkspaceError) as error:
            log.exception("%s can't be taken over", record.id)
            await self._give_up(record, f"it can't be taken over: {error}")

    async def _give_up(self, record: AgentRecord, why: str) -> None:
        """Leave the agent to a person, with the reason."""
        thread = self._kernel.core.threads.get(record.key)
        if thread is None:
            await self._kernel.core.store.set_agent(record.key, state="failed", error=why)
        else:
            await self._kernel.processes.set_state(thread, "failed", error=why)

    # -- epochs ---------------------------------------------------------------------------------------------------

    def _notified(self, channel: str, payload: str) -> None:
        if channel == CHANNEL_APPROVAL:
            # Empty after a reconnect: every parked call looks for itself.
            self._kernel.core.approvals.notice(int(json.loads(payload)["agent"]) if payload else None)
            return
        if channel == CHANNEL_HANDOVER:
            # One that is wanted may not be adopted yet, and one that was given back not be claimed: both are looked at again.
            self._spawn(self._kernel.rollback.handover.give() if payload == ASKED else self._look())
            return
        if channel == CHANNEL_POOL:
            self._kernel.core.pools.others.notice(payload)
            return
        if payload:
            facts = json.loads(payload)
            self._spawn(self._follow(AgentKey(int(facts["agent"])), int(facts["epoch"])))
            return
        # After a reconnect nobody knows what was announced: look at every agent.
        for key in list(self._kernel.core.threads):
            self._spawn(self._follow(key, None))

    async def _follow(self, key: AgentKey, epoch: int | None) -> None:
        core = self._kernel.core
        thread = core.threads.get(key)
        if thread is None:
            return
        try:
            if epoch is None:
                record = await core.store.agent_by_key(key)
                epoch = 0 if record is None else record.epoch
            if thread.epoch < epoch or thread.record.acked_epoch < epoch:
                await apply_epoch(core, thread, epoch)
        except JournalError as error:
            log.warning("policy epoch %s of %s can't be followed now: %s", epoch, thread.id, error)
