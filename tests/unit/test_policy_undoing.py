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
    ],
)
def test_mistakes_are_told(text: str, words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_kernel_file(KERNEL % text, "k.yaml")
    assert words in str(caught.value)
    assert "k.yaml:8:" in str(caught.value)
