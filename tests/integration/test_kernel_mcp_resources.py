"""Resources of declared MCP servers: judged by their URIs, read once, and without the operator's credential in what comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ringfence.agent import CallFailed, Denied, InvalidRequest, QuotaExceeded
from support.scenes import Scene, scene_on
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


def test_a_resource_is_read_by_its_uri_and_what_no_rule_allows_is_not_even_seen(
    scene: Scene, shop: Shop
) -> None:
    held = scene.hold(
        allow=['mcp.shop.@resource: "shop://*"', 'state.*: "*"'],
        deny=['mcp.shop.@resource: "shop://safe/*"'],
        more="when: [{action: state.put, if: {tainted: true}, then: deny}]\n"
        "budgets: {rate: {mcp.shop.@resource: 5/h}, on_exhausted: refuse}",
    )
    held.rf.state.put("before", 1)
    found = held.rf.mcp.resources("shop")
    listed = [one.uri for one in found.resources]
    assert listed == ["shop://shelf/lamp", "shop://shelf/long", "shop://shelf/picture"]
    assert ({one.uri for one in found.templates}, found.withheld) == (
        {"shop://order/{number}", "shop://token/{which}"},
        1,
    )
    assert held.rf.mcp.read("shop", "shop://shelf/lamp").text == "a lamp"
    last = held.last()
    assert (last["action"], last["resource"], last["effect"], last["verdict"]) == (
        "mcp.read",
        "shop shop://shelf/lamp",
        "READ",
        "allow",
    )
    assert "tainted" in held.refused(Denied, lambda: held.rf.state.put("after", 1)).message
    (picture,) = held.rf.mcp.read("shop", "shop://shelf/picture").parts
    assert (picture.data, picture.text, picture.mime_type) == (b"\x89PNG", None, "image/png")
    assert held.rf.mcp.read("shop", "shop://order/7").text == "order 7"
    assert TOKEN not in held.rf.mcp.read("shop", "shop://token/x").text
    gone = held.refused(CallFailed, lambda: held.rf.mcp.read("shop", "shop://shelf/none"))
    assert gone.metadata["sent"] == "yes"
    denied = held.refused(Denied, lambda: held.rf.mcp.read("shop", "shop://safe/gold"))
    assert "mcp.shop.@resource" in denied.message
    for other in (
        "shop://shelf/../safe/gold",
        "shop://%73afe/gold",
        "SHOP://safe/gold",
        "shop://safe%2Fgold",
    ):
        held.refused(InvalidRequest, lambda uri=other: held.rf.mcp.read("shop", uri))
    held.refused(QuotaExceeded, lambda: held.rf.call("mcp.read", {"server": "shop", "uri": "shop://order/8"}))
    assert [one["uri"] for one in shop.deliveries("read")] == [
        "shop://shelf/lamp",
        "shop://shelf/picture",
        "shop://order/7",
    ]
    taught = held.operator.ask("PolicyLearn", agent=held.id)
    assert [rule for rule in taught["allow"] if rule.startswith("mcp.shop.@resource: ") and "order/7" in rule]
    asked = held.operator.ask(
        "PolicyCanI", agent=held.id, action="mcp.shop.@resource", resource="shop://safe/x"
    )
    assert asked["verdict"] == "deny"
    # A tool is none of this: no rule speaks for one.
    held.refused(Denied, lambda: held.rf.mcp.call("shop", "add", {"a": 1, "b": 1}))


def test_a_read_that_is_on_record_is_not_made_again(scene: Scene, shop: Shop) -> None:
    held = scene.hold(allow=['mcp.shop.*: "*"'], more="restart: {policy: on-failure, max: 2}")
    before = len(shop.deliveries("read"))
    assert held.rf.mcp.read("shop", "shop://order/9").text == "order 9"
    scene.kernel.kill()
    scene.kernel.start()
    held.again()
    assert held.rf.mcp.read("shop", "shop://order/9").text == "order 9"
    assert len(shop.deliveries("read")) == before + 1
    assert held.rf.mcp.read("shop", "shop://order/9").text == "order 9"
    assert len(shop.deliveries("read")) == before + 2
