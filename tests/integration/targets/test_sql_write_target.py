"""sql.write against a real PostgreSQL: what it changes, what it keeps, what it refuses, and how it is recovered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.rules import parse_rule
from ringfence.syscalls import sql_write
from ringfence.syscalls.base import Effect
from ringfence.syscalls.errors import (
    CallFailed,
    Denied,
    InvalidRequest,
    Revoked,
    SnapshotFailed,
)

if TYPE_CHECKING:
    from conftest import Database


def allow(*rules: str) -> AgentPolicy:
    return AgentPolicy("agent", [(f"g{n}", parse_rule(rule)) for n, rule in enumerate(rules)], [], [])


BEFORE = ["(1,nut,5,0.10)", "(2,bolt,7,0.20)", "(3,cog,,3.00)"]


async def test_an_update_keeps_the_rows_before_and_after(stock: Database) -> None:
    result = await stock.write("update stock set n = n + %s, name = upper(name) where id <= %s", 10, 2)
    assert (result.row_count, result.columns, result.rows) == (2, [], [])
    assert stock.dump("stock") == ["(1,NUT,15,0.10)", "(2,BOLT,17,0.20)", "(3,cog,,3.00)"]
    record = stock.record()
    change = record["changes"][0]
    assert (record["kind"], record["resource"], record["statement"]) == ("sql", "crm", "update")
    assert (change["columns"], change["key"]) == (["id", "name", "n", "price"], ["id"])
    assert sorted(change["before"]) == [["1", "nut", "5", "0.10"], ["2", "bolt", "7", "0.20"]]
    assert sorted(change["after"]) == [["1", "NUT", "15", "0.10"], ["2", "BOLT", "17", "0.20"]]


async def test_a_delete_and_a_truncate_keep_the_rows(stock: Database) -> None:
    result = await stock.write("delete from stock as s where s.n > %s", 5)
    assert result.row_count == 1
    assert stock.record()["changes"][0]["before"] == [["2", "bolt", "7", "0.20"]]
    assert (await stock.write("truncate table stock")).row_count == 2
    assert len(stock.record()["changes"][0]["before"]) == 2
    assert stock.dump("stock") == []


async def test_an_insert_keeps_what_it_inserted(stock: Database) -> None:
    result = await stock.write("insert into stock (id, name) values (%s,%s), (9, 'pin')", 8, "pan")
    assert result.row_count == 2
    assert sorted(stock.record()["changes"][0]["after"]) == [
        ["8", "pan", None, None],
        ["9", "pin", None, None],
    ]
    copied = await stock.write("insert into stock (id, name) select id + 100, name from stock where id < 3")
    assert copied.row_count == 2
    nothing = await stock.write("insert into stock values (1, 'x') on conflict (id) do nothing returning id")
    assert (nothing.row_count, nothing.rows) == (0, [])


async def test_returning_answers_what_was_asked(stock: Database) -> None:
    update = await stock.write("update stock s set n = 0 where id = 1 returning s.id, price * 2 as double, n")
    assert (update.columns, update.rows) == (["id", "double", "n"], [[1, "0.20", 0]])
    every = await stock.write("delete from stock where id = 2 returning *")
    assert (every.columns, every.rows) == (["id", "name", "n", "price"], [[2, "bolt", 7, "0.20"]])
    inserted = await stock.write("insert into stock as i (id, name) values (4, 'a') returning i.name -- end")
    assert inserted.rows == [["a"]]


@pytest.mark.parametrize(
    "statement",
    [
        "with old as (select id from stock where id < 3) update stock set n = 1 where id in (select id from old)",
        "delete from only stock where id in (select max(id) from stock) or id = 1",
        'update public.stock * as "S" set n = case when "S".id = 1 then 5 else 6 end where "S".id < 3',
        "update stock set n = (n is distinct from 5)::int",
        "delete from stock /* where */ where name = 'where' or name = 'nut' -- or true",
    ],
)
async def test_forms_of_writes(stock: Database, statement: str) -> None:
    result = await stock.write(statement)
    change = stock.record()["changes"][0]
    assert result.row_count == len(change["before"]) > 0


async def test_parameters_keep_their_places(stock: Database) -> None:
    result = await stock.write(
        "with lim as (select %s::int as top) update stock set name = %s "
        "where id <= (select top from lim) and n > %s returning name || %s",
        2,
        "new",
        5,
        "!",
    )
    assert result.rows == [["new!"]]
    assert stock.dump("stock")[1] == "(2,new,7,0.20)"


async def test_the_effect_follows_the_statement(stock: Database) -> None:
    def effect(statement: str) -> Effect | None:
        return sql_write.plan(sql_write.Arguments(database="crm", statement=statement), stock.env).effect

    assert effect("insert into stock values (1)") is None
    assert effect("update stock set n = 1") is None
    assert effect("create table x (id int)") is None
    for statement in (
        "delete from stock",
        "truncate stock",
        "drop table stock",
        "alter table stock drop price",
    ):
        assert effect(statement) is Effect.DESTROY


async def test_the_order_is_copy_then_point_then_policy_then_commit(stock: Database) -> None:
    seen: list[tuple[str, bool, list[str], list[Any]]] = []

    def look(name: str) -> None:
        kept = stock.store.verify(f"p{stock.step}")
        seen.append((name, kept, stock.dump("stock"), list(call.points)))

    call, arguments = stock.prepare_write("delete from stock", on_failpoint=look)
    await sql_write.run(call, arguments)
    assert call.passed == ["before_effect", "check_live", "after_effect"]
    (first, kept, rows, points), (last, _, rows_after, _) = seen
    assert (first, kept, rows) == ("before_effect", True, BEFORE)
    assert points == [(["crm/stock"], "sql", points[0][2])]
    assert points[0][2] > 0
    assert (last, rows_after) == ("after_effect", [])


async def test_a_right_revoked_meanwhile_stops_it(stock: Database) -> None:
    with pytest.raises(Revoked):
        await stock.write("delete from stock", live_error=Revoked("gone"))
    assert stock.dump("stock") == BEFORE


async def test_questions_name_what_is_written_and_what_is_read(stock: Database) -> None:
    def asked(statement: str) -> list[tuple[str, str]]:
        plan = sql_write.plan(sql_write.Arguments(database="crm", statement=statement), stock.env)
        return [(question.action, str(question.resource)) for question in plan.questions]

    assert asked("update stock set n = 1") == [("sql.write", "crm/stock")]
    assert asked("delete from stock where id in (select id from hr.gone)") == [
        ("sql.write", "crm/stock"),
        ("sql.read", "crm/hr.gone"),
    ]
    assert asked("delete from stock returning *") == [("sql.write", "crm/stock"), ("sql.read", "crm/stock")]
    assert asked("insert into stock values (1) returning id") == [("sql.write", "crm/stock")]
    assert asked("insert into stock select * from stock") == [
        ("sql.write", "crm/stock"),
        ("sql.read", "crm/stock"),
    ]
    assert asked("truncate hr.stock") == [("sql.write", "crm/hr.stock")]


async def test_tables_read_in_a_write_are_judged_through_views(stock: Database) -> None:
    stock.run("create table secret (id int primary key); create view v as select id from secret")
    stock.run("create view own as select id from stock")
    stock.policy = allow(
        "sql.write: {database: crm, tables: [stock]}", "sql.read: {database: crm, tables: [v, own]}"
    )
    with pytest.raises(Denied):
        await stock.write("delete from stock where id in (select id from secret)")
    with pytest.raises(Denied, match="secret"):
        await stock.write("delete from stock where id in (select id from v)")
    with pytest.raises(Denied, match="stock"):
        await stock.write("delete from stock where id in (select id from own)")
    with pytest.raises(Denied):
        await stock.write("delete from secret")
    assert stock.dump("stock") == BEFORE


@pytest.mark.parametrize(
    ("setup", "statement", "error", "part"),
    [
        ("create table x (a int)", "insert into x values (1)", SnapshotFailed, "no primary key"),
        ("create view x as select * from stock", "delete from x", SnapshotFailed, "a view"),
        (
            "create table x (a int primary key) partition by range (a)",
            "delete from x",
            SnapshotFailed,
            "a partitioned table",
        ),
        (
            "create table y (a int primary key); create table x (primary key (a)) inherits (y)",
            "delete from x",
            SnapshotFailed,
            "inherit",
        ),
        (
            "create function f() returns trigger language plpgsql as 'begin return new; end'; create trigger noisy before update on stock for each row execute function f()",
            "update stock set n = 1",
            SnapshotFailed,
            "trigger `noisy`",
        ),
        (
            "create rule quiet as on delete to stock do instead nothing",
            "delete from stock",
            SnapshotFailed,
            "rule `quiet`",
        ),
        (
            "create table x (a int references stock on delete cascade)",
            "delete from stock",
            SnapshotFailed,
            "would cascade",
        ),
        (
            "create table x (a int references stock on delete set null)",
            "truncate stock",
            SnapshotFailed,
            "would set null",
        ),
        ("", "create table x as select 1 as a", InvalidRequest, "`as`"),
        ("", "drop table stock cascade", InvalidRequest, "cascade"),
        ("", "truncate stock cascade", InvalidRequest, "cascade"),
        ("", "truncate stock restart identity", InvalidRequest, "restart identity"),
        ("", "with d as (delete from stock returning *) select * from d", InvalidRequest, "inside"),
        (
            "",
            "with d as (delete from stock returning *) insert into stock select * from d",
            InvalidRequest,
            "inside",
        ),
        ("", "copy stock to program 'id'", InvalidRequest, "copy"),
        ("", "do $$ begin delete from stock; end $$", InvalidRequest, "`do`"),
        ("", "call p()", InvalidRequest, "`call`"),
        ("", "set role postgres", InvalidRequest, "`set`"),
        ("", "grant all on stock to public", InvalidRequest, "`grant`"),
        ("", "vacuum", InvalidRequest, "`vacuum`"),
        ("", "explain analyze delete from stock", InvalidRequest, "`explain`"),
        ("", "delete from stock; delete from stock", InvalidRequest, "several"),
        ("", "select * from stock", InvalidRequest, "no write"),
        ("", "delete from pg_catalog.pg_class", InvalidRequest, "system table"),
        ("", "update stock set n = pg_backend_pid()", InvalidRequest, "pg_backend_pid"),
        ("", "delete from stock where pg_sleep(10) is null", InvalidRequest, "pg_sleep"),
        ("", "insert into stock values (1, 'dup')", CallFailed, "duplicate key"),
        ("", "delete from missing", CallFailed, "does not exist"),
        ("", "update stock set missing = 1", CallFailed, "missing"),
    ],
)
async def test_what_can_not_be_undone_is_refused_by_name(
    stock: Database, setup: str, statement: str, error: type[Exception], part: str
) -> None:
    if setup:
        stock.run(setup)
    with pytest.raises(error, match=part) as caught:
        await stock.write(statement)
    assert "\n" not in str(caught.value)
    assert stock.dump("stock") == BEFORE
    assert stock.store.load(f"p{stock.step}") is None


async def test_an_update_of_a_referred_column_would_cascade(stock: Database) -> None:
    stock.run("alter table stock add unique (name)")
    stock.run("create table x (a text references stock (name) on update cascade)")
    await stock.write("update stock set n = 1 where id = 1")
    with pytest.raises(SnapshotFailed, match="would cascade"):
        await stock.write("update stock set name = 'z' where id = 1")
    assert stock.dump("stock")[0] == "(1,nut,1,0.10)"


async def test_a_constraint_checked_at_the_commit_is_an_ordinary_error(stock: Database) -> None:
    stock.run("create table x (a int primary key references stock deferrable initially deferred)")
    with pytest.raises(CallFailed, match="foreign key"):
        await stock.write("insert into x values (99)")
    assert stock.dump("x") == []
    assert stock.store.load(f"p{stock.step}") is None


async def test_a_writer_that_was_first_is_waited_for_and_seen(stock: Database) -> None:
    """Another transaction changes the row between our snapshot and our lock: we start over and see its value."""
    other = await psycopg.AsyncConnection.connect(stock.dsn)
    await other.execute("update stock set n = 100 where id = 1")

    async def release() -> None:
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        while stock.run(waiting) == [(0,)]:
            await asyncio.sleep(0)
        await other.commit()

    _, result = await asyncio.gather(
        release(), stock.write("update stock set n = n + 1 where id = 1 returning n")
    )
    await other.close()
    assert result.rows == [[101]]
    assert stock.record()["changes"][0]["before"][0][2] == "100"


async def test_defaults_that_call_functions_of_the_user_are_refused(stock: Database) -> None:
    stock.run("create function f() returns int language plpgsql as 'begin return 1; end'")
    stock.run("alter table stock add extra int default f()")
    for statement in ("insert into stock values (9, 'x')", "update stock set extra = default"):
        with pytest.raises(SnapshotFailed, match="function `f`"):
            await stock.write(statement)
    assert (await stock.write("delete from stock where id = 1")).row_count == 1
