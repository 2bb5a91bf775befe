"""SECURITY.md names each wall, and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from ringfence.sandbox.native import forms

REPOSITORY = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$")


def rows() -> list[tuple[str, str]]:
    """Wall and tests of each row of the table."""
    text = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
    section = text.partition("\n## The walls of a sandbox\n")[2].partition("\n## ")[0]
    found = [ROW.fullmatch(line) for line in section.splitlines()]
    return [(row[1], row[4]) for row in found if row is not None and row[1] != "wall"]


def test_no_wall_of_doctor_is_missing() -> None:
    named = [wall.strip("`") for wall, _ in rows()]
    assert {*forms.ALWAYS, forms.USER_NAMESPACES, *forms.FORMS} <= set(named)
    assert len(named) == len(set(named))


@pytest.mark.parametrize(("wall", "tests"), rows(), ids=[wall for wall, _ in rows()])
def test_each_wall_names_tests_that_exist(wall: str, tests: str) -> None:
    names = re.findall(r"`([^`]+)`", tests)
    assert names
    assert re.sub(r"`[^`]+`", "", tests).strip() == ""
    for name in names:
        file, _, function = name.partition("::")
        tree = ast.parse((REPOSITORY / "tests" / file).read_text(encoding="utf-8"))
        functions = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert function in functions, name


def test_the_manifest_lists_the_forms_as_they_are() -> None:
    text = (REPOSITORY / "docs" / "manifest.md").read_text(encoding="utf-8")
    section = text.partition("\n## Mounts and walls\n")[2].partition("\n## ")[0]
    listed: dict[str, tuple[str, ...]] = {}
    for wall, cell in re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE):
        listed[wall] = tuple(re.findall(r"`([^`]+)`", cell))
    assert listed == forms.FORMS
