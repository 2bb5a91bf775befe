"""A program that lives through broken connections: its calls are made once each, in order, whatever breaks when."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent.aio import AsyncRingfence
from ringfence.agent.aio_session import AsyncSession
from ringfence.agent.lanes import Lane, TaskLanes
from ringfence.agent.runtime import Ringfence
from ringfence.agent.session import Session
from ringfence.agent.wire import Settings
from support.scenes import Held, Scene, scene_of_its_own, short_directory

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

RULES = ['fs.*: "/workspace/**"', 'state.*: "**"', "sleep"]
CALLS = 120


class Line:
    """A socket before the agent's own that can be cut in the middle of anything, and that may stay away for a while."""

    def __init__(self, path: Path, behind: Path) -> None:
        self.path = path
        self._behind = behind
        self._mutex = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.connections = 0
        self.listen()

    def listen(self) -> None:
        """Be there, again."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(16)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def leave(self) -> None:
        """Be away: nothing answers, and what was open breaks."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.path.unlink(missing_ok=True)
        self.cut()

    def cut(self) -> None:
        """Break every connection."""
        with self._mutex:
            broken, self._open = self._open, []
        for end in broken:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(str(self._behind))
                with self._mutex:
                    self._open += [near, far]
                    self.connections += 1
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


@pytest.fixture
def held(scene: Scene) -> Iterator[Held]:
    held = scene.hold(allow=RULES)
    yield held
    held.end()


@pytest.fixture
def line(held: Held) -> Iterator[Line]:
    with short_directory() as directory:
        line = Line(directory / "line.sock", held.socket)
        yield line
        line.leave()


def check(held: Held, line: Line, expected: str) -> None:
    assert line.connections > 3
    assert (held.live / "log").read_text() == expected
    appended = [s for s in held.steps() if s["action"] == "fs.append"]
    assert [s["outcome"] for s in appended] == ["ok"] * len(expected.split())
    by_lane: dict[str, list[int]] = {}
    for step in appended:
        by_lane.setdefault(step["lane"], []).append(step["lane_step"])
    # One place after the other; the first may follow a sleep.
    assert all(places == list(range(places[0], places[0] + len(places))) for places in by_lane.values())


def test_threads_live_through_cuts_and_absence(held: Held, line: Line) -> None:
    session = Session(Settings(socket=str(line.path), token=held.token))
    rf = Ringfence(session, 1, None)
    expected = ""
    for number in range(CALLS):
        if number % 20 == 10:
            # Cut while the call is under way, at a moment that nobody chose.
            threading.Timer(0.0005 * (number % 7), line.cut).start()
        if number == CALLS // 2:
            line.leave()
            threading.Timer(0.3, line.listen).start()
        rf.fs.append_text("log", f"{number}\n")
        expected += f"{number}\n"
    session.close()
    check(held, line, expected)


async def test_tasks_live_through_cuts_and_absence(held: Held, line: Line) -> None:
    session = await AsyncSession.open(Settings(socket=str(line.path), token=held.token))
    lanes = TaskLanes(Lane())
    rf = AsyncRingfence(session, lanes, 1, None)
    lanes.install()
    loop = asyncio.get_running_loop()
    expected = ""
    for number in range(CALLS):
        if number % 20 == 10:
            loop.call_later(0.0005 * (number % 7), line.cut)
        if number == CALLS // 2:
            line.leave()
            loop.call_later(0.3, line.listen)
        await rf.fs.append_text("log", f"{number}\n")
        expected += f"{number}\n"
    lanes.uninstall()
    await session.close()
    check(held, line, expected)


def test_a_call_that_waits_is_found_again_after_a_cut(held: Held, line: Line) -> None:
    session = Session(Settings(socket=str(line.path), token=held.token))
    rf = Ringfence(session, 1, None)
    for delay in (0.2, 0.5, 0.8):
        threading.Timer(delay, line.cut).start()
    rf.sleep(1.2)
    rf.fs.append_text("log", "awake\n")
    session.close()
    check(held, line, "awake\n")
    slept = [s for s in held.steps() if s["action"] == "sleep"]
    assert [(s["outcome"], s["lane_step"]) for s in slept] == [("ok", 0)]
