"""SIGKILL between the reservation of a call's bytes and their settlement: they are held once, and settled once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.scenes import Scene, scene_of_its_own
from support.target import Target

pytestmark = [
    pytest.mark.fault,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

PROGRAM = """
from ringfence import agent

with agent.boot() as rf:
    rf.fs.write_text("page", rf.http.get("{base}/a/big?50000").text)
    rf.fs.write_text("end", "x")
"""
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources: {{web: {{type: http, base: "{base}"}}}}
  budgets: {{fleet: {{total: {{bytes: 1GiB}}}}}}
"""
LIMIT = 17 << 20
"""Two of the largest answers don't fit."""


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("web") / "web")
    yield target
    target.close()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, web: Target) -> Iterator[Scene]:
    config = CONFIG.format(base=web.base)
    with scene_of_its_own(postgres_server, template_database, config=config) as scene:
        yield scene


def bytes_of(scene: Scene, agent: str) -> tuple[float, float]:
    """Bytes used and held, by the agent's own budget."""
    view = next(b for b in scene.operator.ask("Budget", agent=agent)["budgets"] if b["name"] == "bytes")
    return view["used"], view["reserved"]


@pytest.mark.parametrize(
    "point", ["http.get:before_outcome", "fs.write:after_effect", "fs.write:before_outcome"]
)
def test_bytes_are_settled_once(scene: Scene, web: Target, point: str) -> None:
    scene.kernel.arm(point)
    agent = scene.submit(
        PROGRAM.format(base=web.base),
        allow=[f'http.get: "{web.base}/**"', 'fs.*: "/workspace/**"'],
        more=f"budgets: {{total: {{bytes: {LIMIT}}}, on_exhausted: refuse}}",
    )
    scene.kernel.await_hit(point)
    held = bytes_of(scene, agent)[1]
    assert held > (16 << 20 if point.startswith("http") else 50_000)
    before = scene.operator.ask("Budget", pool="fleet")["pools"][0]
    scene.kernel.kill()
    scene.kernel.disarm(point)
    scene.kernel.start()
    scene.await_end(agent)
    used, left_over = bytes_of(scene, agent)
    # The page came in and went out again, with little around it.
    assert (100_000 < used < 102_000, left_over) == (True, 0)
    said = sum(step.get("used", {}).get("bytes", 0) for step in scene.operator.steps(agent))
    assert used == said
    after = scene.operator.ask("Budget", pool="fleet")["pools"][0]
    assert (after["reserved"], after["used"] - before["used"] <= used) == (0, True)
