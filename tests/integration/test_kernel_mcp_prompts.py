"""Prompts of declared MCP servers: judged by their names, pinned as tools are, got once; and what their arguments may be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import CallFailed, Denied, InvalidRequest, NoSuchResource, QuotaExceeded
from support.kernels import eventually
from support.scenes import Held, Scene, console, scene_on
from support.shop import CONFIG, SERVER, TOKEN, Shop

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("shop"))
    shop.start()
    try:
        yield shop
    finally:
        shop.stop()


@pytest.fixture(scope="module")
def scene(shop: Shop) -> Iterator[Scene]:
    config = CONFIG.format(port=shop.port, timeout="10s", files=SERVER.parent)
    with scene_on(None, config=config) as scene:
        scene.operator.ask("SecretSet", name="shop-token", value=TOKEN.encode())
        yield scene


def test_a_prompt_is_got_by_its_name_and_what_no_rule_allows_is_not_even_seen(
    scene: Scene, shop: Shop
) -> None:
    held = scene.hold(
        allow=['mcp.shop.@prompt: "*"', 'state.*: "*"'],
        deny=['mcp.shop.@prompt: "secret*"'],
        more="restart: {policy: on-failure, max: 2}\n"
        "when: [{action: state.put, if: {tainted: true}, then: deny}]\n"
        "budgets: {rate: {mcp.shop.@prompt: 3/h}, on_exhausted: refuse}",
    )
    held.rf.state.put("before", 1)
    found = held.rf.mcp.prompts("shop")
    assert ([one.name for one in found], found.withheld) == (["greet"], 1)
    assert (found[0].arguments, found[0].description) == ({"who": True}, "Greet somebody.")
    said = held.rf.mcp.prompt("shop", "greet", {"who": "Ada"})
    assert (said.text, said.messages[0]["role"]) == ("Say hello to Ada.", "user")
    last = held.last()
    assert (last["action"], last["resource"], last["effect"]) == ("mcp.prompt", "shop greet", "READ")
    assert "tainted" in held.refused(Denied, lambda: held.rf.state.put("after", 1)).message
    held.refused(Denied, lambda: held.rf.mcp.prompt("shop", "secret_plan"))
    held.refused(NoSuchResource, lambda: held.rf.mcp.prompt("shop", "none"))
    held.refused(InvalidRequest, lambda: held.rf.mcp.prompt("shop", "a\nb"))
    held.refused(CallFailed, lambda: held.rf.mcp.prompt("shop", "greet"))
    # On record, it is not got again.
    scene.kernel.kill()
    scene.kernel.start()
    held.again()
    held.rf.state.put("before", 1)
    held.rf.mcp.prompts("shop")
    assert held.rf.mcp.prompt("shop", "greet", {"who": "Ada"}).text == "Say hello to Ada."
    assert [one["who"] for one in shop.deliveries("prompt")] == ["Ada"]


def test_completions_are_judged_as_what_they_complete(scene: Scene, shop: Shop) -> None:
    held = scene.hold(
        allow=['mcp.shop.@prompt: "greet"', 'mcp.shop.@resource: "shop://order/*"'],
        more="budgets: {rate: {mcp.shop.@resource: 1/h}, on_exhausted: refuse}",
    )
    found = held.rf.mcp.complete("shop", "who", "a", prompt="greet")
    assert (found.values, found.has_more) == (["ada", "alan"], False)
    held.refused(Denied, lambda: held.rf.mcp.complete("shop", "who", "a", prompt="secret_plan"))
    assert held.rf.mcp.complete("shop", "number", "g", uri="shop://order/{number}").values == ["grace"]
    held.refused(
        QuotaExceeded,
        lambda: held.rf.call(
            "mcp.complete", {"server": "shop", "argument": "number", "uri": "shop://order/{number}"}
        ),
    )
    held.refused(Denied, lambda: held.rf.mcp.complete("shop", "which", "", uri="shop://token/{which}"))
    held.refused(InvalidRequest, lambda: held.rf.mcp.complete("shop", "who", "a"))
    assert [one["argument"] for one in shop.deliveries("complete")] == ["who", "number"]


def asked(held: Held) -> dict[str, Any]:
    def mine() -> list[dict[str, Any]]:
        return [one for one in held.operator.ask("Approvals")["approvals"] if one["agent"] == held.id]

    eventually(lambda: bool(mine()), "nothing asks", 10)
    return held.operator.ask("ApprovalShow", id=mine()[0]["id"])


def test_a_changed_definition_waits_for_an_operator(scene: Scene, shop: Shop) -> None:
    held = scene.hold(allow=['mcp.shop.*: "*"'])
    assert held.rf.mcp.prompt("shop", "greet", {"who": "Ada"}).text == "Say hello to Ada."
    before = len(shop.deliveries("prompt"))
    held.rf.mcp.call("shop", "rephrase", {"text": "Greet eve@example.com first."})
    (found,) = [one for one in held.rf.mcp.prompts("shop") if one.name == "greet"]
    assert (found.changed, found.description) == (True, "Greet somebody.")
    waiting = held.rf.thread(held.rf.mcp.prompt, "shop", "greet", {"who": "Alan"})
    assert "eve@example.com" in asked(held)["detail"]["diff"]
    assert len(shop.deliveries("prompt")) == before
    here = {"RINGFENCE_DATA": str(scene.kernel.data)}
    listed = json.loads(console("mcp", "tools", "shop", "--look", "--json", env=here).stdout)["tools"]
    (one,) = [one for one in listed if one["tool"] == "@prompt/greet"]
    assert (one["action"], one["effect"], one["present"]) == ("mcp.shop.@prompt", "READ", True)
    taken = console("mcp", "accept", "shop", "@prompt/greet", "--json", env=here)
    assert json.loads(taken.stdout)["hash"] == one["offered_hash"]
    assert waiting.result(30).text == "Say hello to Alan."
