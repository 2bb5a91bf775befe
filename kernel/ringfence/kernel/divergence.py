"""Programs without lanes of their own that take another way after a restart than before: what they left out, and what differs.

A call of a door or of `rf-call` is known by what it asks. One that asks something new while recorded ones are left is no
error by itself; what it differs in is kept for the operator, and what it can't make up for is asked (`Flight`).
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from ringfence.kernel.journal.types import JournalError
from ringfence.kernel.replay import BOUNDARY_LANE, CONTENT, OPERATOR_LANE
from ringfence.syscalls.errors import Fenced, JournalUnavailable
from ringfence.syscalls.llm_parts import take

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.thread import Thread
    from ringfence.policy.ignoring import Ignoring

EVENT: Final = "strayed"
"""Event of a call that is not on record while recorded ones are left."""
TOLD_MAX: Final = 3
"""Calls of one start that are told of: what comes after the first mostly follows from it."""
DIFFERENCES_MAX: Final = 8
_READ_MAX: Final = 16
_SHOWN_CHARS: Final = 160
_AROUND_CHARS: Final = 24
_WORDS_MAX: Final = 400
_WORD: Final = re.compile(r"\s+|\w+|.", re.DOTALL)


# -- what was left out ------------------------------------------------------------------------------------------------


def left_steps(thread: Thread, *, content: bool = False) -> Iterator[int]:
    """Steps that a program which was started again has not asked for again.

    Args:
        thread: whose.
        content: only calls that are known by what they ask, as those of a program without lanes.
    """
    for lane, last in thread.replay.last.items():
        if lane in (BOUNDARY_LANE, OPERATOR_LANE) or (content and not lane.startswith(CONTENT)):
            continue
        for at in range(thread.next_of(lane), last + 1):
            held = thread.replay.find(lane, at)
            if held is not None and not held.aside:
                yield held.step


def left_out(thread: Thread, *, content: bool = False) -> str:
    """Why a new call can't be taken for one of a program that does again what it did; empty: it can. Arguments as for `left_steps`."""
    step = next(left_steps(thread, content=content), None)
    if step is None:
        return ""
    return f"the program took another way after its restart: it has not asked for step {step} again"


def strayed(thread: Thread, lane: str) -> str:
    """The same for a new call in a lane of a program; empty also where its calls are known by their place."""
    layer = thread.environment.direct
    if layer is not None:
        return layer.strayed()
    if thread.replay.caught_up or not lane.startswith(CONTENT):
        return ""
    why = left_out(thread, content=True)
    # Looked through once: what was asked for again stays so.
    thread.replay.caught_up = not why
    return why


# -- what differs -----------------------------------------------------------------------------------------------------


class Strays:
    """Tells of the calls of one start of a program that are not on record while recorded ones are left."""

    def __init__(self, core: Core, thread: Thread, ignoring: Ignoring) -> None:
        self._core = core
        self._thread = thread
        self._ignoring = ignoring
        self._told: list[dict[str, Any]] = []

    async def look(self, lane: str, lane_step: int, action: str, raw: bytes) -> None:
        """Look at a call before it is made. Costs nothing where nothing is left."""
        thread, place = self._thread, (lane, lane_step)
        if (
            len(self._told) >= TOLD_MAX
            or thread.replay.caught_up
            or place in thread.by_lane
            or place in thread.replay.unfinished
        ):
            return
        if thread.replay.find(*place) is not None:
            return
        left = sorted(left_steps(thread, content=True))
        thread.replay.caught_up = not left
        if not left:
            return
        with contextlib.suppress(
            JournalError, JournalUnavailable, Fenced
        ):  # the call itself says that the database is away
            recorded = await self._recorded(left)
            found = await asyncio.to_thread(self._compare, action, raw, recorded)
            made = {"action": action, "lane": lane, "lane_step": lane_step, "left": len(left), **found}
            self._told.append(made)
            told = {"generation": thread.generation, "calls": self._told}
            await self._core.event(thread.key, EVENT, found["resource"], **told)

    async def _recorded(self, left: Sequence[int]) -> list[tuple[int, str, str, Any]]:
        """Step, action, resource and arguments of the first calls that were left out."""
        found: list[tuple[int, str, str, Any]] = []
        for step in left[:_READ_MAX]:
            rows = await self._core.store.step(self._thread.key, step)
            bodies = (json.loads(row.body) for row in rows)
            arguments = next((body["arguments"] for body in bodies if "arguments" in body), None)
            if rows:
                found.append((step, rows[-1].action, rows[-1].resource, arguments))
        return found

    def _compare(
        self, action: str, raw: bytes, recorded: Sequence[tuple[int, str, str, Any]]
    ) -> dict[str, Any]:
        """The nearest recorded call, and what the new one differs in beside what is ignored."""
        made, row = self._masked(action, raw), self._core.table.get(action)
        if row is not None and row.takes_out:
            made = take(made, {})  # recorded are pointers
        nearest: tuple[float, int, str, Any] | None = None
        for step, was, resource, arguments in recorded:
            if was == action and arguments is not None and made is not None:
                masked = self._masked(action, json.dumps(arguments).encode())
                near = _likeness(_plain(masked), _plain(made))
                if nearest is None or near > nearest[0]:
                    nearest = (near, step, resource, masked)
        if nearest is None:
            step, was, resource, _ = recorded[0] if recorded else (0, "", "", None)
            return {
                "recorded_step": step,
                "recorded_action": was,
                "resource": resource,
                "differences": [],
                "more": 0,
            }
        _, step, resource, masked = nearest
        found = list(differences(masked, made))
        shown = found[:DIFFERENCES_MAX]
        more = len(found) - len(shown)
        return {
            "recorded_step": step,
            "recorded_action": action,
            "resource": resource,
            "differences": shown,
            "more": more,
        }

    def _masked(self, action: str, raw: bytes) -> Any:
        try:
            return self._ignoring.masked(action, raw)
        except ValueError:
            return None


def differences(recorded: Any, made: Any, at: str = "") -> Iterator[dict[str, str]]:
    """Where two documents differ, as `{at, recorded, made}`: a JSON pointer and short texts; one that is absent has none."""
    if isinstance(recorded, dict) and isinstance(made, dict):
        one, other = cast("dict[str, Any]", recorded), cast("dict[str, Any]", made)
        for key in sorted(one.keys() | other.keys()):
            where = f"{at}/{key.replace('~', '~0').replace('/', '~1')}"
            yield from _member(one, other, key, where)
    elif isinstance(recorded, list) and isinstance(made, list):
        first, second = cast("list[Any]", recorded), cast("list[Any]", made)
        for index in range(max(len(first), len(second))):
            yield from _member(dict(enumerate(first)), dict(enumerate(second)), index, f"{at}/{index}")
    elif isinstance(recorded, str) and isinstance(made, str):
        for was, now in _spots(recorded, made):
            yield {"at": at, "recorded": was, "made": now}
    elif _plain(cast("object", recorded)) != _plain(cast("object", made)):
        yield {
            "at": at,
            "recorded": _short(_plain(cast("object", recorded))),
            "made": _short(_plain(cast("object", made))),
        }


def _member(
    one: Mapping[Any, Any], other: Mapping[Any, Any], key: Any, where: str
) -> Iterator[dict[str, str]]:
    if key not in other:
        yield {"at": where, "recorded": _short(_plain(one[key]))}
    elif key not in one:
        yield {"at": where, "made": _short(_plain(other[key]))}
    else:
        yield from differences(one[key], other[key], where)


def _spots(was: str, now: str) -> Iterator[tuple[str, str]]:
    """The parts of two texts that differ, each with a little of what stands around it."""
    if was == now:
        return
    start = _common(was, now)
    end = _common(was[start:][::-1], now[start:][::-1])
    begin = max(start - _AROUND_CHARS, 0)
    one, other = was[begin : len(was) - end], now[begin : len(now) - end]
    tail = was[len(was) - end :][:_AROUND_CHARS]
    left, right = _WORD.findall(one), _WORD.findall(other)
    if max(len(left), len(right)) > _WORDS_MAX:
        yield _short(one), _short(other)
        return
    left, right = [*left, *_WORD.findall(tail)], [*right, *_WORD.findall(tail)]
    for kind, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if kind != "equal":
            # Words around it say where it stands.
            yield _short("".join(left[max(a - 4, 0) : b + 2])), _short("".join(right[max(c - 4, 0) : d + 2]))


def _common(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _likeness(one: str, other: str) -> float:
    """How much of two texts is the same from their beginnings and ends on, between 0 and 1."""
    start = _common(one, other)
    end = _common(one[start:][::-1], other[start:][::-1])
    return (start + end) / max(len(one), len(other), 1)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS // 2]}…{text[-_SHOWN_CHARS // 2 :]}"
