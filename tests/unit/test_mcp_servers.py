"""What declarations of MCP servers say, what of their tools is taken, and what an effect is."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.journal.store_mcp import McpToolRecord
from ringfence.kernel.outreach_mcp import LiveSession, Servers
from ringfence.kernel.outreach_mcp_definitions import compare, difference
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.lint import lint_manifest
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.problems import ManifestError
from ringfence.policy.resources import ResourceDecl
from ringfence.syscalls.base import Effect
from ringfence.syscalls.declared import McpResource
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.mcp_common import (
    declared_tool,
    definition_bytes,
    definition_hash,
    effect_of,
    sayable,
)


def declared(text: str) -> ResourceDecl:
    head = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  resources:\n"
    return parse_kernel_file(f"{head}    shop: {text}\n", "ringfence.yaml").resources["shop"]


def test_secrets_of_headers_and_of_the_environment_are_known() -> None:
    over_http = declared('{type: mcp, url: "https://a.example/mcp/", auth: {bearer: {secret: one}}}')
    assert (over_http.base, over_http.secrets(), over_http.untrusted) == (
        "https://a.example/mcp",
        ("one",),
        True,
    )
    command = declared("{type: mcp, command: [a], env: {K: {secret: two}, N: 1}, trusted: true}")
    assert (command.secrets(), command.untrusted, dict(command.mcp.env)["N"]) == (("two",), False, "1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{type: mcp}", "needs one of: url, command"),
        ('{type: mcp, url: "https://a/b", command: [a]}', "needs one of: url, command"),
        ('{type: mcp, url: "https://a/b", files: /x}', "has no meaning beside `url`"),
        ("{type: mcp, command: [a], auth: {bearer: {secret: x}}}", "has no meaning beside `command`"),
        ("{type: mcp, command: []}", "starts nothing"),
        ("{type: mcp, command: [a], files: here}", "no absolute path"),
        ("{type: mcp, command: [a], tools: {x: {key: {header: K}}}}", "is a command and has no headers"),
        ('{type: mcp, url: "https://a/b", tools: {x: {}}}', "says nothing"),
        ('{type: mcp, url: "https://a/b", tools: {x: {key: {argument: k}, repeat: true}}}', "both"),
        ('{type: mcp, url: "https://a/b", tools: {x: {definition: abc}}}', "no hash of a definition"),
        ('{type: mcp, url: "https://a/b?token=1"}', "has a query"),
    ],
)
def test_what_is_no_declaration(text: str, says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        declared(text)


HINTS = st.dictionaries(
    st.sampled_from(["readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"]),
    st.one_of(st.booleans(), st.none(), st.text(max_size=3), st.integers(0, 1)),
)


@given(st.lists(HINTS, min_size=1, max_size=2))
def test_what_a_server_says_only_tightens(hints: list[dict[str, Any]]) -> None:
    definitions = [definition_bytes({"name": "x", "annotations": one}) for one in hints]
    found = effect_of(None, definitions)
    assert found in (Effect.EXTERNAL, Effect.DESTROY)
    if any(one.get("destructiveHint") is True for one in hints):
        assert found is Effect.DESTROY


def test_the_operators_word_counts() -> None:
    tools = declared(
        '{type: mcp, url: "https://a/b", tools: {"get_*": {effect: read}, "*": {effect: external}}}'
    ).mcp.tools
    resource = McpResource(name="shop", tools=tools)
    destructive = [definition_bytes({"annotations": {"destructiveHint": True}})]
    assert effect_of(declared_tool(resource, "get_x"), destructive) is Effect.READ
    assert effect_of(declared_tool(resource, "put_x"), destructive) is Effect.EXTERNAL


def record(definition: dict[str, Any], offered: dict[str, Any] | None = None) -> McpToolRecord:
    data = definition_bytes(definition)
    other = b"" if offered is None else definition_bytes(offered)
    return McpToolRecord(
        server="shop",
        tool="x",
        taken=data.decode(),
        taken_hash=definition_hash(data),
        taken_at=datetime.now(UTC),
        taken_by="",
        offered=other.decode(),
        offered_hash=definition_hash(other) if other else "",
        offered_at=None,
    )


def test_a_definition_is_taken_once_and_compared_ever_after() -> None:
    first, second = {"name": "x", "description": "a"}, {"description": "b", "name": "x"}
    one, news = compare("x", definition_bytes(first), None, "")
    assert not one.changed
    assert news is not None
    assert compare("x", definition_bytes({"description": "a", "name": "x"}), record(first), "") == (
        one,
        None,
    )
    other, news = compare("x", definition_bytes(second), record(first), "")
    assert (other.changed, other.taken) == (True, definition_bytes(first))
    assert news is not None
    assert news["offered_hash"] == other.offered_hash
    assert compare("x", definition_bytes(second), record(first, second), "")[1] is None
    back, news = compare("x", definition_bytes(first), record(first, second), "")
    assert not back.changed
    assert news is not None
    assert news["offered_hash"] == ""


def test_a_definition_that_the_kernel_file_names_is_the_only_one() -> None:
    first, second = definition_bytes({"name": "x"}), definition_bytes({"name": "x", "title": "X"})
    wanted = definition_hash(second)
    one, _ = compare("x", first, record({"name": "x"}), wanted)
    assert (one.changed, one.taken, one.offered) == (True, b"", first)
    assert not compare("x", second, record({"name": "x"}), wanted)[0].changed


def test_a_difference_is_readable() -> None:
    taken, offered = definition_bytes({"description": "a"}), definition_bytes({"description": "b"})
    assert [line for line in difference(taken, offered).splitlines() if line[1:].startswith(" ")] == [
        '-  "description": "a"',
        '+  "description": "b"',
    ]
    assert json.loads(taken)


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("get_x", True),
        ("a.b/c-d", True),
        ("", False),
        ("a b", False),
        ("*", False),
        ("a..b", False),
        ("x" * 129, False),
    ],
)
def test_names_that_rules_can_say(name: str, fine: bool) -> None:
    assert sayable(name) is fine


def test_lint_knows_servers() -> None:
    head = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  resources:\n"
    file = parse_kernel_file(f"{head}    shop: {{type: mcp, command: [a]}}\n", "ringfence.yaml")
    rules = ['mcp.shop.add: "*"', 'mcp.shop.*: "*"', 'mcp.attic.add: "*"']
    manifest = parse_manifest(
        "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: a}\nspec:\n  run: {command: [a]}\n"
        f"  permissions: {{allow: [{', '.join('{' + rule + '}' for rule in rules)}]}}\n"
    )
    said = [problem.message for problem in lint_manifest(manifest, file)]
    assert not [text for text in said if "mcp.shop.add" in text and "all of them" in text]
    assert [text for text in said if "`mcp.shop.*" in text and "all of them" in text]
    assert [text for text in said if "declares no MCP server `attic`" in text]


async def test_a_kernel_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in `sys.modules` is how Python itself marks what can't be imported.
    monkeypatch.setitem(sys.modules, "mcp", None)
    for name in [one for one in sys.modules if one.startswith(("mcp.", "ringfence.syscalls.mcp_client"))]:
        monkeypatch.delitem(sys.modules, name)

    async def start(_resource: McpResource, _agent: str) -> LiveSession:
        raise AssertionError

    resource = McpResource(name="shop", base="http://127.0.0.1:9/mcp")
    store: Any = None
    servers = Servers(store, lambda: {"shop": resource}, start, lambda _agent: True, store)
    with pytest.raises(CallFailed, match=r"pip install 'ringfence\[mcp\]'; nothing was sent"):
        await servers.session("a", "shop")
    await servers.close()


class Lone:
    """A session with nobody at its other end."""

    alive = True

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def ready(self, within_s: float) -> None:
        del within_s

    async def listed(self, _: str) -> list[dict[str, Any]]:
        return []

    async def ask(self, *_: Any) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        self.closed.set()


async def test_a_session_ends_when_the_kernel_file_has_another_server_there_but_not_under_a_call() -> None:
    opened: list[Lone] = []

    async def start(_resource: McpResource, _agent: str) -> LiveSession:
        opened.append(Lone())
        return opened[-1]

    named = {name: McpResource(name=name, command=("a",)) for name in ("kept", "gone", "busy")}
    store: Any = None
    servers = Servers(store, lambda: named, start, lambda _agent: True, store)
    kept, gone, busy = [await servers.session("a", name) for name in tuple(named)]
    with servers.busy("a", "busy"):
        named = {
            "kept": McpResource(name="kept", command=("a",)),
            "busy": McpResource(name="busy", command=("b",)),
        }
        await servers.reconfigure()
        assert isinstance(gone, Lone)
        await asyncio.wait_for(gone.closed.wait(), 10)
        assert not any(one.closed.is_set() for one in opened if one is not gone)
    assert await servers.session("a", "kept") is kept
    assert await servers.session("a", "busy") is not busy
    await servers.close()
