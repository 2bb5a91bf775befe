"""Replies as hosts send them, whole, in parts, torn and odd; tokens counted on the high side; times to come back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.syscalls.llm_reply import Stream, decode, usage_of, whole
from ringfence.syscalls.llm_tokens import count_text
from ringfence.syscalls.ratelimits import wait_of


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
END = event({"choices": [{"delta": {}, "finish_reason": "stop"}]}) + USAGE + b"data: [DONE]\n\n"


@given(cuts=st.lists(st.integers(1, 400), max_size=20))
def test_a_stream_is_the_same_however_it_is_torn(cuts: list[int]) -> None:
    data = (
        b": comment\r\n\r\n" + delta(role="assistant") + delta(content="Grüß ") + delta(content="漢字") + END
    )
    stream, at = Stream(), 0
    for cut in [*cuts, len(data)]:
        stream.feed(data[at : at + cut])
        at += cut
    reply = stream.assembled()
    assert (reply.text, reply.finish, stream.complete) == ("Grüß 漢字", "stop", True)
    assert reply.usage is not None
    assert (reply.usage.prompt, reply.usage.completion) == (3, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"data: {not json\n\n",
        b"data: []\n\n",
        b"data: null\n\n",
        b"data: {\n",
        b"data: " + b"[" * 100000 + b"\n\n",
        b"data: x\n" * 100_000,
    ],
)
def test_a_part_that_can_not_be_read_breaks_the_reply(data: bytes) -> None:
    stream = Stream()
    stream.feed(delta(content="before") + data + delta(content="after") + END)
    assert (stream.broken, stream.complete) == (True, False)
    assert stream.assembled().text == "before"


def test_an_event_may_have_several_lines() -> None:
    stream = Stream()
    text = delta(content="x").replace(b'"choices"', b'\ndata: "choices"')
    stream.feed(text + delta(content="y").replace(b"\n\n", b"\n") + END)
    assert (stream.assembled().text, stream.complete) == ("xy", True)
    torn = Stream()
    torn.feed(END.replace(b"data: [DONE]\n\n", b"data: {no\n"))
    assert not torn.complete


@pytest.mark.parametrize(
    "data",
    [
        b"data:\n",
        b'data: {"choices":[1]}\n',
        b'data: {"choices":[{"delta":[1]}]}\n',
        b"\xff\xfe\n",
        b"data\n",
        delta(tool_calls=[1, {"index": -1}, {"index": "a"}]),
    ],
)
def test_what_is_no_part_of_a_reply_is_passed_over(data: bytes) -> None:
    stream = Stream()
    stream.feed(data + delta(content="x") + END)
    assert (stream.assembled().text, stream.complete) == ("x", True)


@pytest.mark.parametrize(
    "usage", [None, 3, {}, {"prompt_tokens": -1, "completion_tokens": 2}, {"prompt_tokens": True}]
)
def test_a_usage_that_can_not_be_is_none(usage: Any) -> None:
    assert usage_of({"usage": usage}) is None


def test_a_whole_reply_needs_a_message() -> None:
    assert whole({"choices": []}) is None
    assert whole({"choices": [{"message": "text"}]}) is None
    found = whole({"choices": [{"message": {"content": [{"type": "text", "text": "a"}, {"text": "b"}]}}]})
    assert found is not None
    assert found.text == "ab"
    assert decode(b'{"a": NaN}') is None


# Counted with the vocabularies o200k and cl100k, the larger of both.
KNOWN = [
    ("The quick brown fox jumps over the lazy dog.", 10),
    ("def f(x: int) -> str:\n    return str(x + 1)\n", 17),
    ('{"name": "value", "list": [1, 2, 3]}', 18),
    ("人工智能操作系统内核", 9),
    ("0.8444218515250481 0.7579544029403025", 17),
]


@pytest.mark.parametrize(("text", "known"), KNOWN)
def test_tokens_are_counted_on_the_high_side(text: str, known: int) -> None:
    assert known <= count_text(text) <= 3 * known + 4


@given(st.text(max_size=300), st.text(max_size=300))
def test_more_text_never_counts_much_less(one: str, two: str) -> None:
    assert count_text(one + two) >= max(count_text(one), count_text(two)) * 0.5 - 2
    assert count_text(one) <= 2 * len(one.encode("utf-8", "replace")) + 1


@pytest.mark.parametrize(
    ("status", "headers", "body", "expected"),
    [
        (200, {"retry-after": "5"}, b"", None),
        (400, {"retry-after": "5"}, b"", None),
        (503, {}, b"", None),
        (503, {"retry-after": "5"}, b"", 5),
        (429, {"retry-after": "2"}, b"", 2),
        (429, {"retry-after": "1.5"}, b"", 1.5),
        (429, {"retry-after-ms": "250", "retry-after": "9"}, b"", 0.25),
        (
            429,
            {"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": "Wed, 21 Oct 2015 07:28:00 GMT"},
            b"",
            30,
        ),
        (429, {"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT"}, b"", 0.05),
        (429, {"retry-after": "soon"}, b"", 4),
        (429, {"retry-after": "nan"}, b"", 1),
        (429, {"retry-after": "-3"}, b"", 0.05),
        (429, {"retry-after": "1e30"}, b"", 3600),
        (429, {}, b'{"error":{"message":"Rate limit reached. Please try again in 1.2s. Visit us."}}', 1.2),
        (429, {}, b'{"error":{"message":"try again in 20ms"}}', 0.05),
        (429, {}, b'{"error":{"message":"Please retry after 1m30s"}}', 90),
        (429, {}, b'{"error":{"retry_after":7}}', 7),
        (429, {}, b'{"retry_after_ms":1500}', 1.5),
        (429, {}, b"[1", 4),
        (429, {}, b'{"error":"no"}', 4),
    ],
)
def test_the_time_to_come_back_is_found_wherever_it_stands(
    status: int, headers: dict[str, str], body: bytes, expected: float | None
) -> None:
    found = wait_of(status, headers, body, 3)
    assert found == (None if expected is None else pytest.approx(expected))
