"""What agents chose to call things can't touch the terminal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.console.text import SafeDecoder, pad, safe, safe_block, shorten, to_json, width


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größe 価格 😀", "größe 価格 😀"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b2J\x07\x00\x7f", "\\x9b2J\\x07\\x00\\x7f"),
        ("a\u202eb\u200bc\u2066", "a\\u202eb\\u200bc\\u2066"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_safe(text: str, shown: str) -> None:
    assert safe(text) == shown


@settings(deadline=None)
@given(st.text())
def test_safe_is_one_printable_line(text: str) -> None:
    assert safe(text).isprintable()


def test_safe_block_keeps_lines_and_drops_colours() -> None:
    assert safe_block("\x1b[1;31mred\x1b[0m\r\n\tb\x1b]0;title\x07\r") == "red\n\tb\\x1b]0;title\\x07\\r"


@settings(deadline=None)
@given(st.text(alphabet="ab\x1b[31m;\r\né\u202e"), st.integers(1, 7))
def test_decoding_in_parts_is_decoding_at_once(text: str, step: int) -> None:
    data = text.encode()
    decoder = SafeDecoder()
    parts = [decoder.feed(data[at : at + step]) for at in range(0, len(data), step)]
    assert "".join(parts) + decoder.feed(b"", final=True) == safe_block(text)


def test_bytes_that_are_no_text() -> None:
    decoder = SafeDecoder()
    assert decoder.feed(b"\xff\xc3") + decoder.feed(b"(", final=True) == "��("


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(JSON)
def test_json_is_the_same_document_and_harmless(document: object) -> None:
    # What was read as JSON never holds the two halves of one letter as letters of their own.
    document = json.loads(json.dumps(document))
    text = to_json(document)
    assert json.loads(text) == document
    text.encode()
    assert not any(ord(char) in range(0x7F, 0xA0) or ord(char) < 0x20 for char in text)
    assert "\u202e" not in text


@settings(deadline=None)
@given(st.text(), st.integers(0, 30))
def test_shorten_fits(text: str, columns: int) -> None:
    assert width(shorten(safe(text), columns)) <= columns


def test_shorten_keeps_both_ends() -> None:
    assert shorten("/workspace/reports/2026/january.md", 20) == "/worksp…6/january.md"


def test_pad_counts_wide_letters() -> None:
    assert pad("価", 4) == "価  "
    assert pad("価", 4, right=True) == "  価"
