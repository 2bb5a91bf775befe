"""What is said of messages that nobody can read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.doors.mcp_unread import unreadable


@pytest.mark.parametrize(
    ("sent", "asked", "code"),
    [
        (b"no json", None, -32700),
        (b"\xff\x00", None, -32700),
        (b"[" * 50_000, None, -32700),
        (b'{"jsonrpc": "2.0", "id": 7, "meth', None, -32700),
        (rb'{"jsonrpc": "2.0", "id": 7, "method": "x", "params": {"a": "\ud800"}}', 7, -32700),
        (b'{"jsonrpc": "2.0", "id": "a", "method": "x", "params": {"a": "\xff"}}', "a", -32700),
        (rb'{"jsonrpc": "2.0", "id": "\ud800", "method": "x"}', "\ud800", -32700),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "x", "params": 7}', 7, -32600),
        (b'{"jsonrpc": "1.0", "id": true, "method": "x"}', None, -32600),
        (b'[{"jsonrpc": "2.0", "id": 7, "method": "x"}]', None, -32600),
        (b"{}", None, -32600),
    ],
)
def test_whoever_asks_is_told(sent: bytes, asked: Any, code: int) -> None:
    found = unreadable(sent)
    assert found is not None
    said = json.loads(found)
    assert (said["jsonrpc"], said["id"], said["error"]["code"]) == ("2.0", asked, code)


@pytest.mark.parametrize(
    "sent",
    [
        b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": 7}',
        b'{"jsonrpc": "2.0", "id": 1, "result": 7}',
        b'{"jsonrpc": "2.0", "id": 1, "error": {}}',
    ],
)
def test_where_nobody_waits_nothing_is_said(sent: bytes) -> None:
    assert unreadable(sent) is None


@given(st.binary(max_size=60))
def test_whatever_comes_there_is_one_line_of_json_or_nothing(sent: bytes) -> None:
    found = unreadable(sent)
    assert found is None or (json.loads(found) and b"\n" not in found)
