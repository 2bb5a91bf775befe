"""The HTTP verbs against a real server: what is sent, what comes back, and how a failure is told."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ringfence.policy.engine import AgentPolicy
from ringfence.syscalls import http_delete, http_get, http_head, http_patch, http_post, http_put
from ringfence.syscalls.declared import HttpResource
from ringfence.syscalls.errors import CallFailed, OutcomeUnknown, Revoked

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Call, Upstream

SECRET = "s3cret-token"


class Agent:
    """An agent that may call one declared resource."""

    def __init__(self, upstream: Upstream, make_call: Callable[..., Call]) -> None:
        self.upstream = upstream
        self.make_call = make_call
        self.fields: dict[str, Any] = {
            "name": "api",
            "base": upstream.base,
            "headers": {"Authorization": f"Bearer {SECRET}"},
            "effects": (),
            "idempotency_header": None,
            "secrets": (SECRET,),
        }

    async def send(
        self, verb: Any, path: str, *, call: dict[str, Any] | None = None, **arguments: Any
    ) -> Any:
        env: Any = SimpleNamespace(
            agent="agent",
            http={"api": HttpResource(**self.fields)},
            llm={},
            sql={},
            objects={},
            mcp={},
            a2a={},
        )
        made = verb.Arguments(url=self.upstream.base + path, **arguments)
        self.call = self.make_call(
            env=env, plan=verb.plan(made, env), policy=AgentPolicy("agent", [], [], []), **(call or {})
        )
        return await verb.run(self.call, made)


@pytest.fixture
def agent(upstream: Upstream, make_call: Callable[..., Call]) -> Agent:
    return Agent(upstream, make_call)


async def test_a_get_carries_the_credential_and_the_answer_comes_back(
    agent: Agent, upstream: Upstream
) -> None:
    result = await agent.send(http_get, "/rates?day=1", headers={"Accept": "text/plain"})
    assert (result.status, result.body) == (200, b"hello")
    assert result.headers["x-answer"] == "yes"
    (request,) = upstream.received
    assert (request.method, request.path) == ("GET", "/v1/rates?day=1")
    assert request.headers["authorization"] == f"Bearer {SECRET}"
    assert request.headers["accept"] == "text/plain"
    assert "idempotency-key" not in request.headers
    assert agent.call.passed == ["before_effect", "check_live", "after_effect"]


@pytest.mark.parametrize(
    ("body", "method"),
    [(http_post, "POST"), (http_put, "PUT"), (http_patch, "PATCH"), (http_delete, "DELETE")],
)
async def test_each_verb_sends_its_body_once(
    agent: Agent, upstream: Upstream, body: Any, method: str
) -> None:
    result = await agent.send(body, "/x", body=b'{"a":1}', headers={"Content-Type": "application/json"})
    assert result.status == 200
    assert [(item.method, item.body) for item in upstream.received] == [(method, b'{"a":1}')]
    assert upstream.received[0].headers["content-type"] == "application/json"


async def test_a_head_has_no_body(agent: Agent, upstream: Upstream) -> None:
    result = await agent.send(http_head, "/x")
    assert (result.status, result.headers["content-length"]) == (200, "5")
    assert upstream.received[0].method == "HEAD"


async def test_an_empty_post_says_that_it_is_empty(agent: Agent, upstream: Upstream) -> None:
    await agent.send(http_post, "/x")
    assert upstream.received[0].headers["content-length"] == "0"


async def test_the_effect_id_is_the_key_where_the_resource_takes_one(
    agent: Agent, upstream: Upstream
) -> None:
    agent.fields["idempotency_header"] = "Idempotency-Key"
    for _ in range(2):
        await agent.send(http_post, "/pay", call={"effect_id": "e-1"})
    assert [item.headers["idempotency-key"] for item in upstream.received] == ["e-1", "e-1"]


async def test_an_echoed_credential_is_taken_out(agent: Agent) -> None:
    result = await agent.send(http_get, "/echo")
    echoed = json.loads(result.body)["headers"]
    assert echoed["authorization"] == "Bearer [redacted]"
    assert result.headers["x-echo"] == "Bearer [redacted]"
    assert SECRET.encode() not in result.body


async def test_a_redirect_is_answered_and_not_followed(agent: Agent, upstream: Upstream) -> None:
    result = await agent.send(http_get, "/redirect")
    assert (result.status, result.headers["location"]) == (302, "http://127.0.0.1:1/elsewhere")
    assert len(upstream.received) == 1


async def test_too_many_requests_is_the_agents_to_see(agent: Agent, upstream: Upstream) -> None:
    result = await agent.send(http_post, "/busy")
    assert (result.status, result.headers["retry-after"], result.body) == (429, "2", b"slow down")
    assert len(upstream.received) == 1


async def test_cookies_are_neither_shown_nor_kept(agent: Agent, upstream: Upstream) -> None:
    result = await agent.send(http_get, "/cookie")
    assert "set-cookie" not in result.headers
    await agent.send(http_get, "/again")
    assert "cookie" not in upstream.received[1].headers


async def test_proxies_of_the_environment_are_not_used(
    agent: Agent, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    await agent.send(http_get, "/x")
    assert len(upstream.received) == 1


async def test_a_squeezed_answer_is_unpacked(agent: Agent) -> None:
    result = await agent.send(http_get, "/gzip")
    assert result.body == b"squeezed"
    assert "content-encoding" not in result.headers
    assert "content-length" not in result.headers


@pytest.mark.parametrize(
    ("path", "part"), [("/huge", "more than"), ("/odd", "encoding `br`"), ("/broken", "can't be decoded")]
)
async def test_an_answer_that_can_not_be_taken_says_that_it_was_carried_out(
    agent: Agent, path: str, part: str
) -> None:
    with pytest.raises(CallFailed, match=part) as caught:
        await agent.send(http_post, path)
    assert caught.value.metadata["sent"] == "yes"


async def test_a_revoked_right_stops_it_before_anything_is_sent(agent: Agent, upstream: Upstream) -> None:
    with pytest.raises(Revoked):
        await agent.send(http_post, "/x", call={"live_error": Revoked("gone")})
    assert upstream.received == []


async def test_nothing_sent_is_a_plain_failure(agent: Agent, upstream: Upstream) -> None:
    agent.fields["base"] = "http://127.0.0.1:1/v1"
    env_base, upstream.base = upstream.base, "http://127.0.0.1:1/v1"
    try:
        with pytest.raises(CallFailed, match="nothing was sent") as caught:
            await agent.send(http_post, "/pay")
    finally:
        upstream.base = env_base
    assert caught.value.metadata["sent"] == "no"
    assert "127.0.0.1" not in str(caught.value)


async def test_a_broken_connection_leaves_a_post_unknown(agent: Agent, upstream: Upstream) -> None:
    with pytest.raises(OutcomeUnknown, match=r"ringfence resolve agent \d+ --as done\|not-done"):
        await agent.send(http_post, "/drop", body=b"pay")
    assert len(upstream.received) == 1


async def test_a_broken_connection_fails_a_keyed_post_and_a_get(agent: Agent, upstream: Upstream) -> None:
    with pytest.raises(CallFailed, match="may have arrived"):
        await agent.send(http_get, "/drop")
    agent.fields["idempotency_header"] = "Idempotency-Key"
    with pytest.raises(CallFailed, match="may have arrived") as caught:
        await agent.send(http_post, "/drop", body=b"pay")
    assert caught.value.metadata["sent"] == "maybe"
    assert len(upstream.received) == 2


async def test_no_answer_in_time_leaves_a_post_unknown(agent: Agent, upstream: Upstream) -> None:
    agent.fields["timeout_s"] = 0.2
    with pytest.raises(OutcomeUnknown, match=r"within 0\.2 s"):
        await agent.send(http_post, "/hang", body=b"pay")
    with pytest.raises(CallFailed, match=r"within 0\.1 s"):
        await agent.send(http_get, "/hang", call={"deadline_s": 0.1})
    assert len(upstream.received) == 2


async def test_a_connection_closed_while_idle_does_not_make_a_post_unknown(
    agent: Agent, upstream: Upstream
) -> None:
    """Reading calls keep connections, others open one of their own: none is used that may be gone."""
    await agent.send(http_post, "/x")
    first = upstream.received[0]
    await agent.send(http_post, "/x")
    assert first.peer != upstream.received[1].peer
    await agent.send(http_get, "/x")
    await agent.send(http_get, "/x")
    assert upstream.received[2].peer == upstream.received[3].peer


async def test_many_calls_at_once(agent: Agent, upstream: Upstream) -> None:
    results = await asyncio.gather(*(agent.send(http_get, f"/x{number}") for number in range(30)))
    assert {result.status for result in results} == {200}
    assert len({item.path for item in upstream.received}) == 30


async def test_a_cancelled_call_ends_its_request(agent: Agent, upstream: Upstream) -> None:
    task = asyncio.create_task(agent.send(http_get, "/hang"))
    while not upstream.received:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
