"""What a redirect makes of a request: which calls are made, with what, and when it is not followed."""

from __future__ import annotations

from typing import Any

import pytest
from ringfence.agent import InvalidRequest, redirects
from ringfence.agent.values import Response


def calls(method: str, answers: list[tuple[int, str]], hops: int, **sent: Any) -> tuple[list[Any], Response]:
    """The calls that are made of one request, against answers with status and location, and the last answer."""
    script = redirects.follow(method, "https://a.test/x/y?q", hops, **sent)
    made: list[Any] = []
    value = None
    pending = list(answers)
    while True:
        try:
            operation = script.send(value)  # pyright: ignore[reportArgumentType] - None starts it
        except StopIteration as end:
            return made, end.value
        made.append((operation.action, operation.arguments))
        status, location = pending.pop(0) if pending else (200, "")
        value = Response(status=status, headers={"location": location} if location else {}, body=b"")


@pytest.mark.parametrize(
    ("method", "status", "then"),
    [
        *((m, s, m) for m in ("get", "head") for s in (301, 302, 303, 307, 308)),
        ("post", 301, "get"),
        ("post", 302, "get"),
        *((m, 303, "get") for m in ("post", "put", "patch", "delete")),
        *((m, s, m) for m in ("post", "put", "patch", "delete") for s in (307, 308)),
        *((m, s, "") for m in ("put", "patch", "delete") for s in (301, 302)),
        *(("get", s, "") for s in (200, 300, 304, 305, 306, 404)),
    ],
)
def test_the_method_of_the_next_call(method: str, status: int, then: str) -> None:
    body: dict[str, Any] = {} if method in ("get", "head") else {"json": {"n": 1}}
    made, last = calls(method, [(status, "/z")], 3, headers={"x-a": "1", "Content-Language": "de"}, **body)
    if not then:
        assert (len(made), last.status) == (1, status)
        return
    action, arguments = made[1]
    assert (action, arguments["url"]) == (f"http.{then}", "https://a.test/z")
    assert arguments.get("body") == (made[0][1].get("body") if then == method else None)
    kept = {"x-a": "1"} if then != method else made[0][1]["headers"]
    assert arguments["headers"] == kept


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/z", "https://a.test/z"),
        ("z", "https://a.test/x/z"),
        ("?p", "https://a.test/x/y?p"),
        ("https://a.test/z#part", "https://a.test/z"),
        ("//b.test/z", "https://b.test/z"),
        ("http://a.test/z", "http://a.test/z"),
        ("https://a.test:8443/z", "https://a.test:8443/z"),
    ],
)
def test_where_it_leads_and_what_goes_along(location: str, url: str) -> None:
    made, _ = calls("get", [(302, location)], 1, headers={"x-key": "of this host"})
    assert made[1][1]["url"] == url
    assert ("headers" in made[1][1]) is url.startswith("https://a.test/")


def test_headers_do_not_come_back_with_the_origin() -> None:
    made, _ = calls("get", [(302, "https://b.test/"), (302, "https://a.test/")], 5, headers={"x-key": "k"})
    assert ["headers" in arguments for _, arguments in made] == [True, False, False]


@pytest.mark.parametrize(("hops", "asked"), [(0, 1), (1, 2), (5, 6)])
def test_so_many_hops_and_no_more(hops: int, asked: int) -> None:
    made, last = calls("get", [(302, "/x/y?q")] * 20, hops)
    assert (len(made), last.status) == (asked, 302)


def test_a_location_that_is_missing_or_held_a_credential_is_not_followed() -> None:
    assert len(calls("get", [(302, "")], 5)[0]) == 1
    assert len(calls("get", [(302, "https://a.test/?key=[redacted]")], 5)[0]) == 1


@pytest.mark.parametrize("hops", [-1, 21, 10**9, 1.5, True, "x", None])
def test_what_is_no_number_of_redirects_sends_nothing(hops: Any) -> None:
    with pytest.raises(InvalidRequest, match="whole number from 0 to 20"):
        next(redirects.follow("get", "https://a.test/", hops))
