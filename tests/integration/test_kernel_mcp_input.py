"""Servers that ask for something before they answer: what they ask is a result, the answers go with a call of their own, each once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ringfence.agent import CallFailed, Denied, InvalidRequest
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


def test_a_call_whose_server_asks_is_made_again_with_the_answers(scene: Scene, shop: Shop) -> None:
    held = scene.hold(allow=['mcp.shop.confirm: "*"'], more="restart: {policy: on-failure, max: 2}")
    asks = held.rf.mcp.call("shop", "confirm", {"item": "vase"}, can=["elicitation"])
    assert (list(asks.requests), bool(asks.state), asks.content) == (["sure"], True, [])
    assert asks.requests["sure"]["params"]["message"] == "Sell the vase?"
    assert held.last()["outcome"] == "ok"
    said = {"sure": {"action": "accept", "content": {"sure": True}}}

    def answer() -> str:
        done = held.rf.mcp.call(
            "shop", "confirm", {"item": "vase"}, can=["elicitation"], responses=said, state=asks.state
        )
        assert not done.requests
        return done.text

    assert answer() == "vase: accept"
    assert [one["said"] is None for one in shop.deliveries("confirm")] == [True, False]
    # Each round is on record: nothing of it is sent again.
    scene.kernel.kill()
    scene.kernel.start()
    held.again()
    assert held.rf.mcp.call("shop", "confirm", {"item": "vase"}, can=["elicitation"]).state == asks.state
    assert answer() == "vase: accept"
    assert len(shop.deliveries("confirm")) == 2
    # Each round is decided: a right that is gone answers nothing.
    held.operator.ask("Revoke", agent=held.id, rule_or_grant='mcp.shop.confirm: "*"')
    held.refused(Denied, answer)
    assert len(shop.deliveries("confirm")) == 2


def test_what_its_caller_can_not_answer_is_no_result(scene: Scene, shop: Shop) -> None:
    held = scene.hold(allow=['mcp.shop.*: "*"'])
    failed = held.refused(CallFailed, lambda: held.rf.mcp.call("shop", "confirm", {"item": "lamp"}))
    assert "`elicitation/create`, which its caller can't answer" in failed.message
    failed = held.refused(CallFailed, lambda: held.rf.mcp.call("shop", "lure", can=["elicitation"]))
    assert ("open a page" in failed.message, failed.metadata["sent"]) == (True, "yes")
    assert "evil" not in failed.message
    held.refused(InvalidRequest, lambda: held.rf.mcp.call("shop", "confirm", {"item": "a"}, can=["money"]))
    wrong = {"server": "shop", "tool": "confirm", "responses": [1]}
    held.refused(InvalidRequest, lambda: held.rf.call("mcp.call", wrong))
