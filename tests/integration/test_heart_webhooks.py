"""Receivers of webhooks that don't take what they are sent, and a database that is away when they are declared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ringfence.kernel import webhooks
from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.webhooks import Webhooks
from support.heart import URL, Heart, heart_on
from support.scenes import short_directory
from support.signed import genuine, new_key
from support.target import Target

pytestmark = pytest.mark.postgres

POST = 'http.post: "http://pay.test/**"'
CONFIG = """\
apiVersion: ringfence/v1
kind: Kernel
spec:
  webhooks:
    good: {{url: "{base}/good", key: {{secret: hook}}}}
    redirecting: {{url: "{base}/redirect", key: {{secret: hook}}}}
    failing: {{url: "{base}/fail", key: {{secret: hook}}}}
    dropping: {{url: "{base}/drop", key: {{secret: hook}}}}
    keyless: {{url: "{base}/keyless", key: {{secret: unset}}}}
    badkey: {{url: "{base}/badkey", key: {{secret: plain}}}}
    nowhere: {{url: "http://name.invalid/x", key: {{secret: hook}}}}
"""
KEY = new_key()


@pytest.fixture
async def told(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Heart, Webhooks, Target]]:
    monkeypatch.setattr(webhooks, "POLL_S", 0.01)
    with short_directory() as directory:
        target = Target(directory / "arrived")
        try:
            async with heart_on(dsn, directory, CONFIG.format(base=target.base)) as heart:
                heart.kernel.secrets.set("hook", KEY.encode())
                heart.kernel.secrets.set("plain", b"hunter2-hunter2")
                hooks = Webhooks(heart.kernel)
                try:
                    yield heart, hooks, target
                finally:
                    await hooks.close()
        finally:
            target.close()


async def until(true: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30):
        while not (found := await true()):
            await asyncio.sleep(0.01)
        return found


async def test_what_is_not_taken_says_why_and_waits(told: tuple[Heart, Webhooks, Target]) -> None:
    heart, hooks, target = told
    await hooks.open()
    heart.begin(await heart.agent(ask=[POST]), 0, url=URL)

    async def all_tried() -> dict[str, dict[str, Any]] | None:
        found = {one["name"]: one for one in await hooks.report()}
        done = all(one["delivered_at"] or one["error"] for one in found.values())
        return found if done and len(found) == 7 else None

    found = await until(all_tried)
    errors = {name: one["error"] for name, one in found.items()}
    assert errors.pop("good") is None
    assert "answered 302" in errors["redirecting"]
    assert "answered 500" in errors["failing"]
    assert "broke the connection" in errors["dropping"]
    assert "no secret `unset`" in errors["keyless"]
    assert "no signing key" in errors["badkey"]
    assert "hunter2" not in errors["badkey"]
    assert "is not known" in errors["nowhere"]
    assert {name: one["waiting"] for name, one in found.items() if one["waiting"] != 1} == {"good": 0}
    assert target.deliveries("/elsewhere") == []  # a redirect is no address that the operator declared
    (delivered,) = target.deliveries("/good")
    assert genuine(KEY, delivered)
    # The key is looked up each time.
    heart.kernel.secrets.set("unset", KEY.encode())
    await heart.core.store.hurry_outbox(["keyless"])

    async def arrived() -> bool:
        return bool(target.deliveries("/keyless"))

    await until(arrived)


async def test_they_are_declared_when_the_database_is_back(
    told: tuple[Heart, Webhooks, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    heart, hooks, target = told
    real, away = heart.core.store.kernels, [True]

    async def kernels() -> Any:
        if away[0]:
            raise Unavailable("away")
        return await real()

    monkeypatch.setattr(heart.core.store, "kernels", kernels)
    await hooks.apply()
    assert await hooks.report() == []
    away[0] = False
    await until(hooks.report)
    heart.begin(await heart.agent(ask=[POST]), 0, url=URL)

    async def arrived() -> bool:
        return bool(target.deliveries("/good"))

    await until(arrived)
