"""What a thread was told by those whom the operator trusts: its input, and the fields of answers that a resource vouches for.

Read from the thread's own journal when a condition asks, so a restart, a replay, a fork and a rollback find it as it was.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from ringfence.kernel.settled import answer_from
from ringfence.policy.canonical import bare_url
from ringfence.policy.facts import Told
from ringfence.policy.hearsay import folded, words_in
from ringfence.policy.matcher import match_url_path
from ringfence.policy.problems import PatternError
from ringfence.syscalls.http_common import resource_of

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.journal.types import StoredRow
    from ringfence.kernel.thread import Thread

VALUES_MAX: Final = 65_536
"""Vouched values that are kept of one thread; more vouch for nothing."""

_GOOD: Final = range(200, 300)


@dataclass(slots=True)
class Telling:
    """The vouched values of one thread, as far as they were read from its journal."""

    _values: set[str] = field(default_factory=set[str])
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
            self._values, self._branch, self._seen = set(), thread.branch, 0
        # A call that ended behind a later one is missed here. That only makes the answer stricter.
        async for row in core.store.lineage_outcomes(thread.key, thread.lineage.parts, self._seen):
            self._seen = max(self._seen, row.step)
            if row.action.startswith("http.") and row.outcome == "ok" and len(self._values) < VALUES_MAX:
                self._values.update(folded(word) for word in await _vouched(core, thread, row))
        return Told(input=self._input, values=frozenset(self._values))


async def _input(core: Core, thread: Thread) -> str:
    """What an operator gave: to the agent, or to the one at the head of its family."""
    # INVARIANT: what a parent gives to its child is no operator's word: a hijacked parent could vouch for anything by it.
    above = await core.store.parents(thread.key)
    record = await core.store.agent_by_key(above[-1]) if above else thread.record
    return "" if record is None else record.input.decode("utf-8", "replace")


async def _vouched(core: Core, thread: Thread, row: StoredRow) -> list[str]:
    fields = _fields(thread, row)
    if not fields:
        return []
    answer = await answer_from(row, core.blobs, thread.purged)
    if answer.result is None:
        return []
    try:
        result: Mapping[str, Any] = json.loads(answer.result)
        if result.get("status") not in _GOOD:
            return []
        body = json.loads(base64.b64decode(result.get("body") or ""))
    except (ValueError, RecursionError):
        return []
    return [
        word for pointer in fields for value in _at(body, pointer.split("/")[1:]) for word in words_in(value)
    ]


def _fields(thread: Thread, row: StoredRow) -> tuple[str, ...]:
    """Fields of its answer that the resource vouches for, as the kernel file says now."""
    try:
        urls = {row.resource, bare_url(row.resource)}
        read = [_fields_at(thread, row, url) for url in urls]
    except PatternError:
        return ()
    # INVARIANT: what one server may read as another page vouches for what both would say, or for nothing.
    return read[0] if all(fields == read[0] for fields in read) else ()


def _fields_at(thread: Thread, row: StoredRow, url: str) -> tuple[str, ...]:
    found = resource_of(url, thread.environment.http.values())
    if found is None:
        return ()
    resource, path = found
    method = row.action.removeprefix("http.").upper()
    for verb, pattern, fields in resource.vouches:
        if verb in ("*", method) and match_url_path(pattern, path):
            return fields
    return ()


def _at(value: Any, parts: Sequence[str]) -> Iterator[Any]:
    """Every value at a pointer; `*` is every one of a list or object."""
    if not parts:
        yield value
        return
    name = parts[0].replace("~1", "/").replace("~0", "~")
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        chosen = list(table.values()) if parts[0] == "*" else [table[name]] if name in table else []
    elif isinstance(value, list):
        listed = cast("list[Any]", value)
        inside = name.isascii() and name.isdigit() and int(name) < len(listed)
        chosen = listed if parts[0] == "*" else [listed[int(name)]] if inside else []
    else:
        chosen = []
    for one in chosen:
        yield from _at(one, parts[1:])
