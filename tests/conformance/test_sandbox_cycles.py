"""Many starts and ends leave nothing behind: no process, mount, control group, socket, file, descriptor, thread or memory.

A part of them with the other tests; all with `RINGFENCE_TEST_CYCLES=1000`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Box

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import Traces, eventually, groups, helpers, status_bytes

CYCLES = int(os.environ.get("RINGFENCE_TEST_CYCLES", "240"))
MIXED = CYCLES // 4
WARM_UP = 48
AT_ONCE = 4
TIMEOUT_S = 300
SAME = 5
"""So many looks in a row that find the same are rest."""
GROWTH_MOST = 4 << 20
"""What an allocator may keep for its own use. A spec alone is a kilobyte: keeping more than a few of each is found."""

WAYS = ["killed", "paused", "ended", "missing", "refused", "cancelled"]


def held(box: Box) -> dict[str, int]:
    """What the backend's own processes hold, and every control group whoever is in it; nothing where one has just gone."""
    own = helpers(box)
    try:
        return {
            "processes": len(own),
            "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in own),  # noqa: PTH208 - their number is all
            "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in own),  # noqa: PTH208 - the same
            "control groups": len(groups(box.data)),
        }
    except FileNotFoundError:
        return {}


def at_rest(box: Box) -> dict[str, int]:
    """What they hold when nothing is being made any more: a spare sandbox comes a moment after the last start."""
    found: list[dict[str, int]] = []
    eventually(
        lambda: (
            found.append(held(box))
            or (len(found) > SAME and bool(found[-1]) and found[-SAME:] == [found[-1]] * SAME)
        ),
        lambda: f"no rest: {found[-SAME:]}",
    )
    return found[-1]


def memory(box: Box) -> int:
    return sum(status_bytes(pid, "VmRSS") for pid in helpers(box))


def spec_of(box: Box) -> dict[str, Any]:
    log = box.directory(box.fresh("logs"), owner=box.kind.kernel_uid) / "out"
    words, needed = box.interpreter() if box.kind.warm else (["/bin/sh", "-c"], {})
    text = "import os, signal; os.fork(); signal.pause()" if box.kind.warm else "sleep 1000 & wait"
    return {
        "agent": "agent-1",
        "argv": [*words, text, box.token],
        "env": {"PATH": "/usr/bin:/bin"},
        **needed,
        "image": str(box.directory(box.fresh("image"))),
        "socket_dir": str(box.directory(box.fresh("sockets"))),
        "uid": box.uid,
        "stdout": str(log),
        "stderr": str(log),
    }


def cycle(
    box: Box, count: int, ways: list[str], spec: dict[str, Any], at_once: int = AT_ONCE
) -> dict[str, int]:
    _, done = box.host.begin("cycles", count=count, at_once=at_once, ways=ways, spec=spec)
    return done.result(TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("ways", [["killed"], WAYS], ids=["killed", "mixed"])
def test_cycles_leave_nothing_behind(box: Box, ways: list[str]) -> None:
    before = Traces(box)
    spec = spec_of(box)
    # More at once than will be later, so that every pool of threads and connections is as large as it gets.
    cycle(box, WARM_UP, ways, spec, at_once=6 * AT_ONCE)
    eventually(lambda: box.left() == [], lambda: f"left: {box.left()}")
    held_before, memory_before = at_rest(box), memory(box)
    held_before["descriptors"] += box.kind.pool
    count = (CYCLES if len(ways) == 1 else MIXED) // box.kind.pace
    ended = cycle(box, count, ways, spec)
    assert sum(ended.values()) == count
    assert set(ended) == set(ways)
    # Nothing is waited for: what a kill has returned from is gone.
    assert box.left() == []
    eventually(lambda: before.new() == [], lambda: f"left behind: {before.new()}")
    eventually(lambda: not more(box, held_before), lambda: f"{held_before} became {held(box)}")
    print(
        f"{count} cycles, {ended}: before {held_before}, after {held(box)}, memory {memory(box) - memory_before:+} bytes"
    )
    assert memory(box) - memory_before < GROWTH_MOST


def more(box: Box, expected: dict[str, int]) -> bool:
    """Whether the helpers hold more of anything than is expected."""
    now = held(box)
    return not now or any(count > expected[what] for what, count in now.items())
