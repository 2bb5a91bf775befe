"""Finds out what a rollback would do: what comes back of files, state and SQL targets, of one agent or of several together.

Several are planned as one: a key or row that they changed in turn goes back to how it stood before the first of these
changes. One of them, who wrote it last, puts it back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringfence.kernel import compensation, descent, rollback_atoms
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import Rewound, StateVersion, StoredRow
from ringfence.kernel.problems import conflict
from ringfence.kernel.replay import NO_CUT, OPERATOR_LANE, Lineage
from ringfence.kernel.rollback_cuts import (
    Cut,
    Cuts,
    done_since,
    point_of,
    pruned_before,
    refuse_pruned,
)
from ringfence.kernel.rollback_keys import way_back
from ringfence.kernel.rollback_readers import add_readers
from ringfence.kernel.thread import Thread
from ringfence.sandbox.snapshots import RestorePlan, SnapshotError
from ringfence.syscalls import object_common
from ringfence.syscalls.base import Recovery
from ringfence.syscalls.http_undo import KeptPoint, kept_point
from ringfence.syscalls.object_undo import ObjectPlan, ObjectPoint, object_point, plan_objects
from ringfence.syscalls.sql_target import restore as sql_restore

_LEAVES = frozenset({"EXTERNAL", "DESTROY"})
"""Effects that nothing here can undo where they have no point."""

_SENT_ANEW = frozenset({Recovery.REPEAT, Recovery.KEYED})
"""What a dead kernel may have sent and this one sends again when asked: until then nobody knows."""


@dataclass(slots=True, kw_only=True)
class Undo:
    """Everything a rollback to one step would do."""

    cut: int
    files: RestorePlan | None = None
    state: list[tuple[StateVersion, StateVersion | None]] = field(
        default_factory=list[tuple[StateVersion, StateVersion | None]]
    )
    state_conflicts: dict[str, str] = field(default_factory=dict[str, str])
    sql: dict[str, sql_restore.SqlRestorePlan] = field(default_factory=dict[str, sql_restore.SqlRestorePlan])
    http: compensation.Outward = field(default_factory=compensation.Outward)
    objects: ObjectPlan = field(default_factory=ObjectPlan)
    late_conflicts: dict[str, str] = field(default_factory=dict[str, str])
    not_undoable: list[StoredRow] = field(default_factory=list[StoredRow])
    moved: list[Rewound] = field(default_factory=list[Rewound])
    others: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def of_the_original(row: StoredRow) -> bool:
    """Whether a fork inherited a change of something that it shares with its original, who alone can undo it."""
    return b'"shared":true' in row.body


@dataclass(slots=True, kw_only=True)
class Member:
    """One agent of those that are rolled back together.

    Attributes:
        rows: what it did after the cut, the newest first.
    """

    thread: Thread
    cut: Cut
    rows: list[StoredRow] = field(default_factory=list[StoredRow])
    records: list[tuple[int, dict[str, Any]]] = field(default_factory=list[tuple[int, dict[str, Any]]])
    kept: list[tuple[int, StoredRow, KeptPoint]] = field(
        default_factory=list[tuple[int, StoredRow, KeptPoint]]
    )
    objects: list[tuple[int, ObjectPoint]] = field(default_factory=list[tuple[int, ObjectPoint]])


class Plans:
    """Plans rollbacks of this kernel's agents; changes nothing."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._cuts = Cuts(core.store)

    async def cut_for(self, thread: Thread, to: str) -> Cut:
        """Where a point, a step or a time leads; see `Cuts.find`.

        Raises:
            Problem: there is none.
        """
        return await self._cuts.find(thread, to)

    async def plan(self, thread: Thread, cut: Cut, path: str | None) -> Undo:
        """Find out what a rollback of one agent would do, changing nothing.

        Args:
            thread: the agent.
            cut: where it leads.
            path: canonical path of the workspace; only it and what lies beneath. None: everything.

        Raises:
            Problem: a point is missing or damaged, or a database is no longer declared.
        """
        return (await self.plan_all([Member(thread=thread, cut=cut)], path))[0]

    async def plan_all(self, members: Sequence[Member], path: str | None = None) -> list[Undo]:
        """Find out what rolling several agents back together would do: one answer for each, in their order.

        Raises:
            Problem: as for `plan`.
        """
        undos = [await self._own(member, path) for member in members]
        if path is None:
            changed = await self._state(members, undos)
            await self._sql(members, undos)
            await self._http(members, undos)
            await self._objects(members, undos)
            rollback_atoms.match(undo.moved for undo in undos)
            await add_readers(self._core, members, undos, changed)
        return undos

    async def _own(self, member: Member, path: str | None) -> Undo:
        """What concerns nobody else: files, messages, children, and what left the system."""
        thread, cut = member.thread, member.cut
        undo = Undo(cut=cut.step, others=await descent.waiting(self._core, thread))
        member.rows = await done_since(self._core.store, thread, cut.step)
        try:
            points = await self._gather(member, undo, path)
            if points:
                undo.files = await asyncio.to_thread(
                    thread.environment.snapshots.plan_restore, thread.environment.workspace, points, path
                )
        except SnapshotError as error:
            raise conflict(f"a rollback point can't be used: {error}; nothing was changed") from error
        await self._add_unfinished(member, undo)
        if path is None:
            undo.moved = await rollback_atoms.rewind(self._core, thread, cut, dry=True)
            undo.others += await descent.children_of(self._core, thread, member.rows)
        return undo

    async def _gather(self, member: Member, undo: Undo, path: str | None) -> list[str]:
        """Points of the workspace, the newest first. Records of SQL and HTTP targets go into the member."""
        thread = member.thread
        file_points: list[str] = []
        pruned = await pruned_before(self._core.store, thread)
        done = {row.effect_id for row in member.rows if row.effect_id}
        at = NO_CUT
        for row in member.rows:
            # INVARIANT: among those of other agents its own stay in their order.
            at = min(at, row.started_us + row.duration_us)
            point = point_of(row)
            if point is None:
                left = row.outcome in ("ok", "unknown") and (row.effect in _LEAVES or of_the_original(row))
                if left and not _is_net_zero(row, done):
                    undo.not_undoable.append(row)
                continue
            refuse_pruned(point, row.step, pruned)
            if point["kind"] in ("workspace", "rollback"):
                file_points.append(point["id"])
            if path is None and point["kind"] == object_common.KIND:
                store = thread.environment.snapshots
                member.objects.append((at, await asyncio.to_thread(object_point, store, point["id"])))
            if path is None and point["kind"] == "http":
                store = thread.environment.snapshots
                member.kept.append((at, row, await asyncio.to_thread(kept_point, store, point["id"])))
            if path is None and point["kind"] in ("sql", "rollback"):
                # INVARIANT: the journal says which points there are; one that the store lost stops the rollback.
                manifest = await asyncio.to_thread(thread.environment.snapshots.require, point["id"])
                extra = dict(manifest.extra)
                sql = extra.get("sql", ()) if point["kind"] == "rollback" else [extra]
                member.records += [(at, dict(record)) for record in sql]
        undo.not_undoable.sort(key=lambda each: each.step, reverse=True)
        return file_points

    async def _add_unfinished(self, member: Member, undo: Undo) -> None:
        """What was begun and has no outcome may have left the system as well."""
        for intent, _ in await self._core.store.unfinished(member.thread.key):
            row = self._core.table.get(intent.action)
            sent = row is None or row.recovery in _SENT_ANEW
            beyond = intent.step > member.cut.step
            if sent and beyond and intent.lane != OPERATOR_LANE and intent.effect in _LEAVES:
                undo.not_undoable.append(intent)
        undo.not_undoable.sort(key=lambda each: each.step, reverse=True)

    # -- what agents share ----------------------------------------------------------------------------------------

    async def _state(self, members: Sequence[Member], undos: Sequence[Undo]) -> dict[str, list[StateVersion]]:
        """Returns the versions that are undone, by key."""
        store = self._core.store
        changed: dict[str, list[StateVersion]] = {}
        place = {member.thread.id: number for number, member in enumerate(members)}
        for member in members:
            for version in await store.state_versions_after(member.thread.id, member.cut.step):
                changed.setdefault(version.key, []).append(version)
        for key, versions in sorted(changed.items()):
            newest = max(versions, key=lambda v: v.version)
            undo = undos[place[newest.agent]]
            found = await way_back(store, key, versions)
            if isinstance(found, str):
                undo.state_conflicts[key] = found
            elif found is not None:
                undo.state.append(found)
        return changed

    async def _sql(self, members: Sequence[Member], undos: Sequence[Undo]) -> None:
        """All of one database is put back by one agent, in one transaction: the one that wrote there last."""
        by_resource: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}
        for number, member in enumerate(members):
            for at, record in member.records:
                by_resource.setdefault(str(record["resource"]), []).append((at, number, record))
        for resource, found in by_resource.items():
            found.sort(key=lambda one: one[0], reverse=True)
            last = found[0][1]
            target = members[last].thread.environment.sql.get(resource)
            if target is None:
                raise conflict(
                    f"the database `{resource}` is no longer declared in the kernel file; declare it and try again"
                )
            records = [record for _, _, record in found]
            undos[last].sql[resource] = await sql_restore.plan_restore(target, records)

    async def _objects(self, members: Sequence[Member], undos: Sequence[Undo]) -> None:
        """Each object is put back by the agent that changed it last, to how the first one found it."""
        every = [(at, nr, point) for nr, member in enumerate(members) for at, point in member.objects]
        every.sort(key=lambda one: one[0], reverse=True)
        last: dict[str, int] = {}
        for _, nr, point in every:
            last.setdefault(point.name, nr)
        for nr, (member, undo) in enumerate(zip(members, undos, strict=True)):
            mine = [point for _, _, point in every if last[point.name] == nr]
            undo.objects = await plan_objects(member.thread.environment.objects, mine)

    async def _http(self, members: Sequence[Member], undos: Sequence[Undo]) -> None:
        """Each place is put back by the agent that changed it last, to how the first one found it."""
        every = [(at, nr, row, kept) for nr, member in enumerate(members) for at, row, kept in member.kept]
        every.sort(key=lambda one: one[0], reverse=True)
        last: dict[str, int] = {}
        for _, nr, _, kept in every:
            last.setdefault(kept.kept.keep_url, nr)
        for nr, (member, undo) in enumerate(zip(members, undos, strict=True)):
            # What others did there is theirs to have on record.
            mine = [
                (row if one == nr else replace(row, effect_id=""), kept)
                for _, one, row, kept in every
                if last[kept.kept.keep_url] == nr
            ]
            undo.http = await compensation.plan(
                self._core,
                member.thread,
                kept=mine,
                not_undoable=undo.not_undoable,
                stays=Lineage.of(member.cut.parent, await self._core.store.branches(member.thread.key)),
                cut=member.cut.step,
            )
        for nr, (member, undo) in enumerate(zip(members, undos, strict=True)):
            theirs = [(row, p.kept) for _, row, p in member.kept if last[p.kept.keep_url] != nr]
            for row, kept in [one for one in theirs if one[0].effect_id]:
                # INVARIANT: what is left alone, or fails, is not on record as taken back, for whomever.
                owner = undos[last[kept.keep_url]].http
                shared = owner.with_others.setdefault(kept.keep_url, [])
                shared.append((member.thread, row.effect_id))
                if any(one.keep_url == kept.keep_url for one in owner.kept.standing):
                    # Its owner may be through already.
                    _, effects = undo.http.steps.get(kept.keep_url, (0, []))
                    undo.http.steps[kept.keep_url] = (row.step, [*effects, row.effect_id])
                    undo.http.kept.standing += [] if effects else [kept]


def _is_net_zero(row: StoredRow, done: Collection[str]) -> bool:
    """Whether a row is of an earlier rollback and takes back only what goes itself."""
    return row.lane == OPERATOR_LANE and set(json.loads(row.body).get("of") or ()) <= set(done)
