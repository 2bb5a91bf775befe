"""Retention: what the kernel file lets go, by itself every hour and when an operator says so.

All of it is done in small parts, each a short transaction or one file, so that no call waits for it; a kernel that dies in
the middle has done some of it, and the next look does the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ringfence.kernel.artifact_sweep import ArtifactSweep, Swept
from ringfence.kernel.compaction import Compacted
from ringfence.kernel.journal.blobs import BlobError
from ringfence.kernel.journal.segments import ArchiveError
from ringfence.kernel.journal.types import AgentKey, AgentRecord, JournalError
from ringfence.kernel.operations import removal
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.problems import Problem, bad_usage
from ringfence.kernel.thread import FINAL_STATES
from ringfence.policy.keeping import Keeping, RetentionPolicy
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.syscalls.errors import SyscallError

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 3600.0
"""How often a kernel looks what may go."""

BATCH: Final = 500
"""Messages that are forgotten, and agents that are removed, at a time."""

NEW_ROWS_LEAST: Final = 256
"""Rows of an agent that ended after which it is looked at again."""

KERNEL: Final = "the kernel file"

_ONE_AGENTS: Final = (Problem, SyscallError, SnapshotError, ArchiveError, OSError)
"""What stands in the way of one agent's, as files of it that can't be read, and of nobody else's."""


@dataclass(slots=True, kw_only=True)
class _Look:
    """One look over everything.

    Attributes:
        age_s: what the operator says in place of the file's `keep`; None: as the file says.
        known: where the chains of agents that ended stood when they were looked at; None: look at all.
        artifacts: who looks at their bytes, and knows what was named when it looked last.
    """

    kernel: Kernel
    dry: bool
    operator: str
    artifacts: ArtifactSweep
    age_s: float | None = None
    known: dict[AgentKey, int] | None = None
    agents: list[Compacted] = field(default_factory=list[Compacted])
    removed: list[str] = field(default_factory=list[str])
    skipped: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    messages: int = 0
    logs_bytes: int = 0
    swept: Swept = field(default_factory=Swept)

    def keeping(self, labels: Any) -> Keeping:
        found = self.kernel.ownership.resources.file.retention.of(dict(labels))
        if self.age_s is None:
            return found
        return replace(found, journal_s=self.age_s, messages_s=self.age_s, logs_s=self.age_s)

    def document(self) -> dict[str, Any]:
        return {
            "dry_run": self.dry,
            "archive": str(self.kernel.core.store.archive.root),
            "agents": [one.document() for one in self.agents if not one.nothing],
            "removed": self.removed,
            "messages": self.messages,
            "logs_bytes": self.logs_bytes,
            "artifacts": self.swept.artifacts,
            "artifact_bytes": self.swept.size_bytes,
            "skipped": self.skipped,
        }


async def prune(
    kernel: Kernel, name: str, *, older_than_ms: int | None, dry: bool, operator: str
) -> dict[str, Any]:
    """Archive and prune now, of one agent or of all, or say what would go.

    Raises:
        Problem: no such agent, or nothing says what may go.
    """
    age = None if older_than_ms is None else older_than_ms / 1000
    policy = kernel.ownership.resources.file.retention
    if age is None and policy == RetentionPolicy(archive=policy.archive, webhooks_s=policy.webhooks_s):
        raise bad_usage(
            "nothing says what may go: give `--older-than`, or declare `retention` in the kernel file"
        )
    look = _Look(kernel=kernel, dry=dry, operator=operator, artifacts=_sweep_of(kernel), age_s=age)
    if name:
        record = await kernel.record(name, removed=True)
        if await kernel.core.store.removed_at(record.key) is not None:
            await _removed(look, record.key, record.id, look.keeping(record.labels))
        else:
            await _agent(look, record, named=True)
    else:
        await _everything(look)
    done = look.document()
    if not dry:
        facts = {
            key: done[key] for key in ("removed", "messages", "logs_bytes", "artifacts", "artifact_bytes")
        }
        await kernel.core.operator_event(
            "operator.prune", name, operator=operator, agents=len(done["agents"]), **facts
        )
    return done


async def run(kernel: Kernel) -> None:
    """Look at everything, again and again, and do what the kernel file says."""
    known: dict[AgentKey, int] = {}
    artifacts = _sweep_of(kernel)
    while True:
        policy = kernel.ownership.resources.file.retention
        if policy.every != Keeping() or policy.labels or policy.artifacts_s is not None:
            look = _Look(kernel=kernel, dry=False, operator=KERNEL, artifacts=artifacts, known=known)
            try:
                await _everything(look)
            except (JournalError, OSError) as error:
                log.warning("retention stopped, and goes on with the next look: %s", error)
            for one in look.agents:
                if not one.nothing:
                    log.info("archived %d records of %s, gave up %d files", one.rows, one.agent, one.given_up)
        await asyncio.sleep(LOOK_EVERY_S)


async def _everything(look: _Look) -> None:
    core = look.kernel.core
    for record in await core.store.agents(True):
        try:
            await _agent(look, record)
        except _ONE_AGENTS as error:
            _passed(look, record.id, error)
        await asyncio.sleep(0)
    for key, agent, _ in await core.store.removed_before(0):
        record = await core.store.agent_by_key(key)
        if record is None:
            continue
        try:
            await _removed(look, key, agent, look.keeping(record.labels))
        except _ONE_AGENTS as error:
            _passed(look, agent, error)
    age = look.keeping({}).journal_s
    if age is not None:
        look.agents += await look.kernel.compaction.compact_kernels(age, dry=look.dry)
    await _messages(look)
    await _artifacts(look)


def _passed(look: _Look, agent: str, error: Exception) -> None:
    look.skipped.append({"agent": agent, "reason": str(error)})
    if not isinstance(error, (Problem, SyscallError)):
        log.warning("retention passed %s over: %s", agent, error)


def _sweep_of(kernel: Kernel) -> ArtifactSweep:
    return ArtifactSweep(core=kernel.core, origins=kernel.layout.data / "origins")


async def _artifacts(look: _Look) -> None:
    """Bytes that nothing names, after all that was let go before."""
    age = look.kernel.ownership.resources.file.retention.artifacts_s if look.age_s is None else look.age_s
    if age is None:
        return
    try:
        look.swept = await look.artifacts.look(age, dry=look.dry, whole=look.known is None)
    except (BlobError, JournalError, OSError) as error:
        log.warning("the bytes of artifacts can't be looked at now: %s", error)
        look.skipped.append({"agent": "", "reason": str(error)})


async def _agent(look: _Look, record: AgentRecord, *, named: bool = False) -> None:
    """One agent: removed where it ended long ago, else its journal and its output."""
    kernel, keeping = look.kernel, look.keeping(record.labels)
    thread = kernel.core.threads.get(record.key)
    ended = (thread.state if thread is not None else record.state) in FINAL_STATES
    if ended and keeping.ended_s is not None and _age(record) >= keeping.ended_s:
        look.removed.append(record.id)
        if not look.dry:
            await removal.remove(kernel, record.id, look.operator)
        return
    if keeping.logs_s is not None:
        live = thread is not None and thread.program is not None
        logs = kernel.layout.agent(record.id) / "logs"
        look.logs_bytes += await asyncio.to_thread(_logs, logs, keeping.logs_s, live=live, dry=look.dry)
    if keeping.journal_s is None or not (named or await _worth(look, record, ended=ended)):
        return
    thread = await kernel.thread(record.id)
    done = await kernel.compaction.compact(thread, keeping, dry=look.dry)
    look.agents.append(done)
    if ended and keeping.archive_s is not None:
        async with thread.operation:
            if thread.state in FINAL_STATES:
                await kernel.compaction.give_up(thread.key, thread.id, keeping.archive_s, done, dry=look.dry)


async def _worth(look: _Look, record: AgentRecord, *, ended: bool) -> bool:
    """Whether an agent has to be looked at: one that is owned by another kernel has not, nor one where nothing came."""
    core = look.kernel.core
    if record.key in core.threads and not ended:
        return True
    if not ended:
        return False
    if look.known is None:
        return True
    last = await core.store.last_position(record.key)
    if last - look.known.get(record.key, 0) < NEW_ROWS_LEAST and not await core.store.archived_behind(
        record.key
    ) > (0, 0, 0):
        return False
    look.known[record.key] = last
    return True


async def _removed(look: _Look, key: AgentKey, agent: str, keeping: Keeping) -> None:
    """The journal of an agent that was removed: all of it may go."""
    core = look.kernel.core
    at = await core.store.removed_at(key)
    age = 0.0 if at is None else time.time() - at.timestamp()
    if keeping.journal_s is None or age < keeping.journal_s:
        return
    last = await core.store.last_position(key)
    if look.known is not None and look.known.get(key) == last and keeping.archive_s is None:
        return
    async with look.kernel.compaction.alone:
        if not look.dry:
            if not await core.store.take_agent(key, core.kernel):
                return
            await core.journal.adopt(key)
        try:
            done = await look.kernel.compaction.compact_removed(key, agent, dry=look.dry)
            if keeping.archive_s is not None:
                await look.kernel.compaction.give_up(key, agent, keeping.archive_s, done, dry=look.dry)
            look.agents.append(done)
            if look.known is not None:
                look.known[key] = await core.store.last_position(key)
        finally:
            if not look.dry:
                core.journal.forget(key)


async def _messages(look: _Look) -> None:
    ages = [look.keeping({}).messages_s]
    policy = look.kernel.ownership.resources.file.retention
    ages += [look.keeping({key: value}).messages_s for key, value in policy.labels]
    if any(age is None for age in ages):
        # Somebody keeps them for ever, and a message has two sides.
        return
    age = max(age for age in ages if age is not None)
    while True:
        gone = await look.kernel.core.store.prune_messages(
            age, 1_000_000 if look.dry else BATCH, dry=look.dry
        )
        look.messages += gone
        if look.dry or gone < BATCH:
            return
        await asyncio.sleep(0.05)


def _age(record: AgentRecord) -> float:
    return 0.0 if record.ended_at is None else time.time() - record.ended_at.timestamp()


def _logs(directory: Path, age_s: float, *, live: bool, dry: bool) -> int:
    """Remove output that nobody added to for so long; returns the bytes."""
    freed = 0
    for path in directory.glob("*.log") if directory.is_dir() else ():
        # The newest part of a running program is being written.
        if live and not path.name.endswith(".1.log"):
            continue
        found = path.stat()
        if time.time() - found.st_mtime < age_s:
            continue
        freed += found.st_size
        if not dry:
            path.unlink(missing_ok=True)
    return freed
