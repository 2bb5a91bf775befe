"""The running kernel as operators' requests see it, and what they all need."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from ringfence.kernel.compaction import Compaction
from ringfence.kernel.config import Layout, Settings
from ringfence.kernel.core import Core
from ringfence.kernel.homes import own_home
from ringfence.kernel.journal.anchor import Anchor
from ringfence.kernel.journal.types import AgentRecord, Ambiguous
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.problems import Problem, conflict, files_gone, no_such_agent, not_here, was_removed
from ringfence.kernel.processes import Processes
from ringfence.kernel.retention import Retention
from ringfence.kernel.rollback import Rollback
from ringfence.kernel.scheduler import Scheduler
from ringfence.kernel.secrets import Secrets
from ringfence.kernel.telemetry import Telemetry
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.sandbox.types import Wall


class WaysOut(Protocol):
    """Webhooks, callback and A2A, as operations see them."""

    async def apply(self) -> None:
        """Take over what the kernel file says now."""
        ...

    def callback(self) -> dict[str, Any] | None:
        """Where decisions are heard; None: nowhere."""
        ...

    def a2a(self) -> dict[str, Any] | None:
        """Where clients are heard; None: nowhere."""
        ...

    async def webhooks(self) -> list[dict[str, Any]]:
        """How receivers do."""
        ...


@dataclass(slots=True, kw_only=True)
class Kernel:
    """The composition root's result."""

    settings: Settings
    layout: Layout
    core: Core
    ownership: Ownership
    processes: Processes
    rollback: Rollback
    scheduler: Scheduler
    retention: Retention
    secrets: Secrets
    anchor: Anchor
    database_version: str
    embed: Callable[[], Awaitable[Mapping[str, str]]]
    compaction: Compaction = field(init=False)
    embedded_dsn: str | None = None
    listen: str = ""
    stop: Callable[[float], None] = lambda _drain_s: None
    probed: dict[str, Sequence[Wall]] = field(default_factory=dict[str, "Sequence[Wall]"])
    telemetry: Telemetry = field(default_factory=Telemetry)
    outreach: WaysOut | None = None
    reloading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        """Make what follows from the other parts."""
        self.compaction = Compaction(self.core)
        self.rollback.handover.timers = self.scheduler.timers

    def person_of(self, account: str) -> str:
        """Who works with an operators' account, as the kernel file declares people; the account itself where it says nothing."""
        callback = self.ownership.resources.file.callback
        return account if callback is None else callback.person_of(account)

    async def walls(self, backend: str) -> Sequence[Wall]:
        """A backend's walls on this host, tried once they stand: trying them starts processes.

        What is missing is looked for anew each time: an engine may have been started meanwhile.
        """
        found = self.probed.get(backend)
        if found is None or any(wall.required and not wall.ok for wall in found):
            found = await asyncio.to_thread(self.ownership.backends.named(backend).walls)
            self.probed[backend] = found
        return found

    async def record(self, name: str, *, removed: bool = False) -> AgentRecord:
        """The agent of this id or name; with `removed` also one that was removed, by its id.

        Raises:
            Problem: there is none, or several have the name.
        """
        try:
            record = await self.core.store.agent(name)
        except Ambiguous as error:
            ids = ", ".join(error.ids)
            text = f"several agents are named `{name}`: {ids}; give an id"
            raise Problem(text, exit_code=2, reason="Ambiguous") from error
        if record is None:
            raise no_such_agent(name)
        if (
            not removed
            and record.key not in self.core.threads
            and await self.core.store.removed_at(record.key)
        ):
            raise was_removed(record.id)
        return record

    async def thread(self, name: str) -> Thread:
        """The live side of an agent. One that ended is taken over again, so that it can be rolled back or started.

        Raises:
            Problem: there is none, or another kernel owns it.
        """
        record = await self.record(name)
        thread = self.core.threads.get(record.key)
        if thread is not None:
            return thread
        home = self.layout.agent(record.id)
        kept = await self.core.store.home_of(record.key)
        shared = self.ownership.homes is not None and record.state in FINAL_STATES
        if kept and kept != own_home(self.layout) and not shared:
            # One that lives is brought here by whoever looks for what dead kernels left, who also starts it.
            raise not_here(record.id)
        if not (home / "live").is_dir() and not (kept and shared):
            # Owned or not, it can't be run or rolled back without its files.
            here = await self.had_files_here(record)
            raise files_gone(record.id, home) if here else not_here(record.id)
        if not await self.core.store.take_agent(record.key, self.core.kernel):
            raise not_here(record.id)
        return await self.ownership.adopt(record)

    async def with_files(self, name: str) -> Thread:
        """The live side of an agent whose workspace is to be read or changed.

        Raises:
            Problem: as for `thread`, or its directory was removed.
        """
        thread = await self.thread(name)
        if await asyncio.to_thread(thread.environment.workspace.tree.gone):
            raise files_gone(thread.id, self.layout.agent(thread.id))
        return thread

    async def with_whole_past(self, name: str) -> Thread:
        """The live side of an agent whose journal is to be copied.

        Raises:
            Problem: as for `thread`, or a part of its journal was given up.
        """
        thread = await self.thread(name)
        _, _, pruned = await self.core.store.archived_behind(thread.key)
        if pruned:
            text = f"archived steps of `{thread.id}` up to {pruned} were pruned, so that its past can't be copied whole"
            raise conflict(text)
        return thread

    async def had_files_here(self, record: AgentRecord) -> bool:
        """Whether an agent's last kernel kept it in this data directory."""
        kernels = {known.key: known for known in await self.core.store.kernels()}
        own, owner = kernels[self.core.kernel], kernels.get(record.owner or self.core.kernel)
        return owner is not None and (owner.host, owner.data_dir) == (own.host, own.data_dir)


def manifest_version(text: str) -> str:
    """The version of a manifest: what its text hashes to."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rfc3339(moment: datetime | None) -> str | None:
    """A time as documents show it."""
    return (
        None
        if moment is None
        else moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    )


def from_us(micros: int) -> str:
    """A journal time as documents show it."""
    return rfc3339(datetime.fromtimestamp(micros / 1_000_000, UTC)) or ""


def settled(record_state: str) -> bool:
    """Whether an agent waits for nobody but a person, or for nothing at all."""
    return record_state in FINAL_STATES or record_state in ("unknown", "parked", "paused")


def agent_row(kernel: Kernel, record: AgentRecord) -> dict[str, Any]:
    """One agent as `ps` shows it."""
    thread = kernel.core.threads.get(record.key)
    age = (record.ended_at or datetime.now(UTC)) - record.created_at
    return {
        "id": record.id,
        "name": record.name,
        "state": thread.state if thread is not None else record.state,
        "process": kernel.processes.process_state(thread) if thread is not None else "none",
        "steps": thread.steps if thread is not None else None,
        "tokens": int(thread.budgets.spent["tokens"]) if thread is not None else None,
        "cost_usd": round(thread.budgets.spent["usd"], 6) if thread is not None else None,
        "age_ms": int(age.total_seconds() * 1000),
        "waiting_for": (thread.waiting_for if thread is not None else record.waiting_for) or None,
        "restart": _retry_of(thread),
    }


def _retry_of(thread: Thread | None) -> dict[str, Any] | None:
    """The start again that an agent waits for; None: it waits for none."""
    if thread is None or thread.retry is None or thread.waiting_for != thread.retry.text:
        return None
    return thread.retry.document()
