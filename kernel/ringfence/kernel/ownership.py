"""Takes agents over: builds the live thread of an agent from what the database knows."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringfence.kernel.backends import Backends
from ringfence.kernel.budgets import Budgets, limits_of
from ringfence.kernel.config import Layout
from ringfence.kernel.core import Core
from ringfence.kernel.demands import demanded, limits_in
from ringfence.kernel.environment import AgentEnvironment, SharedState
from ringfence.kernel.homes import Homes
from ringfence.kernel.journal.segments import Archive
from ringfence.kernel.journal.types import AgentKey, AgentRecord, JournalError
from ringfence.kernel.launch import layer_of
from ringfence.kernel.mounts import resolve
from ringfence.kernel.nursery import Nurseries
from ringfence.kernel.outreach_mcp_boxes import Servers, servers_with
from ringfence.kernel.reading import read_past
from ringfence.kernel.recovery import settle_unfinished
from ringfence.kernel.replay import Lineage
from ringfence.kernel.resources import Resources
from ringfence.kernel.resting import belong
from ringfence.kernel.rights import Rights
from ringfence.kernel.shelves import AgentArtifacts, AgentMemory
from ringfence.kernel.thread import Thread
from ringfence.policy.keeping import PointsKept
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.manifest_types import Manifest, SandboxSpec
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.workspace import Workspace

log = logging.getLogger(__name__)


async def nothing_waits(_thread: Thread) -> None:
    """Where nobody takes up parked calls."""


@dataclass(slots=True, kw_only=True)
class Ownership:
    """Builds and rebuilds threads.

    Attributes:
        elsewhere: data directories of other kernels, by agents whose files this one borrows.
    """

    core: Core
    layout: Layout
    resources: Resources
    backends: Backends
    homes: Homes | None = None
    revive: Callable[[Thread], Awaitable[None]] = nothing_waits
    nurseries: Nurseries = field(init=False)
    servers: Servers = field(init=False)
    elsewhere: dict[str, Layout] = field(default_factory=dict[str, Layout])
    rates: dict[AgentKey, Budgets] = field(default_factory=dict[AgentKey, Budgets])
    adopting: dict[AgentKey, asyncio.Task[Thread]] = field(
        default_factory=dict[AgentKey, "asyncio.Task[Thread]"]
    )

    def __post_init__(self) -> None:
        """Make what follows from the other parts."""
        self.core.adopt = self.adopt
        self.core.store.archive = Archive(lambda: self.layout.archive(self.resources.file.retention.archive))
        self.servers = servers_with(self.core, self.layout, self.backends, lambda: self.resources)
        self.nurseries = Nurseries(core=self.core, layout=self.layout, resources=lambda: self.resources)

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
        self.nurseries.place(record.id)
        homes = None if record.id in self.elsewhere else self.homes
        if homes is not None:
            await homes.settle(record)
        manifest = parsed(record)
        above = await self._above(record.key)
        rights = await self._rights(record, manifest)
        branches = await self.core.store.branches(record.key)
        lineage = Lineage.of(record.branch, branches)
        before_run = next(b.cut_step for b in branches if b.branch == lineage.root)
        counts = await self.core.store.counts(record.key, before_run)
        overrides = limits_of(await self.core.store.budgets(record.key))
        limits = (manifest.budgets, self.resources.file.ceilings.budgets, overrides)
        metered = any("bytes" in one.total for one in limits) or self.core.pools.meters
        used, held = await self.core.store.amounts(record.key, before_run, every=metered)
        spent = {"calls": counts.get("calls", 0), "destructive": counts.get("destructive", 0), **used}
        for total, amount in (await self.core.store.reserved_by_children(record.key, before_run)).items():
            spent[total] = spent.get(total, 0) + amount
        budgets = Budgets(
            record.id,
            manifest.budgets,
            self.resources.file.ceilings.budgets,
            spent,
            held=held,
            overrides=overrides,
            above=functools.partial(self._budgets_above, above) if above else tuple,
        )
        await self._remember(record, budgets)
        for one in above:
            await self._remember(one)
        thread = Thread(
            record=record,
            manifest=manifest,
            rights=rights,
            budgets=budgets,
            environment=self._environment(record, manifest, above, rights=rights),
            lineage=lineage,
            next_step=int(counts.get("max_step", 0)) + 1,
            reload=self._reload,
        )
        labels = (manifest.labels, *(parsed(one).labels for one in above))
        thread.pools = await self.core.pools.adopt(record.key, labels)
        belong(thread, thread.environment)
        thread.borrowed = record.id in self.elsewhere
        thread.steps = int(counts.get("max_step", 0))
        thread.on_rest = self.core.on_rest
        if manifest.schedule is not None:
            thread.schedule = await self.core.store.schedule(record.key)
        await self.core.journal.adopt(record.key)
        await self.nurseries.sweep(record.key)
        await asyncio.to_thread(thread.environment.workspace.sweep)
        await self.load_replay(thread)
        unknown = await settle_unfinished(self.core, thread)
        if homes is not None:
            await homes.catch_up(thread.key, thread.id)
        if unknown and thread.state not in ("killed", "failed"):
            thread.state = "unknown"
            thread.waiting_for = f"the outcome of step {unknown[0]}"
            await self.core.store.set_agent(thread.key, state=thread.state, waiting_for=thread.waiting_for)
        await self.revive(thread)
        thread.pools = self.core.pools.member(
            record.key
        )  # the kernel file may have been read again meanwhile
        # INVARIANT: nobody sees a thread before the calls that a dead kernel left are settled, or fly again.
        self.core.threads[record.key] = thread
        return thread

    def points_kept(self, record: AgentRecord) -> PointsKept | None:
        """Which rollback points of an agent the kernel file keeps; None: it doesn't say."""
        return self.resources.file.retention.of(record.labels).points

    async def load_replay(self, thread: Thread) -> None:
        """Read again what the lineage of the thread's branch has recorded.

        Calls may run and end meanwhile. What the thread knew stays in force until all is read.
        """
        async with thread.loading:
            thread.loaded = False
            thread.arrived = []
            try:
                await read_past(self.core, thread, thread.arrived)
                thread.loaded = True
            finally:
                thread.arrived = None

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

    async def _above(self, key: AgentKey) -> list[AgentRecord]:
        """The parent of an agent, the parent's parent and so on."""
        keys = await self.core.store.parents(key)
        found = [await self.core.store.agent_by_key(parent) for parent in keys]
        above = [record for record in found if record is not None]
        if len(above) != len(keys):
            # INVARIANT: a child is never decided without its parent.
            raise JournalError(f"an agent above {key} is gone from the database; restore it from a copy")
        return above

    async def _rights(self, record: AgentRecord, manifest: Manifest) -> Rights:
        # INVARIANT: the epoch is read before everything that it stands for. It moves with every parent's.
        fresh = await self.core.store.agent_by_key(record.key)
        epoch = record.epoch if fresh is None else fresh.epoch
        parent: Rights | None = None
        for one in reversed(await self._above(record.key)):
            parent = await self._rights_of(one, parsed(one), one.epoch, parent)
        return await self._rights_of(record, manifest, epoch, parent)

    async def _rights_of(
        self, record: AgentRecord, manifest: Manifest, epoch: int, parent: Rights | None
    ) -> Rights:
        return Rights(
            agent=record.id,
            manifest=manifest,
            kernel_file=self.resources.file,
            grants=await self.core.store.grants(record.key, active=False),
            epoch=epoch,
            parent=parent,
        )

    def _budgets_above(self, above: Sequence[AgentRecord]) -> list[Budgets]:
        """Budgets of all above an agent: its calls take their turns from their rates too."""
        found: list[Budgets] = []
        for one in above:
            thread = self.core.threads.get(one.key)
            if thread is None and one.key not in self.rates:
                self.rates[one.key] = self._rates_of(one)
            found.append(self.rates[one.key] if thread is None else thread.budgets)
        return found

    def _rates_of(self, record: AgentRecord) -> Budgets:
        """Budgets of an agent that has ended, or whose kernel has: what it was given counts all the same."""
        return Budgets(record.id, parsed(record).budgets, self.resources.file.ceilings.budgets, {})

    async def _remember(self, record: AgentRecord, budgets: Budgets | None = None) -> None:
        """Have rates count what the journal says that an agent and all below it did under an earlier kernel.

        Args:
            record: the agent.
            budgets: its own, as it is adopted; None: one above such an agent, which may be nobody's.
        """
        if budgets is None and (record.key in self.core.threads or record.key in self.rates):
            return
        chosen = self._rates_of(record) if budgets is None else budgets
        if chosen.spans_us:
            below = [kin.child for kin in await self.core.store.descendants(record.key)]
            chosen.remember(await self.core.store.turns(record.key, below, chosen.spans_us))
        if budgets is None:
            self.rates.setdefault(record.key, chosen)

    async def _reload(self, thread: Thread) -> Rights:
        try:
            return await self._rights(thread.record, thread.manifest)
        except KeyError:
            fresh = await self.core.store.agent_by_key(thread.key)
            # INVARIANT: whose role is gone may nothing; without the role's denies its allows would be wider than before.
            return Rights(
                agent=thread.id,
                manifest=replace(thread.manifest, roles=()),
                kernel_file=self.resources.file,
                grants=(),
                epoch=thread.rights.epoch if fresh is None else fresh.epoch,
            )

    def mounts(self, box: SandboxSpec) -> dict[Path, Path]:
        """What a sandbox is to see of the host, as the kernel file in force allows it.

        Raises:
            MountRefused: it doesn't.
        """
        file = self.resources.path
        closed = [self.layout.data, self.layout.run, *([file] if file is not None else [])]
        return resolve(box.mounts, self.resources.file.sandbox.mounts, closed)

    def layout_of(self, agent: str) -> Layout:
        """The data directory that has an agent's files."""
        return self.elsewhere.get(agent, self.layout)

    def own_points(self, agent: str) -> SnapshotStore:
        """The rollback points of an agent where its files are."""
        return SnapshotStore(self.layout_of(agent).points(agent))

    def points_of(self, agent: str, workspace: Workspace, layout: Layout) -> SnapshotStore:
        """The rollback points of an agent, in the shared store too where there is one."""
        if self.homes is None or agent in self.elsewhere:
            return SnapshotStore(layout.points(agent))
        return self.homes.snapshots(agent, workspace, layout.points(agent))

    async def glance(self, record: AgentRecord, layout: Layout | None) -> Thread:
        """A thread to plan with, of an agent that is another kernel's: nothing that it left is settled, and it may do nothing.

        Args:
            record: the agent.
            layout: the directory that has its files; None: this kernel's.

        Raises:
            Unavailable: the database is away.
        """
        manifest = parsed(record)
        above = await self._above(record.key)
        rights = await self._rights(record, manifest)
        lineage = Lineage.of(record.branch, await self.core.store.branches(record.key))
        counts = await self.core.store.counts(record.key)
        thread = Thread(
            record=record,
            manifest=manifest,
            rights=rights,
            budgets=self._rates_of(record),
            environment=self._environment(record, manifest, above, rights=rights, layout=layout),
            lineage=lineage,
            next_step=int(counts.get("max_step", 0)) + 1,
            reload=self._reload,
        )
        belong(thread, thread.environment)
        thread.fenced = True
        return thread

    def _environment(
        self,
        record: AgentRecord,
        manifest: Manifest,
        above: Sequence[AgentRecord],
        *,
        rights: Rights,
        workspace: Workspace | None = None,
        layout: Layout | None = None,
    ) -> AgentEnvironment:
        layout = layout or self.layout_of(record.id)
        home = layout.agent(record.id)
        uid = record.uid if os.geteuid() == 0 else None
        if workspace is None:
            workspace = Workspace(home / "live", uid=uid)
        box = manifest.sandbox
        boxes = [box, *(parsed(one).sandbox for one in above)]
        backend = self.backends.name_for(boxes)
        environment = AgentEnvironment(
            agent=record.id,
            name=record.name,
            mailbox=self.core.mailboxes.of(record.key),
            peers=self.core.mailboxes,
            memory=AgentMemory(self.core.store, record.key),
            artifacts=AgentArtifacts(
                self.core.store, self.core.blobs, record.key, lambda: self._branch(record.key)
            ),
            nursery=self.nurseries.of(record.key),
            workspace=workspace,
            snapshots=self.points_of(record.id, workspace, layout),
            sandbox=self.backends.named(backend),
            limits=limits_in(boxes),
            command_env={**self.backends.environment(backend), **manifest.run.env},
            readonly=self.backends.shown(backend),
            mounts=lambda: self.mounts(box),
            require=demanded(boxes, self.resources.file.sandbox),
            uid=uid,
            scratch_root=home / "scratch",
            direct=layer_of(manifest, home),
            state=SharedState(self.core.store),
            http=self.resources.http,
            sql=self.resources.sql,
            llm=self.resources.llm,
            objects=self.resources.objects,
            servers=self.servers.of(record.id),
            cards=self.servers.cards,
            rights=rights,
        )
        environment.remake = functools.partial(self._environment, record, manifest, above)
        return environment


@functools.lru_cache(maxsize=512)
def manifest_of(text: str, source: str) -> Manifest:
    """Read a manifest, of a fleet that has the same only once: the parser leaves several kilobytes of cycles each time.

    Raises:
        ManifestError: as `parse_manifest`.
    """
    return parse_manifest(text, source)


def parsed(record: AgentRecord) -> Manifest:
    """The manifest of an agent, read once."""
    return manifest_of(record.manifest, record.source)
