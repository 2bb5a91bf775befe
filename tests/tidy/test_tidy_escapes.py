"""docs/escapes.md says what is tried, and what stops it."""

from __future__ import annotations

from security.escapes.attempts.base import TABLE
from security.escapes.document import HEAD, PAGE, table


def test_the_page_lists_every_attempt_as_it_is():
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(HEAD) :] == table(), "run `python tests/security/escapes/document.py`"


def test_nearly_all_have_a_control():
    assert len(TABLE) >= 50
    without = [tried.name for tried in TABLE.values() if tried.control == "none"]
    assert len(without) <= len(TABLE) // 20, without
