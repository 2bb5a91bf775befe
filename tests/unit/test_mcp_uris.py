"""URIs of resources: what a server might read as another than rules do is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.policy.actions import OF_SERVERS, RESOURCE, check_action
from ringfence.policy.problems import PatternError
from ringfence.policy.rules import parse_rule
from ringfence.syscalls.mcp_common import sayable
from ringfence.syscalls.mcp_uris import URI_CHARS_MAX, unusable, unusable_template

GOOD = [
    "file:///docs/a.txt",
    "repo://acme/site?ref=main#L1",
    "test://template/1/data",
    "urn:isbn:0451450523",
    "doc://a//b",
    "notes://Grün/a%20b",
    "x:..a/b..",
]
BAD = [
    "",
    "a",
    "FILE:///docs/a",
    "file:///docs/../a",
    "file:///docs/./a",
    "doc:..",
    "doc://a?path=..",
    "file:///%2e%2e/a",
    "file:///a%2Fb",
    "file:///%73ecret",
    "file:///a%252Fb",
    "file:///a%00b",
    "file:///a b",
    "file:///a\\b",
    "file:///a\nb",
    "file:///" + "a" * URI_CHARS_MAX,
]


@pytest.mark.parametrize("uri", GOOD)
def test_what_says_one_thing_is_taken(uri: str) -> None:
    assert unusable(uri) == ""


@pytest.mark.parametrize("uri", BAD)
def test_what_may_be_read_in_two_ways_is_refused_with_what_to_write(uri: str) -> None:
    assert unusable(uri) != ""


@given(st.text(min_size=1, max_size=60))
def test_no_part_that_leads_elsewhere_gets_through(text: str) -> None:
    uri = f"file:///{text}/../x"
    assert unusable(uri) != ""


def test_a_template_may_have_variables() -> None:
    assert unusable_template("repo://{owner}/{repo}/file{?ref}") == ""
    assert unusable_template("repo://../{repo}") != ""
    assert unusable_template("repo://{owner") != ""


def test_no_tool_that_a_rule_can_say_is_called_as_a_resource_is() -> None:
    assert not sayable(RESOURCE)
    assert OF_SERVERS["mcp.read"] == RESOURCE
    rule = parse_rule('mcp.docs.@resource: "file:///docs/*"')
    assert parse_rule(rule.text).text == rule.text == 'mcp.docs.@resource: "file:///docs/*"'
    # Before, the canonical text of such a rule could not be read again.
    slashed = parse_rule('"mcp.docs.a/b": "*"')
    assert parse_rule(slashed.text).text == slashed.text
    with pytest.raises(PatternError):
        check_action("mcp.read")
