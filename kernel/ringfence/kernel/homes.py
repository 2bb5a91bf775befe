"""Agents whose files are in a store that several nodes share: brought there, and taken over from there.

The data directory stays where an agent works. The store has its workspace as of the last change, its points, its image. `agents.home` says whose
data directory is the newest: a kernel of another one brings the files from the store before it adopts the agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from ringfence.kernel.config import Layout, Settings
from ringfence.kernel.core import Core
from ringfence.kernel.journal.blobs import BlobError, Blobs
from ringfence.kernel.journal.shared_blobs import SharedBlobs
from ringfence.kernel.journal.types import AgentKey, AgentRecord, Phase
from ringfence.kernel.problems import Problem, StoreAway, StoreLacks, conflict
from ringfence.sandbox.depot import Depot, DepotError
from ringfence.sandbox.depot_s3 import open_depot
from ringfence.sandbox.shared import LOG_MAX, SharedFiles
from ringfence.sandbox.shared_points import SharedSnapshots, restore_workspace
from ringfence.sandbox.snapshots import SnapshotError, SnapshotStore
from ringfence.sandbox.workspace import Workspace, WorkspaceError

log = logging.getLogger(__name__)

PAGE_STEPS = 500


class _Body(msgspec.Struct):
    point: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Body).decode


def own_home(layout: Layout) -> str:
    """The name of a data directory, made when it is first asked for."""
    try:
        return layout.home_file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        fresh = layout.home_file.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_text(secrets.token_hex(16), encoding="ascii")
        fresh.replace(layout.home_file)
        return own_home(layout)


def open_blobs(settings: Settings, layout: Layout) -> tuple[Blobs, Depot | None]:
    """The artifacts, and the shared store where there is one.

    Raises:
        BlobError: the store can't be opened, or the directory of artifacts can't be made.
    """
    if settings.store is None:
        return Blobs(layout.blobs), None
    try:
        depot = open_depot(settings.store)
    except DepotError as error:
        raise BlobError(f"{error} (`--store`)") from error
    return SharedBlobs(layout.blobs, depot), depot


def homes_of(core: Core, layout: Layout, depot: Depot | None) -> Homes | None:
    """The shared store as this kernel uses it; None: there is none."""
    return None if depot is None else Homes(core=core, layout=layout, depot=depot, own=own_home(layout))


@dataclass(slots=True, kw_only=True)
class Homes:
    """The shared store as one kernel uses it.

    Attributes:
        depot: the store.
        own: name of this kernel's data directory.
    """

    core: Core
    layout: Layout
    depot: Depot
    own: str
    _files: dict[str, SharedFiles] = field(default_factory=dict[str, SharedFiles])

    def files(self, agent: str) -> SharedFiles:
        """An agent's side of the store, the same one as long as this kernel lives."""
        return self._files.setdefault(agent, SharedFiles(self.depot, agent, self.core.fence))

    def snapshots(self, agent: str, workspace: Workspace, points: Path) -> SharedSnapshots:
        """The points of an agent, in a directory and in the store."""
        return SharedSnapshots(points, self.files(agent), workspace)

    def forget(self, agent: str) -> None:
        """Remove an agent's files from the store, as far as it can be reached."""
        try:
            self.files(agent).forget()
        except DepotError as error:
            log.warning("the files of %s stay in the shared store: %s", agent, error)
        self._files.pop(agent, None)

    async def settle(self, record: AgentRecord) -> None:
        """Before an agent is adopted: have its newest files here, and what they are in the store.

        Raises:
            StoreAway: the store can't be used now.
            Problem: the store has not all that the journal says was done.
            JournalError: the database is away.
        """
        home = await self.core.store.home_of(record.key)
        here = (self.layout.agent(record.id) / "live").is_dir()
        if home == self.own and here:
            return
        # INVARIANT: larger than that of any owner before. A kernel that takes over may be older than the one it takes over from.
        tenure = await self.core.store.tenure(record.key, self.core.kernel)
        if tenure is None:
            raise _moved(record)
        self._files[record.id] = SharedFiles(self.depot, record.id, tenure)
        uid = record.uid if os.geteuid() == 0 else None
        try:
            if home:
                await self._refuse_incomplete(record)
                await asyncio.to_thread(self._bring, record.id, uid, self.layout)
                log.info("the files of %s were brought from the shared store", record.id)
            else:
                # Of a copy, or of an agent that was here before there was a store.
                local = SnapshotStore(self.layout.points(record.id))
                await asyncio.to_thread(self.files(record.id).keep_points, local)
            await self._keep_base(record.key, record.id)
        except DepotError as error:
            raise StoreAway(str(error)) from error
        except (SnapshotError, WorkspaceError, OSError) as error:
            raise conflict(
                f"the files of `{record.id}` can't be brought from the shared store: {error}"
            ) from error
        if not await self.core.store.move_home(record.key, self.core.kernel, self.own):
            raise _moved(record)

    async def catch_up(self, key: AgentKey, agent: str) -> None:
        """After a crash: what this data directory has and the store lacks is brought there as a whole.

        Raises:
            StoreAway: the store can't be used now.
            JournalError: the database is away.
        """
        try:
            missing, behind = await self._missing(key, agent)
            if missing or behind > LOG_MAX:
                await self._keep_base(key, agent)
        except DepotError as error:
            raise StoreAway(str(error)) from error
        except (WorkspaceError, OSError) as error:
            raise conflict(
                f"the workspace of `{agent}` can't be kept in the shared store: {error}"
            ) from error

    async def _missing(self, key: AgentKey, agent: str) -> tuple[list[int], int]:
        """Steps that changed files and are not in the store, and how many changes are behind its base."""

        def known() -> tuple[int, set[int], set[str], int]:
            files = self.files(agent)
            base = files.base()
            if base is None:
                raise DepotError(f"the shared store `{self.depot.place}` has no files of `{agent}`")
            changes = [change.point for _, change in files.changes()]
            return int(base[1]["step"]), set(base[1]["open"]), set(changes), len(changes)

        step, unfinished, there, behind = await asyncio.to_thread(known)
        missing: list[int] = []
        after = min([step, *(one - 1 for one in unfinished)])
        while rows := await self.core.store.steps_page(key, after, PAGE_STEPS):
            after = max(row.step for row in rows)
            for row in rows:
                counts = row.step > step or row.step in unfinished
                if counts and row.phase is Phase.OUTCOME and b'"point":' in row.body:
                    point = _decode(row.body).point
                    if point and point["kind"] in ("workspace", "rollback") and point["id"] not in there:
                        missing.append(row.step)
        return missing, behind

    async def _refuse_incomplete(self, record: AgentRecord) -> None:
        missing, _ = await self._missing(record.key, record.id)
        if missing:
            raise StoreLacks(
                f"the shared store lacks what step {missing[0]} of `{record.id}` left in the workspace: start the kernel that ran it, on its "
                f"own data directory, and there: ringfence start {record.id}"
            )

    async def _keep_base(self, key: AgentKey, agent: str) -> None:
        step = int((await self.core.store.counts(key)).get("max_step", 0))
        unfinished = [intent.step for intent, _ in await self.core.store.unfinished(key)]

        def keep() -> None:
            home = self.layout.agent(agent)
            with tempfile.TemporaryDirectory(prefix=".base-", dir=self.layout.data) as staging:
                self.files(agent).keep_base(home / "live", home / "image", step, unfinished, Path(staging))

        await asyncio.to_thread(keep)

    def bring(self, record: AgentRecord, layout: Layout) -> None:
        """Lay an agent's files out in another directory than this kernel's own, to be looked at.

        Raises:
            DepotError: the store can't be used now.
            SnapshotError, WorkspaceError, OSError: they can't be laid out.
        """
        self._bring(record.id, record.uid if os.geteuid() == 0 else None, layout)

    def _bring(self, agent: str, uid: int | None, layout: Layout) -> None:
        """Lay an agent's files out anew; what an earlier kernel left of them there is out of date."""
        files, home = self.files(agent), layout.agent(agent)
        found = files.base()
        if found is None:
            raise DepotError(f"the shared store `{self.depot.place}` has no files of `{agent}`")
        home.parent.mkdir(mode=0o700, exist_ok=True)
        layout.points(agent).parent.mkdir(mode=0o700, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".submit-", dir=home.parent))
        try:
            for part in ("live", "image"):
                (staging / part).mkdir(mode=0o755)
                if uid is not None:
                    os.chown(staging / part, uid, uid)
                files.fetch_tree(found[1][part], staging / part, uid, staging)
            (staging / "scratch").mkdir(mode=0o711)
            (staging / "logs").mkdir(mode=0o700)
            points = layout.points(agent)
            shutil.rmtree(points, ignore_errors=True)
            files.fetch_points(points)
            restore_workspace(files, Workspace(staging / "live", uid=uid), points)
            if home.exists():
                shutil.rmtree(home)
            staging.rename(home)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _moved(record: AgentRecord) -> Problem:
    return Problem(f"`{record.id}` is another kernel's now", exit_code=5, reason="Fenced")
