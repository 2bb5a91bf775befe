"""What declarations of agents elsewhere say, and which interfaces of a card are spoken to."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ringfence.kernel.a2a.bounding import bounded
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.lint import lint_manifest
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.problems import ManifestError
from ringfence.policy.serving import may_push
from ringfence.syscalls import a2a_client, a2a_get
from ringfence.syscalls.declared import A2aResource
from ringfence.syscalls.mcp_common import Lost, Refused, Sent
from ringfence.syscalls.words import shown

KERNEL = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  resources:\n    oracle: {%s}\n"
AGENT = (
    "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: a}\nspec:\n"
    "  run: {command: [a]}\n  permissions: {allow: [%s]}\n"
)
URL = 'type: a2a, url: "https://a.example/oracle/"'


def test_a_declaration_says_who_it_is_and_what_may_be_named() -> None:
    more = "skills: [lookup], repeat: true, trusted: true, auth: {bearer: {secret: t}}, rate: 3/m, addresses: [10.0.0.0/8]"
    one = parse_kernel_file(KERNEL % f"{URL}, {more}", "f").resources["oracle"]
    assert (one.base, one.a2a.skills, one.a2a.repeat, one.untrusted) == (
        "https://a.example/oracle",
        ("lookup",),
        True,
        False,
    )
    assert one.secrets() == ("t",)
    plain = parse_kernel_file(KERNEL % URL, "f").resources["oracle"]
    assert (plain.untrusted, plain.a2a.repeat, plain.a2a.skills) == (True, False, ())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("type: a2a", "has no `url`"),
        (f"{URL}, skills: []", "has 0 entries"),
        (f"{URL}, card: abc", "`abc` is no hash of a card"),
        (f"{URL}, repeat: perhaps", "write `true` or `false`"),
        (f"{URL}, tools: {{}}", "unknown key `tools`"),
    ],
)
def test_what_is_wrong_is_said(text: str, wrong: str) -> None:
    with pytest.raises(ManifestError, match=wrong):
        parse_kernel_file(KERNEL % text, "f")


def test_rules_name_agents_and_lint_knows_them() -> None:
    manifest = parse_manifest(AGENT % 'a2a.send: oracle, a2a.get: {peers: [attic]}, a2a.*: "*"', "m")
    assert [rule.patterns for rule in manifest.rules.allow] == [("oracle",), ("attic",), ("*",)]
    file = parse_kernel_file(KERNEL % URL, "f")
    said = [one.message for one in lint_manifest(manifest, file)]
    assert any("declares no A2A agent `attic`" in one for one in said)
    assert any("every declared agent elsewhere" in one for one in said)


def interface(url: str, binding: str = "JSONRPC", version: str = "1.0") -> dict[str, str]:
    return {"url": url, "protocolBinding": binding, "protocolVersion": version}


@pytest.mark.parametrize(
    "one",
    [
        interface("https://evil.example/oracle"),
        interface("http://a.example/oracle"),
        interface("https://a.example:8443/oracle"),
        interface("https://a.example@evil.example/"),
        interface("https://somebody:else@a.example/oracle"),
        interface("https://a.example/oracle", "GRPC"),
        interface("https://a.example/oracle", version="0.3"),
        interface("http://[::"),
    ],
)
async def test_no_card_leads_the_credential_elsewhere(one: dict[str, str]) -> None:
    resource = A2aResource(name="oracle", base="https://a.example/oracle", headers={"authorization": "x"})
    card: dict[str, Any] = {"name": "o", "supportedInterfaces": [one], "skills": [{"id": "lookup"}]}

    async def never() -> None:
        raise AssertionError

    with pytest.raises(Lost, match=r"names no interface of A2A 1\.0 at https://a\.example:443"):
        async with a2a_client.reach(resource, json.dumps(card).encode(), Sent(), never):
            pass
    assert a2a_client.skills_of(json.dumps(card).encode()) == ["lookup"]


DEEP = b"[" * 100_000 + b"]" * 100_000


async def test_what_is_nested_too_deep_is_no_card_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = A2aResource(name="oracle", base="https://a.example/oracle", headers={})
    card = {"name": "o", "supportedInterfaces": [interface("https://a.example/oracle")]}
    shown = b'{"name": "o", "supportedInterfaces": ' + b"[" * 600 + b"]" * 600 + b"}"

    async def nobody(*_: object) -> list[str]:
        return []

    async def told(_: object, request: httpx.Request, __: object) -> httpx.Response:
        said = shown if request.method == "GET" else b'{"jsonrpc": "2.0", "id": 1, "result": ' + DEEP + b"}"
        headers = {"content-type": "application/json"}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(said), request=request)

    monkeypatch.setattr(a2a_client, "reachable", nobody)
    monkeypatch.setattr(a2a_client, "deliver", told)
    with pytest.raises(Lost, match="shows a card that is none"):
        await a2a_client.fetch_card(resource, Sent())
    shown = DEEP
    with pytest.raises(Lost, match="shows a card that is no JSON"):
        await a2a_client.fetch_card(resource, Sent())
    async with a2a_client.reach(resource, json.dumps(card).encode(), Sent(), _nothing) as exchange:
        with pytest.raises(Lost, match="answered 200 with what is no answer of A2A"):
            await exchange.send({"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hi"}]})


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ({"id": 1}, "answered another request"),
        ({"id": "other"}, "answered another request"),
        ({"id": None}, "answered another request"),
        ({"id": [""]}, "answered another request"),
        ({}, "answered another request"),
        ({"id": "other", "error": {"code": 1, "message": "no"}}, "answered another request"),
        ({"id": None, "error": {"code": 1, "message": "no"}}, "no"),
        ({"id": "ours", "result": {"task": {"id": "a\x1b[2J"}}}, "by what is no id"),
        ({"id": "ours", "result": {"task": {"id": "a\0"}}}, "by what is no id"),
        ({"id": "ours", "result": {"task": {"id": ""}}}, "by what is no id"),
        ({"id": "ours", "result": {"task": {"id": "a" * 513}}}, "by what is no id"),
        ({"id": "ours", "result": {"task": {"id": "a", "contextId": "\u202e"}}}, "by what is no id"),
        ({"id": "ours", "result": {"message": {"messageId": "m", "contextId": "\r"}}}, "by what is no id"),
        ({"id": "ours", "result": {"task": {"id": "a"}}}, ""),
    ],
)
async def test_an_answer_is_of_the_request_and_names_its_task(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], wrong: str
) -> None:
    async def nobody(*_: object) -> list[str]:
        return []

    async def told(_: object, request: httpx.Request, __: object) -> httpx.Response:
        said = {"jsonrpc": "2.0", "result": {"task": {"id": "t"}}, **answer}
        if "error" in said:
            del said["result"]
        if said.get("id") == "ours":
            said["id"] = json.loads(request.content)["id"]
        headers = {"content-type": "application/json"}
        stream = httpx.ByteStream(json.dumps(said).encode())
        return httpx.Response(200, headers=headers, stream=stream, request=request)

    monkeypatch.setattr(a2a_client, "reachable", nobody)
    monkeypatch.setattr(a2a_client, "deliver", told)
    resource = A2aResource(name="oracle", base="https://a.example/oracle", headers={})
    card = {"name": "o", "supportedInterfaces": [interface("https://a.example/oracle")]}
    async with a2a_client.reach(resource, json.dumps(card).encode(), Sent(), _nothing) as exchange:
        asked = exchange.send({"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hi"}]})
        if wrong:
            with pytest.raises((Lost, Refused), match=wrong):
                await asked
        else:
            assert (await asked)["task"] == "a"


def test_words_of_others_say_nothing_to_a_terminal() -> None:
    assert shown("a\x1b[2J\n b\0\u202ec\ud800") == "a\ufffd[2J b\ufffd\ufffdc\ufffd"
    assert len(shown("x" * 70_000)) == 300


def test_an_error_of_the_door_repeats_no_long_text() -> None:
    long = "x" * 70_000
    error = {"code": -32602, "message": long, "data": [{"parseError": long, long: 1}] * 40}
    answer = json.loads(bounded(json.dumps({"jsonrpc": "2.0", "id": 1, "error": error}).encode()))
    assert (answer["id"], answer["error"]["code"], len(answer["error"]["data"])) == (1, -32602, 16)
    assert answer["error"]["message"] == "x" * 300 + "…"
    assert len(json.dumps(answer)) < 20_000
    # Results are as long as they are.
    for body in ({"result": {"error": long}}, {"error": "short"}, [long, "error"]):
        raw = json.dumps(body).encode()
        assert bounded(raw) == raw


async def test_a_wait_ends_when_it_was_said_to_whoever_goes_on_with_it() -> None:
    arguments = a2a_get.Arguments(peer="oracle", task="t", wait_ms=60_000)
    kept: list[bytes] = []

    async def record(progress: bytes) -> None:
        kept.append(progress)

    def call(progress: bytes | None) -> Any:
        return SimpleNamespace(progress=progress, record=record)

    until_us = await a2a_get.until_us(call(None), arguments)
    assert await a2a_get.until_us(call(kept[0]), arguments) == until_us
    past = b'{"until_us":5}'
    assert (await a2a_get.until_us(call(past), arguments), len(kept)) == (5, 1)
    # A clock that was put back makes it no longer than it was to be.
    far = json.dumps({"until_us": until_us * 2}).encode()
    assert await a2a_get.until_us(call(far), arguments) < until_us + 3_600_000_000


async def _nothing() -> None:
    """Looks at nothing."""


DOOR = 'apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  a2a: {listen: "127.0.0.1:1", clients: {a: {key: {secret: k}, agents: [b]}}, push: [%s]}\n'


def test_clients_are_told_at_hosts_that_the_operator_names_alone() -> None:
    file = parse_kernel_file(DOOR % '"https://hooks.example.com/tasks/**", "http://10.0.0.7:8080/x"', "f")
    assert file.a2a is not None
    for url, may in (
        ("https://hooks.example.com/tasks/7", True),
        ("https://HOOKS.example.com/tasks/a/b?c=d", True),
        ("http://10.0.0.7:8080/x", True),
        ("https://hooks.example.com/tasks/../admin", False),
        ("https://hooks.example.com:444/tasks/7", False),
        ("http://hooks.example.com/tasks/7", False),
        ("https://hooks.example.com@evil.example/tasks/7", False),
        ("https://evil.example/tasks/7", False),
        ("http://10.0.0.7/x", False),
        ("file:///etc/passwd", False),
        ("", False),
    ):
        assert may_push(file.a2a, url) is may, url
    for wide in ('"https://**/x"', '"https://*.example.com/x"', '"http://127.0.0.1:*/x"'):
        with pytest.raises(ManifestError, match="leaves the host open"):
            parse_kernel_file(DOOR % wide, "f")
