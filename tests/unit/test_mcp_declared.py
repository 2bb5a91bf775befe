"""Names of declared servers' tools are names that clients take, and no two are the same."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.doors.mcp_declared import NAME_MAX, Lent, Told, lent_name

SERVERS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
TOOLS = st.from_regex(r"[A-Za-z0-9_/.-]{1,128}", fullmatch=True)


@given(st.lists(st.tuples(SERVERS, TOOLS), unique=True, min_size=2, max_size=20))
def test_names_are_taken_by_clients_and_each_is_one_tools_own(pairs):
    names = [lent_name(server, tool) for server, tool in pairs]
    assert all(re.fullmatch(rf"mcp_[a-zA-Z0-9_-]{{1,{NAME_MAX - 4}}}", name) for name in names)
    assert len(set(names)) == len(pairs)


def test_a_plain_name_is_kept():
    assert lent_name("github", "create_issue") == "mcp_github_create_issue"
    assert lent_name("git_hub", "issue").startswith("mcp_git_hub_issue_")


def test_hints_follow_what_the_kernel_takes_a_call_for():
    for effect, destroys in (("READ", False), ("EXTERNAL", True), ("DESTROY", True)):
        lent = Lent(name="mcp_a_b", server="a", told=Told(name="b", effect=effect))
        hints = lent.tool()["annotations"]
        assert (hints["readOnlyHint"], hints["destructiveHint"], hints["openWorldHint"]) == (
            not destroys,
            destroys,
            True,
        )
    assert lent.arguments({"x": 1}) == {"server": "a", "tool": "b", "arguments": {"x": 1}}
