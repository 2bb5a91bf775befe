"""Every attempt fails in the sandbox as it is, and its control shows that it is no empty attempt.

The control is the same attempt in the same sandbox without the walls that the table names, and only those, in namespaces
that are thrown away. Where even one of the named walls is left, it fails still.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
from security.escapes.attempts.base import MARK, MARKED, REACHES, TABLE, WORKS, Attempt
from support import escapes

pytestmark = pytest.mark.timeout(240)

Whole = Callable[[str], dict[str, dict[str, Any]]]
Lacking = Callable[[str, frozenset[str]], dict[str, Any]]


@pytest.mark.parametrize("kind", ["program", "command"])
def test_every_attempt_was_made_and_the_sandbox_went_on(everywhere: str, whole: Whole, kind: str) -> None:
    went_on(whole(everywhere)[kind], kind)


def test_a_warm_program_made_them_all_too(whole: Whole) -> None:
    if os.geteuid() != 0:
        pytest.skip("the interpreter that runs the tests is the warm one only for root")
    went_on(whole("root")["warm"], "warm")


def went_on(played: dict[str, Any], kind: str) -> None:
    assert (played["reason"], played["code"]) == ("exit", 0), played["err"]
    assert list(played["results"]) == escapes.names(kind)


@pytest.mark.parametrize("name", escapes.names("program"))
def test_a_program_does_not_get_out(program: tuple[str, str], whole: Whole, name: str) -> None:
    mode, kind = program
    stopped(whole(mode)[kind]["results"][name])


@pytest.mark.parametrize("name", escapes.names("command"))
def test_a_command_does_not_get_out(everywhere: str, whole: Whole, name: str) -> None:
    stopped(whole(everywhere)["command"]["results"][name])


def stopped(result: dict[str, Any]) -> None:
    """By an error or by the signal of the filter; an attempt that broke shows nothing."""
    assert set(result) in ({"stopped"}, {"signal"}), result
    assert result.get("signal", 31) == 31, result


def with_control() -> list[str]:
    """Names of attempts that this machine has all for."""
    there = {
        tried for kind in ("program", "command") for tried in map(TABLE.__getitem__, escapes.names(kind))
    }
    return [tried.name for tried in TABLE.values() if tried in there and tried.control != "none"]


@pytest.mark.parametrize("name", with_control())
def test_control(mode: str, whole: Whole, lacking: Lacking, name: str) -> None:
    tried = TABLE[name]
    control = tried.control_in(mode)
    if control == "none":
        pytest.skip("it has no control as an ordinary user")
    result = lacking(mode, escapes.control_walls(tried, mode))[name]
    kind = "command" if tried.kind == "command" else "program"
    real = whole(mode)[kind]["results"][name]
    shown(tried, control, result, real)


def shown(tried: Attempt, control: str, result: dict[str, Any], real: dict[str, Any]) -> None:
    assert "broken" not in result, result
    if control == MARKED:
        assert result == {"stopped": errno.errorcode[MARK]}
    elif control == WORKS:
        assert "won" in result, result
    elif control == REACHES:
        # Another answer, from behind the walls.
        assert "stopped" in result
        assert result != real
    else:
        assert "won" in result or result != real


def covers(taken: frozenset[str], tried: Attempt, mode: str) -> bool:
    """Whether an attempt may win without these walls."""
    # All rights stand above who may look into whom, and a seal of /proc is made of read-only mounts.
    above = {"capabilities": {"undumpable first process"}, "read-only mounts": {"sealed /proc"}}
    more: set[str] = set().union(*(above.get(wall, set()) for wall in taken))
    return tried.walls_in(mode) <= taken | more


@pytest.mark.parametrize("kind", ["program", "command"])
def test_each_wall_holds_alone(mode: str, lacking: Lacking, kind: str) -> None:
    """Where several walls stop an attempt, each does it without the others."""
    escaped = {
        (name, *sorted(taken)): result
        for taken in escapes.control_sets(mode, kind)
        for name, result in lacking(mode, taken).items()
        if not covers(taken, TABLE[name], mode) and set(result) & {"won", "broken"}
    }
    assert escaped == {}
