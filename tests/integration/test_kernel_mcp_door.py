"""Tools for programs nobody rewrote: the official MCP client in a real sandbox, over `rf-mcp`, to a real kernel."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.scenes import Scene, manifest_of, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

SHOP = Path(__file__).parents[1] / "support" / "tool_server.py"
COMMAND = str(Path(sys.executable).with_name("rf-mcp"))
INITIALIZE = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}
CLIENT = Path(__file__).with_name("mcp_door_client.py").read_text()
WRITE = 'fs.write: "/workspace/out/**"'
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources: {{shop: {{type: mcp, url: "http://127.0.0.1:{port}/mcp"}}}}
"""
RULES: dict[str, Any] = {
    "allow": ['fs.read: "/workspace/**"', WRITE],
    "ask": ['fs.write: "/workspace/asked/**"'],
    "deny": ['fs.*: "**/.env"'],
}
FILES = {"client.py": CLIENT, "a.txt": "hello\n", ".env": "KEY=1\n", "long.txt": "0123456789" * 9000}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where a server listens that the operator has declared."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    argv = [sys.executable, str(SHOP), "http", str(tmp_path_factory.mktemp("shop")), str(port)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield port
        process.kill()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, port: int) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database, config=CONFIG.format(port=port)) as scene:
        yield scene


def start(scene: Scene, *words: str) -> str:
    more = "sandbox: {doors: [mcp]}" if "http" in words else ""
    text = manifest_of(scene.name("client"), ["python", "client.py", *words], more=more, **RULES)
    return scene.operator.submit(text, FILES)


def said(scene: Scene, agent: str, what: str, nth: int = 0) -> Any:
    """What the client said, as soon as it did."""
    found: list[Any] = []

    def there() -> bool:
        # The last line may not be all there yet.
        whole = scene.output(agent).rpartition("\n")[0].splitlines()
        found[:] = [line[what] for line in map(json.loads, whole) if what in line]
        return len(found) > nth

    eventually(there, f"the client never said {what}: {scene.output(agent, stderr=True)[-2000:]}")
    return found[nth]


def waiting(scene: Scene, agent: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = [item for item in scene.operator.ask("Approvals")["approvals"] if item["agent"] == agent]
        return len(found) == 1

    eventually(there, "its approval is not there")
    return found[0]


@pytest.mark.parametrize("way", ["stdio", "http"])
@pytest.mark.parametrize(("mode", "version"), [("legacy", "2025-11-25"), ("auto", "2026-07-28")])
def test_a_client_nobody_rewrote_uses_the_kernels_calls_as_tools(
    scene: Scene, mode: str, version: str, way: str
) -> None:
    agent = start(scene, "walk", mode, way)
    tools = said(scene, agent, "tools")
    assert {"fs_read", "fs_list", "fs_write", "fs_append", "now"} <= set(tools)
    assert not {"http_get", "exec_run", "state_put", "checkpoint_save"} & set(tools)
    assert tools["fs_read"]["annotations"]["readOnlyHint"] is True
    assert tools["fs_write"]["annotations"]["destructiveHint"] is True
    assert said(scene, agent, "version") == version
    read = said(scene, agent, "read")
    assert read["structuredContent"]["data_text"] == "hello\n"
    assert json.loads(read["content"][0]["text"]) == read["structuredContent"]
    assert said(scene, agent, "written")["isError"] is False
    assert (scene.live(agent) / "out/b.txt").read_text() == "é\n"
    denied = said(scene, agent, "denied")
    assert denied["isError"] is True
    assert denied["content"][0]["text"].startswith("Denied: denied by rule ")
    assert "its fields: `path`, `offset`, `limit`" in said(scene, agent, "wrong")["content"][0]["text"]
    rest = said(scene, agent, "rest")
    head = said(scene, agent, "long")["content"][1]["text"]
    assert json.loads(head + "".join(rest))["data_text"] == FILES["long.txt"]
    parked = said(scene, agent, "parked")
    approval = waiting(scene, agent)
    assert parked["isError"] is True
    assert f"waits for approval {approval['id']} (step {approval['step']})" in parked["content"][0]["text"]
    scene.operator.ask("Approve", id=approval["id"])
    approved = said(scene, agent, "approved")
    # The very call that was parked, made once.
    assert (approved["isError"], approved["_meta"]["ringfence/step"]) == (False, approval["step"])
    assert (scene.live(agent) / "asked/c.txt").read_text() == "once\n"
    scene.operator.ask("Grant", agent=agent, rule='state.*: "shared/**"')
    assert said(scene, agent, "changed") == ("notified" if mode == "legacy" else "subscribed")
    assert "state_put" in said(scene, agent, "names")
    for grant in scene.show(agent)["grants"]:
        if grant["rule"] == WRITE or "asked" in grant["rule"]:
            scene.operator.ask("Revoke", agent=agent, rule_or_grant=grant["id"])
    assert said(scene, agent, "changed", 1)
    names = said(scene, agent, "names", 1)
    assert ("state_put" in names, "fs_write" in names) == (True, False)
    assert said(scene, agent, "revoked")["isError"] is True
    scene.await_end(agent)
    assert (scene.live(agent) / "out/b.txt").read_text() == "é\n"
    # Every call is a step like any other.
    steps = [(step["action"], step["outcome"]) for step in scene.operator.steps(agent)]
    assert steps[:3] == [("fs.read", "ok"), ("fs.write", "ok"), ("fs.read", "denied")]
    assert [action for action, _ in steps].count("fs.append") == 1


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_an_elicitation_asks_whether_to_wait_and_never_decides(scene: Scene, mode: str) -> None:
    agent = start(scene, "elicit", mode, "accept")
    question = said(scene, agent, "question")
    approval = waiting(scene, agent)
    assert f"approval {approval['id']}" in question
    assert "can't be made here" in question
    # The user has accepted, and nothing was done: only the operator decides.
    assert not (scene.live(agent) / "asked").exists()
    scene.operator.ask("Approve", id=approval["id"])
    assert said(scene, agent, "result")["isError"] is False
    assert (scene.live(agent) / "asked/d.txt").read_text() == f"{mode} accept"


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_a_user_who_does_not_wait_gets_the_parked_result(scene: Scene, mode: str) -> None:
    agent = start(scene, "elicit", mode, "decline")
    result = said(scene, agent, "result")
    assert result["_meta"]["ringfence/reason"] == "Parked"
    assert not (scene.live(agent) / "asked").exists()


def test_tools_of_declared_servers_are_tools_by_themselves(scene: Scene, port: int) -> None:
    def open_for_business() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    eventually(open_for_business, "the shop never opened")
    rules = {"allow": ['mcp.shop.add: "*"', 'mcp.shop.wipe: "*"']}
    text = manifest_of(scene.name("client"), ["python", "client.py", "lent", "auto"], **rules)
    agent = scene.operator.submit(text, FILES)
    tools = said(scene, agent, "tools")
    assert {name for name in tools if name.startswith("mcp_")} == {"mcp_shop_add", "mcp_shop_wipe"}
    assert tools["mcp_shop_add"]["inputSchema"]["required"] == ["a", "b"]
    assert tools["mcp_shop_wipe"]["annotations"]["destructiveHint"] is True
    added = said(scene, agent, "added")
    assert (added["structuredContent"], added["content"][0]["text"]) == ({"result": 42}, "42")
    # What destroys is asked, whatever rules say.
    assert said(scene, agent, "wiped")["_meta"]["ringfence/reason"] == "Parked"
    steps = [(step["action"], step["resource"]) for step in scene.operator.steps(agent)]
    assert steps[:2] == [("mcp.tools", "shop"), ("mcp.call", "shop.add")]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_resources_of_declared_servers_are_read_as_rules_say(scene: Scene, mode: str) -> None:
    uris = [
        "shop://shelf/lamp",
        "shop://shelf/picture",
        "shop://shelf/none",
        "shop://safe/gold",
        "shop://shelf/long",
    ]
    rules = {"allow": ['mcp.shop.add: "*"'], "deny": ['mcp.shop.@resource: "shop://safe/*"']}
    text = manifest_of(scene.name("client"), ["python", "client.py", "reads", mode, *uris], **rules)
    agent = scene.operator.submit(text, FILES)
    assert said(scene, agent, "before") == []
    if mode == "auto":
        said(scene, agent, "listens")
    scene.operator.ask("Grant", agent=agent, rule='mcp.shop.@resource: "shop://*"')
    resources = said(scene, agent, "resources")
    assert set(resources) == {"shop://shelf/lamp", "shop://shelf/long", "shop://shelf/picture"}
    assert resources["shop://shelf/lamp"]["_meta"]["ringfence/server"] == "shop"
    assert "shop://order/{number}" in said(scene, agent, "templates")
    (lamp,) = said(scene, agent, "shop://shelf/lamp")["contents"]
    assert (lamp["text"], lamp["mimeType"]) == ("a lamp", "text/plain")
    (picture,) = said(scene, agent, "shop://shelf/picture")["contents"]
    assert picture["blob"] == "iVBORw==" or picture["blob"].startswith("iVBO")
    missing = said(scene, agent, "shop://shelf/none")
    assert missing["code"] == (-32002 if mode == "legacy" else -32602)
    denied = said(scene, agent, "shop://safe/gold")
    assert (denied["code"], denied["message"].startswith("Denied: denied by rule ")) == (-32000, True)
    told, begins = said(scene, agent, "shop://shelf/long")["contents"]
    assert "Read on at resource `ringfence://result/" in told["text"]
    assert begins["text"].startswith('{"contents":')
    scene.await_end(agent)
    made = [(step["action"], step["outcome"]) for step in scene.operator.steps(agent)]
    assert made.count(("mcp.read", "ok")) == 3
    assert ("mcp.read", "denied") in made


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_prompts_of_declared_servers_are_got_as_rules_say(scene: Scene, mode: str) -> None:
    rules = {"allow": ['mcp.shop.@prompt: "*"'], "ask": ['mcp.shop.@prompt: "secret*"']}
    text = manifest_of(scene.name("client"), ["python", "client.py", "prompts", mode], **rules)
    agent = scene.operator.submit(text, FILES)
    listed = {one["name"]: one for one in said(scene, agent, "prompts")}
    assert set(listed) == {"mcp_shop_greet", "mcp_shop_secret_plan"}
    assert listed["mcp_shop_greet"]["arguments"] == [{"name": "who", "required": True}]
    (message,) = said(scene, agent, "got")["messages"]
    assert message == {"role": "user", "content": {"type": "text", "text": "Say hello to Ada."}}
    assert said(scene, agent, "completed") == ["grace"]
    parked = said(scene, agent, "mcp_shop_secret_plan")
    assert (parked["code"], parked["data"]["ringfence/reason"]) == (-32000, "Parked")
    assert "there is no prompt `greet`" in said(scene, agent, "greet")["message"]
    scene.operator.ask("Kill", agent=agent)


@pytest.mark.parametrize("way", ["stdio", "http"])
@pytest.mark.parametrize(("mode", "action"), [("legacy", "accept"), ("auto", "accept"), ("auto", "decline")])
def test_what_a_declared_server_asks_comes_to_the_clients_user_in_its_name(
    scene: Scene, mode: str, action: str, way: str
) -> None:
    more = "sandbox: {doors: [mcp]}" if way == "http" else ""
    words = ["python", "client.py", "sell", mode, action, way]
    text = manifest_of(scene.name("client"), words, allow=['mcp.shop.*: "*"'], more=more)
    agent = scene.operator.submit(text, FILES)
    assert said(scene, agent, "question") == "The MCP server `shop` asks: Sell the vase?"
    assert said(scene, agent, "sold")["content"][0]["text"] == f"vase: {action}"
    lured = said(scene, agent, "lured")
    assert (lured["isError"], "open a page" in lured["content"][0]["text"]) == (True, True)
    scene.await_end(agent)
    made = [(step["action"], step["outcome"]) for step in scene.operator.steps(agent)]
    assert made.count(("mcp.call", "ok")) == 2


def test_a_program_that_is_started_again_finds_its_answers(scene: Scene) -> None:
    text = manifest_of(
        scene.name("client"),
        ["python", "client.py", "once", "auto"],
        more="restart: {policy: on-failure}",
        **RULES,
    )
    agent = scene.operator.submit(text, FILES)
    first = said(scene, agent, "appended")
    scene.kill_program(agent)
    again = said(scene, agent, "appended", 1)
    assert again["_meta"]["ringfence/step"] == first["_meta"]["ringfence/step"]
    assert (scene.live(agent) / "out/log").read_text() == "x\n"
    scene.operator.ask("Kill", agent=agent)


def test_what_is_no_message_harms_nobody_and_a_token_is_needed(scene: Scene) -> None:
    held = scene.hold(allow=['fs.read: "/workspace/**"'])
    lines = [
        b"\xff\x00 no json",
        b"[" * 5000,
        b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}',
        b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": 7}',
        json.dumps({"jsonrpc": "2.0", "id": 2, "method": "initialize", "params": INITIALIZE}).encode(),
        b'{"jsonrpc": "2.0", "method": "notifications/initialized"}',
        b'{"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "no_such"}}',
        rb'{"jsonrpc": "2.0", "id": "five", "method": "tools/call", "params": {"name": "\ud83d"}}',
        b'{"jsonrpc": "2.0", "id": 4, "method": "ping"}',
    ]
    env = {**os.environ, "RINGFENCE_SOCKET": str(held.socket), "RINGFENCE_TOKEN": held.token}
    with subprocess.Popen([COMMAND], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bridge:
        assert bridge.stdin is not None
        assert bridge.stdout is not None
        bridge.stdin.write(b"\n".join(lines) + b"\n")
        bridge.stdin.flush()
        answers: dict[Any, Any] = {}
        while 4 not in answers:
            answer = json.loads(bridge.stdout.readline())
            answers[answer.get("id")] = answer
        bridge.stdin.close()
        assert bridge.wait(30) == 0
    # Before, nobody was told: a client waited for as long as it does.
    assert answers["five"]["error"]["code"] == -32700
    assert answers[None]["error"]["code"] == -32700
    assert answers[1]["error"]["code"] == -32602
    assert answers[2]["result"]["serverInfo"]["name"] == "ringfence"
    assert answers[3]["error"]["message"].startswith("there is no tool `no_such`")
    assert answers[4]["result"] == {}
    long = (
        b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"_meta": "' + b"x" * (9 << 20) + b'"}}\n'
    )
    refused = subprocess.run([COMMAND], env=env, input=long, capture_output=True, check=False)
    assert (refused.returncode, b"larger than max" in refused.stderr) == (1, True)
    env["RINGFENCE_TOKEN"] = "another"
    refused = subprocess.run([COMMAND], env=env, input=b"{}\n", capture_output=True, check=False)
    assert (refused.returncode, refused.stderr.startswith(b"rf-mcp: BadCredential: ")) == (1, True)
    # What went wrong there is told to the client, and the door serves on.
    assert held.rf.fs.list("/workspace") is not None
