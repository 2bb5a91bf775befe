"""What an HTTP call is planned as: which resource, which effect, which headers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.policy.canonical import canonical_url
from ringfence.policy.problems import PatternError
from ringfence.syscalls import http_delete, http_get, http_post
from ringfence.syscalls.base import Effect, Plan
from ringfence.syscalls.declared import HttpResource
from ringfence.syscalls.errors import InvalidRequest, NoSuchResource
from ringfence.syscalls.http_common import plan_http


def resource(name: str, base: str, **more: Any) -> HttpResource:
    fields: dict[str, Any] = {"headers": {}, "effects": (), "idempotency_header": None, **more}
    return HttpResource(name=name, base=base, **fields)


def env(*resources: HttpResource) -> Any:
    return SimpleNamespace(http={item.name: item for item in resources})


RATES = resource(
    "rates", "https://api.example.com/v1", headers={"Authorization": "Bearer s3cret", "X-Team": "a"}
)


def plan(method: str, url: str, *resources: HttpResource, headers: dict[str, str] | None = None) -> Plan:
    return plan_http(method, url, headers or {}, env(*(resources or (RATES,))))


def test_a_url_below_the_base_is_planned_in_its_canonical_spelling() -> None:
    found = http_get.plan(
        http_get.Arguments(url="HTTPS://API.Example.com.:443/v1/%72ates?x=1#part"), env(RATES)
    )
    assert found.resource == "https://api.example.com/v1/rates?x=1"
    assert found.questions[0].action == "http.get"
    assert found.questions[0].resource == found.resource
    assert found.effect is None
    assert found.idempotent


@pytest.mark.parametrize(
    "url",
    [
        "https://api.example.com/v1x",
        "https://api.example.com/v1x/rates",
        "https://api.example.com/",
        "https://api.example.com/V1/rates",
        "http://api.example.com/v1/rates",
        "https://api.example.com:8443/v1/rates",
        "https://api.example.com.evil.test/v1/rates",
        "https://evil.test/v1/rates",
        "https://evil.test/api.example.com/v1/rates",
    ],
)
def test_a_url_outside_every_base_is_no_resource(url: str) -> None:
    with pytest.raises(NoSuchResource, match=r"declared: `https://api\.example\.com/v1` \(rates\)"):
        plan("GET", url)


@pytest.mark.parametrize(
    "url",
    [
        "https://api.example.com/v1/../admin",
        "https://api.example.com/v1/%2e%2e/admin",
        "https://api.example.com/v1//x",
        "https://api.example.com/v1/%252e%252e/admin",
        "https://user:pw@api.example.com/v1/x",
        "https://api.example.com\\@evil.test/v1/x",
        "file:///etc/passwd",
        "/v1/x",
        "",
        "https://api.example.com/v1/a\r\nHost: evil",
    ],
)
def test_a_url_that_can_be_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        plan("GET", url)


def test_an_unknown_url_is_named_without_its_query() -> None:
    with pytest.raises(NoSuchResource) as caught:
        plan("GET", "https://evil.test/x?token=hush")
    assert "hush" not in str(caught.value)


def test_the_most_specific_resource_is_taken() -> None:
    wide = resource("wide", "https://api.example.com")
    deep = resource("deep", "https://api.example.com/v1/pay/")
    assert plan("GET", "https://api.example.com/v1/pay/x", wide, RATES, deep).data.resource is deep
    assert plan("GET", "https://api.example.com/v1/payx", deep, RATES, wide).data.resource is RATES
    assert plan("GET", "https://api.example.com/v2", RATES, wide).data.resource is wide


PAYMENTS = resource(
    "payments",
    "http://127.0.0.1:9000/api",
    effects=(
        ("POST", "/pay", Effect.EXTERNAL),
        ("post", "/search", Effect.READ),
        ("DELETE", "/**", Effect.DESTROY),
        ("GET", "/trigger/*", Effect.EXTERNAL),
        ("GET", "/touch", Effect.WRITE),
        ("*", "/wipe", Effect.DESTROY),
    ),
)


@pytest.mark.parametrize(
    ("method", "path", "effect", "idempotent"),
    [
        ("POST", "/pay", None, False),
        ("POST", "/search", None, False),
        ("POST", "/other", None, False),
        ("DELETE", "/users/1", Effect.DESTROY, False),
        ("DELETE", "", Effect.DESTROY, False),
        ("GET", "/pay", None, True),
        ("GET", "/trigger/x", Effect.EXTERNAL, True),
        ("GET", "/trigger/x/y", None, True),
        ("GET", "/touch", Effect.EXTERNAL, True),
        ("POST", "/wipe", Effect.DESTROY, False),
        ("POST", "/wipe/", Effect.DESTROY, False),
        ("HEAD", "/wipe", Effect.DESTROY, True),
    ],
)
def test_the_first_declared_effect_counts_and_never_lowers_the_rows(
    method: str, path: str, effect: Effect | None, idempotent: bool
) -> None:
    found = plan(method, "http://127.0.0.1:9000/api" + path, PAYMENTS)
    assert (found.effect, found.idempotent) == (effect, idempotent)
    if effect is Effect.DESTROY:
        assert (
            found.no_return
            == f"can't be undone: the resource `payments` declares no `undo` for this {method}"
        )


def test_a_key_makes_a_post_repeatable() -> None:
    keyed = resource("keyed", "http://127.0.0.1:9000", idempotency_header="Idempotency-Key")
    assert http_post.plan(http_post.Arguments(url="http://127.0.0.1:9000/pay"), env(keyed)).idempotent
    with pytest.raises(InvalidRequest, match="set by the resource `keyed`"):
        plan("POST", "http://127.0.0.1:9000/pay", keyed, headers={"idempotency-key": "mine"})


def test_an_own_key_is_sent_where_the_resource_takes_none() -> None:
    bare = resource("bare", "http://127.0.0.1:9000")
    found = http_delete.plan(
        http_delete.Arguments(url="http://127.0.0.1:9000/a", headers={"Idempotency-Key": "mine"}), env(bare)
    )
    assert found.data.headers == {"idempotency-key": "mine"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.test"},
        {"hOsT": "evil.test"},
        {"Authorization": "Bearer other"},
        {"authorization": "Bearer other"},
        {"Cookie": "a=b"},
        {"Connection": "close"},
        {"Transfer-Encoding": "chunked"},
        {"Content-Length": "3"},
        {"X-HTTP-Method-Override": "DELETE"},
        {"X-Forwarded-For": "10.0.0.1"},
        {"X_HTTP_Method_Override": "DELETE"},
        {"x_forwarded_for": "10.0.0.1"},
        {"X-Original-URL": "/admin"},
        {"X-Rewrite-Url": "/admin"},
        {"X-Forwarded-Prefix": "/admin"},
        {"x-team": "b"},
        {"x_team": "b"},
        {"X-A": "1\r\nHost: evil.test"},
        {"X-A": "1\n"},
        {"X-A": "\u2028"},
        {"X A": "1"},
        {"X-A:": "1"},
        {"": "1"},
        {"X-A": "1", "x-a": "2"},
        {f"x-{number}": "1" for number in range(65)},
        {"x-long": "a" * 20_000},
    ],
)
def test_headers_that_are_not_the_agents_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan("GET", "https://api.example.com/v1/x", headers=headers)
    assert "\n" not in str(caught.value)
    assert "\r" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("X-Api-Key", "api-key", "ApiKey", "X_API_KEY", "PRIVATE-TOKEN", "X-Auth-Token", "X-Vault-Token"),
        *("X-Goog-Api-Key", "X-Amz-Security-Token", "JOB-TOKEN", "X-Authorization", "DD-APPLICATION-KEY"),
        "Ocp-Apim-Subscription-Key",
    ],
)
def test_a_credential_that_an_agent_found_is_not_sent(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"carries a credential; .* as `auth` of the resource"):
        plan("GET", "https://api.example.com/v1/x", headers={name: "stray"})


@pytest.mark.parametrize(
    "name", ["Accept", "If-Match", "Idempotency-Key", "X-Continuation-Token", "X-Request-Id", "X-Key-Count"]
)
def test_other_headers_are_the_agents_own(name: str) -> None:
    found = plan("GET", "https://api.example.com/v1/x", headers={name: "1"})
    assert found.data.headers == {name.lower(): "1"}


@given(st.text(max_size=30), st.text(max_size=20))
def test_what_was_judged_is_what_the_client_sends(path: str, query: str) -> None:
    try:
        canonical = canonical_url(f"http://127.0.0.1:9000/{path}?{query}")
    except PatternError:
        return
    # The sender refuses a difference; for what the canonicaliser lets through there is none.
    assert str(httpx.URL(canonical)) == canonical
