"""The same sandboxes for all modules here: one start per mode, and one per set of walls that controls take away."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conformance.backends import KINDS
from security.escapes.attempts import all_attempts
from support import escapes

assert all_attempts.GROUPS


def there(mode: str) -> str:
    """The mode, or a skip with the reason."""
    if mode == "root" and os.geteuid() != 0:
        pytest.skip("only root can give each agent a uid of its own")
    if mode == "user" and not escapes.PYTHON:
        pytest.skip("an ordinary user needs a Python below /usr")
    if mode == "docker" and (reason := KINDS["docker"].missing()):
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return mode


@pytest.fixture(scope="session", params=["root", "user"])
def mode(request: pytest.FixtureRequest) -> str:
    """Modes of the native backend, whose walls can be taken away."""
    return there(request.param)


@pytest.fixture(scope="session", params=["root", "user", "docker"])
def everywhere(request: pytest.FixtureRequest) -> str:
    """Modes that attempts are made in."""
    return there(request.param)


@pytest.fixture(scope="session", params=["root", "root-warm", "user", "docker"])
def program(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Where programs run: the mode, and the kind of program."""
    name, _, warm = request.param.partition("-")
    return there(name), warm or "program"


@pytest.fixture(scope="session")
def whole() -> Callable[[str], dict[str, dict[str, Any]]]:
    """All attempts against the sandbox as it is, by mode: in a program, in a warm one, and in a command."""

    @cache
    def run(mode: str) -> dict[str, dict[str, Any]]:
        kinds = ("program", "command", "warm") if mode == "root" else ("program", "command")
        return escapes.play(mode, {kind: escapes.names(kind) for kind in kinds})

    return run


@pytest.fixture(scope="session")
def lacking() -> Callable[[str, frozenset[str]], dict[str, Any]]:
    """Attempts against the sandbox without some walls, by mode: those that the walls have a part in."""

    @cache
    def run(mode: str, taken: frozenset[str]) -> dict[str, Any]:
        kind = "command" if "masks" in taken else "program"
        names = [tried.name for tried in escapes.of_kind(kind) if escapes.concerns(tried, taken)]
        alone = [tried.name for tried in escapes.of_kind(kind, alone=True) if tried.walls_in(mode) == taken]
        played = escapes.play(mode, {kind: names, **({f"{kind}-alone": alone} if alone else {})}, taken)
        found: dict[str, Any] = {}
        for each in played.values():
            found |= each["results"]
        return found

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts real sandboxes."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sandbox)
