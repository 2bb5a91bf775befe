"""What a thread has read, how old that is, and whether it changed since: made from its journal when a condition asks.

Nothing is kept for agents without such conditions. After the first question the newest rows are noted as they are made.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from ringfence.kernel.journal.types import Phase, Row, StoredRow
from ringfence.kernel.rows import MadeRows
from ringfence.kernel.told import Telling
from ringfence.policy.facts import Read
from ringfence.policy.when import READS
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls.sql_target.records import KIND as SQL

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.thread import Thread

ROWS_MAX: Final = 4096
"""Rows that wait to be noted; beyond it all is read again from the journal."""

_ABSENT: Final = "absent"
_STATE_WRITES: Final = frozenset({"state.put", "state.delete", "state.transaction"})


@dataclass(slots=True, kw_only=True)
class Known:
    """The newest read of one resource.

    Attributes:
        version: as it was; None: not recorded, empty: it has none.
        sha256: of the whole content of a file; empty where not all of it was read.
    """

    action: str
    resource: str
    step: int
    at_us: int
    version: str | None = ""
    sha256: str = ""


@dataclass(slots=True)
class History:
    """What one thread read and made, on its present branch.

    Attributes:
        reads: by action and resource.
        created: paths and `state KEY`s that the thread made itself and that are its own still.
        rows: rows of databases that it made.
        told: what it was told by those whom the operator trusts.
        pruned: whether a part of its journal was given up, so that nobody knows all that it read.
    """

    reads: dict[tuple[str, str], Known] = field(default_factory=dict[tuple[str, str], Known])
    created: set[str] = field(default_factory=set[str])
    rows: MadeRows = field(default_factory=MadeRows)
    told: Telling = field(default_factory=Telling)
    pruned: bool = False
    _waiting: list[StoredRow | Row] | None = None
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def watching(self) -> bool:
        """Whether rows are to be handed to `add`."""
        return self._waiting is not None

    def add(self, row: Row | StoredRow) -> None:
        """Keep a row of the present branch to be noted with the next question."""
        if self._waiting is None:
            return
        self._waiting.append(row)
        if len(self._waiting) > ROWS_MAX:
            self._forget()

    def _forget(self) -> None:
        self._waiting = None
        self.reads.clear()
        self.created.clear()
        self.rows.clear()

    async def catch_up(self, core: Core, thread: Thread) -> None:
        """Note all that the journal holds.

        Raises:
            Unavailable: the database is away.
        """
        async with self._loading:
            if self._waiting is None:
                self._forget()
                self._waiting = []
                self.pruned = (await core.store.archived_behind(thread.key))[2] > 0
                try:
                    async for row in core.store.lineage_outcomes(thread.key, thread.lineage.parts, 0):
                        await self._note(thread, row)
                except BaseException:
                    self._forget()
                    raise
            rows, self._waiting = self._waiting, []
            for row in rows:
                await self._note(thread, row)

    async def _note(self, thread: Thread, row: Row | StoredRow) -> None:
        if row.phase is not Phase.OUTCOME or row.outcome != "ok":
            return
        if row.action in READS:
            self._read(row)
        elif row.action in _STATE_WRITES:
            self._state_written(row)
        elif row.action in ("fs.write", "fs.append"):
            self._renew(("fs.read", row.resource), row, _document(row).get("version"))
        point: dict[str, Any] | None = json.loads(row.body).get("point") if b'"point":' in row.body else None
        if point is not None and point["kind"] == "workspace":
            await asyncio.to_thread(self._files_changed, thread, str(point["id"]), row.action)
        elif point is not None and point["kind"] == SQL:
            self.rows.note(str(point["id"]))

    def _read(self, row: Row | StoredRow) -> None:
        resources = row.resource.split(", ") if row.action == "sql.read" else [row.resource]
        version, sha256 = "", ""
        if row.action in ("fs.read", "state.get"):
            document = _document(row)
            found = document.get("version")
            version = None if found is None else str(found)
            sha256 = _whole(document) if row.action == "fs.read" else ""
        for resource in resources:
            self.reads[row.action, resource] = Known(
                action=row.action,
                resource=resource,
                step=row.step,
                at_us=row.started_us,
                version=version,
                sha256=sha256,
            )

    def _renew(self, place: tuple[str, str], row: Row | StoredRow, version: Any) -> None:
        """What a thread wrote itself over something that it had read, it knows."""
        known = self.reads.get(place)
        if known is not None:
            known.step, known.at_us, known.sha256 = row.step, row.started_us, ""
            known.version = None if version is None else str(version)

    def _state_written(self, row: Row | StoredRow) -> None:
        document = _document(row)
        versions: dict[str, Any] = document.get("versions") or {row.resource: document.get("version")}
        for key, version in versions.items():
            self._renew(("state.get", key), row, version)
            if version == 1:
                self.created.add(f"state {key}")
            elif row.action == "state.delete":
                self.created.discard(f"state {key}")

    def _files_changed(self, thread: Thread, point: str, action: str) -> None:
        try:
            manifest = thread.environment.snapshots.load(point)
        except SnapshotError:
            return
        if manifest is None:
            return
        for path in manifest.paths:
            after = manifest.expect.get(path.path, path.before)
            if after == _ABSENT:
                self.created.discard(path.path)
                if action in ("fs.delete", "fs.move"):
                    self.reads.pop(("fs.read", path.path), None)
            elif path.before == _ABSENT:
                self.created.add(path.path)

    def state_versions(self, keys: Iterable[str]) -> dict[str, int]:
        """Versions of state keys as they were read; of what is no key, or has no version, nothing."""
        found = {key: self.reads.get(("state.get", key)) for key in keys}
        return {
            key: int(known.version) for key, known in found.items() if known is not None and known.version
        }

    # -- what conditions are told ---------------------------------------------------------------------------------

    async def as_facts(self, core: Core, thread: Thread) -> tuple[Read, ...] | None:
        """Every read with its age and what is known to have changed; None: not all of them are known.

        Raises:
            Unavailable: the database is away.
        """
        await self.catch_up(core, thread)
        if self.pruned:
            return None
        now_us = time.time_ns() // 1000
        found = [
            Read(
                action=known.action,
                resource=known.resource,
                step=known.step,
                age_s=max(0.0, (now_us - known.at_us) / 1e6),
                changed=await self._changed(core, thread, known),
            )
            for known in sorted(self.reads.values(), key=lambda one: one.step)
        ]
        return tuple(found)

    @staticmethod
    async def _changed(core: Core, thread: Thread, known: Known) -> str:
        if known.version == "":
            return ""
        if known.version is None:
            return "its version is not recorded"
        if known.action == "state.get":
            held = await core.store.state_get(known.resource)
            version = 0 if held is None else held.version
            by = "" if held is None else f" by {held.agent} at step {held.step}"
            return (
                ""
                if str(version) == known.version
                else f"it is at version {version}{by} now, it was read at {known.version}"
            )
        return await asyncio.to_thread(_file_changed, thread, known)


def _file_changed(thread: Thread, known: Known) -> str:
    workspace = thread.environment.workspace
    try:
        _, version = workspace.version(known.resource)
        if version == known.version:
            return ""
        # A file that was put back, or that a fork copied, is another one with the same content.
        if known.sha256 and workspace.content_hash(known.resource) == known.sha256:
            return ""
    except WorkspaceError:
        return "it is not there any more"
    return "the file changed"


def _document(row: Row | StoredRow) -> dict[str, Any]:
    """The result of a row, or of a large one what the row itself says of it."""
    body: dict[str, Any] = json.loads(row.body)
    result: object = body.get("result")
    return cast("dict[str, Any]", result) if isinstance(result, dict) else {"version": body.get("version")}


def _whole(document: dict[str, Any]) -> str:
    data = base64.b64decode(document.get("data") or "")
    return hashlib.sha256(data).hexdigest() if len(data) == document.get("size_bytes", 0) else ""
