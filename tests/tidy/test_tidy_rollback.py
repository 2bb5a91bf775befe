"""The page on rollback names a test in each line, and each of them is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "rollback.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def declared(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")}


def missing(text: str) -> list[str]:
    """Tests that a text names and that aren't there."""
    return [
        f"{file}::{test}"
        for file, test in NAMED.findall(text)
        if not (REPOSITORY / file).is_file() or test not in declared(REPOSITORY / file)
    ]


def unshown(text: str) -> list[str]:
    """Lines of tables that name no test."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "shown by |" not in line]
    return [line for line in lines if not NAMED.search(line)]


def test_every_line_is_shown_by_a_test_that_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    promises, _, _ = text.partition("\n## What it costs\n")  # behind it tables have figures
    assert promises != text
    assert (missing(text), unshown(promises)) == ([], [])
    assert len(NAMED.findall(text)) >= 30


def test_what_is_not_shown_is_seen() -> None:
    assert missing("`tests/tidy/test_tidy_rollback.py::test_nothing`") != []
    assert missing("`tests/fault/test_no_such.py::test_nothing`") != []
    assert unshown("| what | shown by |\n|---|---|\n| something | by nobody |") == [
        "| something | by nobody |"
    ]
