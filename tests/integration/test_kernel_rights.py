"""Rights that change under a running agent: grants, uses, lives, revocation, ceilings, reloads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import Denied, Revoked, RingfenceError
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  ceilings:
    deny: [{fs.*: "**/.env"}, {state.put: "ceiling/*"}]
  roles: {clerk: {allow: [{state.*: "clerk/**"}]}}
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database, config=CONFIG) as scene:
        yield scene


def grants_of(held: Held, **wanted: Any) -> list[dict[str, Any]]:
    shown = held.operator.ask("Show", agent=held.id)["grants"]
    return [grant for grant in shown if all(grant[key] == value for key, value in wanted.items())]


# -- grants -----------------------------------------------------------------------------------------------------------


def test_a_grant_counts_from_the_next_call_on(scene: Scene) -> None:
    held = scene.hold()
    denied = held.refused(Denied, lambda: held.rf.fs.write_text("out/a.txt", "a"))
    assert "/workspace/out/a.txt" in denied.message
    granted = held.operator.ask("Grant", agent=held.id, rule='fs.write: "/workspace/out/**"')
    assert granted["verdict"] == "allow"
    held.rf.fs.write_text("out/a.txt", "a")
    assert held.last()["rule"] == granted["id"]
    # Only what it says.
    held.refused(Denied, lambda: held.rf.fs.write_text("elsewhere.txt", "a"))
    held.refused(Denied, lambda: held.rf.fs.delete("out/a.txt"))
    can = held.operator.ask("PolicyCanI", agent=held.id, action="fs.write", resource="/workspace/out/b")
    assert (can["verdict"], can["rule"]) == ("allow", granted["id"])
    explained = held.operator.ask("PolicyExplain", agent=held.id, step=2)
    assert [(r["text"], r["origin"]) for r in explained["rules"]] == [
        ('fs.write: "/workspace/out/**"', "operator")
    ]


def test_a_grant_with_uses_is_used_up_exactly(scene: Scene) -> None:
    held = scene.hold()
    held.operator.ask("Grant", agent=held.id, rule='state.put: "uses/**"', uses=3)
    outcomes: list[str] = []
    lock = threading.Lock()

    def put(number: int) -> None:
        try:
            held.rf.state.put(f"uses/{number}", number)
            word = "ok"
        except RingfenceError as error:
            word = error.reason
        with lock:
            outcomes.append(word)

    # Side by side: taking a use is one atomic step, so no two calls share one.
    held.rf.parallel([lambda number=number: put(number) for number in range(8)])
    assert sorted(outcomes) == ["Denied"] * 5 + ["ok"] * 3
    assert scene.sql("select count(*) from state where key like 'uses/%' and value is not null") == [(3,)]
    assert grants_of(held, origin="operator")[0]["uses_left"] == 0


def test_a_grant_ends_with_its_life(scene: Scene) -> None:
    held = scene.hold()
    held.operator.ask("Grant", agent=held.id, rule='state.put: "life/**"', expires_ms=400)
    held.rf.state.put("life/a", 1)

    def over() -> bool:
        try:
            held.rf.state.put("life/b", 1)
        except Denied:
            return True
        return False

    eventually(over, "the grant does not end")
    held.refused(Denied, lambda: held.rf.state.put("life/c", 1))
    listed = held.operator.ask("PolicyCanI", agent=held.id, action="state.put", resource="life/a")
    assert listed["verdict"] == "deny"


def test_a_wrong_grant_is_refused_with_its_place(scene: Scene) -> None:
    held = scene.hold()
    for rule in ("fs.write", "fs.write: /etc/passwd", "no.such: x", 'fs.write: "/workspace/[a]"', ""):
        with pytest.raises(Refused) as refused:
            held.operator.ask("Grant", agent=held.id, rule=rule)
        assert refused.value.exit_code == 2, rule
        assert "\n" not in str(refused.value), rule
    assert grants_of(held, origin="operator") == []
    with pytest.raises(Refused) as refused:
        held.operator.ask("Grant", agent="nobody", rule="fs.read: /workspace/a")
    assert refused.value.exit_code == 4


# -- revocation -------------------------------------------------------------------------------------------------------


def test_revoke_takes_one_rule_one_grant_one_action_or_all(scene: Scene) -> None:
    held = scene.hold(
        allow=[
            'fs.read: "/workspace/**"',
            'fs.write: "/workspace/a/**"',
            'fs.write: "/workspace/b/**"',
            'state.*: "**"',
        ],
        files={"x": "x"},
    )
    granted = held.operator.ask("Grant", agent=held.id, rule='fs.write: "/workspace/c/**"')
    for place in "abc":
        held.rf.fs.write_text(f"{place}/f", "1")
    by_rule = held.operator.ask("Revoke", agent=held.id, rule_or_grant='fs.write: "/workspace/a/**"')
    assert [r["rule"] for r in by_rule["revoked"]] == ['fs.write: "/workspace/a/**"']
    held.refused(Denied, lambda: held.rf.fs.write_text("a/f", "2"))
    held.rf.fs.write_text("b/f", "2")
    held.operator.ask("Revoke", agent=held.id, rule_or_grant=granted["id"])
    held.refused(Denied, lambda: held.rf.fs.write_text("c/f", "2"))
    by_action = held.operator.ask("Revoke", agent=held.id, rule_or_grant="fs.write")
    assert len(by_action["revoked"]) == 1
    held.refused(Denied, lambda: held.rf.fs.write_text("b/f", "3"))
    assert held.rf.fs.read_text("x") == "x"
    with pytest.raises(Refused) as refused:
        held.operator.ask("Revoke", agent=held.id, rule_or_grant="fs.write")
    assert refused.value.exit_code == 4
    with pytest.raises(Refused, match="has no permission `g999`; it has: g") as refused:
        held.operator.ask("Revoke", agent=held.id, rule_or_grant="g999")
    assert refused.value.exit_code == 4
    everything = held.operator.ask("Revoke", agent=held.id, all=True)
    assert len(everything["revoked"]) == 2
    held.refused(Denied, lambda: held.rf.fs.read_text("x"))
    held.refused(Denied, lambda: held.rf.state.put("k", 1))
    for wrong in ({"all": True, "rule_or_grant": "fs.read"}, {}):
        with pytest.raises(Refused) as refused:
            held.operator.ask("Revoke", agent=held.id, **wrong)
        assert refused.value.exit_code == 2


def test_no_call_after_a_revoke_is_allowed(scene: Scene) -> None:
    """Many rounds against a looping client; the journal's order is the judge, not a clock."""
    held = scene.hold(allow=['state.get: "**"'])
    for _ in range(20):
        granted = held.operator.ask("Grant", agent=held.id, rule='state.put: "round/**"')
        stop = threading.Event()
        began = threading.Event()

        def loop(stop: threading.Event = stop, began: threading.Event = began) -> None:
            while not stop.is_set():
                try:
                    held.rf.state.put("round/key", 1)
                    began.set()
                except (Denied, Revoked):
                    return

        worker = held.rf.thread(loop)
        assert began.wait(30)
        revoked = held.operator.ask("Revoke", agent=held.id, rule_or_grant=granted["id"])
        # No sleep, no retry: the very next call is denied.
        held.refused(Denied, lambda: held.rf.state.put("round/after", 1))
        stop.set()
        worker.join()
        assert all(call["fate"] in ("cancelled", "finished") for call in revoked["affected"])
    assert scene.sql("select 1 from state where key = 'round/after'") == []
    check_order(scene, held)


def check_order(scene: Scene, held: Held) -> None:
    """By position: after a denial under an epoch no allow under an earlier one."""
    rows = scene.sql(
        "select pos, action, verdict, body from journal where chain = %s and phase = 1 order by pos",
        scene.key_of(held.id),
    )
    seen = 0
    for _, action, verdict, body in rows:
        if action != "state.put":
            continue
        epoch = json.loads(bytes(body))["epoch"]
        if verdict == "allow":
            assert epoch >= seen
        seen = max(seen, epoch)


def test_the_fate_of_a_call_under_way_is_told_and_recorded(scene: Scene) -> None:
    held = scene.hold(
        allow=['exec.run: "*"', 'fs.*: "/workspace/**"'],
        files={"a.txt": "a"},
        more="restart: {policy: never}",
    )
    caught: list[RingfenceError] = []

    def run() -> None:
        try:
            held.rf.exec.run(["sh", "-c", "echo changed > a.txt; sleep 600"])
        except RingfenceError as error:
            caught.append(error)

    worker = held.rf.thread(run)
    scratch = held.live.parent / "scratch"
    eventually(lambda: any(scratch.glob("*/upper/a.txt")), "the command did not start")
    revoked = held.operator.ask("Revoke", agent=held.id, rule_or_grant="exec.run")
    assert [(c["step"], c["action"], c["fate"]) for c in revoked["affected"]] == [
        (1, "exec.run", "cancelled")
    ]
    worker.join()
    assert [type(error) for error in caught] == [Revoked]
    # Nothing of the half-done command counts.
    assert (held.live / "a.txt").read_text() == "a"
    step = held.steps()[0]
    assert (step["verdict"], step["outcome"]) == ("deny", "denied")
    facts = [
        r
        for r in held.operator.stream("Audit")
        if r["action"] == "operator.revoke" and r["resource"] == held.id
    ]
    assert json.loads(facts[-1]["body"])["affected"] == revoked["affected"]


def test_an_agent_keeps_no_right_through_a_restart(scene: Scene) -> None:
    held = scene.hold(allow=['state.*: "**"'])
    held.rf.state.put("restart/a", 1)
    held.operator.ask("Revoke", agent=held.id, rule_or_grant="state.*")
    held.operator.ask("Kill", agent=held.id)
    held.operator.ask("Start", agent=held.id)
    held.again()
    assert held.rf.state.put("restart/a", 1) == 1  # its first step: the journal's answer
    held.refused(Denied, lambda: held.rf.state.put("restart/b", 1))


# -- denies -----------------------------------------------------------------------------------------------------------


def test_a_deny_outlasts_revocations_forks_rollbacks_and_restarts(scene: Scene) -> None:
    held = scene.hold(allow=['fs.*: "/workspace/**"', 'exec.run: "*"'], files={"a": "a", "b/c": "c"})
    held.rf.fs.write_text("b/first", "1")
    caught: list[RingfenceError] = []

    def run() -> None:
        try:
            held.rf.exec.run(["sh", "-c", "touch begun; sleep 600"])
        except RingfenceError as error:
            caught.append(error)

    worker = held.rf.thread(run)
    eventually(lambda: any((held.live.parent / "scratch").glob("*/upper/begun")), "the command did not start")
    shut = held.operator.ask("Grant", agent=held.id, rule='exec.run: "*"', deny=True)
    assert [(c["action"], c["fate"]) for c in shut["affected"]] == [("exec.run", "cancelled")]
    worker.join()
    assert [type(error) for error in caught] == [Revoked]
    denied = held.operator.ask("Grant", agent=held.id, rule='fs.*: "/workspace/b/**"', deny=True)
    assert (denied["verdict"], denied["uses_left"]) == ("deny", None)
    held.refused(Denied, lambda: held.rf.fs.read_text("b/c"))
    assert held.rf.fs.read_text("a") == "a"
    explained = held.operator.ask("PolicyExplain", agent=held.id, step=held.last()["step"] - 1)
    assert (explained["rules"][0]["id"], explained["rules"][0]["verdict"]) == (denied["id"], "deny")
    with pytest.raises(Refused, match="isn't used up"):
        held.operator.ask("Grant", agent=held.id, rule='fs.read: "/workspace/a"', deny=True, uses=1)
    # A grant doesn't get past it, and who takes all permissions away leaves it.
    held.operator.ask("Grant", agent=held.id, rule='fs.read: "/workspace/b/c"')
    held.refused(Denied, lambda: held.rf.fs.read_text("b/c"))
    fork = held.operator.ask("Fork", agent=held.id, at="1")["id"]
    can = held.operator.ask("PolicyCanI", agent=fork, action="fs.read", resource="/workspace/b/c")
    assert can["verdict"] == "deny"
    revoked = held.operator.ask("Revoke", agent=held.id, all=True)["revoked"]
    assert not {denied["id"], shut["id"]} & {grant["id"] for grant in revoked}
    held.operator.ask("Grant", agent=held.id, rule='fs.read: "/workspace/**"')
    held.operator.ask("Rollback", agent=held.id, to="1")
    scene.kernel.kill()
    scene.kernel.start()
    for path, verdict in (("/workspace/b/c", "deny"), ("/workspace/a", "allow")):
        can = scene.operator.ask("PolicyCanI", agent=held.id, action="fs.read", resource=path)
        assert can["verdict"] == verdict
    assert [g["id"] for g in grants_of(held, verdict="deny")] == [shut["id"], denied["id"]]
    scene.operator.ask("Revoke", agent=held.id, rule_or_grant=denied["id"])
    can = scene.operator.ask("PolicyCanI", agent=held.id, action="fs.read", resource="/workspace/b/c")
    assert can["verdict"] == "allow"
