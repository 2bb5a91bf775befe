"""What a thread was told by those whom the operator trusts: its input, and the fields of answers that a resource vouches for.

Read from the thread's own journal when a condition asks, so a restart, a replay, a fork and a rollback find it as it was.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.settled import answer_from
from ringfence.policy.canonical import bare_url
from ringfence.policy.exact import Exact
from ringfence.policy.facts import Told
from ringfence.policy.hearsay import folded
from ringfence.policy.matcher import match_url_path
from ringfence.policy.problems import PatternError
from ringfence.syscalls.http_place import resource_of

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.journal.types import StoredRow
    from ringfence.kernel.thread import Thread
    from ringfence.policy.vouching import Vouched

VALUES_MAX: Final = 65_536
"""Vouched values that are kept of one thread; more vouch for nothing."""

_GOOD: Final = range(200, 300)


@dataclass(slots=True)
class Telling:
    """The vouched values of one thread, as far as they were read from its journal."""

    _values: set[str] = field(default_factory=set[str])
    _named: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    _input: str | None = None
    _branch: int = -1
    _seen: int = 0

    async def to(self, core: Core, thread: Thread) -> Told:
        """What the thread was told by now.

        Raises:
            Unavailable: the database is away.
        """
        if self._input is None:
            self._input = await _input(core, thread)
        if self._branch != thread.branch:
            self._values, self._named, self._branch, self._seen = set(), {}, thread.branch, 0
        # A call that ended behind a later one is missed here. That only makes the answer stricter.
        async for row in core.store.lineage_outcomes(thread.key, thread.lineage.parts, self._seen):
            self._seen = max(self._seen, row.step)
            if row.action.startswith("http.") and row.outcome == "ok" and len(self._values) < VALUES_MAX:
                for name, words in await _vouched(core, thread, row):
                    self._values.update(words)
                    self._named.setdefault(name, set()).update(words)
        named = {name: frozenset(words) for name, words in self._named.items() if name}
        return Told(input=self._input, values=frozenset(self._values), named=named)


async def _input(core: Core, thread: Thread) -> str:
    """What an operator gave: to the agent, or to the one at the head of its family."""
    # INVARIANT: what a parent gives to its child is no operator's word: a hijacked parent could vouch for anything by it.
    above = await core.store.parents(thread.key)
    record = await core.store.agent_by_key(above[-1]) if above else thread.record
    return "" if record is None else record.input.decode("utf-8", "replace")


async def _vouched(core: Core, thread: Thread, row: StoredRow) -> list[tuple[str, set[str]]]:
    """What one answer vouches for, folded, by the name that the operator gave to it."""
    said = _said(thread, row)
    if not said:
        return []
    answer = await answer_from(row, core.blobs, thread.purged)
    if answer.result is None:
        return []
    try:
        result: Mapping[str, Any] = json.loads(answer.result)
        if result.get("status") not in _GOOD:
            return []
        body = json.loads(base64.b64decode(result.get("body") or ""), parse_float=Exact)
    except (ValueError, RecursionError):
        return []
    return [(one.name, {folded(word) for word in one.words(body)}) for one in said]


def _said(thread: Thread, row: StoredRow) -> tuple[Vouched, ...]:
    """Fields of its answer that the resource vouches for, as the kernel file says now."""
    try:
        urls = {row.resource, bare_url(row.resource)}
        read = [_said_at(thread, row, url) for url in urls]
    except PatternError:
        return ()
    # INVARIANT: what one server may read as another page vouches for what both would say, or for nothing.
    return read[0] if all(said == read[0] for said in read) else ()


def _said_at(thread: Thread, row: StoredRow, url: str) -> tuple[Vouched, ...]:
    found = resource_of(url, thread.environment.http.values())
    if found is None:
        return ()
    resource, path = found
    method = row.action.removeprefix("http.").upper()
    for verb, pattern, said in resource.vouches:
        if verb in ("*", method) and match_url_path(pattern, path):
            return said
    return ()
