"""Agents that start agents: what a child gets, what it may, and what becomes of it with its parent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import BudgetExhausted, Denied, InvalidRequest, QuotaExceeded, Revoked, RingfenceError
from support.kernels import Refused, eventually
from support.scenes import HOLD, Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  roles:
    worker: {allow: [{fs.write: "/workspace/out/**"}], deny: [{fs.write: "/workspace/out/no"}]}
    other: {allow: [{fs.*: "/workspace/**"}]}
"""
HELD = ["sh", "-c", HOLD]
FILES = {"in/a.csv": "a", "in/b.txt": "b", ".env": "secret", "sub/agent.py": "print('here')"}


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database, config=CONFIG) as scene:
        yield scene


def child_of(parent: Held, name: str = "child", **more: Any) -> Held:
    return parent.scene.held(parent.rf.spawn(name, HELD, **more).id)


def allow(*rules: str) -> dict[str, list[str]]:
    return {"allow": list(rules)}


# -- birth ------------------------------------------------------------------------------------------------------------


def test_a_child_runs_on_a_copy_of_what_its_parent_may_read(scene: Scene) -> None:
    parent = scene.hold(
        files=FILES,
        allow=['spawn: "*"', 'fs.read: "/workspace/**"', 'fs.write: "/workspace/**"'],
        deny=['fs.*: "/workspace/.env"', 'fs.read: "/workspace/in/b.txt"'],
    )
    child = child_of(parent, workspace="/workspace", permissions=allow('fs.*: "/workspace/**"'))
    found = sorted(str(p.relative_to(child.live)) for p in child.live.rglob("*") if p.is_file())
    assert found == ["in/a.csv", "sub/agent.py"]
    child.rf.fs.write_text("in/a.csv", "changed")
    assert parent.rf.fs.read_text("in/a.csv") == "a"
    shown = scene.show(child.id)
    assert (shown["parent"], shown["name"]) == (parent.id, "child")
    assert [c["id"] for c in scene.show(parent.id)["children"]] == [child.id]


def test_its_program_runs_from_what_was_copied(scene: Scene) -> None:
    parent = scene.hold(files=FILES, allow=['spawn: "*"', 'fs.read: "/workspace/sub/**"'])
    born = parent.rf.spawn("runs", ["python", "sub/agent.py"], workspace="sub", input="x", env={"A": "b"})
    scene.await_end(born.id)
    assert scene.output(born.id) == "here\n"


def test_what_is_wrong_is_said_and_nobody_is_born(scene: Scene) -> None:
    parent = scene.hold(files=FILES, allow=['spawn: "good*"', 'fs.read: "/workspace/in/**"'])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"permissions": {"allow": [{"fs.fly": "/workspace/**"}]}}, "fs.fly"),
        ({"permissions": allow("nonsense")}, "nonsense"),
        ({"permissions": {"alow": []}}, "alow"),
        ({"roles": ["nobody"]}, "nobody"),
        ({"delegates": ["worker"]}, "delegates"),
        ({"sandbox": {"mounts": ["/srv"]}}, "mounts"),
        ({"workspace": "/workspace/.env"}, ".env"),
        ({"workspace": "/etc"}, "/etc"),
        ({"env": {"A B": "c"}}, "A B"),
    ]
    for more, text in wrong:
        with pytest.raises(RingfenceError):
            parent.rf.spawn("good", HELD, **more)
        assert text in str(parent.last()["error"]), more
    parent.refused(Denied, lambda: parent.rf.spawn("bad", HELD))
    parent.refused(InvalidRequest, lambda: parent.rf.spawn("good\nx", HELD))
    assert scene.show(parent.id)["children"] == []
    assert not list((scene.kernel.data / "agents").glob(".spawn-*"))


# -- rights -----------------------------------------------------------------------------------------------------------


def test_a_child_may_what_both_may(scene: Scene) -> None:
    parent = scene.hold(
        allow=['spawn: "*"', 'fs.write: "/workspace/a/**"', 'fs.write: "/workspace/b/**"'],
        deny=['fs.write: "/workspace/b/no"'],
    )
    child = child_of(
        parent, permissions=allow('fs.write: "/workspace/b/**"', 'fs.write: "/workspace/c/**"', 'spawn: "*"')
    )
    child.rf.fs.write_text("b/yes", "1")
    assert child.last()["verdict"] == "allow"
    child.refused(Denied, lambda: child.rf.fs.write_text("a/x", "1"))
    by_rule = child.refused(Denied, lambda: child.rf.fs.write_text("b/no", "1"))
    assert parent.id in by_rule.message
    lacking = child.refused(Denied, lambda: child.rf.fs.write_text("c/x", "1"))
    assert parent.id in lacking.message
    # And so on downwards.
    grandchild = child_of(child, permissions=allow('fs.*: "/workspace/**"'))
    grandchild.rf.fs.write_text("b/yes", "1")
    grandchild.refused(Denied, lambda: grandchild.rf.fs.write_text("c/x", "1"))
    explained = child.operator.ask("PolicyExplain", agent=child.id, step=3)
    assert explained["rules"][0]["text"] == 'fs.write: "/workspace/b/no"'
    assert explained["rules"][0]["agent"] == parent.id
    can = child.operator.ask("PolicyCanI", agent=child.id, action="fs.write", resource="/workspace/c/x")
    assert can["verdict"] == "deny"
    assert parent.id in can["reason"]
    shown = child.operator.ask("PolicyShow", agent=child.id)
    assert shown["parents"][0]["agent"] == parent.id
    assert 'fs.write: "/workspace/a/**"' in {rule["text"] for rule in shown["parents"][0]["rules"]}


def test_what_a_parent_has_to_ask_a_child_has_to_ask(scene: Scene) -> None:
    parent = scene.hold(
        allow=['spawn: "*"'], ask=['fs.write: "/workspace/asked"'], more="approvals: {linger: 1h}"
    )
    child = child_of(parent, permissions=allow('fs.write: "/workspace/**"'))
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(child.rf.fs.write_text("asked", "1")))
    thread.start()

    def waiting() -> list[Any]:
        return child.operator.ask("Approvals", agent=child.id)["approvals"]

    eventually(lambda: len(waiting()) == 1, "the child's call does not wait")
    assert done == []
    (why,) = child.operator.ask("ApprovalShow", id=waiting()[0]["id"])["why"]
    assert parent.id in why
    assert 'fs.write: "/workspace/asked"' in why
    child.operator.ask("Approve", id=waiting()[0]["id"])
    thread.join(30)
    assert len(done) == 1


@pytest.mark.parametrize("delegates", [True, False])
def test_a_role_that_the_parent_delegates_is_not_met(scene: Scene, delegates: bool) -> None:
    coordinator = scene.hold(allow=['spawn: "*"'], more="delegates: [worker]" if delegates else "")
    worker = child_of(coordinator, roles=["worker"], permissions=allow('fs.write: "/workspace/more/**"'))
    if delegates:
        worker.rf.fs.write_text("out/a", "1")
        worker.refused(Denied, lambda: worker.rf.fs.write_text("out/no", "1"))
    else:
        worker.refused(Denied, lambda: worker.rf.fs.write_text("out/a", "1"))
        assert coordinator.id in worker.last()["error"]
    # Nothing else of it comes along.
    worker.refused(Denied, lambda: worker.rf.fs.write_text("more/a", "1"))


def test_a_child_delegates_only_what_its_parent_does(scene: Scene) -> None:
    top = scene.hold(allow=['spawn: "*"'], more="delegates: [worker]")
    top.refused(InvalidRequest, lambda: top.rf.spawn("x", HELD, delegates=["other"]))
    middle = child_of(top, delegates=["worker"], permissions=allow('spawn: "*"'))
    middle.refused(InvalidRequest, lambda: middle.rf.spawn("x", HELD, delegates=["other"]))
    other = child_of(middle, roles=["other", "worker"])
    other.rf.fs.write_text("out/a", "1")
    other.refused(Denied, lambda: other.rf.fs.write_text("b", "1"))


def test_a_revoke_reaches_all_descendants(scene: Scene) -> None:
    rule = 'fs.write: "/workspace/**"'
    parent = scene.hold(allow=['spawn: "*"', rule])
    child = child_of(parent, permissions=allow(rule, 'spawn: "*"'))
    grandchild = child_of(child, permissions=allow(rule))
    grandchild.rf.fs.write_text("a", "1")
    parent.operator.ask("Revoke", agent=parent.id, rule_or_grant=rule)
    for held in (child, grandchild):
        held.refused(Denied, lambda held=held: held.rf.fs.write_text("b", "1"))
    # A grant to the top alone brings it back everywhere below.
    parent.operator.ask("Grant", agent=parent.id, rule=rule)
    grandchild.rf.fs.write_text("c", "1")


def test_a_revoke_cancels_calls_of_descendants_and_lists_them(scene: Scene) -> None:
    parent = scene.hold(allow=['spawn: "*"', 'messages.receive: "*"'])
    child = child_of(parent, permissions=allow('messages.receive: "*"'))
    caught: list[BaseException] = []

    def receive() -> None:
        try:
            child.rf.messages.receive()
        except BaseException as error:  # noqa: BLE001 - shown below
            caught.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    eventually(lambda: scene.show(child.id)["state"] == "sleeping", "the child does not wait")
    revoked = parent.operator.ask("Revoke", agent=parent.id, rule_or_grant="messages.receive")
    thread.join(30)
    assert [type(error) for error in caught] == [Revoked]
    assert [(call["agent"], call["fate"]) for call in revoked["affected"]] == [(child.id, "cancelled")]


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_totals_come_out_of_the_parents(scene: Scene) -> None:
    parent = scene.hold(allow=['spawn: "*"', "now"], more="budgets: {total: {calls: 20}}")
    parent.refused(InvalidRequest, lambda: parent.rf.spawn("x", HELD))
    child = child_of(parent, budgets={"total": {"calls": 10}, "on_exhausted": "refuse"})
    error = parent.refused(
        BudgetExhausted, lambda: parent.rf.spawn("x", HELD, budgets={"total": {"calls": 10}})
    )
    assert int(error.metadata["left"]) in range(1, 10)
    # Most of its budget is there: it goes on, and asks for less.
    assert parent.rf.now()
    assert (scene.show(parent.id)["state"], scene.show(parent.id)["process"]) == ("running", "live")
    child_of(parent, "less", budgets={"total": {"calls": 2}})
    for _ in range(10):
        child.rf.now()
    child.refused(BudgetExhausted, child.rf.now)
    left = {b["name"]: b["left"] for b in scene.show(parent.id)["budgets"]}
    assert left["calls"] < 10


def test_a_spawn_takes_its_own_way_from_the_start(scene: Scene) -> None:
    child_of(scene.hold(allow=['spawn: "*"']))
    assert "bug in" not in scene.kernel.log.read_text()


def test_generations_are_bounded(scene: Scene) -> None:
    held = scene.hold(allow=['spawn: "*"'])
    for number in range(4):
        held = child_of(held, f"gen{number}", permissions=allow('spawn: "*"'))
    held.refused(BudgetExhausted, lambda: held.rf.spawn("deep", HELD))


# -- family life ------------------------------------------------------------------------------------------------------


def test_a_kill_takes_the_whole_tree(scene: Scene) -> None:
    parent = scene.hold(allow=['spawn: "*"'])
    child = child_of(parent, permissions=allow('spawn: "*"'))
    grandchild = child_of(child)
    tree = parent.operator.ask("Tree", agent=parent.id)["agents"]
    assert tree[0]["children"][0]["children"][0]["id"] == grandchild.id
    killed = parent.operator.ask("Kill", agent=parent.id)
    assert {c["id"] for c in killed["descendants"]} == {child.id, grandchild.id}
    assert {scene.show(a)["state"] for a in (parent.id, child.id, grandchild.id)} == {"killed"}


def test_only_the_one_is_killed_where_that_is_said(scene: Scene) -> None:
    parent = scene.hold(allow=['spawn: "*"', "now"])
    child = child_of(parent, permissions=allow("now"))
    parent.operator.ask("Kill", agent=parent.id, only=True)
    assert scene.show(child.id)["process"] == "live"
    child.rf.now()


def test_a_rollback_past_the_spawn_ends_the_child_and_lists_it(scene: Scene) -> None:
    parent = scene.hold(allow=['spawn: "*"', 'fs.*: "/workspace/**"'])
    parent.rf.fs.write_text("a", "1")
    child = child_of(parent)
    preview = parent.operator.ask("Rollback", agent=parent.id, to="1", preview=True)
    assert {"kind": "child", "id": child.id}.items() <= preview["others"][0].items()
    assert scene.show(child.id)["process"] == "live"
    done = parent.operator.ask("Rollback", agent=parent.id, to="1")
    assert [(o["kind"], o["id"]) for o in done["others"]] == [("child", child.id)]
    assert scene.show(child.id)["state"] == "killed"


def test_unknown_agents_have_no_tree(scene: Scene) -> None:
    with pytest.raises(Refused) as caught:
        scene.operator.ask("Tree", agent="nobody")
    assert caught.value.exit_code == 4


def test_a_rollback_lists_the_approvals_that_it_voids(scene: Scene) -> None:
    parent = scene.hold(
        allow=['fs.write: "/workspace/free"'],
        ask=['fs.write: "/workspace/asked"'],
        more="approvals: {linger: 1h}",
    )
    parent.rf.fs.write_text("free", "1")
    stream = parent.stream()
    stream.post("fs.write", b'{"path":"/workspace/asked"}', step=1)
    eventually(
        lambda: parent.operator.ask("Approvals", agent=parent.id)["approvals"] != [], "the call does not wait"
    )
    (waits,) = parent.operator.ask("Approvals", agent=parent.id)["approvals"]
    preview = parent.operator.ask("Rollback", agent=parent.id, to="0", preview=True)
    done = parent.operator.ask("Rollback", agent=parent.id, to="0")
    stream.close()
    for document in (preview, done):
        assert [(o["kind"], o["id"], o["action"]) for o in document["others"]] == [
            ("approval", waits["id"], "voided")
        ]
    assert parent.operator.ask("Approvals", agent=parent.id)["approvals"] == []


def test_a_child_is_not_forked_by_itself_and_a_twin_of_its_parent_has_no_hold_on_it(scene: Scene) -> None:
    parent = scene.hold(allow=['spawn: "*"', 'fs.write: "/workspace/a"'])
    child = child_of(parent, permissions=allow('fs.write: "/workspace/**"'))
    child.rf.fs.write_text("a", "1")
    with pytest.raises(Refused, match="can't be forked by itself") as caught:
        parent.operator.ask("Fork", agent=child.id, at="1")
    assert caught.value.exit_code == 5
    # A fork of the parent has the spawn in its past, and not the child.
    twin = parent.operator.ask("Fork", agent=parent.id, at="1")["id"]
    assert parent.operator.ask("Rollback", agent=twin, to="0")["others"] == []
    assert scene.show(child.id)["process"] == "live"


def test_a_parent_of_the_living_can_not_be_removed(scene: Scene) -> None:
    parent = scene.hold(allow=['spawn: "*"'])
    child = child_of(parent)
    parent.operator.ask("Kill", agent=parent.id, only=True)
    with pytest.raises(Refused) as caught:
        parent.operator.ask("Remove", agent=parent.id)
    assert caught.value.exit_code == 5
    parent.operator.ask("Kill", agent=child.id)
    parent.operator.ask("Remove", agent=parent.id)
    roots = {node["id"] for node in child.operator.ask("Tree", all=True)["agents"]}
    assert child.id in roots
    assert parent.id not in roots


def test_rates_are_shared_with_the_parent(scene: Scene) -> None:
    parent = scene.hold(allow=['spawn: "*"', "now"], more="budgets: {rate: {now: 2/h}}")
    child = child_of(parent)
    child.rf.now()
    parent.rf.now()
    refused = child.refused(QuotaExceeded, child.rf.now)
    assert "`now`" in refused.message


def test_a_condition_asks_what_siblings_and_the_family_have_used(scene: Scene) -> None:
    put = "{action: state.put, if: {budget: {total: calls, over: 20%, of: siblings}}, then: deny}"
    get = "{action: state.get, if: {budget: {total: calls, over: 27%, of: family}}, then: deny}"
    parent = scene.hold(
        allow=['spawn: "*"', 'state.*: "**"'],
        more=f"budgets: {{total: {{calls: 40}}}}\nwhen: [{put}, {get}]",
    )
    born = {"permissions": allow('state.*: "**"'), "budgets": {"total": {"calls": 10}}}
    first, second = (child_of(parent, name, **born) for name in ("one", "two"))
    for number in range(6):
        first.rf.state.put("kin/x", number)
    for number in range(2):
        second.rf.state.put("kin/y", number)
    assert first.rf.state.get("kin/x") == 5
    # Nine of the forty of the parent; what it gave and nobody used does not count.
    for held in (second, first):
        error = held.refused(Denied, lambda held=held: held.rf.state.put("kin/z", 1))
        assert "22.5 % of the budget `calls` of `siblings` is used, more than 20 %" in str(error)
    for held in (parent, second):
        error = held.refused(Denied, lambda held=held: held.rf.state.get("kin/x"))
        assert "27.5 % of the budget `calls` of `family`" in str(error)
    parent.rf.state.put("kin/p", 1)
