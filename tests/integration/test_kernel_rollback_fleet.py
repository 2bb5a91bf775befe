"""Several agents go back together, from the command line: what they did in turn is undone in its reverse order, and nobody's work is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from ringfence.kernel.postgres import EmbeddedPostgres
from support.kernels import eventually
from support.scenes import HOLD, Held, Scene, console, scene_on

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec: {resources: {shop: {type: postgres, embedded: true}}}
"""

ALL = [
    'fs.*: "/workspace/**"',
    'state.*: "**"',
    "sql.*: {database: shop}",
    'messages.*: "*"',
    'memory.*: "**"',
    'artifacts.*: "*"',
]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with scene_on(None, config=CONFIG) as scene:
        with shop(scene) as connection:
            connection.execute("create table stock (id int primary key, name text not null)")
        yield scene


def shop(scene: Scene) -> psycopg.Connection[Any]:
    """A connection of our own to the target, beside the kernel's."""
    return psycopg.connect(EmbeddedPostgres(scene.kernel.data).dsn("shop", "shop"), autocommit=True)


def stock(scene: Scene) -> dict[int, str]:
    with shop(scene) as connection:
        return dict(connection.execute("select id, name from stock order by id").fetchall())


def name(held: Held, number: int, text: str) -> None:
    held.rf.sql.execute("shop", f"update stock set name = '{text}' where id = {number}")


def now() -> str:
    return datetime.now(UTC).isoformat()


def back_all(scene: Scene, to: str, *more: str, expect: int = 0) -> dict[str, Any]:
    done = console("rollback", "--all", "--to", to, "--json", "--data", str(scene.kernel.data), *more)
    assert done.returncode == expect, done.stderr
    return {document["agent"]: document for document in json.loads(done.stdout)}


def rolled(held: Held, to: str | int) -> dict[str, Any]:
    held.disconnect()
    return held.operator.ask("Rollback", agent=held.id, to=str(to))


def told(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (o["id"], o["action"], o["detail"].partition(" ")[0])
        for o in document["others"]
        if o["kind"] == "reader"
    ]


def kept(scene: Scene, key: str) -> Any:
    rows = scene.sql("select value from state where key = %s", key)
    return json.loads(rows[0][0]) if rows and rows[0][0] is not None else None


def test_what_two_did_in_turn_goes_back_in_the_reverse_order(scene: Scene) -> None:
    ann = scene.hold(name="ann", allow=ALL, files={"f": "old"})
    bob = scene.hold(name="bob", allow=ALL, files={"f": "old"})
    with shop(scene) as connection:
        connection.execute("insert into stock values (1, 'zero'), (2, 'zero')")
    ann.rf.state.put("turn", 0)
    moment = now()
    # Each changes what the other has changed: a key, a row, and two messages that were received crosswise.
    for number, one in enumerate((ann, bob, ann, bob, ann), 1):
        one.rf.state.put("turn", number)
        name(one, 1, f"by {number}")
        one.rf.fs.write_text("f", f"new {number}")
    name(bob, 2, "by bob")
    ann.rf.messages.send(bob.id, "to bob")
    received = bob.rf.messages.receive(timeout_s=0)
    assert received is not None
    bob.rf.messages.send(ann.id, "to ann")
    assert ann.rf.messages.receive(timeout_s=0) is not None
    ann.rf.memory.append("a thought", space="both")
    # And a row that is as before by itself.
    ann.rf.sql.execute("shop", "insert into stock values (3, 'short')")
    bob.rf.sql.execute("shop", "delete from stock where id = 3")
    between = now()
    ends = {one.id: str(one.last()["step"]) for one in (ann, bob)}
    for one in (ann, bob):
        one.disconnect()
    preview = back_all(scene, moment, "--preview")
    assert set(preview) == {ann.id, bob.id}
    assert stock(scene) == {1: "by 5", 2: "by bob"}
    done = back_all(scene, moment)
    for one in done.values():
        assert (one["conflicts"], one["not_undoable"], one["state"]) == ([], [], "paused")
    assert {agent: one["changes"] for agent, one in done.items()} == {
        agent: one["changes"] for agent, one in preview.items()
    }
    assert (kept(scene, "turn"), stock(scene)) == (0, {1: "zero", 2: "zero"})
    assert [(one.live / "f").read_text() for one in (ann, bob)] == ["old", "old"]
    assert rows_of(ann) == rows_of(bob) == []
    # From the branch that was left, what an agent had itself written is shown as it stood and as it stands.
    rows = [("modified", "1", "by 5", "zero"), ("modified", "2", "by bob", "zero")]
    assert (rows_of(ann, ends[ann.id]), rows_of(bob, ends[bob.id])) == (rows[:1], rows)
    waiting = "select count(*) from messages m join agents a on a.key = m.recipient where a.id = any(%s) and m.voided_at is null"
    assert scene.sql(waiting, [ann.id, bob.id]) == [(0,)]
    # Also forward again: to a moment on the branches that were left.
    back_all(scene, between)
    started = [("modified", "1", "zero", "by 5"), ("modified", "2", "zero", "by bob")]
    assert (rows_of(ann), rows_of(bob)) == (started[:1], started)
    assert (kept(scene, "turn"), stock(scene)) == (5, {1: "by 5", 2: "by bob"})
    assert [(one.live / "f").read_text() for one in (ann, bob)] == ["new 5", "new 4"]
    assert scene.operator.ask("AuditVerify")["ok"]
    with shop(scene) as connection:
        connection.execute("delete from stock")


def rows_of(held: Held, start: str = "") -> list[tuple[str, str, Any, Any]]:
    asked: dict[str, Any] = {"agent": held.id, "from": start}
    found = held.operator.ask("Diff", **asked)["rows"]
    return [
        (one["kind"], one["target"].rpartition("=")[2], one["before"]["name"], one["after"]["name"])
        for one in found
    ]


def test_who_left_all_to_another_ones_part_goes_forward_too(scene: Scene) -> None:
    """What it had written another one wrote after it, and put back."""
    ann, bob = scene.hold(name="ann", allow=ALL), scene.hold(name="bob", allow=ALL)
    moment = now()
    bob.rf.state.put("last", "bob")
    ann.rf.state.put("last", "ann")
    between = now()
    for one in (ann, bob):
        one.disconnect()
    assert set(back_all(scene, moment)) == {ann.id, bob.id}
    assert back_all(scene, moment) == {}
    assert set(back_all(scene, between)) == {ann.id, bob.id}
    assert kept(scene, "last") == "ann"
    assert back_all(scene, between) == {}
    # Its program finds its own past there.
    bob.operator.ask("Start", agent=bob.id)
    bob.again()
    bob.rf.state.put("last", "bob")
    assert kept(scene, "last") == "ann"


def keys_of(held: Held, start: str = "") -> list[tuple[str, str, Any, Any]]:
    asked: dict[str, Any] = {"agent": held.id, "from": start}
    found = held.operator.ask("Diff", **asked)["keys"]
    return [(one["key"], one["kind"], one["before"], one["after"]) for one in found]


def test_what_went_back_together_differs_in_nothing(scene: Scene) -> None:
    ann, bob = scene.hold(name="ann", allow=ALL), scene.hold(name="bob", allow=ALL)
    moment = now()
    for _ in range(3):
        for one in (ann, bob):
            one.rf.state.update("q/x", lambda value: (value or 0) + 1)
    for one in (ann, bob):
        one.rf.state.put(f"q/{one.id}", 1)
    # This one is as before by itself, so that the rollback writes no version of it.
    ann.rf.state.put("q/gone", 1)
    bob.rf.state.delete("q/gone")
    for one in (ann, bob):
        one.disconnect()
    steps = {one.id: str(one.last()["step"]) for one in (ann, bob)}
    between = now()
    back_all(scene, moment)
    assert kept(scene, "q/x") is None
    assert keys_of(ann) == keys_of(bob) == []
    # From the branch that was left the key is gone for both, whoever of them put it back.
    for one in (ann, bob):
        gone = [(f"q/{one.id}", "removed", 1, None), ("q/x", "removed", 6, None)]
        assert keys_of(one, steps[one.id]) == gone
    back_all(scene, between)
    assert kept(scene, "q/x") == 6
    for one in (ann, bob):
        assert keys_of(one) == [(f"q/{one.id}", "created", None, 1), ("q/x", "created", None, 6)]


def test_one_alone_never_takes_the_others_work(scene: Scene) -> None:
    """Two agents on one table and one key; the file tree is changed by another program."""
    ann = scene.hold(name="ann", allow=ALL, files={"f": "old", "g": "old"})
    bob = scene.hold(name="bob", allow=ALL)
    with shop(scene) as connection:
        connection.execute("insert into stock values (1, 'zero'), (2, 'zero'), (3, 'zero')")
    ann.rf.state.put("mixed", "ann 1")
    ann.rf.state.put("own", "ann")
    name(ann, 1, "ann 1")
    name(ann, 2, "ann")
    ann.rf.fs.write_text("f", "ann 1")
    ann.rf.fs.write_text("g", "ann")
    ann.rf.fs.write_text("h", "ann 1")
    # The other one's work lies between two writes of the one that goes back.
    (ann.live / "h").write_text("by another program")
    ann.rf.fs.write_text("h", "ann 2")
    bob.rf.state.put("mixed", "bob")
    name(bob, 1, "bob")
    name(bob, 3, "bob")
    ann.rf.state.put("mixed", "ann 2")
    name(ann, 1, "ann 2")
    name(ann, 3, "ann")
    (ann.live / "f").write_text("by another program")
    done = rolled(ann, 0)
    assert {c["target"] for c in done["conflicts"]} == {
        "mixed",
        "shop/stock id=1",
        "/workspace/f",
        "/workspace/h",
    }
    assert (kept(scene, "mixed"), kept(scene, "own")) == ("ann 2", None)
    # What only ann changed is back, and of the third row so is what bob had left there.
    assert stock(scene) == {1: "ann 2", 2: "zero", 3: "bob"}
    assert [(ann.live / path).read_text() for path in ("f", "g", "h")] == [
        "by another program",
        "old",
        "ann 2",
    ]
    # The other one goes back with all that is its own now.
    rolled(bob, 0)
    assert stock(scene) == {1: "ann 2", 2: "zero", 3: "zero"}
    with shop(scene) as connection:
        connection.execute("delete from stock")


def test_one_after_the_other_in_the_reverse_order_leaves_no_conflict(scene: Scene) -> None:
    ann, bob = scene.hold(name="ann", allow=ALL), scene.hold(name="bob", allow=ALL)
    ann.rf.state.put("after", "ann")
    bob.rf.state.put("after", "bob")
    assert rolled(bob, 0)["conflicts"] == []
    assert kept(scene, "after") == "ann"
    assert rolled(ann, 0)["conflicts"] == []
    assert kept(scene, "after") is None


def test_who_read_what_is_undone_is_listed_and_told(scene: Scene) -> None:
    ann = scene.hold(name="ann", allow=ALL)
    reader = scene.hold(name="reader", allow=ALL)
    early = scene.hold(name="early", allow=ALL)
    with shop(scene) as connection:
        connection.execute("insert into stock values (7, 'zero')")
    ann.rf.state.put("read", "before")
    early.rf.state.get("read")
    cut = ann.last()["step"]
    ann.rf.state.put("read", "after")
    name(ann, 7, "after")
    ann.rf.memory.append("zanzibar is near", space="team")
    assert reader.rf.state.get("read") == "after"
    reader.rf.sql.query("shop", "select name from stock")
    reader.rf.memory.search("zanzibar", space="team")
    ann.disconnect()
    preview = ann.operator.ask("Rollback", agent=ann.id, to=str(cut), preview=True)
    done = rolled(ann, cut)
    assert told(preview) == told(done) == [(reader.id, "told", "state")]
    (entry,) = [o for o in done["others"] if o["kind"] == "reader"]
    assert [word.split(" ")[0] for word in entry["detail"].split(", ")] == ["state", "table", "memory"]
    message = reader.rf.messages.receive(timeout_s=0)
    assert message is not None
    assert message.sender == "kernel:rollback"
    assert message.json["rolled_back"] == {"agent": ann.id, "step": done["step"], "to_step": cut}
    assert early.rf.messages.receive(timeout_s=0) is None
    with shop(scene) as connection:
        connection.execute("delete from stock")


def test_a_child_that_was_born_after_ends_and_its_work_is_undone(scene: Scene) -> None:
    parent = scene.hold(name="parent", allow=[*ALL, 'spawn: "*"'])
    moment = now()
    child = scene.held(
        parent.rf.spawn("child", ["sh", "-c", HOLD], permissions={"allow": [{"state.*": "**"}]}).id
    )
    child.rf.state.put("family", "child")
    parent.rf.state.put("family", "parent")
    child.disconnect()
    parent.disconnect()
    done = back_all(scene, moment)
    assert list(done) == [child.id, parent.id]
    assert [(o["kind"], o["id"]) for o in done[parent.id]["others"]] == [("child", child.id)]
    assert kept(scene, "family") is None
    assert [scene.show(one)["state"] for one in (child.id, parent.id)] == ["killed", "paused"]


def test_a_late_call_goes_back_in_the_order_of_effects(scene: Scene) -> None:
    """A call that waited for a person has an early number and a late effect."""
    held = scene.hold(name="late", ask=["sql.write: {database: shop}"])
    with shop(scene) as connection:
        connection.execute("insert into stock values (9, 'zero')")
    stream = held.stream()
    for lane, text in (("0.1", "late"), ("0.2", "early")):
        statement = f"update stock set name = '{text}' where id = 9"
        said = {"database": "shop", "parameters": [], "statement": statement}
        stream.post("sql.write", json.dumps(said, separators=(",", ":")).encode(), lane=lane, step=0)
    eventually(lambda: len(waiting(held)) == 2, "nobody is asked")
    first, second = sorted(waiting(held), key=lambda one: one["step"])
    for asked in (second, first):
        held.operator.ask("Approve", id=asked["id"])
        eventually(lambda asked=asked: outcome(held, asked["step"]) == "ok", "an approved call did not run")
    stream.close()
    changed = stock(scene)[9]
    assert changed != "zero"
    done = rolled(held, 0)
    assert (done["conflicts"], stock(scene)[9]) == ([], "zero")
    rolled(held, done["point"])
    assert stock(scene)[9] == changed


def waiting(held: Held) -> list[dict[str, Any]]:
    return held.operator.ask("Approvals", agent=held.id)["approvals"]


def outcome(held: Held, step: int) -> str:
    return next(s["outcome"] for s in held.steps() if s["step"] == step)
