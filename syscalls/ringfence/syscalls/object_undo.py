"""Objects at a rollback: what the points say stood there is brought back, byte for byte and with its attributes.

INVARIANT: an object that stands neither as a point has it nor as the calls left it is somebody else's, and left alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import msgspec
from ringfence.sandbox.points import SnapshotError
from ringfence.syscalls.drivers.protocol import ABSENT, DriverError, ObjectDriver, Snapshot, Stat
from ringfence.syscalls.object_common import CONTENT, GONE, Kept
from ringfence.syscalls.redaction import redactor_of

if TYPE_CHECKING:
    from ringfence.sandbox.snapshots import SnapshotStore
    from ringfence.syscalls.declared import ObjectResource


_BETWEEN: Final = "changed by somebody else between two of these calls; go back to a later step to have that"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPoint:
    """One point of an object.

    Attributes:
        name: `NAME/KEY`.
        kept: how it stood.
        left: how the call left it, or was about to; empty: not known.
        store: where its content is.
    """

    name: str
    kept: Kept
    left: str
    store: SnapshotStore


def object_point(store: SnapshotStore, point: str) -> ObjectPoint:
    """Read a point of an object.

    Raises:
        SnapshotError: it is gone or damaged.
    """
    manifest = store.require(point)
    name = manifest.paths[0].path
    return ObjectPoint(
        name=name,
        kept=msgspec.convert(manifest.extra, Kept),
        left=str(manifest.expect.get(name, "")),
        store=store,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One object that is brought back.

    Attributes:
        name: `NAME/KEY`.
        kept: how it stood.
        store: where its content is.
        now: the version that stands there, `ABSENT` for none.
    """

    name: str
    kept: Kept
    store: SnapshotStore
    now: str

    @property
    def action(self) -> str:
        """What a rollback does with it."""
        if self.kept.snapshot.stat is None:
            return "remove"
        return "restore" if self.now != ABSENT else "create"


@dataclass(slots=True, kw_only=True)
class ObjectPlan:
    """What a rollback would bring back, and what it leaves alone, with the reason by name."""

    items: list[Item] = field(default_factory=list[Item])
    conflicts: dict[str, str] = field(default_factory=dict[str, str])

    def changes(self) -> list[dict[str, Any]]:
        """As the document of a rollback lists them."""
        return [
            {"kind": "object", "target": item.name, "action": item.action, "detail": ""}
            for item in self.items
        ]


async def plan_objects(resources: Mapping[str, ObjectResource], points: Sequence[ObjectPoint]) -> ObjectPlan:
    """Find out what is to be brought back; changes nothing.

    Args:
        resources: the declared ones.
        points: newest first.
    """
    plan = ObjectPlan()
    found: dict[str, tuple[ObjectPoint, str]] = {}
    between: set[str] = set()
    for point in points:
        # Of several for one object the oldest says how it stood, and the newest how the calls left it.
        left = point.left
        if (newer := found.get(point.name)) is not None:
            left = newer[1]
            if not _follows(newer[0].kept.snapshot, point):
                between.add(point.name)
        found[point.name] = point, left
    for name, (point, left) in found.items():
        try:
            now = await _stands(resources, point.kept, left)
        except (DriverError, _Alone, TimeoutError) as error:
            plan.conflicts[name] = _told(resources, point.kept, error)
            continue
        if now is not None and name in between:
            plan.conflicts[name] = _BETWEEN
        elif now is not None:
            plan.items.append(Item(name=name, kept=point.kept, store=point.store, now=now))
    return plan


def _follows(stood: Snapshot, older: ObjectPoint) -> bool:
    """Whether what a call found is what an older one left, or what that one had found: then it failed, or was taken back."""
    before = older.kept.snapshot
    if stood.stat is None:
        return older.left == GONE or before.stat is None
    if stood.stat.version == older.left or CONTENT + stood.sha256 == older.left:
        return True
    same = before.stat is not None and before.stat.attributes == stood.stat.attributes
    return same and before.sha256 == stood.sha256


class _Alone(Exception):
    """An object is left alone; the message says why."""


def _driver(resources: Mapping[str, ObjectResource], kept: Kept) -> tuple[ObjectDriver, float]:
    resource = resources.get(kept.resource)
    if resource is None or resource.driver is None:
        raise _Alone(f"the resource `{kept.resource}` is no longer declared, or is unavailable")
    if kept.elsewhere(resource.driver):
        raise _Alone(f"the resource `{kept.resource}` is another target now than the one where it was kept")
    return resource.driver, resource.timeout_s


def _told(resources: Mapping[str, ObjectResource], kept: Kept, error: Exception) -> str:
    resource = resources.get(kept.resource)
    if isinstance(error, TimeoutError):
        return f"`{kept.resource}` gives no answer"
    return redactor_of(() if resource is None else resource.secrets).text(str(error))


async def _stands(resources: Mapping[str, ObjectResource], kept: Kept, left: str) -> str | None:
    """The version that is to be replaced; None: it stands as it was.

    Raises:
        _Alone: somebody else changed it.
        DriverError: it can't be asked for.
    """
    driver, timeout_s = _driver(resources, kept)
    async with asyncio.timeout(timeout_s):
        now = await driver.describe(kept.snapshot.key)
    if await driver.verify(kept.snapshot):
        return None
    if now is None:
        if left == GONE:
            return ABSENT
        raise _Alone("somebody removed it since")
    if left == now.version or (left.startswith(CONTENT) and await _has(driver, kept, now, left)):
        return now.version
    raise _Alone("something else stands there now")


async def _has(driver: ObjectDriver, kept: Kept, now: Stat, left: str) -> bool:
    """Whether an object has the content that a call was about to write when a crash cut it off."""
    wanted = msgspec.structs.replace(
        kept.snapshot, stat=msgspec.structs.replace(now, version="."), sha256=left.removeprefix(CONTENT)
    )
    return await driver.verify(wanted)


async def restore_objects(resources: Mapping[str, ObjectResource], plan: ObjectPlan) -> None:
    """Bring all of it back; what fails becomes a conflict. What a crash cuts off can be done again."""
    for item in list(plan.items):
        try:
            await _restore(resources, item)
        except (DriverError, _Alone, SnapshotError, TimeoutError, OSError) as error:
            plan.items.remove(item)
            plan.conflicts[item.name] = f"it was not brought back: {_told(resources, item.kept, error)}"


async def _restore(resources: Mapping[str, ObjectResource], item: Item) -> None:
    snapshot = item.kept.snapshot
    driver, _ = _driver(resources, item.kept)
    if snapshot.stat is None:
        await driver.restore(snapshot, None, item.now)
    else:
        fd = await asyncio.to_thread(item.store.open_blob, snapshot.sha256)
        with os.fdopen(fd, "rb") as file:
            await driver.restore(snapshot, cast("BinaryIO", file), item.now)
    if not await driver.verify(snapshot):
        raise DriverError("it reads back otherwise than it was kept")
