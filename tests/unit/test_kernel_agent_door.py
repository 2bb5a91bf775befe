"""An agent's door and who answers at it, as far as no journal is needed: nobody is held for ever, and nothing outlives its end."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ringfence.kernel.descriptors import Descriptors
from ringfence.kernel.server import connection, frames, talk
from ringfence.kernel.server.agent_door import SOCKET, AgentDoor
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.server.frames import frame
from ringfence.kernel.server.gate import CHORES_MAX, READS_MAX, Bounds
from ringfence.kernel.server.replies import Replies
from ringfence.kernel.server.stream import Handler, Stream
from ringfence.kernel.server.talk import Talk
from ringfence.kernel.server.unary import Unary
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.policy.manifest_types import Restart
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.table import build_table
from ringfence.v1 import syscalls_pb2 as pb
from support.doors import ACKNOWLEDGED, Door, headers, message

THREAD = cast(
    "Thread",
    SimpleNamespace(
        id="a-1",
        generation=1,
        branch=1,
        live_lanes=0,
        waits=[],
        record=SimpleNamespace(thread="t"),
        manifest=SimpleNamespace(restart=Restart()),
        replay=SimpleNamespace(checkpoint=None, first_step=1, last={}),
        releases=None,
        token_matches="right".__eq__,
    ),
)
HELLO = pb.StreamRequest(hello=pb.Hello(token="right", protocol=1)).SerializeToString()


async def nobody(_thread: Thread, _answer: Any) -> None:
    """Nothing is parked here."""


def answered_by(make: Callable[[Desk, Stream], Handler]) -> tuple[Door, Desk]:
    """A door with one stream that `make`'s handler answers; its desk has no dispatcher, so each call meets a bug."""
    door = Door()
    desk = Desk(THREAD, cast("Any", None), nobody)
    door.bounds = desk.bounds
    door.connection = type(door.connection)(door)
    door.connection.connection_made(door.pipe)  # type: ignore[arg-type]  # as much of a transport as is used
    door.serves = False
    door.feed(ACKNOWLEDGED + headers(1))
    stream = door.listeners[0].stream
    handler = make(desk, stream)
    stream.attend(handler)
    cast("Any", handler).begin()
    return door, desk


def ended(door: Door) -> list[bytes]:
    """Header blocks that end the stream."""
    return [
        payload
        for kind, flags, number, payload in door.pipe.frames()
        if kind == frames.HEADERS and number and flags & frames.END_STREAM
    ]


async def test_a_greeting_that_waits_for_calls_to_end_is_no_missing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(talk, "HELLO_S", 0.0)
    door, desk = answered_by(Talk)
    desk.bounds.gate.change(1, 1 << 30)
    door.feed(frame(frames.DATA, 0, 1, message(HELLO)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert ended(door) == []
    desk.bounds.gate.change(-1, -(1 << 30))
    for _ in range(3):
        await asyncio.sleep(0)
    assert any(kind == frames.DATA for kind, _, _, _ in door.pipe.frames())
    door.connection.connection_lost(None)


async def test_counts_of_lanes_carry_no_call_and_are_paid_for() -> None:
    door, desk = answered_by(Talk)
    door.feed(frame(frames.DATA, 0, 1, message(HELLO)))
    lanes = frame(frames.DATA, 0, 1, message(pb.StreamRequest(lanes=3).SerializeToString()))
    door.feed(lanes * (2 * CHORES_MAX))
    assert ended(door) == []
    assert desk.thread.live_lanes == 3
    assert not door.pipe.reads
    door.connection.connection_lost(None)


async def test_a_bug_in_a_single_call_is_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> Any:
        raise KeyError("a bug")

    row = build_table({"fs.read"})["fs.read"]
    door, desk = answered_by(lambda desk, stream: Unary(desk, stream, row, vouched=True))
    monkeypatch.setattr(desk, "in_turn", fails)
    data = message(pb.FsReadRequest(path="a").SerializeToString())
    door.feed(frame(frames.DATA, frames.END_STREAM, 1, data))
    for _ in range(5):
        await asyncio.sleep(0)
    (block,) = ended(door)
    assert b"grpc-status\x0213" in block
    door.connection.connection_lost(None)


async def test_a_connection_that_comes_as_the_door_closes_is_closed_too(tmp_path: Path) -> None:
    door = AgentDoor(THREAD, cast("Any", None), nobody, Descriptors(4096))
    await door.open(tmp_path / "a1", {}, None)
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        await loop.sock_connect(client, str(tmp_path / "a1" / SOCKET))
        door._accept()  # pyright: ignore[reportPrivateUsage] - before the loop does, so that nothing has begun yet
        await door.close()
        async with asyncio.timeout(5):
            while await loop.sock_recv(client, 4096):
                pass


async def test_who_hangs_up_and_reads_nothing_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written to it may wait for ever; its connection does not."""
    monkeypatch.setattr(connection, "GOODBYE_S", 0.0)
    door = Door()
    door.feed(ACKNOWLEDGED + headers(1))
    door.connection.eof_received()
    assert door.pipe.frames()[-1][0] == frames.GOAWAY
    assert (door.pipe.closed, door.pipe.aborted) == (True, False)
    while not door.pipe.aborted:
        await asyncio.sleep(0)


async def test_single_calls_leave_nothing_to_wait_in() -> None:
    """However many different ones come: what they queue in goes with the last of them."""
    desk = Desk(THREAD, cast("Any", None), nobody)
    row = build_table(["state.get"])["state.get"]
    request = row.request_class
    done = await asyncio.gather(*(desk.in_turn(row, request(key=f"k{n % 7}")) for n in range(50)))
    assert {answer.failure.reason for answer in done if answer.failure is not None} == {"Internal"}
    del done
    gc.collect()
    assert len(desk._turns) == 0  # pyright: ignore[reportPrivateUsage] - what stays is what counts


async def test_an_answer_that_can_not_be_sent_is_told_as_that() -> None:
    door = Door()
    door.feed(ACKNOWLEDGED + headers(1))
    stream = door.listeners[0].stream
    bounds, began = Bounds(), list[int]()
    owed = Replies(stream, lambda _: None).expect(7, bounds, 10, reads=True)
    for who in (owed, *range(1, READS_MAX + 1)):
        bounds.reads.take(who, lambda: began.append(len(began)))
    assert len(began) == READS_MAX
    owed.reply(Answer(step=3, failure=InvalidRequest("half a character: \ud800")))
    sent = b"".join(data for kind, _, _, data in door.pipe.frames() if kind == frames.DATA)
    told = pb.StreamResponse.FromString(sent[5:]).reply
    assert (told.id, told.step, told.failure.reason) == (7, 3, "Internal")
    # It gives back all that it held, also the place of a read.
    assert len(began) == READS_MAX + 1


async def test_a_door_that_closes_late_leaves_that_of_its_successor(tmp_path: Path) -> None:
    """As of a kernel that was taken over from while it stood still."""
    doors = [AgentDoor(THREAD, cast("Any", None), nobody, Descriptors()) for _ in range(2)]
    place = tmp_path / "a1"
    await doors[0].open(place, {}, None)
    (place / SOCKET).unlink()
    place.rmdir()
    await doors[1].open(place, {}, None)
    await doors[0].close()
    assert (place / SOCKET).is_socket()
    await doors[1].close()
    assert not place.exists()
