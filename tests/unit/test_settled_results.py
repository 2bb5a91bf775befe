"""What an operator may give as the result of a call that nobody saw end."""

from __future__ import annotations

import msgspec
import pytest
from ringfence.kernel.operations.results import settled_result
from ringfence.kernel.problems import Problem
from ringfence.syscalls.base import Recovery
from ringfence.syscalls.codec import result_to_message
from ringfence.syscalls.table import build_table

TABLE = build_table()


@pytest.mark.parametrize("action", [a for a, row in TABLE.items() if row.recovery is not Recovery.REPEAT])
def test_without_a_result_the_agent_can_read_what_it_gets(action):
    row = TABLE[action]
    result_to_message(row, msgspec.json.encode(settled_result(TABLE, action, "")))


def test_what_is_given_stands_and_the_rest_is_neutral():
    assert settled_result(TABLE, "http.post", '{"status": 404, "body": "aGk="}') == {
        "status": 404,
        "headers": {"ringfence-resolved": "done"},
        "body": "aGk=",
    }
    assert settled_result(TABLE, "sql.write", '{"row_count": 3}') == {
        "row_count": 3,
        "columns": [],
        "rows": [],
    }


@pytest.mark.parametrize(
    ("action", "text", "named"),
    [
        ("http.post", '"x"', "not a JSON object"),
        ("http.post", "[]", "not a JSON object"),
        ("http.post", "{", "not JSON"),
        ("http.post", '{"status": "200"}', "status"),
        ("http.post", '{"body": "no base64!"}', "body"),
        ("http.post", '{"stauts": 200}', "`stauts`"),
        ("fs.delete", '{"removed": null}', "removed"),
        ("exec.run", '{"exit_code": 1e99}', "exit_code"),
    ],
)
def test_what_the_call_never_returns_is_refused(action, text, named):
    with pytest.raises(Problem) as caught:
        settled_result(TABLE, action, text)
    assert caught.value.exit_code == 2
    assert named in caught.value.message
    assert f"`{action}` returns {{" in caught.value.message
