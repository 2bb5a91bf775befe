"""Tools that stand in a group are looked at like those that don't, and those that either side may run."""

from __future__ import annotations

import pytest
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.llm_wire import check

FUNCTION = {"type": "function", "name": "fs_write", "parameters": {"type": "object"}}


def group(*tools: object) -> dict[str, object]:
    return {"type": "namespace", "name": "mcp__ringfence", "tools": list(tools)}


def test_a_group_of_the_programs_own_tools_goes_along():
    check("responses", None, [FUNCTION, group(FUNCTION, {**FUNCTION, "name": "fs_read"})], {})


@pytest.mark.parametrize(
    "wrong", [group({"type": "web_search"}), group(group(FUNCTION)), group("x"), {"type": "namespace"}]
)
def test_whatever_acts_at_the_host_is_refused_in_a_group_too(wrong):
    with pytest.raises(InvalidRequest, match="can't be used here"):
        check("responses", None, [wrong], {})


def test_other_protocols_have_no_groups():
    with pytest.raises(InvalidRequest, match="`namespace` can't be used here"):
        check("chat", None, [group(FUNCTION)], {})


def test_a_search_for_tools_goes_along_where_the_program_makes_it():
    search = {"type": "tool_search", "description": "Find tools", "parameters": {"type": "object"}}
    check("responses", None, [{**search, "execution": "client"}], {})
    for wrong in (search, {**search, "execution": "server"}):
        with pytest.raises(InvalidRequest, match="`tool_search` can't be used here"):
            check("responses", None, [wrong], {})
    with pytest.raises(InvalidRequest, match="can't be used here"):
        check("chat", None, [{**search, "execution": "client"}], {})


def test_tools_that_a_conversation_brings_are_looked_at_too():
    item = {"type": "additional_tools", "role": "developer", "tools": [group(FUNCTION)]}
    check("responses", None, [], {}, [item, {"role": "user", "content": "hello"}])
    for wrong in ({"type": "web_search"}, group({"type": "mcp"})):
        with pytest.raises(InvalidRequest, match="can't be used here"):
            check("responses", None, [], {}, [{**item, "tools": [FUNCTION, wrong]}])


def test_an_item_that_stands_at_the_host_is_refused():
    item = {"type": "item_reference", "id": "msg_1"}
    with pytest.raises(InvalidRequest, match="`item_reference` can't be used here: the prompt would stand"):
        check("responses", None, [], {}, [{"role": "user", "content": "hello"}, item])
