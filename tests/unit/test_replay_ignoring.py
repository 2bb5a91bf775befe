"""What calls may differ in and still be recognised (`restart.ignore`): no more than what the manifest names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.server.desk import lane_of
from ringfence.policy.ignoring import BadPattern, Ignoring, compiled
from ringfence.policy.manifest import ManifestError, parse_manifest
from ringfence.policy.manifest_types import Ignored
from ringfence.syscalls.codec import canonical_json

DATE = r"\d{4}-\d{2}-\d{2}"
TEMP = r"/tmp/[a-z0-9]+"
ENTRIES = (
    Ignored(action="llm.complete", pattern=DATE),
    Ignored(action="llm.complete", pattern=TEMP),
    Ignored(action="llm.complete", at=("extra", "metadata", "user_id")),
    Ignored(action="llm.complete", at=("messages", "*", "id")),
    Ignored(action="mcp.tracker.*", at=("arguments", "request_id")),
)
IGNORING = Ignoring(ENTRIES)
dates = st.dates().map(str)
temps = st.from_regex(r"\A/tmp/[a-z0-9]{1,12}\Z")
varied = dates | temps
# Words that hold nothing of what is ignored, and no part of it: where one would end, another begins.
words = st.text(st.characters(codec="utf-8", exclude_characters="/-0123456789"), max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


def left(call: Any, action: str = "llm.complete", ignoring: Ignoring = IGNORING) -> bytes | None:
    return ignoring.likeness(action, canonical_json(call))


def request(text: str, ident: Any, user: Any, rest: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text, "id": ident}, {"role": "user", "content": rest}]
    return {"model": "m", "messages": messages, "extra": {"metadata": {"user_id": user, "kind": rest}}}


@given(words, words, varied, varied, plain, plain, plain)
def test_what_is_ignored_never_counts(
    before: str, after: str, one: str, other: str, a: Any, b: Any, rest: Any
) -> None:
    first = request(f"{before} {one} {after}", a, b, rest)
    again = request(f"{before} {other} {after}", b, a, rest)
    assert left(first) == left(again) is not None
    del again["extra"]["metadata"]["user_id"]
    assert left(first) == left(again)


@given(plain, plain)
def test_everything_else_does(one: Any, other: Any) -> None:
    same = canonical_json(one) == canonical_json(other)
    assert (left(request("x", 1, 1, one)) == left(request("x", 1, 1, other))) is same


@given(st.lists(words | varied, min_size=1, max_size=6), st.lists(words | varied, min_size=1, max_size=6))
def test_a_text_counts_as_what_stands_around(one: list[str], other: list[str]) -> None:
    """Held against plain substitution, whose marks no text here has."""

    def image(parts: list[str]) -> list[str]:
        return " ".join("\0" if "-" in part or "/" in part else part for part in parts).split("\0")

    same = image(one) == image(other)
    assert (left(request(" ".join(one), 1, 1, 1)) == left(request(" ".join(other), 1, 1, 1))) is same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2026-01-01", ""),
        ("a 2026-01-01", "a 2026-01-01 2026-01-02"),
        ("a 2026-01-01 b", ["a ", " b"]),
        ("a", ["s", "a"]),
        (["i"], ["l", "i"]),
        (1, "1"),
        (1, True),
        ({"s": "x"}, ["s", "x"]),
    ],
)
def test_no_two_forms_look_alike(one: Any, other: Any) -> None:
    assert left(request("x", 1, 1, one)) != left(request("x", 1, 1, other))


def test_only_named_actions_are_matched_loosely() -> None:
    for action in ("http.post", "sql.write", "fs.write", "fs.delete", "exec.run", "messages.send"):
        assert left({"path": "/tmp/a 2026-01-01"}, action) is None
    call = {"server": "tracker", "tool": "make", "arguments": {"request_id": 1, "title": "t"}}
    again = {**call, "arguments": {"request_id": 2, "title": "t"}}
    assert left(call, "mcp.call") == left(again, "mcp.call") is not None
    assert left({**call, "server": "tracker2"}, "mcp.call") is None
    assert left({**again, "tool": "close"}, "mcp.call") != left(call, "mcp.call")


def test_a_pattern_at_a_place_holds_there_alone() -> None:
    ignoring = Ignoring((Ignored(action="llm.complete", at=("messages", "0"), pattern="[0-9]+"),))

    def of(first: str, second: str) -> bytes | None:
        return left({"messages": [{"content": first}, {"content": second}]}, ignoring=ignoring)

    assert of("at 1", "at 1") == of("at 22", "at 1")
    assert of("at 1", "at 1") != of("at 1", "at 22")


def test_a_lane_without_anything_ignored_is_named_as_it_always_was() -> None:
    raw = canonical_json({"key": "a"})
    assert lane_of("state.get", raw, None) == "call-da191f8ae4de3d4f07e4783c"
    assert lane_of("llm.complete", raw, left({"key": "a"})) != lane_of("llm.complete", raw, None)


def test_what_is_no_json_or_too_deep_counts_whole() -> None:
    assert IGNORING.likeness("llm.complete", b"{") is None
    assert IGNORING.likeness("llm.complete", b"[" * 5000 + b"]" * 5000) is None


def test_patterns_take_no_more_time_than_the_text_is_long() -> None:
    # A machine that tries all ways would not come to an end here.
    assert compiled("(a+)+b").search(b"a" * 100_000) is None
    with pytest.raises(BadPattern, match="empty"):
        compiled("a*")


def test_a_manifest_says_it() -> None:
    text = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: bot}
spec:
  run: {command: [python, agent.py]}
  restart:
    ignore:
      - {pattern: '[0-9a-f]{7,40}'}
      - {at: "/extra/a~1b/*", pattern: x}
      - {action: mcp.tracker.*, at: /arguments/id}
"""
    assert parse_manifest(text, "agent.yaml").restart.ignore == (
        Ignored(action="llm.complete", pattern="[0-9a-f]{7,40}"),
        Ignored(action="llm.complete", at=("extra", "a/b", "*"), pattern="x"),
        Ignored(action="mcp.tracker.*", at=("arguments", "id")),
    )


@pytest.mark.parametrize("pattern", [r"\w{1,1000}@\w{1,400}", r"(a|aa|aaa){1,60}@", r"(.{0,30}a.{0,30}){3}@"])
def test_a_pattern_that_takes_much_for_each_byte_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern, match=r"steps when compiled, and at most 300 are taken"):
        compiled(pattern)


@pytest.mark.parametrize(
    ("action", "field"),
    [
        ("fs.delete", "path"),
        ("fs.move", "to"),
        ("http.post", "url"),
        ("sql.write", "statement"),
        ("state.put", "key"),
    ],
)
def test_what_a_call_is_about_always_counts(action: str, field: str) -> None:
    ignoring = Ignoring((Ignored(action=action, pattern="[a-z0-9]+"), Ignored(action=action, at=(field,))))
    one, other = ({field: f"d/{name}", "text": "x"} for name in ("a1", "keep"))
    assert left(one, action, ignoring) != left(other, action, ignoring)
    assert left(one, action, ignoring) == left({**one, "text": "y"}, action, ignoring) is not None


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{action: fs.delete, at: /path}", "`/path` can't be ignored: it says what the call is about"),
        ("{at: /model}", "`/model` can't be ignored: it says what the call is about"),
        ("{at: /messages}", "nothing of what is asked would be left"),
        ('{at: "/messages/*"}', "nothing of what is asked would be left"),
        ('{at: "/*"}', "nothing of what is asked would be left"),
        ('{at: "/messages/**"}', "`**` is no part of a JSON pointer"),
        (
            "{pattern: '[ab]{1,135}x'}, {pattern: '[ab]{1,136}x'}, {pattern: '[ab]{1,137}x'}, {pattern: '[ab]{1,138}x'}",
            "taken together",
        ),
    ],
)
def test_what_would_make_all_calls_alike_is_refused(entry: str, says: str) -> None:
    text = f"""
apiVersion: ringfence/v1
kind: Agent
metadata: {{name: bot}}
spec:
  run: {{command: [python, agent.py]}}
  restart:
    ignore: [{entry}]
"""
    with pytest.raises(ManifestError) as problem:
        parse_manifest(text, "agent.yaml")
    assert says in str(problem.value)
