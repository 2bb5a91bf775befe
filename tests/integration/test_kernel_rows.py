"""Rows that a thread inserted itself: what `created` says of them, for every row of a statement, in the target's transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, LiteralString

import psycopg
import pytest
from ringfence.agent import Denied
from ringfence.kernel.postgres import EmbeddedPostgres
from support.kernels import eventually
from support.scenes import Held, Scene, scene_on

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec: {resources: {shop: {type: postgres, embedded: true}}}
"""
ALLOW = ["sql.*: {database: shop}"]
WHEN = "when: [{action: sql.write, if: {created: false}, then: %s}]"


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with scene_on(None, config=CONFIG) as scene:
        yield scene


class Admin:
    """Somebody else on the same database; connected anew for each statement, for its server may have been started anew."""

    def __init__(self, scene: Scene) -> None:
        self._dsn = EmbeddedPostgres(scene.kernel.data).dsn("shop", "shop")

    def execute(self, statement: LiteralString) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture
def admin(scene: Scene) -> Admin:
    """In tables with one row of theirs."""
    admin = Admin(scene)
    admin.execute("drop table if exists stock, twin")
    admin.execute(
        "create table stock (id int primary key, n int); create table twin (id int primary key, n int)"
    )
    admin.execute("insert into stock values (0, 0); insert into twin values (0, 0)")
    return admin


def stock(admin: Admin) -> list[tuple[Any, ...]]:
    return admin.execute("select id, n from stock order by id")


def writer(held: Held) -> Callable[[str], Any]:
    return lambda statement: held.rf.sql.execute("shop", statement)


def test_only_rows_that_the_thread_made_and_nobody_changed(scene: Scene, admin: Admin) -> None:
    held, other = (scene.hold(allow=ALLOW, more=WHEN % "deny") for _ in range(2))
    write = writer(held)
    write("insert into stock values (1, 1), (2, 2), (3, 3), (4, 4), (5, 5)")
    writer(other)("insert into stock values (9, 9)")
    for statement in (
        "delete from stock",
        "delete from stock where id in (1, 0)",
        "update stock set n = n + 1",
        "update stock set n = 7 where id = 9",
        "truncate stock",
        "delete from twin where id = 0",
        "with them as (select 0 as id) delete from stock where id in (select id from them)",
    ):
        error = held.refused(Denied, lambda statement=statement: write(statement))
        assert "did not make" in error.message, statement
    assert stock(admin) == [(0, 0), *((n, n) for n in range(1, 6)), (9, 9)]
    write("update stock set n = n * 10 where id between 1 and 3")
    write("delete from stock where id = 1")
    write("update stock set n = 0 where id = 1000")  # of no row
    # Changed by somebody else, or put there in place of its own: not as it left them.
    admin.execute("update stock set n = 33 where id = 3")
    admin.execute("delete from stock where id = 4")
    admin.execute("insert into stock values (4, 44), (1, 1)")
    for row in (1, 3, 4):
        held.refused(Denied, lambda row=row: write(f"delete from stock where id = {row}"))
    # The same value again is the row as it left it.
    admin.execute("update stock set n = 30 where id = 3")
    write("delete from stock where id in (2, 3, 5)")
    assert stock(admin) == [(0, 0), (1, 1), (4, 44), (9, 9)]
    told = held.operator.ask("PolicyExplain", agent=held.id, step=held.last()["step"])
    assert told["verdict"] == "allow"
    denied = next(step for step in held.steps() if step["outcome"] == "denied")
    told = held.operator.ask("PolicyExplain", agent=held.id, step=denied["step"])
    assert (told["verdict"], [rule["id"] for rule in told["rules"]]) == ("deny", ["w1"])


def test_rows_of_others_are_asked_about_and_its_own_are_not(scene: Scene, admin: Admin) -> None:
    held = scene.hold(allow=ALLOW, more=WHEN % "ask")
    write = writer(held)
    write("insert into stock values (1, 1), (2, 2)")
    write("update stock set n = 5 where id = 1")
    worker = held.rf.thread(lambda: write("update stock set n = n + 1"))
    eventually(lambda: bool(held.operator.ask("Approvals", agent=held.id)["approvals"]), "nothing asks")
    (approval,) = held.operator.ask("Approvals", agent=held.id)["approvals"]
    assert stock(admin) == [(0, 0), (1, 5), (2, 2)]
    held.operator.ask("Approve", id=approval["id"])
    eventually(lambda: worker.done, "the approved call does not end")
    assert worker.result().row_count == 3
    assert stock(admin) == [(0, 1), (1, 6), (2, 3)]
    # What a person let it change did not become its own by that.
    write("delete from stock where id = 1")
    worker = held.rf.thread(lambda: write("delete from stock where id = 0"))
    eventually(lambda: bool(held.operator.ask("Approvals", agent=held.id)["approvals"]), "nothing asks")
    (approval,) = held.operator.ask("Approvals", agent=held.id)["approvals"]
    held.operator.ask("Deny", id=approval["id"], reason="no")
    eventually(lambda: worker.done, "the denied call does not end")
    with pytest.raises(Denied):
        worker.result()
    assert stock(admin) == [(0, 1), (2, 3)]


def test_a_condition_on_what_it_made_itself(scene: Scene, admin: Admin) -> None:
    held = scene.hold(allow=ALLOW, more="when: [{action: sql.write, if: {created: true}, then: deny}]")
    write = writer(held)
    admin.execute("insert into stock values (1, 1)")
    write("update stock set n = 2 where id = 1")
    # Inserting changes no row of anybody: there is none that it did not make.
    held.refused(Denied, lambda: write("insert into stock values (2, 2)"))
    assert stock(admin) == [(0, 0), (1, 2)]


def test_what_it_made_is_known_after_a_restart_and_not_after_a_rollback(scene: Scene, admin: Admin) -> None:
    held = scene.hold(allow=ALLOW, more=WHEN % "deny")
    write = writer(held)
    write("insert into stock values (1, 1)")
    made = held.last()["step"]
    write("insert into stock values (2, 2)")
    asks = scene.hold(allow=ALLOW, more=WHEN % "ask")
    asks.rf.thread(lambda: writer(asks)("update stock set n = 8 where id = 0"))
    eventually(lambda: bool(asks.operator.ask("Approvals", agent=asks.id)["approvals"]), "nothing asks")
    (approval,) = asks.operator.ask("Approvals", agent=asks.id)["approvals"]
    for one in (held, asks):
        one.disconnect()
    scene.kernel.kill()
    scene.kernel.start()
    # It waits on under the same approval, and runs once when a person lets it.
    assert [one["id"] for one in scene.operator.ask("Approvals")["approvals"]] == [approval["id"]]
    scene.operator.ask("Approve", id=approval["id"])
    eventually(lambda: (0, 8) in stock(admin), "the approved call does not run")
    held = held.again()
    write = writer(held)
    for row in (1, 2):  # answered from the record
        write(f"insert into stock values ({row}, {row})")
    write("update stock set n = 11 where id = 1")
    held.refused(Denied, lambda: write("delete from stock where id = 0"))
    held.operator.ask("Rollback", agent=held.id, to=str(made - 1), start=True)
    held = held.again()
    admin.execute("insert into stock values (1, 1)")
    held.refused(Denied, lambda: writer(held)("delete from stock where id = 1"))


def test_a_table_is_its_own_only_with_all_its_rows(scene: Scene, admin: Admin) -> None:
    held = scene.hold(allow=ALLOW, more=WHEN % "deny")
    write = writer(held)
    admin.execute("delete from twin; drop table if exists mine")
    for table in ("stock", "twin"):
        held.refused(Denied, lambda table=table: write(f"drop table {table}"))
    write("create table mine (id int primary key)")
    write("insert into mine values (1)")
    admin.execute("insert into mine values (2)")
    held.refused(Denied, lambda: write("drop table mine"))
    admin.execute("delete from mine where id = 2")
    write("drop table mine")
    assert admin.execute("select to_regclass('mine')") == [(None,)]


def test_tables_go_back_and_a_column_is_asked_about(scene: Scene, admin: Admin) -> None:
    held = scene.hold(allow=ALLOW)
    write = writer(held)
    admin.execute("drop table if exists mine")
    write("create table mine (id int primary key)")
    write("drop table stock")
    step = held.last()
    assert (step["effect"], step["verdict"], step["outcome"]) == ("DESTROY", "allow", "ok")
    worker = held.rf.thread(lambda: write("alter table twin drop column n"))
    eventually(lambda: bool(held.operator.ask("Approvals", agent=held.id)["approvals"]), "nothing asks")
    (approval,) = held.operator.ask("Approvals", agent=held.id)["approvals"]
    assert approval["detail"]["undo"].startswith("can't be undone: the column `n` of `twin` goes")
    assert admin.execute("select n from twin") == [(0,)]
    held.operator.ask("Approve", id=approval["id"])
    eventually(lambda: worker.done, "the approved call does not end")
    worker.result()
    assert admin.execute("select * from twin") == [(0,)]
    found = held.operator.ask("Diff", agent=held.id)
    assert [(row["target"], row["kind"]) for row in found["rows"]] == [
        ("shop/mine", "created"),
        ("shop/stock", "removed"),
    ]
    preview = held.operator.ask("Rollback", agent=held.id, to="0", preview=True)
    done = held.operator.ask("Rollback", agent=held.id, to="0")
    for told in (preview, done):
        assert {(one["kind"], one["target"], one["action"]) for one in told["changes"]} == {
            ("table", "shop/stock", "create"),
            ("table", "shop/mine", "remove"),
        }
        assert told["conflicts"] == []
        assert [(one["resource"], one["effect"]) for one in told["not_undoable"]] == [
            ("shop/twin", "DESTROY")
        ]
    assert stock(admin) == [(0, 0)]
    assert admin.execute("select to_regclass('mine')") == [(None,)]
    # And forth: the rollback has a point of its own.
    held.operator.ask("Rollback", agent=held.id, to=str(step["step"]))
    assert admin.execute("select to_regclass('stock'), to_regclass('mine')::text") == [(None, "mine")]


def test_asking_without_a_call_knows_no_rows(scene: Scene) -> None:
    held = scene.hold(allow=ALLOW, more=WHEN % "deny")
    told = held.operator.ask("PolicyCanI", agent=held.id, action="sql.write", resource="shop/stock")
    assert told["verdict"] == "deny"
