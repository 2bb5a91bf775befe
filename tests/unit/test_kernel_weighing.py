"""What a condition can see of a request's body: only what no other reading could make something else."""

from __future__ import annotations

import base64
import json

import pytest
from ringfence.kernel.weighing import arguments_of

BODY = b'{"amount": 5, "x": "&amount=500&y="}'


def _given(body: bytes, headers: dict[str, str]) -> bytes:
    return json.dumps({"body": base64.b64encode(body).decode(), "headers": headers}).encode()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "application/json"},
        {"Content-Type": "Application/JSON; charset=UTF-8"},
        {"content-type": 'application/vnd.api+json; charset="utf-8"; version=1'},
        {"content-type": "text/json", "content-encoding": "identity"},
    ],
)
def test_a_body_that_is_json_by_its_headers_is_read(headers: dict[str, str]) -> None:
    assert arguments_of(_given(BODY, headers))["json"]["amount"] == 5


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/x-www-form-urlencoded"},
        {"CONTENT-TYPE": "multipart/form-data; boundary=x"},
        {"content-type": "text/plain"},
        {"content-type": ""},
        {"content-type": "application/json, application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=utf-7"},
        {"content-type": "application/json; charset=utf-8; charset=utf-16"},
        {"content-type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_a_body_that_a_target_may_read_as_something_else_is_unreadable(headers: dict[str, str]) -> None:
    assert "json" not in arguments_of(_given(BODY, headers))
