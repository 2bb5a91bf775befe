"""How the keys of an agent differ between two of its steps, also where it went back together with others.

Of several agents that go back together, one puts a key back that all of them changed in turn. So for each of the others that
is a version of its own, and what they wrote on each other before is no way in which the key ever stood for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import StateVersion, StoredRow
from ringfence.kernel.operations.diff_parts import parts_of
from ringfence.kernel.rollback_cuts import is_rollback
from ringfence.kernel.thread import Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Versions of one key that several agents wrote and that were undone together.

    Attributes:
        cut: the step of the agent that is looked at to which it went back.
        step: that of its part in the rollback.
        first: the first version that was undone.
        last: the version that undid them, or the last of them where the key was as before by itself.
        written: whether there is a version that undid them.
        before: how the key stood before all of them.
    """

    cut: int
    step: int
    first: int
    last: StateVersion
    written: bool
    before: StateVersion | None

    def holds(self, version: StateVersion) -> bool:
        return self.first <= version.version <= self.last.version


async def key_changes(
    store: Store, thread: Thread, rows: Sequence[StoredRow], low: int, high: int | None
) -> list[dict[str, Any]]:
    """Which keys differ between two steps, by key.

    Args:
        store: the journal.
        thread: the agent.
        rows: its outcomes after the earlier step, the oldest first.
        low: the one step.
        high: the other one; None: now.

    Raises:
        Unavailable: the database is away.
    """
    since = await store.state_versions_after(thread.id, low if high is None else min(low, high))
    spans: dict[str, list[_Span]] = {}
    for row in rows:
        if is_rollback(row):
            for key, span in (await _together(store, thread, row.step)).items():
                spans.setdefault(key, []).append(span)
                if span.written and span.last.agent != thread.id:
                    since.append(replace(span.last, agent=thread.id, step=row.step))

    found: list[dict[str, Any]] = []
    for key in sorted({version.key for version in since}):
        mine = [version for version in since if version.key == key]
        undone = sorted(spans.get(key, ()), key=lambda span: span.first)
        was, after = await _at(store, mine, undone, low), await _at(store, mine, undone, high)
        if was != after:
            kind = "created" if was is None else "removed" if after is None else "modified"
            found.append({"key": key, "kind": kind, "before": was, "after": after})
    return found


async def _at(store: Store, mine: Sequence[StateVersion], undone: Sequence[_Span], step: int | None) -> Any:
    """How a key stood before the first of the agent's versions after a step, or after all of them."""
    later = [] if step is None else [version for version in mine if version.step > step]
    if step is None or not later:
        newest = max(mine, key=lambda version: version.version)
        for span in undone:
            if (step is None or step >= span.step) and span.holds(newest):
                return _value(span.before)
        return _value(newest)
    first = min(later, key=lambda version: version.version)
    for span in undone:
        if step <= span.cut and span.holds(first):
            return _value(span.before)
    return _value(await store.state_before(first.key, first.version))


async def _together(store: Store, thread: Thread, step: int) -> dict[str, _Span]:
    """What a rollback of an agent undid together with others, of the keys that it had changed itself; none: it was alone."""
    parts = await parts_of(store, thread, step)
    own = {version.key for version in await store.state_versions_after(thread.id, 0)} if parts else set[str]()
    undone: dict[str, list[StateVersion]] = {}
    for part in parts:
        for version in await store.state_versions_after(part.record.id, part.cut):
            if version.step <= part.step and version.key in own:
                undone.setdefault(version.key, []).append(version)
    cut = next((part.cut for part in parts if part.record.key == thread.key), 0)
    found: dict[str, _Span] = {}
    for key, versions in undone.items():
        versions.sort(key=lambda version: version.version)
        first, last = versions[0], versions[-1]
        before = await store.state_before(key, first.version)
        # Otherwise somebody else had changed it, and it was left as it was.
        if last.value == (None if before is None else before.value):
            found[key] = _Span(
                cut=cut,
                step=step,
                first=first.version,
                last=last,
                written=any((last.agent, last.step) == (part.record.id, part.step) for part in parts),
                before=before,
            )
    return found


def _value(version: StateVersion | None) -> Any:
    return None if version is None or version.value is None else msgspec.json.decode(version.value)
