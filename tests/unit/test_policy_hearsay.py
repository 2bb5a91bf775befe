"""Hearsay: what stands in the input or in a vouched field, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.policy.facts import Facts, Told
from ringfence.policy.hearsay import Hearsay, folded, stands_in
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.problems import ManifestError
from ringfence.policy.vouching import Vouched

PROMPT = "Pay GB29NWBK60161331926819 and tell john.doe@example.com (Spotify's boss). Amount: 12.50."


@pytest.mark.parametrize(
    ("word", "stands"),
    [
        ("GB29NWBK60161331926819", True),
        ("gb29nwbk60161331926819", True),
        ("GB29NWBK6016133192681", False),
        ("B29NWBK60161331926819", False),
        ("john.doe@example.com", True),
        ("doe@example.com", False),
        ("john.doe@example", False),
        ("john", False),
        ("john.doe@example.com.evil.test", False),
        ("Spotify", True),
        ("boss", True),
        ("12.50", True),
        ("12", False),
        ("50", False),
        ("evil", False),
    ],
)
def test_a_word_stands_by_itself(word: str, stands: bool) -> None:
    assert stands_in(folded(word), folded(PROMPT)) is stands


WORDS = st.text(alphabet="ab1.@_-", min_size=1, max_size=8).filter(
    lambda w: w[0].isalnum() and w[-1].isalnum()
)


@given(WORDS, WORDS)
def test_a_word_between_spaces_is_found_and_within_another_is_not(word: str, other: str) -> None:
    assert stands_in(word, f"{other} {word} {other}") is True
    assert stands_in(word, f"x{word}") is False
    assert stands_in(word, f"{word}@x") is False
    assert stands_in(word, f"a.{word}") is False


@given(st.text(max_size=12), st.text(max_size=40))
def test_no_text_breaks_it(word: str, text: str) -> None:
    if stands_in(folded(word), folded(text)):
        assert folded(word) in folded(text)


def holds(arguments: Any, told: Told | None, *, fields: tuple[str, ...] = ("/json/to",), **more: Any) -> str:
    return Hearsay(fields=fields, **more).holds(Facts(arguments=arguments, told=told))


TOLD = Told(
    input=PROMPT,
    values=frozenset({"known@example.com", "7"}),
    named={"payees": frozenset({"7"})},
)


@pytest.mark.parametrize(
    "to",
    [
        "known@example.com",
        "KNOWN@example.com",
        "john.doe@example.com",
        7,
        12.5,
        None,
        "",
        [],
        True,
        ["known@example.com", "Spotify"],
    ],
)
def test_what_is_vouched_for_or_not_there_is_no_hearsay(to: Any) -> None:
    # 12.5 is written as 12.50 in the input, so it is another word.
    found = holds({"json": {"to": to}}, TOLD)
    assert (found == "") is (to != 12.5)


@pytest.mark.parametrize(
    "to",
    [
        "evil@example.com",
        8,
        ["known@example.com", "evil@example.com"],
        {"a": {"b": ["evil"]}},
        "nown@example.com",
    ],
)
def test_anything_else_is(to: Any) -> None:
    found = holds({"json": {"to": to}}, TOLD)
    assert found.startswith("`/json/to` holds `")
    assert "neither the agent's input nor an answer that is vouched for names" in found


def test_what_can_not_be_known_counts_as_hearsay() -> None:
    assert holds(None, TOLD)
    assert holds({"json": {"to": "Spotify"}}, None)
    assert holds({"body": "AAAA"}, TOLD) == "the body of the request can't be read"
    assert holds({"url": "x"}, TOLD, fields=("/to",)) == ""


def test_a_field_is_found_whatever_the_case_of_its_name() -> None:
    """Some targets read `To` as `to`: an agent must not get past a condition by that."""
    assert holds({"json": {"To": "evil@example.com"}}, TOLD)
    assert holds({"json": {"to": "known@example.com", "TO": "evil@example.com"}}, TOLD)
    assert not holds({"json": {"TO": "known@example.com", "too": "evil@example.com"}}, TOLD)
    assert holds({"json": {"a": [{"Who": "x"}, {"wHO": "evil"}]}}, TOLD, fields=("/json/A/1/who",))


@pytest.mark.parametrize(
    ("to", "fields"),
    [
        ({"evil@example.com": 7}, ("/json/to",)),
        ({"evil@example.com": None}, ("/json/to",)),
        ([{"known@example.com": {"evil@example.com": ""}}], ("/json/to",)),
        ({"known@example.com": True, "EVIL": False}, ("/json/to",)),
        ("known@example.com", ("/json",)),
    ],
)
def test_the_name_of_a_field_carries_a_destination_too(to: Any, fields: tuple[str, ...]) -> None:
    assert "holds a field named `" in holds({"json": {"to": to}}, TOLD, fields=fields)


def test_names_of_the_targets_own_form_say_nothing() -> None:
    sent = {"json": {"to": [{"email": "known@example.com", "Name": "Spotify"}]}}
    assert "a field named `email`" in holds(sent, TOLD)
    assert "a field named `Name`" in holds(sent, TOLD, names=("email",))
    assert holds(sent, TOLD, names=("email", "name")) == ""
    assert holds({"json": {"to": {"email": "evil"}}}, TOLD, names=("email", "name"))
    assert holds({"json": {"to": {"known@example.com": 7}}}, TOLD) == ""
    assert holds(sent, TOLD, names=("to", "email", "name"), fields=("/json",)) == ""


def test_each_source_by_itself() -> None:
    known, named = {"json": {"to": "known@example.com"}}, {"json": {"to": "Spotify"}}
    assert holds(known, TOLD, vouched_by=("input",))
    assert not holds(named, TOLD, vouched_by=("input",))
    assert not holds(known, TOLD, vouched_by=("answers",))
    assert "not an answer that is vouched for names" in holds(named, TOLD, vouched_by=("answers",))
    paid = {"json": {"to": 7}}
    assert not holds(paid, TOLD, vouched_by=("answers",))
    assert not holds(paid, TOLD, vouched_by=("input", "payees"))
    assert "an answer that is vouched for as `friends` names" in holds(paid, TOLD, vouched_by=("friends",))
    assert "nor an answer that is vouched for as `payees`" in holds(
        known, TOLD, vouched_by=("input", "payees")
    )


MANIFEST = """apiVersion: ringfence/v1
kind: Agent
metadata: {name: a}
spec:
  run: {command: [a]}
  permissions: {allow: [http.post: "http://a.test/**"]}
  when:
    - {action: http.post, if: {hearsay: %s}, then: ask}
"""


@pytest.mark.parametrize(
    ("written", "fields", "vouched_by", "names"),
    [
        ("/json/to", ("/json/to",), ("input", "answers"), ()),
        ("[/json/to, /json/cc]", ("/json/to", "/json/cc"), ("input", "answers"), ()),
        ("{fields: /json/to, vouched_by: [answers, input]}", ("/json/to",), ("input", "answers"), ()),
        ("{fields: [/json/to], vouched_by: [input]}", ("/json/to",), ("input",), ()),
        ("{fields: /json/to, vouched_by: [of-b, input, of-b]}", ("/json/to",), ("input", "of-b"), ()),
        ('{fields: /json, names: [to, "a, b"]}', ("/json",), ("input", "answers"), ("to", "a, b")),
    ],
)
def test_its_forms(
    written: str, fields: tuple[str, ...], vouched_by: tuple[str, ...], names: tuple[str, ...]
) -> None:
    (condition,) = parse_manifest(MANIFEST % written).when
    assert condition.tests == (Hearsay(fields=fields, vouched_by=vouched_by, names=names),)
    # Its own text is a form, and says the same.
    again = parse_manifest(MANIFEST.replace("{hearsay: %s}", f"{{{condition.tests[0].text}}}")).when
    assert again[0].tests == condition.tests


@pytest.mark.parametrize(
    ("written", "column", "words"),
    [
        ("to", 41, "is no place among arguments"),
        ("[]", 41, "names no field"),
        ("{vouched_by: [input]}", 41, "names no `fields`"),
        ("{fields: /json/to, vouched_by: []}", 41, "names nobody"),
        ("{fields: /json/to, vouched_by: [Friends]}", 73, "Friends"),
        ("{fields: /json/to, vouched_by: [input, [a]]}", 80, "vouched_by"),
        ("{fields: /json/to, by: [input]}", 60, "by"),
    ],
)
def test_its_mistakes_are_told_with_their_place(written: str, column: int, words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(MANIFEST % written, "m.yaml")
    assert f"m.yaml:8:{column}: " in str(caught.value)
    assert words in str(caught.value)


KERNEL = """apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    a:
      type: http
      base: "http://a.test"
      vouches: %s
"""


def test_what_a_resource_vouches_for() -> None:
    told = parse_kernel_file(KERNEL % '{"GET /a/*": /items/*/to, "* /b": [/x, /y~1z/0]}')
    assert [(v.method, v.path, v.said) for v in told.resources["a"].vouches] == [
        ("GET", "/a/*", (Vouched(fields=("/items/*/to",)),)),
        ("*", "/b", (Vouched(fields=("/x", "/y~1z/0")),)),
    ]
    some = "{of: /items/*, where: {/kind: sent, /n: [1, true]}, fields: [/to, /cc], names: /with, as: written-to}"
    (read,) = parse_kernel_file(KERNEL % f'{{"GET /a": [/x, {some}, /y]}}').resources["a"].vouches
    assert read.said == (
        Vouched(fields=("/x", "/y")),
        Vouched(
            of="/items/*",
            where=(("/kind", ("sent",)), ("/n", (1, True))),
            fields=("/to", "/cc"),
            names=("/with",),
            name="written-to",
        ),
    )
    for wrong, words in (
        ('{"GET /a": x}', "is no field of an answer"),
        ('{"GET /a": /x*}', "is no field of an answer"),
        ('{"GET /a": []}', "vouches for nothing"),
        ('{"GET /a": {of: /x}}', "vouches for nothing"),
        ('{"GET /a": {fields: []}}', "is empty"),
        ('{"GET /a": {field: /x}}', "unknown key `field`"),
        ('{"GET /a": {fields: /x, where: {/b/*: 1}}}', "is no field of an entry"),
        ('{"GET /a": {fields: /x, where: {/b: []}}}', "names no value"),
        ('{"GET /a": {fields: /x, where: {/b: }}}', "names no value"),
        ('{"GET /a": {fields: /x, of: items}}', "is no field of an answer"),
        ('{"GET /a": {fields: /x, as: answers}}', "can't be the name"),
        ('{"GET /a": {fields: /x, as: "Paid to"}}', "can't be the name"),
        ('{"/a": /x}', "is no method and path"),
        ("[a]", "vouches"),
    ):
        with pytest.raises(ManifestError) as caught:
            parse_kernel_file(KERNEL % wrong, "k.yaml")
        assert words in str(caught.value), wrong


@pytest.mark.parametrize("field", ["/json", "/json/to", "/JSON/to"])
def test_of_a_body_that_can_not_be_read_nothing_is_vouched_for(field: str) -> None:
    assert "can't be read" in holds({"body": "dG89bWFsbG9yeQ=="}, TOLD, fields=(field,))
    assert holds({"json": {"to": "known@example.com"}}, TOLD, fields=(field,), names=("to",)) == ""


MAIL = {
    "items": [
        {"status": "sent", "to": ["ann@a.test"], "cc": "bob@a.test", "from": "me@a.test"},
        {"status": "received", "to": ["me@a.test"], "from": "eve@evil.test", "body": "status: sent"},
        {"status": ["sent"], "to": "eve@evil.test"},
        {"to": "eve@evil.test", "more": {"status": "sent", "to": "eve@evil.test"}},
        "eve@evil.test",
    ],
    "files": {
        "a": {"owner": "me@a.test", "shared": {"cyd@a.test": "r", "": "r"}, "n": 1},
        "b": {"owner": "eve@evil.test", "shared": {"eve@evil.test": "rw"}, "n": True},
        "c": {"owner": "me@a.test", "shared": ["eve@evil.test"], "n": 1.0},
    },
}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"of": "/items/*", "where": (("/status", ("sent",)),), "fields": ("/to", "/cc")}, "ann bob"),
        ({"of": "/items/*", "where": (("/status", ("SENT", "draft")),), "fields": ("/to",)}, ""),
        ({"of": "/files/*", "where": (("/owner", ("me@a.test",)),), "names": ("/shared",)}, "cyd"),
        ({"of": "/files/*", "where": (("/owner", ("me@a.test",)), ("/n", (2,))), "names": ("/shared",)}, ""),
        ({"of": "/files/*", "where": (("/n", (True,)),), "names": ("/shared",)}, "eve"),
        ({"of": "/files/*", "where": (("/n", (1,)),), "names": ("/shared",)}, "cyd"),
        ({"of": "/files/b", "names": ("/shared",)}, "eve"),
        ({"names": ("/files/a/shared",), "fields": ("/items/0/cc", "/none")}, "bob cyd"),
        ({"of": "/none/*", "fields": ("",)}, ""),
    ],
)
def test_only_entries_with_the_right_thing_in_them_vouch(said: Any, words: str) -> None:
    found = sorted(word.partition("@")[0] for word in Vouched(**said).words(MAIL))
    assert " ".join(found) == words
    assert list(Vouched(**said).words("no object")) == []
