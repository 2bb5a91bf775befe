"""Errors of the kernel in the words of models' hosts."""

from __future__ import annotations

import json

import pytest
from ringfence.kernel.doors.refusals import KINDS, of_error, of_status
from ringfence.kernel.settled import ERRORS


@pytest.mark.parametrize("reason", sorted(ERRORS))
@pytest.mark.parametrize("anthropic", [True, False])
def test_every_error_has_a_shape(reason: str, anthropic: bool) -> None:
    status, body, headers = of_error(
        ERRORS[reason]("why, and what to do", rule="a rule"), anthropic=anthropic
    )
    document = json.loads(body)
    assert status == (KINDS[reason].status if reason in KINDS else 500)
    assert (document.get("type") == "error") is anthropic
    error = document["error"]
    assert error["message"] == "why, and what to do"
    assert error["ringfence"] == {"reason": reason, "rule": "a rule"}
    assert headers["x-should-retry"] in ("true", "false")
    assert ("retry-after" in headers) == (status in (429, 503))


def test_when_to_come_back() -> None:
    full = ERRORS["QuotaExceeded"]("full", retry_after_ms="2100")
    assert of_error(full, anthropic=False)[2]["retry-after"] == "3"
    long = ERRORS["QuotaExceeded"]("too long", quota="context")
    status, body, headers = of_error(long, anthropic=True)
    assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
    assert (headers["x-should-retry"], "retry-after" in headers) == ("false", False)


def test_a_host_without_its_key_is_no_missing_model() -> None:
    unset = ERRORS["NoSuchResource"]("secret `key` is not set", unavailable="openai")
    status, body, headers = of_error(unset, anthropic=True)
    assert (status, json.loads(body)["error"]["type"]) == (403, "permission_error")
    assert json.loads(body)["error"]["message"] == "secret `key` is not set"
    assert headers["x-should-retry"] == "false"


def test_what_a_host_says_goes_through() -> None:
    said = ERRORS["CallFailed"](
        "`host` answered 529", status="529", body='{"error": {"type": "overloaded_error"}}'
    )
    status, body, headers = of_error(said, anthropic=True)
    assert (status, body) == (529, b'{"error": {"type": "overloaded_error"}}')
    assert headers["x-should-retry"] == "true"
    bare = ERRORS["CallFailed"]("`host` answered 404", status="404", sent="yes")
    status, body, headers = of_error(bare, anthropic=False)
    assert (status, json.loads(body)["error"]["message"]) == (404, "`host` answered 404")
    assert headers["x-should-retry"] == "false"


def test_errors_of_http_have_one_too() -> None:
    body, _ = of_status(413, "too long", anthropic=True)
    assert json.loads(body)["error"]["type"] == "request_too_large"
    body, _ = of_status(418, "no tea", anthropic=False)
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_pointer_to_nothing_is_no_missing_model() -> None:
    gone = ERRORS["NoSuchResource"]("there is no `/workspace/a.png`", pointer="/workspace/a.png")
    status, body, _ = of_error(gone, anthropic=False)
    assert (status, json.loads(body)["error"]["code"]) == (404, None)
