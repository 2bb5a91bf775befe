"""Writes the table of docs/escapes.md: `python tests/security/escapes/document.py`."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY / "tests"))

from security.escapes.attempts import all_attempts  # noqa: E402 - found by the line above
from security.escapes.attempts.base import TABLE, Attempt  # noqa: E402

PAGE = REPOSITORY / "docs" / "escapes.md"
HEAD = "| attempt | what it tries | in | walls | control |\n|---|---|---|---|---|\n"
_KINDS = {"both": "program, command", "program": "program", "command": "command"}


def row(tried: Attempt) -> str:
    """One line of the table."""
    walls = ", ".join(tried.walls)
    if tried.user_walls:
        walls += f" (user: {', '.join(tried.user_walls)})"
    control = tried.control
    if tried.user_control and tried.user_control != control:
        control += f" (user: {tried.user_control})"
    return f"| `{tried.name}` | {tried.what} | {_KINDS[tried.kind]} | {walls} | {control} |\n"


def table() -> str:
    """The whole table, a group after the other."""
    assert all_attempts.GROUPS
    return HEAD + "".join(row(tried) for tried in TABLE.values())


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text[: text.index(HEAD)] + table(), encoding="utf-8")
