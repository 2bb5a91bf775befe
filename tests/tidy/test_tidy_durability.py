"""The page on durability names tests that are there, and every file of fault tests is named by it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "durability.md"


def declared(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")}


def missing(text: str) -> list[str]:
    """Tests that a page names and that aren't there."""
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)
    return [
        f"{file}::{test}"
        for file, test in named
        if not (REPOSITORY / file).is_file() or test not in declared(REPOSITORY / file)
    ]


def test_every_named_test_is_there() -> None:
    assert missing(PAGE.read_text(encoding="utf-8")) == []


def test_a_test_that_is_not_there_is_seen() -> None:
    assert missing("`tests/fault/test_kill_matrix.py::test_nothing`") != []
    assert missing("`tests/fault/test_no_such.py::test_nothing_is_repeated_and_nothing_lost`") != []


def test_every_file_of_fault_tests_shows_a_guarantee() -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests" / "fault").glob("test_*.py")}
    assert {file for file in files if file not in text} == set()


def test_every_guarantee_is_shown() -> None:
    """A heading that is a question is followed by tests."""
    parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    questions = [part for part in parts if part.split("\n", 1)[0].endswith("?")]
    assert len(questions) >= 10
    assert [
        part.split("\n", 1)[0] for part in questions if not re.search(r"^- `tests/", part, flags=re.MULTILINE)
    ] == []
