"""What a compensation is made of: values of a recorded call and its answer, and nothing that leads elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ringfence.syscalls.declared import HttpResource, HttpUndo
from ringfence.syscalls.http_compensate import NoWay, Recorded, compensation_of

SHOP = HttpResource(name="shop", base="http://shop.test/v1", headers={}, effects=(), idempotency_header=None)


TILL = HttpResource(
    name="till", base="http://shop.test/v1/till", headers={}, effects=(), idempotency_header=None
)


def call(
    answer: Any = None, *, status: int = 201, location: str = "", body: Any = None, raw: str = ""
) -> Recorded:
    return Recorded(
        url="http://shop.test/v1/orders",
        headers={"content-type": "application/json"},
        body=(raw or json.dumps(body or {"sum": 12, "to": "ann"})).encode(),
        status=status,
        answer_headers={"content-type": "application/json", **({"location": location} if location else {})},
        answer=json.dumps(answer).encode(),
    )


def made(parts: tuple[str, ...], recorded: Recorded, body: Any = None) -> tuple[str, str, str]:
    undo = HttpUndo(method="POST", path="/orders", compensate_method="POST", compensate=parts, body=body)
    request = compensation_of(SHOP, undo, recorded, (SHOP, TILL))
    return request.method, request.url, request.body


def test_values_of_request_and_answer() -> None:
    assert made(("/orders/", "reply:/id", "/void"), call({"id": "a b&c"}))[1] == (
        "http://shop.test/v1/orders/a%20b&c/void"
    )
    body = {"of": "{reply:/id}", "sum": "{/sum}", "text": ["{/to}: {reply:/id}"], "by": 1}
    sent = made(("/refunds",), call({"id": 7}), body)[2]
    assert json.loads(sent) == {"of": 7, "sum": 12, "text": ["ann: 7"], "by": 1}
    assert made(("/refunds",), call(location="/v1/orders/7"), {"of": "{location}"})[2] == (
        '{"of":"http://shop.test/v1/orders/7"}'
    )


@pytest.mark.parametrize(
    "number", ["12.50", "1e3", "1E400", "0.1000000000000000055", "18446744073709551616", "true"]
)
def test_amounts_go_back_as_they_were_written(number: str) -> None:
    sent = made(("/refunds",), call(raw=f'{{"sum": {number}}}'), {"sum": "{/sum}", "text": "of {/sum}"})[2]
    assert sent == f'{{"sum":{number},"text":"of {number}"}}'


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/v1/orders/7", "http://shop.test/v1/orders/7"),
        ("orders/7", "http://shop.test/v1/orders/7"),
        ("http://shop.test/v1/orders/7?x=1", "http://shop.test/v1/orders/7?x=1"),
    ],
)
def test_where_the_answer_says(location: str, url: str) -> None:
    assert made(("", "location", ""), call(location=location))[1] == url


@pytest.mark.parametrize(
    ("parts", "recorded", "words"),
    [
        (("", "location", ""), call(location="http://evil.test/v1/orders/7"), "not below"),
        (("", "location", ""), call(location="/v2/orders/7"), "not below"),
        (("", "location", ""), call(location="/v1/../v2/7"), ""),
        (("", "location", ""), call(), "no `Location`"),
        (("/o/", "reply:/id", ""), call({"id": ".."}), "can't be a part of a path"),
        (("/o/", "reply:/id", ""), call({"id": "7/../9"}), "can't be named"),
        (("/o/", "reply:/id", ""), call({"id": True}), "can't be a part of a path"),
        (("/o/", "reply:/id", ""), call({"id": {"a": 1}}), "has no `/id`"),
        (("/o/", "reply:/id", ""), call({}), "has no `/id`"),
        (("/o/", "reply:/id", ""), call({"id": 1}, status=500), "answered with 500"),
        (("/o/", "/sum", ""), call(raw='{"sum": "\\ud800"}'), "nothing that JSON can carry"),
        (("/o/", "/sum", ""), call(raw='{"sum": NaN}'), "nothing that JSON can carry"),
        (("", "location", ""), call(location="http://[/v1/orders/7"), "no URL"),
        # Another resource's, whose credential is another.
        (("", "location", ""), call(location="/v1/till/7"), "another resource's"),
        (("", "location", ""), call(location="/v1/till;x/7"), "another resource's"),
        (("/", "/to", ""), call(body={"to": "till"}), "another resource's"),
    ],
)
def test_what_leads_elsewhere_or_nowhere(parts: tuple[str, ...], recorded: Recorded, words: str) -> None:
    with pytest.raises(NoWay) as caught:
        made(parts, recorded)
    assert words in str(caught.value)


@pytest.mark.parametrize("raw", ['{"sum": "\\udfff"}', '{"sum": NaN}', '{"sum": -Infinity}'])
def test_what_no_json_carries_is_not_sent(raw: str) -> None:
    for text in ("{/sum}", "of {/sum}"):
        with pytest.raises(NoWay, match="nothing that JSON can carry"):
            made(("/refunds",), call(raw=raw), {"sum": text})
