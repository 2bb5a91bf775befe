"""What RFC 9113 leaves no choice in, what would hold an honest client up, and what a hostile one may not have for nothing."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ringfence.kernel.server import frames
from ringfence.kernel.server.frames import FRAME_BYTES_MAX, WINDOW_FIRST, frame
from ringfence.kernel.server.gate import CHORES_MAX, READS_MAX, Gate, Places, Reads
from ringfence.kernel.server.stream import WINDOW_WAITING
from support.doors import ACKNOWLEDGED, HELLO, Door, headers, message, run

NUMBER = struct.Struct(">I")
ENDS = frames.END_HEADERS | frames.END_STREAM


class Sender:
    """An honest client of one stream: it sends as much as it has heard that there is room for."""

    def __init__(self, door: Door, *, acknowledged: bool) -> None:
        self._door = door
        self._room = WINDOW_WAITING if acknowledged else WINDOW_FIRST
        self._seen = 0

    def narrow(self) -> None:
        """Take over the settings, and say so."""
        self._room -= WINDOW_FIRST - WINDOW_WAITING
        self._door.feed(frame(frames.SETTINGS, frames.ACK, 0))

    def send(self, data: bytes, most: int = FRAME_BYTES_MAX, padding: int = 0) -> bytes:
        """Send what there is room for; gives what there is none for. Padding takes room as well."""
        while data:
            written = self._door.pipe.frames()
            for kind, _, number, payload in written[self._seen :]:
                if kind == frames.WINDOW and number == 1:
                    self._room += NUMBER.unpack(payload)[0]
            self._seen = len(written)
            around = padding + 1 if padding else 0
            size = min(len(data), self._room - around, most - around)
            if size <= 0:
                break
            self._room -= size + around
            flags, first = (frames.PADDED, bytes([padding])) if padding else (0, b"")
            self._door.feed(frame(frames.DATA, flags, 1, first + data[:size] + bytes(padding)))
            data = data[size:]
        return data


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20_000), st.integers(40_000, 90_000))
def test_a_message_as_long_as_a_window_comes_in_whatever_came_before(before: int, size: int) -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + headers(1))
        sender = Sender(door, acknowledged=True)
        texts = [b"x" * before, b"y" * size, b"z"]
        assert sender.send(b"".join(message(text) for text in texts)) == b""
        assert door.listeners[0].heard == texts
        door.end()

    run(work)


@settings(max_examples=20, deadline=None)
@example(150_000, 255, 400)
@given(st.integers(20_000, 400_000), st.integers(1, 255), st.integers(300, FRAME_BYTES_MAX))
def test_padding_holds_no_message_up(size: int, padding: int, most: int) -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + headers(1))
        text = b"x" * size
        assert Sender(door, acknowledged=True).send(message(text) * 2, most, padding) == b""
        assert door.listeners[0].heard == [text, text]
        door.end()

    run(work)


def test_settings_that_a_client_hears_of_within_a_message_hold_it_up_no_longer_than_the_answer() -> None:
    def work() -> None:
        door = Door()
        door.feed(HELLO + headers(1))
        sender, data = Sender(door, acknowledged=False), message(b"x" * 50_000)
        assert sender.send(data[:32_000]) == b""
        sender.narrow()
        assert sender.send(data[32_000:]) == b""
        assert door.listeners[0].heard == [b"x" * 50_000]
        door.end()

    run(work)


def test_a_stream_ends_once_though_its_last_message_ends_it() -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + headers(1, flags=ENDS))
        stream = door.listeners[0].stream
        stream.send(b"x" * 20_000, lambda: stream.end(0))
        kinds = [(kind, flags) for kind, flags, number, _ in door.pipe.frames() if number == 1]
        assert kinds[1:] == [
            (frames.HEADERS, frames.END_HEADERS),
            (frames.DATA, 0),
            (frames.DATA, 0),
            (frames.HEADERS, ENDS),
        ]
        door.end()

    run(work)


def test_nothing_is_said_of_a_stream_that_has_ended() -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + headers(1))
        compressed = b"\x01" + message(bytes(FRAME_BYTES_MAX - 5))[1:]
        door.feed(frame(frames.DATA, 0, 1, compressed))
        assert [kind for kind, _, number, _ in door.pipe.frames() if number][-1] == frames.RESET
        door.end()

    run(work)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (headers(1) + frame(frames.WINDOW, 0, 1, bytes(4)), frames.PROTOCOL),
        (frame(frames.WINDOW, 0, 0, bytes(4)), frames.PROTOCOL),
        (frame(frames.WINDOW, 0, 0, b"\x80\x00\x00\x00"), frames.PROTOCOL),
        (frame(frames.WINDOW, 0, 7, NUMBER.pack(1)), frames.PROTOCOL),
        (headers(3) + frame(frames.WINDOW, 0, 2, NUMBER.pack(1)), frames.PROTOCOL),
        (headers(3) + frame(frames.RESET, 0, 2, NUMBER.pack(0)), frames.PROTOCOL),
        (headers(3) + frame(frames.DATA, 0, 2, b"x"), frames.PROTOCOL),
        (frames.settings({frames.SET_PUSH: 2}), frames.PROTOCOL),
        (frames.settings({frames.SET_FRAME: FRAME_BYTES_MAX - 1}), frames.PROTOCOL),
        (frames.settings({frames.SET_FRAME: 1 << 24}), frames.PROTOCOL),
        (
            frame(frames.SETTINGS, 0, 0, struct.pack(">HIHI", 4, 1 << 31, 4, WINDOW_FIRST)),
            frames.FLOW,
        ),
        (headers(1, flags=ENDS) + frame(frames.DATA, 0, 1, b"x"), frames.CLOSED),
        (headers(1, flags=ENDS) + headers(1, flags=ENDS), frames.CLOSED),
        (headers(1) + headers(1), frames.PROTOCOL),
        (headers(1, b"\x00\x00", frames.END_HEADERS | frames.PRIORITISED), frames.FRAME_SIZE),
        (frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), frames.FRAME_SIZE),
        (
            headers(1)
            + frame(frames.WINDOW, 0, 1, NUMBER.pack(2**31 - 1 - WINDOW_FIRST))
            + frames.settings({frames.SET_WINDOW: WINDOW_FIRST + 1}),
            frames.FLOW,
        ),
    ],
)
def test_what_leaves_no_choice_ends_the_connection(data: bytes, code: int) -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + data)
        kind, _, _, payload = door.pipe.frames()[-1]
        assert (kind, NUMBER.unpack_from(payload, 4)[0]) == (frames.GOAWAY, code)
        door.end()

    run(work)


def test_a_window_that_has_become_less_than_nothing_is_made_up_for_first() -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + headers(1))
        stream = door.listeners[0].stream
        stream.send(b"x" * 20_000)
        door.feed(frames.settings({frames.SET_WINDOW: 10}))
        stream.send(b"y")
        sent = len(door.pipe.written)
        door.feed(frame(frames.WINDOW, 0, 1, NUMBER.pack(20_005 - 10)))
        assert len(door.pipe.written) == sent
        door.feed(frame(frames.WINDOW, 0, 1, NUMBER.pack(6)))
        assert door.pipe.written.endswith(message(b"y"))
        door.end()

    run(work)


@pytest.mark.parametrize(
    ("piece", "chores"),
    [
        (frame(frames.DATA, 0, 1), 1),
        (frame(frames.DATA, frames.PADDED, 1, b"\x02xx"), 1),
        (frame(frames.SETTINGS, 0, 0, bytes(6) * 2700), 2700),
        (headers(3, b"\x20" * 16_000), 1000),
    ],
)
def test_what_carries_no_call_is_paid_for(piece: bytes, chores: int) -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + headers(1) + headers(5))
        # Twice as many: some come back meanwhile.
        data = piece * (2 * CHORES_MAX // chores + 1)
        door.feed(data)
        assert not door.pipe.closed
        assert not door.pipe.reads
        door.end()

    run(work)


def test_a_frame_that_comes_byte_by_byte_is_paid_for() -> None:
    def work() -> None:
        door = Door()
        door.feed(ACKNOWLEDGED + headers(1))
        for _ in range(5):
            door.feed(frame(frames.DATA, 0, 1, message(bytes(FRAME_BYTES_MAX - 5))), 1)
        assert len(door.listeners[0].heard) == 5
        assert not door.pipe.reads
        door.end()

    run(work)


def test_streams_that_wait_for_calls_to_end_are_forgotten_with_their_end() -> None:
    def work() -> None:
        door = Door()
        gate = door.bounds.gate
        gate.change(1, 1 << 30)
        called = list[int]()
        gate.when_open(lambda: called.append(1))
        door.feed(ACKNOWLEDGED)
        for number in range(1, 201, 2):
            door.feed(headers(number) + frame(frames.DATA, 0, number, message(b"x")))
            door.feed(frame(frames.RESET, 0, number, bytes(4)))
        assert all(listener.over for listener in door.listeners)
        assert waiting(gate) == 1
        door.end()

    run(work)


def waiting(gate: Gate) -> int:
    """How many are called when it opens."""
    return len(gate._waiting)  # pyright: ignore[reportPrivateUsage] - what they hold is what counts


class Brief:
    """Whoever gets a place and leaves it at once."""

    def __init__(self, leave: Callable[[Brief], None]) -> None:
        self.begun = 0
        self._leave = leave

    def begin(self) -> None:
        self.begun += 1
        self._leave(self)


def test_a_long_queue_for_places_is_no_deep_one() -> None:
    places, first = Places(1), object()
    places.take(first, lambda: None)
    queue = [Brief(places.leave) for _ in range(2000)]
    for who in queue:
        places.take(who, who.begin)
    places.leave(first)
    assert all(who.begun == 1 for who in queue)


def test_a_long_queue_of_reads_is_no_deep_one() -> None:
    async def main() -> None:
        reads = Reads()
        firsts = [object() for _ in range(READS_MAX)]
        for first in firsts:
            reads.take(first, lambda: None)
        queue = [Brief(reads.leave) for _ in range(2000)]
        for who in queue:
            reads.take(who, who.begin)
        for first in firsts:
            reads.leave(first)
        assert all(who.begun == 1 for who in queue)

    asyncio.run(main())
