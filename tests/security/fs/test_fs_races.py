"""Parents, names and kinds that change while fs.* resolve: thousands of calls, none of which touches what lies outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.syscalls import errors
from support.fs_world import World, picture

pytestmark = pytest.mark.timeout(240)

EXCHANGE = 2
HERE = -100
LOOKS, CHANGES = 2000, 250
libc = ctypes.CDLL(None, use_errno=True)


def exchange(one: Path, other: Path) -> None:
    if libc.renameat2(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    place = tmp_path / "outside"
    (place / "deep").mkdir(parents=True)
    for name in ("secret", "deep/secret", "only-outside"):
        (place / name).write_text("canary")
    return place


@contextlib.contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """Another thread repeats `work` until the block is over, and has done it once when the block begins."""
    stop, begun = threading.Event(), threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                work()
                begun.set()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        stop.set()
        thread.join()


def swaps(world: World, outside: Path) -> dict[str, Callable[[], Any]]:
    """What the other side does: each makes `d/secret` now an own file, now a way out."""
    live = world.live
    (live / "d/deep").mkdir(parents=True)
    (live / "way").symlink_to(outside)
    (live / "up").symlink_to("../outside")

    def name() -> None:
        # The last name itself: a file, then a link.
        with contextlib.suppress(FileNotFoundError):
            (live / "d/secret").unlink()
        (live / "d/secret").symlink_to(outside / "secret")
        (live / "d/secret").unlink()
        (live / "d/secret").write_text("own")

    def kind() -> None:
        # A pipe, which would hold a careless reader for ever.
        with contextlib.suppress(FileNotFoundError):
            (live / "d/secret").unlink()
        os.mkfifo(live / "d/secret")
        (live / "d/secret").unlink()
        (live / "d/secret").write_text("own")

    def hard() -> None:
        # A second name of the file outside.
        with contextlib.suppress(FileNotFoundError):
            (live / "d/secret").unlink()
        (live / "d/secret").hardlink_to(outside / "secret")
        (live / "d/secret").unlink()

    def moved() -> None:
        # The directory itself leaves the workspace and comes back: `..` of a handle would then be outside.
        (live / "d").rename(outside.parent / "gone")
        (outside.parent / "gone").rename(live / "d")

    return {
        "parent": lambda: exchange(live / "d", live / "way"),
        "relative": lambda: exchange(live / "d", live / "up"),
        "name": name,
        "kind": kind,
        "hard": hard,
        "moved": moved,
    }


CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "fs.read": (LOOKS, {"path": "d/secret"}),
    "fs.stat": (LOOKS, {"path": "d/secret"}),
    "fs.list": (LOOKS, {"path": "d"}),
    "fs.search": (CHANGES, {"path": "d", "text": "canary"}),
    "fs.write": (CHANGES, {"path": "d/secret", "data": b"mine"}),
    "fs.append": (CHANGES, {"path": "d/secret", "data": b"mine"}),
    "fs.delete": (CHANGES, {"path": "d/secret"}),
    "fs.move": (CHANGES, {"path": "d/secret", "to": "d/deep/new"}),
}

# A second name that goes between the opening of a file and the look at it leaves one name, and which of them can't be told.
# Only who has the host's files can make such a name; nothing of an agent's can.
BY_OTHERS_ONLY = {("hard", "fs.read"), ("hard", "fs.search"), ("hard", "fs.append")}


SWAPS = ["parent", "relative", "name", "kind", "hard", "moved"]


@pytest.mark.parametrize(
    ("swap", "action"),
    [(swap, action) for swap in SWAPS for action in CALLS if (swap, action) not in BY_OTHERS_ONLY],
)
async def test_no_call_gets_out(world: World, outside: Path, swap: str, action: str) -> None:
    work = swaps(world, outside)[swap]
    before = picture(outside, times=False)
    tries, arguments = CALLS[action]
    with meanwhile(work):
        for _ in range(tries):
            with contextlib.suppress(errors.SyscallError):
                no_canary(await world.run(action, **arguments))
    after = picture(outside, times=False)
    assert {name: seen[1:] for name, seen in after.items()} == {
        name: seen[1:] for name, seen in before.items()
    }
    assert stat.S_ISREG((outside / "secret").stat().st_mode)
    assert (outside / "secret").read_text() == "canary"


def no_canary(result: Any) -> None:
    assert getattr(result, "data", b"") != b"canary"
    assert not getattr(result, "matches", [])
    listed = {entry.path.rpartition("/")[2] for entry in getattr(result, "entries", [])}
    assert "only-outside" not in listed
