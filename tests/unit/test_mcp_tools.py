"""The table as tools: names, schemas, hints, arguments and results, for every row."""

from __future__ import annotations

import base64
import json
import re

import jsonschema
import msgspec
import pytest
from ringfence.kernel.doors import mcp_tools
from ringfence.kernel.doors.mcp_words import words
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.table import build_table

TABLE = build_table()
TOOLS = mcp_tools.by_name(TABLE)


def test_every_row_is_a_tool_but_those_that_are_withheld():
    assert {row.action for row in TOOLS.values()} == set(TABLE) - mcp_tools.WITHHELD
    assert len(TOOLS) == len(TABLE) - len(mcp_tools.WITHHELD)
    for name in TOOLS:
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name)


@pytest.mark.parametrize("name", TOOLS)
def test_its_schemas_are_schemas_with_words_for_every_field(name):
    row = TOOLS[name]
    shown = mcp_tools.tool(row)
    assert len(shown["description"]) > 15
    for schema, message in ((shown["inputSchema"], row.request), (shown["outputSchema"], row.response)):
        jsonschema.Draft202012Validator.check_schema(schema)
        names = {field.name for field in message.fields}
        doubled = {
            f"{field.name}{mcp_tools.TEXT}" for field in message.fields if field.type == field.TYPE_BYTES
        }
        # No field has a name that would be taken for the text of another.
        assert not names & doubled
        assert set(schema["properties"]) == names | doubled
        assert all(field["description"] for field in schema["properties"].values())
    assert set(shown["inputSchema"].get("required", ())) <= {row.resource_field}
    assert shown["inputSchema"]["additionalProperties"] is False


def test_every_method_and_field_has_words():
    assert {row.method for row in TABLE.values()} <= set(words())
    for row in TABLE.values():
        assert {f"{row.request.name}.{field.name}" for field in row.request.fields} <= set(words())


@pytest.mark.parametrize(
    ("name", "reads", "destroys", "leaves"),
    [
        ("fs_read", True, False, False),
        ("http_get", True, False, True),
        ("llm_complete", True, False, True),
        ("fs_write", False, True, False),
        ("fs_delete", False, True, False),
        ("exec_run", False, True, False),
        ("sql_write", False, True, True),
        ("http_post", False, True, True),
        ("messages_send", False, False, False),
        ("memory_append", False, False, False),
    ],
)
def test_hints_say_what_a_call_may_do(name, reads, destroys, leaves):
    hints = mcp_tools.hints(TOOLS[name])
    found = (hints["readOnlyHint"], hints["destructiveHint"], hints["openWorldHint"])
    assert found == (reads, destroys, leaves)
    assert hints["idempotentHint"] is reads


def test_text_and_base64_are_the_same_arguments():
    row = TOOLS["fs_write"]
    text = mcp_tools.arguments(row, {"path": "a", "data_text": "é"})
    encoded = base64.b64encode("é".encode()).decode()
    assert text == mcp_tools.arguments(row, {"data": encoded, "path": "a"})
    assert json.loads(text) == {"path": "a", "data": encoded}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"path": "a", "data": "eA==", "data_text": "x"}, "one of the two"),
        ({"path": "a", "data_text": 1}, "one of the two"),
        ({"file": "a"}, "its fields: `path`, `data_text`, `data`, `mode`"),
        ({"path": 3}, "its fields: "),
        ({"path": "a", "data_text": "\ud800"}, ""),
    ],
)
def test_wrong_arguments_are_told_with_the_fields(given, told):
    row = TOOLS["fs_write"]
    if not told:
        # Half of a surrogate pair is kept as the bytes that it stands for, as clients of JSON do.
        assert msgspec.json.decode(mcp_tools.arguments(row, given))["path"] == "a"
        return
    with pytest.raises(InvalidRequest) as caught:
        mcp_tools.arguments(row, given)
    assert told in caught.value.message


def test_results_hold_text_where_there_is_text():
    row = TOOLS["fs_read"]
    recorded = {"data": base64.b64encode("é\n".encode()).decode(), "size_bytes": 3, "version": "v"}
    assert mcp_tools.result(row, json.dumps(recorded).encode()) == {
        "data_text": "é\n",
        "size_bytes": 3,
        "version": "v",
    }
    recorded["data"] = "/w=="
    found = mcp_tools.result(row, json.dumps(recorded).encode())
    assert found == recorded
    jsonschema.validate(found, mcp_tools.tool(row)["outputSchema"])
