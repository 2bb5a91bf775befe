"""How close counts are to the usage that hosts gave, and how what is reserved follows it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.policy.tokenizers import TOKENIZERS, tokenizer_of
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.llm_counter import counter
from ringfence.syscalls.llm_counting import Counting
from ringfence.syscalls.llm_ledger import ENOUGH, HIGHEST, LOWEST, WINDOW, Closeness
from ringfence.syscalls.llm_paging import Request, measure
from ringfence.syscalls.llm_profiles import PROFILES

STRING = {"type": "string"}


def function(name: str, description: str = "", **properties: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    if properties:
        schema["required"] = list(properties)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def pair(name: str, arguments: str, result: str) -> list[dict[str, Any]]:
    call = {"id": "call_55Y1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_55Y1", "content": result},
    ]


CITY = [{"role": "user", "content": "What is the largest city in the user country?"}]
CITY_TOOLS = [
    function("get_user_country"),
    function("final_result", "The final response which ends this conversation", city=STRING, country=STRING),
]
TOKYO = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the temperature in Tokyo?"},
]
TOKYO_TOOLS = [function("get_temperature", city=STRING)]
CAPITAL = [
    {"role": "user", "content": "What is the capital of France?"},
    *pair("get_capital", '{"country":"France"}', "Paris"),
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "What is the capital of England?"},
]
CAPITAL_TOOLS = [
    function(
        "get_capital", "Get the capital of a country.", country={**STRING, "description": "The country name."}
    )
]
SUM = [{"role": "user", "content": "What is 2+2?"}]
USES = [
    {"role": "user", "content": [{"type": "text", "text": CITY[0]["content"]}]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "get_user_country", "input": {}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Mexico"}]},
]
REPORTED = [
    ("gpt-4o", CITY, CITY_TOOLS, 68),
    ("gpt-4o", CITY + pair("get_user_country", "{}", "Mexico"), CITY_TOOLS, 89),
    ("gpt-4.1-mini", TOKYO, TOKYO_TOOLS, 50),
    ("gpt-4.1-mini", TOKYO + pair("get_temperature", '{"city":"Tokyo"}', "20.0"), TOKYO_TOOLS, 75),
    ("gpt-4o-mini", CAPITAL, CAPITAL_TOOLS, 104),
    ("gpt-4o-mini", CAPITAL + pair("get_capital", '{"country":"England"}', "London"), CAPITAL_TOOLS, 129),
    ("claude-opus-4-6", SUM, [], 14),
    ("claude-opus-5", SUM, [], 13),
    ("claude-sonnet-4-5", USES[:1], CITY_TOOLS, 711),
    ("claude-sonnet-4-5", USES, CITY_TOOLS, 762),
]
"""Requests whose usage hosts of these models gave."""


def count(tokenizer: str, messages: list[Any], tools: list[Any] | None = None) -> int:
    profile = PROFILES[tokenizer]
    request = Request(tokenizer=tokenizer, messages=messages, tools=tools or [])
    return measure(request, profile, counter(profile.encoding)).tokens


@pytest.mark.parametrize(("model", "messages", "tools", "usage"), REPORTED)
def test_a_count_is_close_to_the_usage_and_not_below(
    model: str, messages: list[Any], tools: list[Any], usage: int
) -> None:
    found = count(tokenizer_of(model, ()), messages, tools)
    most = 1.05 * usage if model.startswith("gpt") else 1.2 * usage + 12
    assert usage <= found <= most


def test_images_and_what_nobody_knows_are_counted() -> None:
    def image(detail: str) -> list[Any]:
        inner = {"url": "data:image/png;base64," + "A" * 5000, "detail": detail}
        return [{"role": "user", "content": [{"type": "image_url", "image_url": inner}]}]

    assert 85 <= count("o200k_base", image("low")) < 110
    assert 2048 <= count("o200k_base", image("high")) < 2100
    odd = [
        {
            "role": "user",
            "content": [{"type": "file", "file": {"file_data": "word " * 100}}],
            "more": {"a": [1]},
        }
    ]
    assert count("o200k_base", odd) > 100
    assert count("o200k_base", [{"role": ["odd"], "type": {"a": 1}, "content": [{"type": [1]}, 7]}]) > 4
    deep: Any = "end"
    for _ in range(300):
        deep = [deep]
    assert count("estimate", [{"role": "user", "content": deep}]) > 100
    assert count("o200k_base", SUM, [{"odd": "tool " * 50}]) > count("o200k_base", SUM) + 50


def test_a_tokenizer_is_found_by_the_model() -> None:
    known = {
        "gpt-5": "o200k_base", "gpt-4o-mini": "o200k_base", "gpt-4-turbo": "cl100k_base", "gpt-4.1": "o200k_base",
        "o3": "o200k_base", "o4-mini": "o200k_base", "gpt-oss-120b": "o200k_harmony", "claude-3-5-haiku": "claude-3",
        "claude-sonnet-4-20250514": "claude-3", "claude-opus-4-6": "claude-3", "claude-opus-4-7": "claude-4.7",
        "anthropic/claude-sonnet-4.5": "claude-3", "claude-opus-5": "claude-4.7", "llama-3": "estimate", "o": "estimate",
    }  # fmt: skip
    assert {model: tokenizer_of(model, ()) for model in known} == known
    declared = (("llama-*", "cl100k_base"), ("gpt-5", "auto"), ("*", "estimate"))
    assert [tokenizer_of(m, declared) for m in ("llama-3", "gpt-5", "gpt-4o")] == [
        "cl100k_base",
        "o200k_base",
        "estimate",
    ]
    assert set(PROFILES) == set(TOKENIZERS) - {"auto"}


@given(st.lists(st.tuples(st.integers(64, 10**6), st.floats(0.05, 8)), max_size=WINDOW + 5))
def test_what_is_reserved_covers_a_call_like_one_that_was(calls: list[tuple[int, float]]) -> None:
    closeness = Closeness(resource="model", model="m", tokenizer="o200k_base")
    for counted, ratio in calls:
        closeness.told(counted, max(1, int(counted * ratio)), "o200k_base")
    recent = [max(1, int(c * r)) / c for c, r in calls[-WINDOW:]]
    assert closeness.factor >= min(HIGHEST, max(recent, default=0))
    assert LOWEST <= closeness.factor <= HIGHEST
    assert len(calls) >= ENOUGH or closeness.factor >= 1
    assert closeness.calls == len(calls)


def test_a_host_that_counts_more_raises_the_next_count_and_another_tokenizer_begins_anew() -> None:
    closeness = Closeness(resource="model", model="m")
    assert (closeness.factor, closeness.ratio, closeness.worst) == (1.0, None, None)
    closeness.told(1000, 1500, "o200k_base")
    assert closeness.factor == pytest.approx(1.53)
    closeness.told(10, 60, "o200k_base")  # too small to say anything
    assert (closeness.factor, closeness.worst, closeness.calls) == (pytest.approx(1.53), 1.5, 2)
    for _ in range(WINDOW):
        closeness.told(1000, 700, "o200k_base")
    assert closeness.factor == pytest.approx(0.714)
    closeness.told(0, 5, "claude-3")
    assert (closeness.factor, closeness.calls) == (1.0, 0)


async def test_counting_in_a_process_of_its_own_outlives_its_end() -> None:
    counting = Counting()
    try:
        request = Request(tokenizer="cl100k_base", messages=[{"role": "user", "content": "word " * 1000}])
        first = await counting.count(request)
        process = counting._process
        assert process is not None
        process.kill()
        process.wait()
        # Two at once, and the process is not there any more: it is started again.
        assert await asyncio.gather(counting.count(request), counting.count(request)) == [first, first]
        assert counting._process is not process
        waiting = asyncio.create_task(counting.count(request))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await counting.count(request) == first
        with pytest.raises(CallFailed, match="can't be counted"):
            await counting.count(Request(tokenizer="none", messages=[]))
    finally:
        await counting.close()
    assert counting._process is None
