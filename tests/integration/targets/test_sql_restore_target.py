"""Rolling back rows on a real PostgreSQL: byte for byte, all or nothing, and never over what others did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from ringfence.syscalls import sql_write
from ringfence.syscalls.base import Rerun
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import CallFailed, Conflict, SnapshotFailed
from ringfence.syscalls.sql_target.restore import plan_restore, restore, take_point
from ringfence.syscalls.sql_target.session import close_targets

if TYPE_CHECKING:
    from conftest import Database
    from ringfence.syscalls.sql_target.restore import SqlRestorePlan, SqlRestoreReport


def records(crm: Database, *, since: int = 0) -> list[dict[str, Any]]:
    """The records of the agent's writes, newest first."""
    return [crm.record(step) for step in range(crm.step, since, -1) if crm.store.load(f"p{step}") is not None]


async def plan(crm: Database, *, since: int = 0) -> SqlRestorePlan:
    return await plan_restore(crm.resource, records(crm, since=since))


async def roll_back(crm: Database, *, since: int = 0) -> SqlRestoreReport:
    return await restore(crm.resource, await plan(crm, since=since))


@pytest.fixture
def stock(crm: Database) -> Database:
    crm.run("create table stock (id int primary key, name text, n int)")
    crm.run("insert into stock values (1, 'nut', 5), (2, 'bolt', 7), (3, null, null)")
    return crm


async def test_every_kind_of_write_is_undone(stock: Database) -> None:
    before = stock.dump("stock")
    for statement in (
        "update stock set n = 100, name = 'x'",
        "delete from stock where id = 2",
        "insert into stock values (2, 'other', 1), (9, 'nine', 9)",
        "update stock set name = 'y' where id in (2, 9)",
        "truncate stock",
        "insert into stock values (1, 'again', 1)",
    ):
        await stock.write(statement)
    found = await plan(stock)
    assert [(item.key, item.action) for item in found.items] == [
        (("1",), "restore"),
        (("2",), "create"),
        (("3",), "create"),
    ]
    assert found.conflicts == ()
    report = await restore(stock.resource, found)
    assert report.items == found.items
    assert stock.dump("stock") == before


async def test_rolling_back_to_the_middle(stock: Database) -> None:
    await stock.write("update stock set n = 1 where id = 1")
    middle, step = stock.dump("stock"), stock.step
    await stock.write("update stock set n = 2 where id = 1")
    await stock.write("delete from stock")
    await roll_back(stock, since=step)
    assert stock.dump("stock") == middle


async def test_a_preview_says_what_and_changes_nothing(stock: Database) -> None:
    await stock.write("update stock set n = 1 where id = 1")
    await stock.write("insert into stock values (4)")
    stock.run("update stock set n = 2 where id = 1")
    now = stock.dump("stock")
    (by,) = stock.run("select xmin::text from stock where id = 1")[0]
    assert (await plan(stock)).describe() == [
        {"table": "crm/stock", "key": {"id": "4"}, "action": "remove"},
        {
            "table": "crm/stock",
            "key": {"id": "1"},
            "action": "conflict",
            "reason": "changed since by others; it is kept",
            "changed": ["n"],
            "transaction": by,
        },
    ]
    assert stock.dump("stock") == now


async def test_what_others_changed_is_kept(stock: Database) -> None:
    await stock.write("update stock set n = 50")
    await stock.write("insert into stock values (4, 'four'), (5, 'five')")
    await stock.write("delete from stock where id = 2")
    stock.run("update stock set name = 'theirs' where id in (1, 4)")
    stock.run("insert into stock values (2, 'theirs', 0)")
    stock.run("delete from stock where id = 5")
    found = await plan(stock)
    assert [item.key for item in found.items] == [("3",)]
    assert [conflict.key for conflict in found.conflicts] == [("1",), ("2",), ("4",)]
    await restore(stock.resource, found)
    assert stock.dump("stock") == ["(1,theirs,50)", "(2,theirs,0)", "(3,,)", "(4,theirs,)"]


async def test_a_write_that_changed_nothing_of_a_row_has_nothing_to_undo_there(stock: Database) -> None:
    await stock.write("update stock set n = 5 where id < 3")
    stock.run("update stock set name = 'theirs' where id = 2")
    theirs = stock.dump("stock")
    await stock.write("delete from stock where id = 1")
    await stock.write("update stock set n = 6 where id = 2")
    only = await plan_restore(stock.resource, [stock.record(1)])
    assert only.items == ()
    assert [conflict.key for conflict in only.conflicts] == [("2",)]
    await stock.write("update stock set n = n")
    found = await plan_restore(stock.resource, [stock.record(4)])
    assert (found.items, found.conflicts) == ((), ())
    await roll_back(stock, since=1)
    assert stock.dump("stock") == theirs


async def test_what_others_changed_between_two_writes_is_kept(stock: Database) -> None:
    await stock.write("update stock set n = 50 where id = 1")
    stock.run("update stock set name = 'theirs' where id = 1")
    await stock.write("update stock set n = 60 where id = 1")
    found = await plan(stock)
    assert found.items == ()
    assert "between two" in found.conflicts[0].reason


async def test_a_row_changed_after_the_plan_is_kept_and_reported(stock: Database) -> None:
    await stock.write("update stock set n = 50")
    found = await plan(stock)
    stock.run("update stock set n = 51 where id = 2")
    report = await restore(stock.resource, found)
    assert [conflict.key for conflict in report.conflicts] == [("2",)]
    assert stock.dump("stock") == ["(1,nut,5)", "(2,bolt,51)", "(3,,)"]


async def test_it_can_be_run_again(stock: Database) -> None:
    before = stock.dump("stock")
    await stock.write("delete from stock")
    found = await plan(stock)
    await restore(stock.resource, found)
    report = await restore(stock.resource, found)
    assert (report.items, report.conflicts) == ((), ())
    assert (await plan(stock)).items == ()
    assert stock.dump("stock") == before


async def test_the_point_from_just_before_undoes_the_rollback(stock: Database) -> None:
    await stock.write("update stock set n = 50 where id = 1")
    await stock.write("delete from stock where id = 2")
    await stock.write("insert into stock values (7, 'seven')")
    after = stock.dump("stock")
    found = await plan(stock)
    point = await take_point(stock.resource, found)
    stock.store.put_record("before", point)
    await restore(stock.resource, found)
    assert stock.dump("stock") != after
    manifest = stock.store.load("before")
    assert manifest is not None
    await restore(stock.resource, await plan_restore(stock.resource, [manifest.extra]))
    assert stock.dump("stock") == after


async def test_a_write_that_never_committed_is_no_reason_for_anything(stock: Database) -> None:
    await stock.write("update stock set n = 50 where id = 1")
    call, _ = await stock.crash("update stock set n = 60 where id = 1", "before_effect")
    assert stock.store.load(f"p{call.step}") is not None
    found = await plan(stock)
    assert (len(found.items), found.conflicts) == (1, ())
    await restore(stock.resource, found)
    assert stock.dump("stock")[0] == "(1,nut,5)"


async def test_a_recovered_write_is_undone_like_any_other(stock: Database) -> None:
    before = stock.dump("stock")
    call, arguments = await stock.crash("delete from stock", "after_effect")
    assert not isinstance(await sql_write.recover(call, arguments), Rerun)
    await roll_back(stock)
    assert stock.dump("stock") == before


async def test_generated_and_identity_columns_are_restored(crm: Database) -> None:
    crm.run(
        "create table t (id int generated always as identity primary key, serial serial, n int,"
        " twice int generated always as (n * 2) stored, other int generated by default as identity)"
    )
    crm.run("insert into t (n) values (1), (2)")
    before = crm.dump("t")
    await crm.write("update t set n = 10 returning *")
    await crm.write("delete from t where id = 1")
    await crm.write("insert into t (n) values (5)")
    await roll_back(crm)
    assert crm.dump("t") == before


async def test_odd_names_and_compound_keys(crm: Database) -> None:
    crm.run('create schema "Odd Schema"')
    crm.run(
        'create table "Odd Schema"."Sel""ect" ("a b" text, "Key" int, "val%" text, primary key ("Key", "a b"))'
    )
    crm.run(
        "insert into \"Odd Schema\".\"Sel\"\"ect\" values ('x,y', 1, 'one'), ('x', 1, 'two'), ('', 2, null)"
    )
    before = crm.dump('"Odd Schema"."Sel""ect"')
    await crm.write('update "Odd Schema"."Sel""ect" set "val%%" = %s where "Key" = %s', "new", 1)
    await crm.write('delete from "Odd Schema"."Sel""ect" as "T" where "T"."a b" = \'\'')
    await roll_back(crm)
    assert crm.dump('"Odd Schema"."Sel""ect"') == before


async def test_foreign_keys_between_the_tables(crm: Database) -> None:
    crm.run("create table parent (id int primary key, up int references parent)")
    crm.run("create table child (id int primary key, parent int not null references parent)")
    crm.run("insert into parent values (1, null), (2, 1), (3, 2)")
    crm.run("insert into child values (10, 1), (20, 3)")
    before = crm.dump("parent") + crm.dump("child")
    await crm.write("delete from child where parent = 3")
    await crm.write("delete from parent where id in (2, 3)")
    await crm.write("insert into parent values (7, 1)")
    await crm.write("update child set parent = 7 where id = 10")
    await crm.write("insert into child values (30, 7)")
    await roll_back(crm)
    assert crm.dump("parent") + crm.dump("child") == before


async def test_unique_values_that_moved_between_rows(crm: Database) -> None:
    crm.run("create table t (id int primary key, email text unique)")
    crm.run("insert into t values (1, 'a'), (2, 'b')")
    before = crm.dump("t")
    await crm.write("delete from t where id = 1")
    await crm.write("insert into t values (3, 'a')")
    await roll_back(crm)
    assert crm.dump("t") == before


async def test_a_refusal_of_the_target_leaves_everything_as_it_was(crm: Database) -> None:
    crm.run("create table t (id int primary key, email text unique); create table u (id int primary key)")
    crm.run("insert into t values (1, 'a'); insert into u values (1)")
    await crm.write("delete from u")
    await crm.write("delete from t")
    crm.run("insert into t values (99, 'a')")
    with pytest.raises(CallFailed, match=r"can't be put back.*duplicate key.*nothing was changed"):
        await roll_back(crm)
    assert crm.dump("t") == ["(99,a)"]
    assert crm.dump("u") == []


async def test_rows_of_others_are_not_lost_by_a_cascade(crm: Database) -> None:
    crm.run("create table parent (id int primary key)")
    await crm.write("insert into parent values (1), (2)")
    crm.run("create table child (id int primary key, parent int references parent on delete cascade)")
    crm.run("insert into child values (10, 1)")
    with pytest.raises(Conflict, match="would cascade"):
        await roll_back(crm)
    assert (crm.dump("parent"), crm.dump("child")) == (["(1)", "(2)"], ["(10,1)"])
    crm.run("delete from child")
    await roll_back(crm)
    assert crm.dump("parent") == []


async def test_a_table_that_changed_its_shape_is_kept(stock: Database) -> None:
    await stock.write("update stock set n = 50")
    stock.run("create table other (id int primary key); insert into other values (1)")
    await stock.write("delete from other")
    stock.run("alter table stock add extra int")
    found = await plan(stock)
    assert [(str(conflict.table), conflict.key) for conflict in found.conflicts] == [("stock", ())]
    assert "columns" in found.conflicts[0].reason
    await restore(stock.resource, found)
    assert stock.dump("other") == ["(1)"]
    stock.run("drop table stock")
    assert len((await plan(stock)).conflicts) == 1


async def test_a_trigger_that_appeared_since_stops_the_restore(stock: Database) -> None:
    await stock.write("update stock set n = 50")
    found = await plan(stock)
    stock.run("create function f() returns trigger language plpgsql as 'begin new.n = 1; return new; end'")
    stock.run("create trigger late before update on stock for each row execute function f()")
    with pytest.raises(SnapshotFailed, match="trigger `late`"):
        await restore(stock.resource, found)
    assert (await plan(stock)).items == ()


async def test_another_database_is_not_touched(stock: Database, target_server: Any) -> None:
    await stock.write("delete from stock")
    name = target_server.create()
    try:
        moved = SqlResource(name="crm", dsn=target_server.dsn(name))
        with pytest.raises(Conflict, match="another database"):
            await plan_restore(moved, records(stock))
        with pytest.raises(SnapshotFailed, match="can't be rolled back"):
            await plan_restore(SqlResource(name="hr", dsn=stock.dsn), records(stock))
        with pytest.raises(SnapshotFailed, match="can't be read"):
            await plan_restore(stock.resource, [{"kind": "sql"}])
    finally:
        await close_targets()
        target_server.drop(name)
