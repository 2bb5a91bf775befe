"""Connections of an agent's door without a socket: whatever comes, in whatever pieces, what they hold is bounded."""

from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.kernel.server import frames
from ringfence.kernel.server.connection import CONNECTION_STREAMS_MAX, STRANGER_STREAMS_MAX
from ringfence.kernel.server.frames import PREFACE, WINDOW_FIRST, frame
from ringfence.kernel.server.gate import LARGE_MAX, READS_MAX, Calm, Places, Reads
from support.doors import ACKNOWLEDGED, FIELDS, HELLO, Door, headers, message, run


@pytest.mark.parametrize("piece", [1, 7, 30_000])
def test_messages_come_whole_however_they_are_cut(piece: int) -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + headers(1), piece)
        texts = [b"", b"a", b"b" * 20_000, b"c"]
        data = b"".join(message(text) for text in texts)
        for at in range(0, len(data), 5000):
            door.feed(frame(frames.DATA, 0, 1, data[at : at + 5000]), piece)
        door.feed(frame(frames.DATA, frames.END_STREAM, 1), piece)
        (listener,) = door.listeners
        assert listener.heard == texts
        assert listener.ends
        listener.stream.send(b"answer")
        listener.stream.end(0)
        kinds = [kind for kind, _, number, _ in door.pipe.frames() if number == 1]
        assert [kind for kind in kinds if kind != frames.WINDOW] == [
            frames.HEADERS,
            frames.DATA,
            frames.HEADERS,
        ]
        door.end()

    run(work)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 11),
            st.integers(0, 255),
            st.integers(0, 9),
            st.one_of(st.binary(max_size=40), st.just(b"\xbe" * 9000), st.just(b"\x00" * 4)),
        ),
        max_size=40,
    ),
    st.binary(max_size=30),
)
def test_no_bytes_are_a_bug(parts: list[tuple[int, int, int, bytes]], rest: bytes) -> None:
    """Frames of any kind in any order end in answers or in a goodbye, never in an exception."""

    def work() -> None:
        door = Door()
        door.feed(HELLO + b"".join(frame(*part) for part in parts) + rest)
        if door.pipe.closed:
            assert door.pipe.frames()[-1][0] == frames.GOAWAY
        door.end()

    run(work)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", frames.PROTOCOL),
        (PREFACE + frame(frames.PING, 0, 0, bytes(8)), frames.PROTOCOL),
        (HELLO + headers(1, b"\xbe"), frames.COMPRESSION),
        (HELLO + headers(1, b"\x40\x01a\x7f\xbd\x1d" + b"v" * 3900 + b"\xbe" * 4), frames.COMPRESSION),
        (HELLO + headers(1, FIELDS, 0) + frame(frames.CONTINUATION, 0, 1, bytes(16_000)) * 2, frames.CALM),
        (HELLO + headers(1, FIELDS, 0) + frame(frames.PING, 0, 0, bytes(8)), frames.PROTOCOL),
        (HELLO + headers(2), frames.PROTOCOL),
        (HELLO + frame(frames.DATA, 0, 1, b"x"), frames.PROTOCOL),
        (HELLO + b"\x00\x40\x01" + bytes(6), frames.FRAME_SIZE),
        (HELLO + headers(1) + frame(frames.WINDOW, 0, 1, b"\x7f\xff\xff\xff"), frames.FLOW),
    ],
)
def test_what_may_not_come_ends_the_connection(data: bytes, code: int) -> None:
    def work() -> None:
        door = Door()
        door.feed(data)
        kind, _, _, payload = door.pipe.frames()[-1]
        assert kind == frames.GOAWAY
        assert struct.unpack_from(">I", payload, 4) == (code,)
        assert door.pipe.closed
        door.end()

    run(work)


def test_a_stream_that_waits_may_send_little_and_one_beyond_its_room_ends_the_connection() -> None:
    def work() -> None:
        door = Door(serves=False)
        part = frame(frames.DATA, 0, 1, message(b"x" * 4091))
        door.feed(ACKNOWLEDGED + headers(1) + part * 2)
        assert not door.pipe.closed
        door.feed(part)
        assert door.pipe.closed
        assert door.pipe.frames()[-1][0] == frames.GOAWAY
        door.end()

    run(work)


@pytest.mark.parametrize(
    ("hello", "most"), [(HELLO, STRANGER_STREAMS_MAX), (ACKNOWLEDGED, CONNECTION_STREAMS_MAX)]
)
def test_streams_beyond_the_bound_are_refused(hello: bytes, most: int) -> None:
    def work() -> None:
        door = Door(serves=False)
        door.feed(hello + b"".join(headers(number) for number in range(1, 101, 2)))
        refused = [number for kind, _, number, _ in door.pipe.frames() if kind == frames.RESET]
        assert refused == list(range(1, 101, 2))[most:]
        assert len(door.listeners) == most
        door.end()

    run(work)


def test_few_large_messages_come_in_at_a_time() -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + b"".join(headers(number) for number in range(1, 11, 2)))
        first = message(b"x" * 300_000)[:16_000]
        for number in range(1, 11, 2):
            door.feed(frame(frames.DATA, 0, number, first))
        room = {number: WINDOW_FIRST - len(first) for number in range(1, 11, 2)}
        for kind, _, number, payload in door.pipe.frames():
            if kind == frames.WINDOW and number:
                room[number] += struct.unpack(">I", payload)[0] - (
                    WINDOW_FIRST - 8192 if room[number] + len(first) == WINDOW_FIRST else 0
                )
        assert sum(left > WINDOW_FIRST for left in room.values()) == LARGE_MAX
        door.end()

    run(work)


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + headers(1))
        door.connection.pause_writing()
        assert not door.pipe.reads
        done: list[int] = []
        stream = door.listeners[0].stream
        stream.send(b"one", lambda: done.append(1))
        stream.send(b"x" * 100_000, lambda: done.append(2))
        assert done == []
        door.connection.resume_writing()
        assert door.pipe.reads
        assert done == [1]  # the other one waits for the client's window
        door.feed(frame(frames.WINDOW, 0, 1, struct.pack(">I", 99_999)))
        assert done == [1]
        door.feed(frame(frames.WINDOW, 0, 0, struct.pack(">I", 99_999)))
        assert done == [1, 2]
        stream.send(b"x" * 200_000, lambda: done.append(3))
        door.end()
        assert done == [1, 2, 3]

    run(work)


def test_a_flood_of_frames_is_left_unread_for_a_while() -> None:
    def work() -> None:
        door = Door()
        door.feed(HELLO + frame(frames.PING, 0, 0, bytes(8)) * 20_000)
        assert not door.pipe.reads
        assert not door.pipe.closed
        door.end()

    run(work)


def test_calm_comes_back_with_time() -> None:
    now = [0.0]
    calm = Calm(lambda: now[0])
    calm.spend(10_000)
    assert calm.debt_s() == 0
    calm.spend(5_000)
    assert calm.debt_s() == pytest.approx(1.0)
    now[0] = 0.5
    assert calm.debt_s() == pytest.approx(0.5)
    now[0] = 100.0
    assert calm.debt_s() == 0


def test_places_are_taken_in_the_order_of_coming() -> None:
    places, begun = Places(2), list[str]()
    for who in "abcd":
        places.take(who, lambda who=who: begun.append(who))
    places.leave("c")
    places.leave("a")
    places.leave("a")
    assert begun == ["a", "b", "d"]


def test_reads_that_nobody_takes_hold_up_only_reads() -> None:
    async def main() -> None:
        reads, begun = Reads(), list[int]()
        for who in range(READS_MAX + 2):
            reads.take(who, lambda who=who: begun.append(who))
        assert begun == list(range(READS_MAX))
        reads.answered(0)
        assert len(begun) == READS_MAX
        reads.leave(0)
        reads.leave(0)
        assert begun == list(range(READS_MAX + 1))

    asyncio.run(main())
