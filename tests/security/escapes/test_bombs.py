"""Bombs end in their own sandbox, and an honest agent beside them goes on with its work."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from security.escapes.conftest import there
from support import escapes

pytestmark = pytest.mark.timeout(240)

# How each may end: by its limit, by the error that the limit gives it, or, where it goes on without harm, by its time.
ENDS = {
    "memory": {"memory", "exit"},
    "memory of many": {"memory", "exit", "timeout"},
    "shared memory": {"memory"},
    "sockets": {"memory"},
    "forks": {"timeout"},
    "tmp": {"exit", "memory"},
    "names": {"exit", "memory"},
    "descriptors": {"exit", "memory"},
    "output": {"timeout", "signal", "exit"},
    "processor": {"timeout"},
}


@pytest.fixture(scope="module")
def exploded() -> Callable[[str], dict[str, dict[str, Any]]]:
    return cache(escapes.explode)


@pytest.fixture(scope="module", params=["root", "user"])
def mode(request: pytest.FixtureRequest) -> str:
    return there(request.param)


@pytest.mark.parametrize("name", ENDS)
def test_a_bomb_ends_and_nobody_else_notices(mode: str, exploded: Any, name: str) -> None:
    result = exploded(mode)[name]
    assert result["reason"] in ENDS[name], result
    assert result["during"], "the honest agent stood still"
    assert result["after"], "the honest agent stands still"


def test_all_were_set_off(mode: str, exploded: Any) -> None:
    assert set(exploded(mode)) == set(ENDS)
