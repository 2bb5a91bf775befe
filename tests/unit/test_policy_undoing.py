"""How a kernel file says that destructive HTTP calls are undone."""

from __future__ import annotations

import pytest
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.problems import ManifestError
from ringfence.policy.undoing import Template

KERNEL = """apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    a:
      type: http
      base: "http://a.test"
      undo: %s
"""


def test_both_requests_are_read() -> None:
    text = """{"DELETE /f/*": {keep: "GET {path}", put_back: "PUT {path}"}, "POST /r": {keep: "GET /f/{/a/b~1c}?x=1", put_back: "POST /f"}}"""
    first, second = parse_kernel_file(KERNEL % text).resources["a"].undo
    assert (first.method, first.path) == ("DELETE", "/f/*")
    assert first.keep == Template(method="GET", parts=("", "path", ""))
    assert second.keep == Template(method="GET", parts=("/f/", "/a/b~1c", "?x=1"))
    assert second.put_back == Template(method="POST", parts=("/f",))


def test_a_compensation_is_read() -> None:
    text = """{"POST /pay": {compensate: "POST /refunds/{reply:/id}", body: {of: "{reply:/id}", sum: "{/sum}", why: [1, "undo {/to}"]}},
      "POST /f": {compensate: "DELETE {location}"}, "PUT /f": {keep: "GET {path}", put_back: "PUT {path}", remove: "DELETE {path}"}}"""
    pay, made, put = parse_kernel_file(KERNEL % text).resources["a"].undo
    assert pay.compensate == Template(method="POST", parts=("/refunds/", "reply:/id", ""))
    assert pay.body == {"of": "{reply:/id}", "sum": "{/sum}", "why": [1, "undo {/to}"]}
    assert made.compensate == Template(method="DELETE", parts=("", "location", ""))
    assert put.remove == Template(method="DELETE", parts=("", "path", ""))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"DELETE /f": {keep: "GET /f"}}', "has no `put_back`"),
        ('{"DELETE /f": {put_back: "PUT /f"}}', "has no `keep`"),
        ('{"DELETE /f": {keep: "POST /f", put_back: "PUT /f"}}', "is no GET and path"),
        ('{"DELETE /f": {keep: "GET /f", put_back: "DELETE /f"}}', "is no PUT or POST or PATCH and path"),
        ('{"DELETE /f": {keep: "GET f", put_back: "PUT /f"}}', "is no GET and path"),
        ('{"DELETE /f": {keep: "GET /{name}", put_back: "PUT /f"}}', "can't stand in a URL"),
        ('{"DELETE /f": {keep: "GET /f g", put_back: "PUT /f"}}', "can't stand in a URL"),
        ('{"DELETE f": {keep: "GET /f", put_back: "PUT /f"}}', "is no method and path"),
        ('{"DELETE /f": {keep: "GET /f", put_back: "PUT /f", more: 1}}', "more"),
        ('{"DELETE /f": "GET /f"}', "undo"),
        ('{"POST /f": {compensate: "GET /f"}}', "is no DELETE or POST or PUT or PATCH and path"),
        ('{"POST /f": {compensate: "DELETE /f/{location}"}}', "can't stand in a URL"),
        ('{"POST /f": {compensate: "DELETE /f", keep: "GET /f"}}', "has `keep` beside `compensate`"),
        ('{"POST /f": {keep: "GET /f", put_back: "PUT /f", body: {a: 1}}}', "has `body` beside `keep`"),
        ('{"POST /f": {compensate: "DELETE /f", body: {a: 1}}}', "sends no body"),
        ('{"POST /f": {compensate: "POST /f", body: {a: "{b}"}}}', "a brace that is no hole"),
        ('{"POST /f": {keep: "GET /f/{reply:/id}", put_back: "PUT /f"}}', "which is not there yet"),
    ],
)
def test_mistakes_are_told(text: str, words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_kernel_file(KERNEL % text, "k.yaml")
    assert words in str(caught.value)
    assert "k.yaml:8:" in str(caught.value)
