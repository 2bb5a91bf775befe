"""The matcher against a slow reference that follows the definition, and against any text."""

from __future__ import annotations

from itertools import product

from hypothesis import example, given, settings
from hypothesis import strategies as st
from ringfence.policy.glob import MANY, Many, Segment, cover_pieces, match_pieces, parse_segment
from ringfence.policy.matcher import (
    PatternError,
    canonical_path,
    canonical_url,
    compile_pattern,
    literal_pattern,
    match_path,
)


# A slow reference: all ways of cutting, straight from the definition.
def slow_segment(parts: tuple[str, ...], text: str) -> bool:
    if len(parts) == 1:
        return parts[0] == text
    if not text or text in {".", ".."}:
        return False
    head, tail = parts[0], parts[1:]
    if not text.startswith(head):
        return False
    return slow_star(tail, text[len(head) :])


def slow_star(parts: tuple[str, ...], text: str) -> bool:
    for at in range(len(text) + 1):
        if len(parts) == 1:
            if text[at:] == parts[0]:
                return True
        elif text.startswith(parts[0], at) and slow_star(parts[1:], text[at + len(parts[0]) :]):
            return True
    return False


def slow_pieces(pieces: tuple[Segment | Many, ...], segments: tuple[str, ...]) -> bool:
    if not pieces:
        return not segments
    first = pieces[0]
    if isinstance(first, Many):
        return any(slow_pieces(pieces[1:], segments[at:]) for at in range(len(segments) + 1))
    return bool(segments) and slow_segment(first.parts, segments[0]) and slow_pieces(pieces[1:], segments[1:])


LITERAL = st.text(alphabet="ab.", max_size=3)
SEGMENT = (
    st.lists(LITERAL, min_size=1, max_size=3).filter(lambda p: "" not in p[1:-1] and p != [""]).map(Segment)
)
PIECES = st.lists(st.one_of(SEGMENT, st.just(MANY)), min_size=1, max_size=5).map(tuple)
TEXTS = st.lists(st.text(alphabet="ab.", max_size=4), min_size=0, max_size=6).map(tuple)


@given(PIECES, TEXTS)
@settings(max_examples=600)
@example((Segment(("", "")), MANY), ("..",))
def test_the_matcher_does_what_the_reference_does(
    pieces: tuple[Segment | Many, ...], texts: tuple[str, ...]
) -> None:
    assert match_pieces(pieces, texts) == slow_pieces(pieces, texts)


@given(PIECES, PIECES)
@settings(max_examples=300)
def test_a_pattern_that_covers_another_matches_all_that_it_does(
    here: tuple[Segment | Many, ...], there: tuple[Segment | Many, ...]
) -> None:
    if cover_pieces(here, there):
        names = ("a", "b", "ab", "a.b", "bab")
        for count in range(4):
            for texts in product(names, repeat=count):
                assert not match_pieces(there, texts) or match_pieces(here, texts)


@given(SEGMENT)
def test_a_segment_reads_back_as_itself(segment: Segment) -> None:
    assert parse_segment(segment.render()) == segment


ANY_NAME = st.text(
    alphabet=st.characters(
        codec="utf-8", exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"], exclude_characters="/"
    ),
    min_size=1,
    max_size=12,
)


@given(st.lists(ANY_NAME, min_size=1, max_size=4), st.lists(ANY_NAME, min_size=1, max_size=4))
def test_the_literal_pattern_of_a_path_matches_it_and_no_other(one: list[str], other: list[str]) -> None:
    try:
        path, different = (
            canonical_path("/workspace/" + "/".join(one)),
            canonical_path("/workspace/" + "/".join(other)),
        )
    except PatternError:
        return
    pattern = literal_pattern("path", path)
    assert match_path(pattern, path)
    assert match_path(pattern, different) == (path == different)


@given(st.text(max_size=40))
@settings(max_examples=500)
def test_any_text_as_a_pattern_is_refused_cleanly_or_renders_stably(text: str) -> None:
    refusals: list[str] = []
    for kind in ("path", "url", "name", "key", "table", "command"):
        try:
            canonical = compile_pattern(kind, text).text
        except PatternError as error:
            refusals.append(error.message)
            continue
        assert compile_pattern(kind, canonical).text == canonical
    assert all(refusals)


@given(st.text(max_size=40))
@settings(max_examples=500)
def test_any_text_as_a_resource_is_refused_cleanly_or_canonical_twice(text: str) -> None:
    for make in (canonical_path, canonical_url):
        for value in (text, f"http://h/{text}"):
            try:
                canonical = make(value)
            except PatternError:
                continue
            assert make(canonical) == canonical
