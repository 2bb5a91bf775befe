"""A spent budget parks an agent before anything follows the refused call, and raised makes that call afresh, each once."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scenes import Scene, scene_on
from support.target import Target

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[Target]:
    counter = Target(tmp_path / "deliveries")
    yield counter
    counter.close()


@pytest.fixture
def scene(counter: Target, postgres_server: Any, template_database: str) -> Iterator[Scene]:
    """A kernel whose target takes no key: what is sent twice is counted twice."""
    name = postgres_server.create(template_database)
    config = (
        "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  resources:\n"
        f'    plain: {{type: http, base: "{counter.base}", effects: {{"POST /**": external}}}}\n'
    )
    try:
        with scene_on(postgres_server.dsn(name), config=config) as scene:
            yield scene
    finally:
        postgres_server.drop(name)


CATCHES = """
from ringfence import agent
with agent.boot() as rf:
    def post(path):
        # Whoever is refused goes on: under a kernel that answers, the next line sends.
        try:
            rf.state.put("parked" + path, 1)
        except agent.BudgetExhausted:
            pass
        rf.http.post({base!r} + path, json={{}})
"""


def submit(scene: Scene, counter: Target, program: str, calls: int, more: str = "") -> str:
    rules = [f'http.*: "{counter.base}/**"', 'state.*: "**"']
    text = CATCHES.format(base=counter.base) + program
    return scene.submit(text, allow=rules, more=f"budgets: {{total: {{calls: {calls}}}}}\n{more}")


def raised(scene: Scene, agent: str, calls: int) -> None:
    scene.operator.ask("Budget", agent=agent, name="calls", value=str(calls))
    scene.await_end(agent)


def sent(counter: Target) -> Count[str]:
    return Count(line["path"] for line in counter.deliveries())


def outcomes(scene: Scene, agent: str) -> Count[str]:
    return Count(step["outcome"] for step in scene.operator.steps(agent))


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_follows_the_refused_call(scene: Scene, counter: Target, killed: bool) -> None:
    agent = submit(scene, counter, "    post('/a')\n    post('/b')\n    post('/c')\n", 2)
    scene.await_end(agent, "parked")
    assert scene.show(agent)["process"] == "none"
    assert sent(counter) == {"/a": 1}
    assert outcomes(scene, agent) == {"ok": 2, "refused": 1}
    if killed:
        scene.kernel.kill()
        scene.kernel.start()
        assert scene.show(agent)["state"] == "parked"
        assert sent(counter) == {"/a": 1}
    raised(scene, agent, 100)
    assert sent(counter) == {"/a": 1, "/b": 1, "/c": 1}
    assert outcomes(scene, agent) == {"ok": 6, "refused": 1}
    # The refused call itself was made, and not only what comes after it.
    keys = scene.sql("select key, version from state where key like 'parked/%' order by key")
    assert keys == [(f"parked/{name}", 1) for name in "abc"]


def test_the_other_lanes_are_held_from_then_on(scene: Scene, counter: Target) -> None:
    """Eight lanes with two calls each, of which five fit: one refusal, five effects, and the rest afterwards."""
    agent = submit(scene, counter, "    rf.parallel([lambda n=n: post(f'/{n}') for n in range(8)])\n", 5)
    scene.await_end(agent, "parked")
    assert outcomes(scene, agent) == {"ok": 5, "refused": 1}
    before = sent(counter)
    assert all(number == 1 for number in before.values())
    scene.kernel.kill()
    scene.kernel.start()
    assert sent(counter) == before
    raised(scene, agent, 100)
    assert sent(counter) == {f"/{number}": 1 for number in range(8)}
    assert outcomes(scene, agent)["ok"] == 16


UNARY = """
import json, os, grpc
from ringfence.v1 import syscalls_pb2 as pb
channel = grpc.insecure_channel("unix:" + os.environ["RINGFENCE_SOCKET"])
ask = channel.unary_unary(
    "/ringfence.v1.SyscallService/Now",
    request_serializer=pb.NowRequest.SerializeToString,
    response_deserializer=pb.NowResponse.FromString,
)
token = "Bearer " + os.environ["RINGFENCE_TOKEN"]
for number in range(3):
    try:
        ask(pb.NowRequest(), metadata=(("authorization", token),), timeout=60)
        print(json.dumps("ok"), flush=True)
    except grpc.RpcError as error:
        print(json.dumps(error.code().name), flush=True)
"""


def test_a_caller_without_the_library_hears_nothing_either(scene: Scene) -> None:
    agent = scene.submit(UNARY, allow=["now"], more="budgets: {total: {calls: 2}}")
    scene.await_end(agent, "parked")
    assert scene.said(agent) == ["ok", "ok"]
    raised(scene, agent, 3)
    assert scene.said(agent) == ["ok", "ok"] + ["ok"] * 3
    assert outcomes(scene, agent) == {"ok": 3, "refused": 1}


def test_a_program_does_not_fail_over_the_refusal_and_start_again(scene: Scene, counter: Target) -> None:
    """It never hears of the refusal, so it can't fail over it and be started again to be refused twice."""
    program = "    for number in range(6):\n        rf.state.put('parked/x', number)\n"
    agent = submit(scene, counter, program, 3, "restart: {policy: on-failure, max: 5}")
    scene.await_end(agent, "parked")
    assert (outcomes(scene, agent), scene.show(agent)["restarts"]) == ({"ok": 3, "refused": 1}, 0)
    raised(scene, agent, 6)
    assert outcomes(scene, agent) == {"ok": 6, "refused": 1}
