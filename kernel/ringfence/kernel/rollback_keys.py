"""How one key of the shared state goes back: to before the first of some writes, where no work of others would be lost by it."""

from __future__ import annotations

from collections.abc import Sequence

from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import StateVersion


async def way_back(
    store: Store, key: str, undone: Sequence[StateVersion]
) -> tuple[StateVersion, StateVersion | None] | str | None:
    """How a key stands and how it goes back.

    Args:
        store: the journal.
        key: which.
        undone: the versions that are undone, some.

    Returns:
        The version that there is and the one to bring back (None: there was none); a line that says why not; or None where
        it is as it was.

    Raises:
        Unavailable: the database is away.
    """
    now = await store.state_get(key)
    mine = {version.version for version in undone}
    first = min(undone, key=lambda version: version.version)
    before = await store.state_before(key, first.version)
    if now is None:
        return "removed since"
    if (before.value if before else None) == now.value:
        return None
    last: StateVersion | None = None
    # From the newest down: what others wrote has to be undone itself, or it would be lost.
    for number in range(now.version, first.version - 1, -1):
        if number in mine:
            last = None
            continue
        if last is None:
            last = now if number == now.version else await store.state_version(key, number)
            below = max(one for one in mine if one < number)
            if last is None or not await _undoes(store, last, undone, below):
                by = "another agent" if last is None else f"`{last.agent}`"
                if number > max(mine):
                    return f"changed since by {by}"
                return f"changed by {by} between two of these writes; go back to a later step to have that"
    return now, before


async def _undoes(store: Store, last: StateVersion, undone: Sequence[StateVersion], below: int) -> bool:
    """Whether the newest of what others wrote is their rollback to what stood before all of it."""
    stood = next(version for version in undone if version.version == below)
    if last.value != stood.value:
        return False
    writer = await store.agent(last.agent)
    rows = [] if writer is None else await store.step(writer.key, last.step)
    return any(row.action == "rollback" for row in rows)
