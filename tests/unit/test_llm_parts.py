"""Binary parts of requests to models: taken out and put back, character by character."""

from __future__ import annotations

import base64
import binascii
import copy
import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.policy.canonical import canonical_url
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.llm_parts import Part, extent, is_taken, kept, put_back, take
from ringfence.syscalls.llm_sources import Content, Pointer, filled, pointers, questions
from ringfence.syscalls.llm_wire import check

PICTURE = hashlib.sha256(b"a picture").digest() * 200
CODED = base64.b64encode(PICTURE).decode()
NAME = f"sent.{hashlib.sha256(PICTURE).hexdigest()}"
POINTER = f"ringfence://artifacts/{NAME}?base64={len(PICTURE)}"

# Made of a number each: long random bytes are slow to draw.
LONG = st.integers(0, 999).map(
    lambda number: hashlib.sha256(str(number).encode()).digest() * 97 + b"ab"[: number % 3]
)
TEXTS = st.one_of(
    st.text(max_size=30),
    LONG.map(lambda data: base64.b64encode(data).decode()),
    LONG.map(lambda data: f"data:image/png;base64,{base64.b64encode(data).decode()}"),
    # Such as only look like base64, or like a pointer.
    LONG.map(lambda data: base64.encodebytes(data).decode()),
    st.sampled_from(
        [
            CODED[:-1] + "!",
            CODED[:-1],
            "QQ==" * 2000,
            "a" * 5000,
            "é" * 5000,
            POINTER,
            f"data:a/b;base64,{POINTER}",
        ]
    ),
    st.sampled_from(
        [f"ringfence://artifacts/{NAME}?text=9", f"{POINTER} ", "x" * 4096, CODED.replace("A", "-")]
    ),
)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none() | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "data", "media_type", "format", "url"]), inner, max_size=4)
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(VALUES)
def test_what_is_put_back_is_what_was_taken(value: Any) -> None:
    before = copy.deepcopy(value)
    parts: dict[str, Part] = {}
    recorded = take(value, parts)
    assert value == before
    assert put_back(recorded, {name: part.data for name, part in parts.items()}) == value
    assert {one.name for one in kept(recorded)} == set(parts)
    assert all(one.size_bytes == len(parts[one.name].data) for one in kept(recorded))
    assert all(name == f"sent.{hashlib.sha256(part.data).hexdigest()}" for name, part in parts.items())
    assert extent(recorded) == _chars(value) - _chars(recorded)


def _chars(value: Any) -> int:
    """Characters of all the texts in it."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(_chars(one) for one in inner)


@pytest.mark.parametrize(
    ("part", "recorded", "media_type"),
    [
        (
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{CODED}"}},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{POINTER}"}},
            "image/png",
        ),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/webp", "data": CODED}},
            {"type": "image", "source": {"type": "base64", "media_type": "image/webp", "data": POINTER}},
            "image/webp",
        ),
        (
            {"type": "input_audio", "input_audio": {"format": "wav", "data": CODED}},
            {"type": "input_audio", "input_audio": {"format": "wav", "data": POINTER}},
            "audio/wav",
        ),
        (
            {"type": "input_file", "filename": "a.bin", "file_data": CODED},
            {"type": "input_file", "filename": "a.bin", "file_data": POINTER},
            "application/octet-stream",
        ),
    ],
)
def test_what_is_recorded_of_a_part(part: Any, recorded: Any, media_type: str) -> None:
    parts: dict[str, Part] = {}
    assert take([{"role": "user", "content": [part, part]}], parts) == [
        {"role": "user", "content": [recorded, recorded]}
    ]
    assert parts == {NAME: Part(PICTURE, media_type)}
    assert len(msgspec.json.encode(recorded)) < 300


def test_a_text_that_reads_like_a_pointer_stands_for_itself() -> None:
    parts: dict[str, Part] = {}
    recorded = take([{"role": "user", "content": POINTER}], parts)
    (name, part), *none = parts.items()
    assert (part.data, none) == (POINTER.encode(), [])
    assert recorded[0]["content"] == f"ringfence://artifacts/{name}?text={len(POINTER)}"
    assert is_taken(recorded[0]["content"])
    assert put_back(recorded, {name: part.data, NAME: PICTURE})[0]["content"] == POINTER


WITH_SOURCES = [
    (
        {"image_url": {"url": "{}", "detail": "low"}},
        {"image_url": {"url": "data:image/png;base64,YWI=", "detail": "low"}},
    ),
    (
        {"type": "input_image", "image_url": "{}"},
        {"type": "input_image", "image_url": "data:image/png;base64,YWI="},
    ),
    (
        {"type": "input_file", "file_url": "{}"},
        {"type": "input_file", "file_data": "data:image/png;base64,YWI=", "filename": "logo"},
    ),
    (
        {"file": {"file_data": "{}", "filename": "f"}},
        {"file": {"file_data": "data:image/png;base64,YWI=", "filename": "f"}},
    ),
    ({"input_audio": {"data": "{}", "format": "wav"}}, {"input_audio": {"data": "YWI=", "format": "wav"}}),
    (
        {"source": {"type": "url", "url": "{}"}},
        {"source": {"type": "base64", "media_type": "image/png", "data": "YWI="}},
    ),
    (
        {"source": {"type": "base64", "media_type": "a/b", "data": "{}"}},
        {"source": {"type": "base64", "media_type": "a/b", "data": "YWI="}},
    ),
    # What some hosts take, too, or what is nearly what all take.
    ({"type": "image", "image": "{}"}, {"type": "image", "image": "data:image/png;base64,YWI="}),
    ({"type": "image", "url": "{}"}, {"type": "image", "url": "data:image/png;base64,YWI="}),
    ({"type": "image", "source": "{}"}, {"type": "image", "source": "data:image/png;base64,YWI="}),
    ({"type": "video", "video": ["{}"]}, {"type": "video", "video": ["data:image/png;base64,YWI="]}),
    ({"image_url": [{"url": "{}"}]}, {"image_url": [{"url": "data:image/png;base64,YWI="}]}),
    (
        {"image_url": {"url": {"url": ["{}"]}}},
        {"image_url": {"url": {"url": ["data:image/png;base64,YWI="]}}},
    ),
    ({"file": {"url": "{}"}}, {"file": {"url": "data:image/png;base64,YWI="}}),
    ({"input_audio": {"url": "{}"}}, {"input_audio": {"url": "data:image/png;base64,YWI="}}),
    (
        {"source": {"type": "URL", "url": "{}"}},
        {"source": {"type": "base64", "media_type": "image/png", "data": "YWI="}},
    ),
    (
        {"type": "tool_use", "image_url": "{}", "input": {"image_url": "https://c.example"}},
        {
            "type": "tool_use",
            "image_url": "data:image/png;base64,YWI=",
            "input": {"image_url": "https://c.example"},
        },
    ),
]


def _with(shape: Any, text: str) -> Any:
    return msgspec.json.decode(msgspec.json.encode(shape).replace(b"{}", text.encode()))


@pytest.mark.parametrize(("shape", "sent"), WITH_SOURCES)
@pytest.mark.parametrize(
    "around",
    [
        lambda p: [{"content": [p]}],
        lambda p: [{"content": [{"type": "tool_result", "content": [p]}]}],
        lambda p: [{"type": "function_call_output", "output": [p]}],
        lambda p: [{"role": "user", "type": "tool_use", "content": [p]}],
        lambda p: [{"role": "user", "type": ["image"], "content": [p]}],
    ],
)
def test_where_a_source_may_stand(shape: Any, sent: Any, around: Any) -> None:
    prompt = around(_with(shape, "ringfence://artifacts/logo"))
    assert [(q.action, q.resource) for q in questions(prompt, str)] == [("artifacts.get", "logo")]
    assert pointers(prompt) == {Pointer(artifact="logo")}
    assert filled(prompt, {Pointer(artifact="logo"): Content(b"ab", "image/png")}) == around(sent)
    outside = around(_with(shape, "HTTPS://Example.com:443/a%20b"))
    url = canonical_url("HTTPS://Example.com:443/a%20b")
    assert [(q.action, q.resource) for q in questions(outside, str)] == [("http.get", url)]
    # What was judged is what is sent.
    assert filled(outside, {}) == around(_with(shape, url))
    file = around(_with(shape, "ringfence://workspace/a/b%20c.png"))
    assert [(q.action, q.resource) for q in questions(file, str)] == [("fs.read", "/workspace/a/b c.png")]
    inside = around(_with(shape, "data:image/png;base64,YWI="))
    assert (questions(inside, str), filled(inside, {})) == ((), inside)


def test_a_text_document_is_sent_as_text() -> None:
    prompt: list[Any] = [{"source": {"type": "url", "url": "ringfence://artifacts/notes"}}]
    held = {Pointer(artifact="notes"): Content("é".encode(), "text/markdown")}
    assert filled(prompt, held) == [{"source": {"type": "text", "media_type": "text/plain", "data": "é"}}]


@pytest.mark.parametrize(
    "source",
    [
        *(
            "file:///etc/passwd",
            "gs://bucket/a",
            "ftp://a.example/b",
            "ringfence://artifacts/",
            "ringfence://secrets/a",
        ),
        *(
            "ringfence://artifacts/a/b",
            "ringfence://workspace/",
            "ringfence://artifacts/../a",
            f"ringfence://artifacts/{'a' * 64}",
        ),
        *(
            " https://a.example/b",
            "\thttps://a.example/b",
            "https://user:pass@a.example/b",
            "https://a.example/b/../c",
        ),
        *(
            "https://a.example/b;x/c",
            "https://a.example/b./c",
            "RINGFENCE://artifacts/a",
        ),
        # Readers of URLs leave out what is no part of one, or complete it.
        *("ht\ttps://a.example/b", "h\nttps://a.example/b", "\ufeffhttps://a.example/b"),
        *("//a.example/b", "/\\a.example/b", "a.example/b", "https\u200b://a.example/b"),
        *("ringfence://workspace/a%C0%AEb", "ringfence://workspace/%ff"),
    ],
)
def test_what_nobody_can_judge_is_refused(source: str) -> None:
    prompt = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": source}}]}]
    with pytest.raises(InvalidRequest):
        questions(prompt, str)


def test_too_many_sources_and_what_no_host_fetches() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://a.example/b"}}
    assert len(questions([{"content": [part] * 256}], str)) == 1
    with pytest.raises(InvalidRequest, match="more than 256"):
        questions([{"content": [part] * 257}], str)
    used = {"type": "tool_use", "input": {"image_url": "https://a.example/b"}}
    cited = {
        "type": "output_text",
        "text": "https://a.example",
        "annotations": [{"url": "https://a.example"}],
    }
    assert questions([{"content": [used, cited]}], str) == ()


def test_base64_has_one_form() -> None:
    # The bits that padding leaves over: two texts with the same bytes.
    other = CODED[:-3] + chr(ord(CODED[-3]) + 1) + "=="
    assert (binascii.a2b_base64(other), other != CODED) == (PICTURE, True)
    parts: dict[str, Part] = {}
    assert take(other, parts) == other
    assert parts == {}


@pytest.mark.parametrize(
    ("api", "extra"),
    [
        ("messages", {"system": [{"type": "image", "source": {"type": "url", "url": "https://a.example"}}]}),
        ("responses", {"instructions": [{"content": [{"image_url": "https://a.example"}]}]}),
        ("chat", {"prediction": {"content": [{"image_url": {"url": "ringfence://artifacts/a"}}]}}),
    ],
)
def test_sources_stand_in_messages_alone(api: str, extra: Any) -> None:
    with pytest.raises(InvalidRequest, match="only a message may"):
        check(api, extra, [], {})
    check(api, {"metadata": {"image_url": "https://a.example"}}, [], {})


@pytest.mark.parametrize("name", ["plugins", "mcp_servers", "data_sources", "search_parameters"])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_host_is_asked_for_nothing_beside_a_reply(api: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match="the host would act by itself"):
        check(api, {name: [{"url": "https://a.example"}]}, [], {})


@pytest.mark.parametrize(
    "environment", [None, {}, {"type": "container_auto"}, {"type": "container_reference"}]
)
def test_a_shell_is_the_programs_own(environment: Any) -> None:
    shell = {"type": "shell", "environment": environment}
    for tool in (shell, {"type": "namespace", "tools": [shell]}):
        with pytest.raises(InvalidRequest, match="the host would act by itself"):
            check("responses", None, [tool], {})
    check("responses", None, [{"type": "shell", "environment": {"type": "local"}}], {})
