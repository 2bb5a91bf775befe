"""One URL that servers read in several ways: a deny holds however it is read, and an allow only where all read alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ringfence.policy.canonical import bare_url, canonical_url
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.matcher import match_url
from ringfence.policy.problems import PatternError
from ringfence.policy.rules import parse_rule
from ringfence.policy.types import Request, Verdict
from ringfence.syscalls.base import Effect
from ringfence.syscalls.declared import HttpResource, HttpUndo
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.http_common import Target, plan_http
from ringfence.syscalls.http_undo import undo_of

BASE = "http://bank.test/v1"


def resource(name: str = "bank", base: str = BASE, **more: Any) -> HttpResource:
    fields: dict[str, Any] = {"headers": {}, "effects": (), "idempotency_header": None, **more}
    return HttpResource(name=name, base=base, **fields)


def verdict(url: str, *, deny: str = "http.post: http://bank.test/v1/pay", verb: str = "deny") -> Verdict:
    """Of a POST under an allow of everything, as a call would be planned and judged."""
    env: Any = SimpleNamespace(http={"bank": resource()})
    plan = plan_http("POST", url, {}, env)
    grants = [("g", parse_rule('http.*: "http://bank.test/v1/**"'))]
    rules = [parse_rule(deny, verb)]
    policy = AgentPolicy(
        "a", grants if verb == "deny" else [*grants, ("k", rules[0])], rules if verb == "deny" else []
    )
    (question,) = plan.questions
    return policy.decide(Request(principal="a", action=question.action, resource=question.resource)).verdict


OTHER_SPELLINGS = [
    "pay", "pay/", "%70ay", "pay;x", "pay;", "pay;x=1;y", "pay%3Bx", "pay%3bx", "pay.", "pay...", "pay%20", "pay.;x", "pay;/",
    "pay?x=1", "pay#x", "pay;x?y",
]  # fmt: skip
REFUSED = [
    "/pay", "./pay", "x/../pay", "x/..;/pay", "x/..;a=b/pay", "x/%2e%2e/pay", "x/%2E%2E%3B/pay", "x/.;/pay", "x/;a/pay", "%2fpay",
    "%2Fpay", "x%2f..%2fpay", "\\pay", "%5cpay", "%255cpay", "%2570ay", "pay%00", "pay%0a", "pay%", "pay%zz", "p%c0%afay", "...;/pay",
    "x/...", "x/%20/pay", "pay\u200b",
]  # fmt: skip


@pytest.mark.parametrize("path", OTHER_SPELLINGS)
@pytest.mark.parametrize("verb", ["deny", "ask"])
def test_no_other_spelling_gets_past_a_deny_or_an_ask(path: str, verb: str) -> None:
    assert verdict(f"{BASE}/{path}", verb=verb).value == verb


@pytest.mark.parametrize("path", REFUSED)
def test_what_leads_elsewhere_on_some_server_is_not_sent(path: str) -> None:
    with pytest.raises(InvalidRequest):
        verdict(f"{BASE}/{path}")


def test_a_deny_of_a_tree_or_of_a_name_holds_for_what_has_parameters() -> None:
    assert verdict(f"{BASE}/admin;x/users", deny="http.post: http://bank.test/v1/admin/**") is Verdict.DENY
    assert verdict(f"{BASE}/x.php;a", deny="http.post: http://bank.test/v1/*.php") is Verdict.DENY
    # Several denies whose patterns begin alike in one reading only.
    assert verdict(f"{BASE}/a;1/b;2/c.", deny="http.post: http://bank.test/v1/a/b/c") is Verdict.DENY
    assert verdict(f"{BASE}/payments;x") is Verdict.ALLOW


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("/a", "/a", True),
        ("/a", "/a;x", False),
        ("/a;x", "/a;x", True),
        ("/a;x", "/a", False),
        ("/items/*", "/items/1;v=2", True),
        ("/items/*;v=2", "/items/1;v=2", False),
        ("/**", "/a;x/b", True),
        ("/a/**", "/a;x/b", False),
        ("/v1.", "/v1.", True),
        ("/files/*.txt", "/files/a.txt.", False),
    ],
)
def test_an_allow_wants_every_reading_or_to_have_spelt_it_out(pattern: str, path: str, matches: bool) -> None:
    assert match_url(f"http://a.test{pattern}", f"http://a.test{path}") is matches


def served(path: str) -> str:
    """What a careless server makes of a path: it decodes, cuts parameters, dots and spaces, merges slashes and goes up."""
    kept: list[str] = []
    for segment in unquote(path.partition("?")[0].partition("#")[0]).replace("\\", "/").split("/"):
        bare = segment.partition(";")[0]
        if bare == ".." and kept:
            kept.pop()
        elif bare.rstrip(". "):
            kept.append(bare.rstrip(". "))
    return "/".join(kept)


@given(
    st.lists(
        st.sampled_from(
            [
                "pay",
                "/",
                ";",
                ".",
                "..",
                "%2e",
                "%2F",
                "%3b",
                "x",
                "a=1",
                "%20",
                "\\",
                "//",
                "?q",
                "%70",
                "..;",
            ]
        ),
        max_size=7,
    ).map("".join)
)
@settings(max_examples=600)
@example("x/..;/pay")
@example("pay;x=1")
def test_whatever_a_careless_server_takes_for_it_is_denied(path: str) -> None:
    try:
        found = verdict(f"{BASE}/{path}")
    except InvalidRequest:
        return
    assert (found is Verdict.DENY) is (served(path) == "pay")


@given(st.text("ab;.% 3Bb/é", max_size=12))
def test_the_bare_reading_is_canonical_and_its_own(path: str) -> None:
    try:
        url = canonical_url(f"http://a.test/{path}")
    except PatternError:
        return
    assert canonical_url(bare_url(url)) == bare_url(url) == bare_url(bare_url(url))


def test_a_url_of_two_resources_is_of_none() -> None:
    admin = resource("admin", "http://bank.test/v1/admin", headers={"Authorization": "Bearer x"})
    env: Any = SimpleNamespace(http={"bank": resource(), "admin": admin})
    for path in ("admin;x/users", "admin./users", "admin%3b"):
        with pytest.raises(InvalidRequest, match="one of another resource"):
            plan_http("GET", f"{BASE}/{path}", {}, env)
    assert plan_http("GET", f"{BASE}/admin/users;x", {}, env).data.resource is admin


def test_the_strictest_effect_of_all_readings_counts() -> None:
    declared = resource(
        effects=(
            ("GET", "/status", Effect.READ),
            ("GET", "/**", Effect.EXTERNAL),
            ("*", "/jobs/*", Effect.DESTROY),
        ),
        undo=(
            HttpUndo(
                method="*", path="/jobs/1", keep=("/jobs/1",), put_back_method="PUT", put_back=("/jobs/1",)
            ),
        ),
    )
    env: Any = SimpleNamespace(http={"bank": declared})

    def effect(method: str, path: str) -> Effect | None:
        return plan_http(method, f"{BASE}{path}", {}, env).effect

    assert effect("GET", "/status") is None
    assert effect("GET", "/status;x") is Effect.EXTERNAL
    assert effect("DELETE", "/jobs;x/1") is Effect.DESTROY
    # What may be another job on another server is undone by nothing that was declared.
    target: Target = plan_http("DELETE", f"{BASE}/jobs/1;x", {}, env).data
    assert undo_of(declared, "DELETE", f"{BASE}/jobs/1") is declared.undo[0]
    assert undo_of(declared, "DELETE", target.url) is None
