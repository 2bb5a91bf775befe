"""What leaves a prompt that is too long: pairs stay, nothing is lost, it fits or it is said that it doesn't."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.syscalls.llm_counter import Answer, answer, counter
from ringfence.syscalls.llm_paging import PREFIX, Counted, Request, apply, kept, measure, pointer
from ringfence.syscalls.llm_profiles import PROFILES
from ringfence.syscalls.llm_shape import content_at, result_key, results

TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            "x",
            "row 1, 2, 3\n" * 60,
            '"quoted"\nsecond line\n' + "word " * 300,
            "数据\n" * 200,
            "\x00\x1b[31m " * 90,
        ]
    ),
)
PARTS = st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=2)


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One turn of a conversation with tools, in one of three protocols."""
    kind = draw(st.sampled_from(["openai", "anthropic", "responses", "talk"]))
    ids = [f"c{draw(st.integers(0, 999))}-{nr}" for nr in range(draw(st.integers(1, 2)))]
    contents = [draw(st.one_of(TEXTS, PARTS)) for _ in ids]
    if kind == "openai":
        calls = [{"id": i, "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in ids]
        told = [{"role": "tool", "tool_call_id": i, "content": c} for i, c in zip(ids, contents, strict=True)]
        return [{"role": "assistant", "content": None, "tool_calls": calls}, *told]
    if kind == "anthropic":
        uses = [{"type": "tool_use", "id": i, "name": "look", "input": {"a": 1}} for i in ids]
        told = [
            {"type": "tool_result", "tool_use_id": i, "content": c}
            for i, c in zip(ids, contents, strict=True)
        ]
        return [{"role": "assistant", "content": uses}, {"role": "user", "content": told}]
    if kind == "responses":
        pairs = zip(ids, contents, strict=True)
        return [
            item
            for i, c in pairs
            for item in (
                {"type": "function_call", "call_id": i, "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": i, "output": c},
            )
        ]
    return [{"role": "assistant", "content": draw(TEXTS)}, {"role": "user", "content": draw(TEXTS)}]


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    head = [{"role": "system", "content": draw(TEXTS)}, {"role": "user", "content": draw(TEXTS)}]
    return head + [message for turn in draw(st.lists(turns(), max_size=5)) for message in turn]


def counted(messages: list[Any], limit: int | None, *, page: bool = True, factor: float = 1.0) -> Counted:
    request = Request(tokenizer="o200k_base", messages=messages, limit=limit, page=page, factor=factor)
    return measure(request, PROFILES["o200k_base"], counter("o200k_base"))


def skeleton(messages: list[Any]) -> list[Any]:
    """Everything but the contents of results."""

    def bare(holder: dict[str, Any], *, message: bool) -> dict[str, Any]:
        key = result_key(holder, message=message)
        return {name: value for name, value in holder.items() if name != key}

    found: list[Any] = []
    for message in messages:
        content = message.get("content")
        if result_key(message, message=True) is None and isinstance(content, list):
            found.append({**message, "content": [bare(part, message=False) for part in content]})
        else:
            found.append(bare(message, message=True))
    return found


@settings(deadline=None, max_examples=60)  # the first reads the vocabulary
@given(messages=conversations(), share=st.floats(0.05, 1.1), factor=st.sampled_from([0.7, 1.0, 1.6]))
def test_paging_keeps_pairs_and_order_and_loses_nothing(
    messages: list[Any], share: float, factor: float
) -> None:
    before = copy.deepcopy(messages)
    limit = int(counted(messages, None, factor=factor).tokens * share) + 1
    found = counted(messages, limit, factor=factor)
    paged, left = apply(messages, found.pages)
    assert messages == before
    assert skeleton(list(paged)) == skeleton(messages)
    places = results(messages)
    gone = [(page.message, page.part) for page in found.pages]
    # Oldest first: only results too small to gain anything are passed over.
    assert gone == [place for place in places if place in gone]
    for page in found.pages:
        content = content_at(messages, (page.message, page.part))
        data, media_type = kept(content)
        assert left[page.name] == data
        assert (page.ref, page.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
        assert page.name == PREFIX + page.ref[:32]
        assert (data.decode() if media_type.startswith("text") else msgspec.json.decode(data)) == content
        shown = content_at(list(paged), (page.message, page.part))
        assert page.name in (shown if isinstance(shown, str) else shown[0]["text"])
    untouched = [place for place in places if place not in gone]
    assert all(content_at(list(paged), place) == content_at(messages, place) for place in untouched)
    # It fits, or all that could leave has been counted out.
    again = counted(list(paged), None, factor=factor)
    assert again.tokens == found.tokens
    if found.tokens > limit:
        assert counted(messages, 1, factor=factor).tokens == found.tokens
    else:
        assert counted(list(paged), limit, factor=factor).pages == []
    assert counted(messages, limit, factor=factor) == found
    assert not gone or counted(messages, limit, factor=factor, page=False).pages == []


@settings(deadline=None, max_examples=60)  # the first reads the vocabulary
@given(messages=conversations())
def test_what_the_model_has_not_answered_never_leaves(messages: list[Any]) -> None:
    pages = counted(messages, 1).pages
    last = max(
        (
            nr
            for nr, message in enumerate(messages)
            if message.get("role") == "assistant" or message.get("type") == "function_call"
        ),
        default=0,
    )
    assert all(page.message < last for page in pages)


def test_no_more_leaves_than_it_takes_and_the_pointer_says_what() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turn = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    rows = [f'row "{nr}"\tof ten\n' + "many words here " * 200 for nr in range(3)]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for text in rows:
        messages += [*turn, {"role": "tool", "tool_call_id": "a", "content": text}]
    messages += [{"role": "assistant", "content": "done"}, {"role": "user", "content": "more"}]
    whole = counted(messages, None).tokens
    (page,) = counted(messages, whole - 100).pages
    assert (page.message, page.part, page.media_type) == (2, -1, "text/plain; charset=utf-8")
    paged, _ = apply(messages, [page])
    text = paged[2]["content"]
    assert f"{len(rows[0])} bytes" in text
    assert "beginning \"row '0' of ten\"" in text
    assert "artifacts.get" in text
    assert len(counted(messages, whole - 900).pages) == 2
    with pytest.raises(ValueError, match="not the one"):
        apply([*messages[:2], messages[4], *messages[3:]], [page])


def test_a_pointer_is_short_whatever_it_points_at() -> None:
    for data in (b"", b"\x00" * 5000, "\u202e\u200b é".encode() * 999, b'"' * 300):
        text = pointer("paged.0", data, "text/plain; charset=utf-8")
        assert len(text) < 400
        assert text.isprintable()


def test_a_frame_that_can_not_be_counted_is_answered() -> None:
    assert answer(b"{") != Answer()
    assert "KeyError" in answer(b'{"tokenizer":"none","messages":[]}').error
    assert "ValidationError" in answer(b'{"tokenizer":"o200k_base","messages":[1]}').error
