"""What may come over an agent's connection, byte by byte. That real gRPC servers are understood is what all other tests here show."""

from __future__ import annotations

import base64
import struct

import pytest
from ringfence.agent import headers, http2
from ringfence.agent.http2 import WINDOW_BYTES, Exchange

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0, 1, 3, 4, 5, 6, 7, 8, 9,
)  # fmt: skip
END_STREAM, END_HEADERS, PADDED, PRIORITY = 0x1, 0x4, 0x8, 0x20
OK = headers.encode([(":status", "200"), ("content-type", "application/grpc")])


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 1) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


def trailers(*pairs: tuple[str, str]) -> bytes:
    return frame(HEADERS, headers.encode(pairs), END_HEADERS | END_STREAM)


def sent(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Frames in order: kind, flags, stream, payload."""
    found: list[tuple[int, int, int, bytes]] = []
    while data:
        size = int.from_bytes(data[:3], "big")
        found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return found


def begun() -> Exchange:
    """One whose request has gone out and whose answer has begun."""
    exchange = Exchange("/s/M", most_bytes=1 << 20)
    exchange.receive(frame(SETTINGS, stream=0) + frame(HEADERS, OK, END_HEADERS))
    exchange.outgoing.clear()
    return exchange


# -- header lists: the examples of RFC 7541, appendix C


def test_header_lists_with_huffman_codes_and_a_growing_table():
    decoder = headers.Decoder()
    first = decoder.decode(bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff"))
    assert first == [
        (b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com"),
    ]  # fmt: skip
    second = decoder.decode(bytes.fromhex("828684be5886a8eb10649cbf"))
    assert second == [*first, (b"cache-control", b"no-cache")]
    third = decoder.decode(bytes.fromhex("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf"))
    assert third[3:] == [(b":authority", b"www.example.com"), (b"custom-key", b"custom-value")]


def test_entries_leave_a_table_that_is_full():
    decoder = headers.Decoder()
    decoder.decode(b"\x3f\xe1\x01")  # 256 bytes from now on
    for value in (b"a" * 100, b"b" * 100):
        decoder.decode(b"\x40\x01x" + bytes((len(value),)) + value)
    assert decoder.decode(b"\xbe") == [(b"x", b"b" * 100)]
    with pytest.raises(headers.HeaderError, match="not there"):
        decoder.decode(b"\xbf")


@pytest.mark.parametrize(
    "block",
    [
        b"\x80", b"\xff\xff\xff\xff\xff\xff\xff\x0f", b"\x40\x05abc", b"\x00\x81\xff\x00", b"\x00\x81\x00\x00",
        b"\x3f\xff\xff\x01", b"\x82\x20", b"\x00\x84\xff\xff\xff\xff\x00",
    ],
)  # fmt: skip
def test_what_is_no_header_list_is_refused(block: bytes):
    with pytest.raises(headers.HeaderError):
        headers.Decoder().decode(block)


def test_what_is_written_is_read_back():
    pairs = [("authorization", "Bearer " + "x" * 300), ("grpc-message", "ü")]
    decoded = headers.Decoder().decode(headers.encode(pairs))
    assert decoded == [(name.encode(), value.encode()) for name, value in pairs]


# -- frames


def test_the_request_is_a_grpc_call():
    exchange = Exchange("/s/M", most_bytes=10, metadata=[("authorization", "Bearer t")])
    exchange.send(b"abc")
    exchange.send(b"", last=True)
    preface, frames = exchange.outgoing[:24], sent(bytes(exchange.outgoing[24:]))
    assert preface == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    assert [kind for kind, *_ in frames] == [SETTINGS, WINDOW_UPDATE, HEADERS, DATA, DATA]
    pairs = dict(headers.Decoder().decode(frames[2][3]))
    assert (pairs[b":path"], pairs[b"te"], pairs[b"authorization"]) == (b"/s/M", b"trailers", b"Bearer t")
    assert [(flags, payload) for _, flags, _, payload in frames[3:]] == [
        (0, message(b"abc")), (END_STREAM, message(b"")),
    ]  # fmt: skip


def test_messages_come_whole_however_the_bytes_are_cut():
    whole = b"".join(
        (
            frame(SETTINGS, struct.pack(">HI", 5, 1 << 15), stream=0),
            frame(HEADERS, b"\x02" + bytes(4) + b"\x10" + OK + b"\0\0", END_HEADERS | PADDED | PRIORITY),
            frame(DATA, message(b"one") + message(b"")[:2]),
            frame(DATA, b"\x03" + message(b"")[2:] + message(b"t") + b"\0\0\0", PADDED),
            trailers(("grpc-status", "0")),
        )
    )
    for size in (1, 2, 7, len(whole)):
        exchange = Exchange("/s/M", most_bytes=1 << 20)
        got: list[bytes] = []
        for at in range(0, len(whole), size):
            got += exchange.receive(whole[at : at + size])
        assert got == [b"one", b"", b"t"]
        assert exchange.ended is not None
        assert exchange.ended.code == "OK"


def test_a_status_is_read_with_its_text_and_details():
    exchange = begun()
    details = base64.b64encode(b"\x08\x07xy").decode().rstrip("=")
    block = headers.encode(
        [("grpc-status", "7"), ("grpc-message", "%C3%BC%20no%0a"), ("grpc-status-details-bin", details)]
    )
    exchange.receive(frame(HEADERS, block[:5], END_STREAM))
    assert exchange.ended is None
    exchange.receive(frame(CONTINUATION, block[5:], END_HEADERS))
    assert exchange.ended is not None
    assert (exchange.ended.code, exchange.ended.detail) == ("PERMISSION_DENIED", "ü no")
    assert exchange.ended.details == b"\x08\x07xy"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "UNAVAILABLE"),
        (frame(RST_STREAM, struct.pack(">I", 8)), "CANCELLED"),
        (frame(RST_STREAM, struct.pack(">I", 7)), "UNAVAILABLE"),
        (frame(RST_STREAM, struct.pack(">I", 2)), "INTERNAL"),
        (frame(GOAWAY, struct.pack(">II", 0, 11), stream=0), "UNAVAILABLE"),
        (frame(DATA, message(b""), END_STREAM), "INTERNAL"),
        (frame(DATA, b"\x01\0\0\0\0"), "INTERNAL"),
        (frame(DATA, struct.pack(">BI", 0, (1 << 20) + 1)), "RESOURCE_EXHAUSTED"),
        (trailers(("grpc-status", "99")), "UNKNOWN"),
        (trailers(("server", "x")), "UNKNOWN"),
        (frame(HEADERS, OK, END_HEADERS), "INTERNAL"),
        (frame(PUSH_PROMISE, bytes(4)), "INTERNAL"),
        (frame(DATA, message(b"x"), stream=3), "INTERNAL"),
        (frame(CONTINUATION, OK, END_HEADERS), "INTERNAL"),
        (frame(HEADERS, OK) + frame(PING, bytes(8), stream=0), "INTERNAL"),
        (frame(HEADERS, b"\x80", END_HEADERS), "INTERNAL"),
        (frame(DATA, b"\x05abc", PADDED), "INTERNAL"),
        (frame(RST_STREAM, b"\0"), "INTERNAL"),
        (b"HTTP/1.1 400 Bad Request\r\n", "INTERNAL"),
        (frame(HEADERS, bytes(1 << 16)) + frame(CONTINUATION, bytes(1)), "INTERNAL"),
    ],
)
def test_however_it_ends_there_is_a_status(data: bytes, code: str):
    exchange = begun()
    exchange.receive(data)
    assert exchange.ended is not None
    assert exchange.ended.code == code
    exchange.send(b"late")
    assert DATA not in [kind for kind, *_ in sent(bytes(exchange.outgoing))]


def test_a_call_under_way_outlives_a_connection_that_takes_no_new_ones():
    exchange = begun()
    goaway = frame(GOAWAY, struct.pack(">II", (1 << 31) - 1, 0), stream=0)
    assert exchange.receive(goaway + frame(PING, b"12345678", stream=0) + frame(DATA, message(b"x"))) == [
        b"x"
    ]
    assert exchange.ended is None
    assert sent(bytes(exchange.outgoing)) == [(PING, 1, 0, b"12345678")]


def test_nothing_is_sent_beyond_a_window():
    exchange = begun()
    exchange.receive(frame(SETTINGS, struct.pack(">HI", 4, 100), stream=0))
    exchange.outgoing.clear()
    exchange.send(bytes(250))
    exchange.send(b"next", last=True)
    assert [len(payload) for *_, payload in sent(bytes(exchange.outgoing))] == [100]
    exchange.outgoing.clear()
    exchange.receive(frame(WINDOW_UPDATE, struct.pack(">I", 155)))
    exchange.receive(frame(WINDOW_UPDATE, struct.pack(">I", 4)))
    exchange.receive(frame(SETTINGS, struct.pack(">HI", 4, 1000), stream=0))
    frames = [one for one in sent(bytes(exchange.outgoing)) if one[0] == DATA]
    assert b"".join(payload for *_, payload in frames) == message(bytes(250))[100:] + message(b"next")
    assert [flags for _, flags, *_ in frames] == [0] * (len(frames) - 1) + [END_STREAM]


def test_a_window_that_shrinks_holds_back_what_was_within_it():
    exchange = begun()
    exchange.send(bytes(995))
    exchange.receive(frame(SETTINGS, struct.pack(">HI", 4, 900), stream=0))
    exchange.outgoing.clear()
    exchange.send(b"x")
    exchange.receive(frame(WINDOW_UPDATE, struct.pack(">I", 100)))
    assert not exchange.outgoing
    exchange.receive(frame(WINDOW_UPDATE, struct.pack(">I", 6)))
    assert [payload for *_, payload in sent(bytes(exchange.outgoing))] == [message(b"x")]


def test_the_kernel_gets_its_window_back():
    exchange = begun()
    part = message(bytes((1 << 20) - 5))
    for count in range(WINDOW_BYTES // len(part)):
        assert len(exchange.receive(frame(DATA, part))) == 1
        assert bool(exchange.outgoing) is (count % 2 == 1)
        given = [struct.unpack(">I", payload)[0] for *_, payload in sent(bytes(exchange.outgoing))]
        assert given in ([], [2 * len(part)] * 2)
        exchange.outgoing.clear()


def test_giving_up_is_told():
    exchange = begun()
    exchange.cancel()
    exchange.cancel()
    assert sent(bytes(exchange.outgoing)) == [(RST_STREAM, 0, 1, struct.pack(">I", 8))]
    assert exchange.ended is not None
    assert exchange.receive(frame(DATA, message(b"late"))) == []
    assert http2.FRAME_BYTES <= WINDOW_BYTES
