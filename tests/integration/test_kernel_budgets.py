"""Budgets of a real agent: reserved before the spend, exact under parallel calls, kept over restarts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import BudgetExhausted, Denied, RingfenceError
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec: {ceilings: {budgets: {total: {destructive: 2}}}}
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database, config=CONFIG) as scene:
        yield scene


def view(held: Held, name: str) -> dict[str, Any]:
    return next(b for b in held.operator.ask("Show", agent=held.id)["budgets"] if b["name"] == name)


def test_a_spent_total_refuses_and_says_so(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {total: {calls: 3}, on_exhausted: refuse}")
    for number in range(3):
        held.rf.state.put("spent/x", number)
    error = held.refused(BudgetExhausted, lambda: held.rf.state.put("spent/x", 9))
    assert error.metadata["budget"] == "calls"
    assert (error.metadata["limit"], error.metadata["used"]) == ("3", "3")
    assert scene.sql("select value from state where key = 'spent/x'") == [(b"2",)]
    assert (view(held, "calls")["used"], view(held, "calls")["left"]) == (3, 0)
    assert [(s["outcome"], s["reason"]) for s in held.steps()][-1] == ("refused", "BudgetExhausted")


def test_parallel_calls_never_pass_a_total(scene: Scene) -> None:
    """C49: eight at once against four that are left."""
    held = scene.hold(
        allow=['fs.*: "/workspace/**"'], more="budgets: {total: {calls: 4}, on_exhausted: refuse}"
    )
    outcomes: list[str] = []
    lock = threading.Lock()

    def append() -> None:
        try:
            held.rf.fs.append_text("count.txt", "x")
            word = "ok"
        except RingfenceError as error:
            word = error.reason
        with lock:
            outcomes.append(word)

    held.rf.parallel([append] * 8)
    assert sorted(outcomes) == ["BudgetExhausted"] * 4 + ["ok"] * 4
    assert (held.live / "count.txt").read_text() == "xxxx"


def test_a_refused_call_spends_nothing(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {total: {calls: 2}, on_exhausted: refuse}")
    for _ in range(5):
        held.refused(Denied, lambda: held.rf.fs.write_text("a", "a"))
    assert view(held, "calls")["used"] == 0
    held.rf.state.put("refused/a", 1)
    held.rf.state.put("refused/a", 2)
    held.refused(BudgetExhausted, lambda: held.rf.state.put("refused/a", 3))


def test_what_is_spent_stays_spent_over_restarts(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {total: {calls: 3}, on_exhausted: refuse}")
    held.rf.state.put("restarts/a", 1)
    held.rf.state.put("restarts/a", 2)
    held.disconnect()
    scene.operator.ask("Kill", agent=held.id)
    scene.kernel.kill()
    scene.kernel.start()
    scene.operator.ask("Start", agent=held.id)
    held.again()
    held.socket = scene.socket_of(held.id)
    assert view(held, "calls")["used"] == 2
    # Replay is free: the first two are answered from the journal.
    assert [held.rf.state.put("restarts/a", number) for number in (1, 2, 3)] == [1, 2, 3]
    held.refused(BudgetExhausted, lambda: held.rf.state.put("restarts/a", 4))
    assert view(held, "calls")["used"] == 3


def test_the_operators_ceiling_bounds_what_a_manifest_asks_for(scene: Scene) -> None:
    files = {name: name for name in "abcd"}
    held = scene.hold(
        allow=['fs.*: "/workspace/**"'],
        files=files,
        more="budgets: {total: {destructive: 100}, on_exhausted: refuse}",
    )
    for name in "ab":
        held.rf.fs.delete(name)
    error = held.refused(BudgetExhausted, lambda: held.rf.fs.delete("c"))
    assert error.metadata["budget"] == "destructive"
    assert (held.live / "c").exists()
    # What isn't destructive goes on.
    held.rf.fs.write_text("c", "changed")
    assert view(held, "destructive") == {
        "name": "destructive",
        "kind": "total",
        "limit": 2,
        "used": 2,
        "left": 0,
        "reserved": 0,
        "origin": "ceiling",
        "period_ms": None,
        "refill_ms": None,
    }


def test_a_command_that_removes_is_destructive_by_what_it_did(scene: Scene) -> None:
    held = scene.hold(
        allow=['fs.*: "/workspace/**"', 'exec.run: "*"'],
        files={name: name for name in "abcd"},
        more="budgets: {on_exhausted: refuse}",
    )
    held.rf.exec.run(["rm", "a"])
    held.rf.exec.run(["touch", "new"])
    held.rf.exec.run(["rm", "b", "new"])
    held.refused(BudgetExhausted, lambda: held.rf.exec.run(["rm", "c"]))
    assert (held.live / "c").exists()
    assert [s["effect"] for s in held.steps()] == ["DESTROY", "WRITE", "DESTROY", "WRITE"]


def test_a_rate_makes_a_call_wait(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {rate: {state.put: 2/s}}")
    for number in range(4):
        held.rf.state.put("rate/a", number)
    # The journal's own times: two tokens at once, then half a second for each further one.
    rows = scene.sql(
        "select started_us, duration_us from journal where chain = %s and phase = 1 order by step",
        scene.key_of(held.id),
    )
    assert sum(rows[3]) - rows[0][0] >= 950_000
    assert [s["outcome"] for s in held.steps()] == ["ok"] * 4
    # Other actions don't wait for it.
    assert held.rf.state.get("rate/a") == 3


def test_a_rate_that_is_full_for_longer_than_the_deadline_refuses_at_once(scene: Scene) -> None:
    from ringfence.v1 import syscalls_pb2 as pb

    held = scene.hold(allow=['state.*: "**"'], more="budgets: {rate: {state.*: 1/h}}")
    stream = held.stream()
    assert stream.ask("state.put", b'{"key":"rate/h","value":1}', step=0).failure.reason == ""
    call = pb.Call(
        id=9, lane="0", step=1, action="state.put", arguments=b'{"key":"rate/h","value":2}', deadline_ms=1000
    )
    stream.send(pb.StreamRequest(call=call))
    reply = stream.receive().reply
    assert reply.failure.reason == "QuotaExceeded"
    assert int(reply.failure.metadata["retry_after_ms"]) > 3_000_000
    stream.close()
    assert [(s["outcome"], s["reason"]) for s in held.steps()] == [("ok", None), ("refused", "QuotaExceeded")]


PARKED = """
import json, sys
from ringfence import agent
with agent.boot() as rf:
    for number in range(4):
        rf.state.put(f"parked/{sys.argv[1]}", number)
    print(json.dumps("over"), flush=True)
"""


def budget(scene: Scene, agent: str, name: str = "", value: str = "") -> dict[str, Any]:
    return scene.operator.ask("Budget", agent=agent, name=name, value=value)


def line(scene: Scene, agent: str, name: str) -> dict[str, Any]:
    return next(b for b in budget(scene, agent)["budgets"] if b["name"] == name)


def test_a_spent_total_parks_the_agent_until_it_is_raised(scene: Scene) -> None:
    agent = scene.submit(
        PARKED.replace("sys.argv[1]", "1"), allow=['state.*: "**"'], more="budgets: {total: {calls: 2}}"
    )
    scene.await_end(agent, "parked")
    shown = scene.show(agent)
    assert (shown["process"], shown["waiting_for"]) == ("none", "budget `calls`")
    assert "limit 2, used 2, asked 1, left 0" in shown["error"]
    assert f"ringfence budget {agent} set calls 3" in shown["error"]
    assert [s["outcome"] for s in scene.operator.steps(agent)] == ["ok", "ok", "refused"]
    # Too little parks it again, at the same call; enough ends it, with every effect once.
    assert budget(scene, agent, "calls", "3")["state"] == "running"
    scene.await_end(agent, "parked")
    assert budget(scene, agent, "calls", "4")["budgets"][0]["origin"] == "operator"
    scene.await_end(agent)
    assert [s["outcome"] for s in scene.operator.steps(agent)].count("ok") == 4
    assert scene.sql("select value, version from state where key = 'parked/1'") == [(b"3", 4)]
    events = scene.sql(
        "select convert_from(body, 'UTF8')::json ->> 'value' from journal where chain = %s and action = 'budget.set' order by pos",
        scene.key_of(agent),
    )
    assert events == [("3",), ("4",)]


def test_what_an_operator_set_outlives_the_kernel_and_wakes_an_agent_parked_before(scene: Scene) -> None:
    more = "budgets: {total: {calls: 2}, rate: {state.put: 100/s, state.*: 50/d}}"
    agent = scene.submit(PARKED.replace("sys.argv[1]", "2"), allow=['state.*: "**"'], more=more)
    scene.await_end(agent, "parked")
    budget(scene, agent, "state.put", "200/s")
    scene.kernel.kill()
    scene.kernel.start()
    assert scene.show(agent)["state"] == "parked"
    rate = line(scene, agent, "state.put")
    assert (rate["limit"], rate["period_ms"], rate["origin"]) == (200, 1000, "operator")
    # A restart gives nobody a rate anew.
    assert 1.5 < line(scene, agent, "state.*")["used"] <= 2
    assert line(scene, agent, "calls")["used"] == 2
    budget(scene, agent, "calls", "10")
    scene.await_end(agent)
    assert budget(scene, agent, "state.put", "manifest")["budgets"][-1]["origin"] == "manifest"


def test_no_limit_goes_above_a_ceiling(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {total: {calls: 5}}")
    for name, value, code in [
        ("destructive", "3", 3),
        ("nonsense", "3", 2),
        ("calls", "many", 2),
        ("calls", "1.5", 2),
        ("http.get", "3", 2),
        ("http.get", "0/s", 2),
        ("calls", "", 2),
    ]:
        with pytest.raises(Refused) as caught:
            budget(scene, held.id, name, value)
        assert caught.value.exit_code == code, (name, value)
    assert line(scene, held.id, "calls")["limit"] == 5
    # Lowering is possible, below what is used too, and says what is left.
    assert budget(scene, held.id, "destructive", "1")["budgets"][1]["origin"] == "operator"
    held.rf.state.put("lowered/a", 1)
    budget(scene, held.id, "calls", "0")
    assert (line(scene, held.id, "calls")["left"], line(scene, held.id, "calls")["used"]) == (0, 1)


def test_a_raised_rate_wakes_the_call_that_waits_for_it(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {rate: {state.put: 1/m}}")
    held.rf.state.put("woken/a", 1)
    worker = held.rf.thread(held.rf.state.put, "woken/a", 2)
    # It has taken the turn after the next one.
    eventually(lambda: line(scene, held.id, "state.put")["refill_ms"] > 60_000, "it does not wait")
    budget(scene, held.id, "state.put", "100/s")
    assert worker.result() == 2


def test_a_reload_puts_new_ceilings_in_force(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'], more="budgets: {total: {calls: 50}, on_exhausted: refuse}")
    held.rf.state.put("ceiling/a", 1)
    before = scene.kernel.config.read_text()
    scene.kernel.config.write_text(CONFIG.replace("destructive: 2", "destructive: 2, calls: 1"))
    scene.operator.ask("Reload")
    try:
        error = held.refused(BudgetExhausted, lambda: held.rf.state.put("ceiling/a", 2))
        assert "ceilings.budgets.total.calls" in str(error)
    finally:
        scene.kernel.config.write_text(before)
        scene.operator.ask("Reload")
    assert held.rf.state.put("ceiling/a", 3) == 2
