"""Takes agents over: builds the live thread of an agent from what the database knows."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from ringfence.kernel.budgets import Budgets, limits_of
from ringfence.kernel.config import Layout
from ringfence.kernel.core import Core
from ringfence.kernel.environment import (
    AgentEnvironment,
    SharedState,
    interpreter_directories,
    interpreter_environment,
)
from ringfence.kernel.journal.types import AgentKey, AgentRecord, Damaged, StoredRow
from ringfence.kernel.recovery import settle_unfinished
from ringfence.kernel.replay import Effects, Lineage, Replay
from ringfence.kernel.resources import Resources
from ringfence.kernel.rights import Rights
from ringfence.kernel.shelves import AgentArtifacts, AgentMemory
from ringfence.kernel.thread import Thread
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.manifest_types import Manifest
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.types import Limits, Sandbox
from ringfence.sandbox.workspace import Workspace

log = logging.getLogger(__name__)


async def nothing_waits(_thread: Thread) -> None:
    """Where nobody takes up parked calls."""


@dataclass(slots=True, kw_only=True)
class Ownership:
    """Builds and rebuilds threads."""

    core: Core
    layout: Layout
    resources: Resources
    sandbox: Sandbox
    revive: Callable[[Thread], Awaitable[None]] = nothing_waits
    adopting: dict[AgentKey, asyncio.Task[Thread]] = field(
        default_factory=dict[AgentKey, "asyncio.Task[Thread]"]
    )

    async def adopt(self, record: AgentRecord) -> Thread:
        """Build the thread of an agent this kernel owns and settle what a dead kernel left of it.

        An operator may ask for an agent while it is being taken over: both get the same thread.
        """
        thread = self.core.threads.get(record.key)
        if thread is not None and record.key not in self.adopting:
            return thread
        work = self.adopting.get(record.key)
        if work is None:
            work = asyncio.create_task(self._adopt(record))
            self.adopting[record.key] = work
            work.add_done_callback(lambda _: self.adopting.pop(record.key, None))
        return await asyncio.shield(work)

    async def _adopt(self, record: AgentRecord) -> Thread:
        manifest = parse_manifest(record.manifest, record.source)
        rights = await self._rights(record, manifest)
        branches = await self.core.store.branches(record.key)
        lineage = Lineage.of(record.branch, branches)
        before_run = next(b.cut_step for b in branches if b.branch == lineage.root)
        counts = await self.core.store.counts(record.key, before_run)
        used, held = await self.core.store.amounts(record.key, before_run)
        thread = Thread(
            record=record,
            manifest=manifest,
            rights=rights,
            budgets=Budgets(
                record.id,
                manifest.budgets,
                self.resources.file.ceilings.budgets,
                {"calls": counts.get("calls", 0), "destructive": counts.get("destructive", 0), **used},
                held=held,
                overrides=limits_of(await self.core.store.budgets(record.key)),
            ),
            environment=self._environment(record, manifest, rights),
            lineage=lineage,
            next_step=int(counts.get("max_step", 0)) + 1,
            reload=self._reload,
        )
        thread.steps = int(counts.get("max_step", 0))
        thread.on_rest = self.core.on_rest
        if manifest.schedule is not None:
            thread.schedule = await self.core.store.schedule(record.key)
        await self.core.journal.adopt(record.key)
        await asyncio.to_thread(thread.environment.workspace.sweep)
        await self.load_replay(thread)
        unknown = await settle_unfinished(self.core, thread)
        if unknown and thread.state not in ("killed", "failed"):
            thread.state = "unknown"
            thread.waiting_for = f"the outcome of step {unknown[0]}"
            await self.core.store.set_agent(thread.key, state=thread.state, waiting_for=thread.waiting_for)
        await self.revive(thread)
        # INVARIANT: nobody sees a thread before the calls that a dead kernel left are settled, or fly again.
        self.core.threads[record.key] = thread
        return thread

    async def load_replay(self, thread: Thread) -> None:
        """Read again what the lineage of the thread's branch has recorded.

        Calls may run and end meanwhile. What the thread knew stays in force until all is read.
        """
        async with thread.loading:
            thread.loaded = False
            thread.arrived = []
            try:
                await self._read_past(thread, thread.arrived)
                thread.loaded = True
            finally:
                thread.arrived = None

    async def _read_past(self, thread: Thread, arrived: list[StoredRow]) -> None:
        store, lineage = self.core.store, thread.lineage
        kept = thread.replay.unfinished.items()
        replay = Replay(unfinished={p: u for p, u in kept if lineage.holds(u.intent.branch, u.intent.step)})
        parts = lineage.parts
        thread.unreadable = ""
        try:
            replay.checkpoint = await store.latest_checkpoint(thread.key, parts)
        except Damaged as error:
            # Never taken for none: that would do all of it again.
            older = f"ringfence rollback {thread.id} --to {error.step - 1} --start"
            thread.unreadable = f"{error}; go on from before it: {older}"
        after = 0 if replay.checkpoint is None else replay.checkpoint.step
        async for row in store.lineage_outcomes(thread.key, parts, after):
            replay.add(row)
        effects = Effects()
        async for row in store.effect_outcomes(thread.key):
            effects.add(row)
        purged = frozenset(await store.purged_grants(thread.key))
        # INVARIANT: from here to the end nothing suspends, so no call ends between what was read and what is taken over.
        for row in arrived:
            effects.add(row)
            if lineage.holds(row.branch, row.step):
                replay.add(row)
        # Calls that have no outcome yet hold their ids too: those in flight, and those that a dead kernel left.
        consumed = effects.consumed(lineage)
        consumed.update(f.effect_id for f in thread.flights.values() if f.effect_id)
        consumed.update(u.intent.effect_id for u in replay.unfinished.values() if u.intent.effect_id)
        thread.effects, thread.consumed_effects = effects.known(), consumed
        thread.purged = purged
        thread.replay = replay

    async def switch_branch(self, thread: Thread, branch: int) -> None:
        """Continue on another branch."""
        thread.lineage = Lineage.of(branch, await self.core.store.branches(thread.key))
        thread.branch = branch
        if thread.schedule is not None:
            # Whoever rolls back a run that is over goes on with it.
            thread.schedule = await self.core.store.schedule(thread.key)
        thread.loaded = False
        await self.load_replay(thread)

    def _branch(self, key: AgentKey) -> int:
        thread = self.core.threads.get(key)
        return 0 if thread is None else thread.branch

    # -- parts ----------------------------------------------------------------------------------------------------

    async def _rights(self, record: AgentRecord, manifest: Manifest) -> Rights:
        fresh = await self.core.store.agent_by_key(record.key)
        epoch = record.epoch if fresh is None else fresh.epoch
        grants = await self.core.store.grants(record.key, active=False)
        return Rights(
            agent=record.id, manifest=manifest, kernel_file=self.resources.file, grants=grants, epoch=epoch
        )

    async def _reload(self, thread: Thread) -> Rights:
        return await self._rights(thread.record, thread.manifest)

    def _environment(self, record: AgentRecord, manifest: Manifest, rights: Rights) -> AgentEnvironment:
        home = self.layout.agent(record.id)
        uid = record.uid if os.geteuid() == 0 else None
        box = manifest.sandbox
        return AgentEnvironment(
            agent=record.id,
            name=record.name,
            mailbox=self.core.mailboxes.of(record.key),
            peers=self.core.mailboxes,
            memory=AgentMemory(self.core.store, record.key),
            artifacts=AgentArtifacts(
                self.core.store, self.core.blobs, record.key, lambda: self._branch(record.key)
            ),
            workspace=Workspace(home / "live", uid=uid),
            snapshots=SnapshotStore(self.layout.points(record.id)),
            sandbox=self.sandbox,
            limits=Limits(
                memory_bytes=box.memory_bytes,
                pids=box.pids,
                cpu=box.cpu,
                disk_bytes=box.disk_bytes,
                timeout_s=box.timeout_s,
            ),
            command_env={
                **interpreter_environment(self.layout.interpreter),
                "HOME": "/tmp",  # noqa: S108 - inside the sandbox
                "LANG": "C.UTF-8",
                **manifest.run.env,
            },
            readonly=(
                self.layout.interpreter,
                *interpreter_directories(),
                *(Path(m.source) for m in box.mounts),
            ),
            uid=uid,
            scratch_root=home / "scratch",
            state=SharedState(self.core.store),
            http=self.resources.http,
            sql=self.resources.sql,
            llm=self.resources.llm,
            rights=rights,
        )
