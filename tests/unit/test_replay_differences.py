"""How two requests that differ are shown."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.divergence import differences

documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(documents, documents)
def test_there_are_differences_where_documents_differ(one: Any, other: Any) -> None:
    same = (repr(one), type(one)) == (repr(other), type(other)) or (one == other and type(one) is type(other))
    assert (list(differences(one, one)), bool(list(differences(one, other)))) == (
        [],
        not _equal(one, other),
    ), same


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        first, second = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    if isinstance(one, list) and isinstance(other, list):
        left, right = cast("list[Any]", one), cast("list[Any]", other)
        return len(left) == len(right) and all(map(_equal, left, right))
    return json.dumps(one) == json.dumps(other)


@pytest.mark.parametrize(
    ("recorded", "made", "shown"),
    [
        ({"a": {"b/c": 1}}, {"a": {"b/c": 2}}, [{"at": "/a/b~1c", "recorded": "1", "made": "2"}]),
        ([1], [1, {"x": 2}], [{"at": "/1", "made": '{"x": 2}'}]),
        ({"a": 1}, {}, [{"at": "/a", "recorded": "1"}]),
        (
            "It is 2026-01-01 in /tmp/abc now, and all is well.",
            "It is 2026-01-02 in /tmp/xyz now, and all is well.",
            [
                {"at": "", "recorded": "2026-01-01 in", "made": "2026-01-02 in"},
                {"at": "", "recorded": " /tmp/abc now", "made": " /tmp/xyz now"},
            ],
        ),
        (
            "x" * 1000,
            "y" * 1000,
            [{"at": "", "recorded": f"{'x' * 80}…{'x' * 80}", "made": f"{'y' * 80}…{'y' * 80}"}],
        ),
    ],
)
def test_they_are_short_and_say_where(recorded: Any, made: Any, shown: Any) -> None:
    assert list(differences(recorded, made)) == shown
