"""Tables that are made and dropped on a real PostgreSQL: behind a copy of all that they are, and back again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from ringfence.syscalls import sql_write
from ringfence.syscalls.base import Effect, Rerun
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import (
    CallFailed,
    Conflict,
    Denied,
    InvalidRequest,
    NoSuchResource,
    SnapshotFailed,
)
from ringfence.syscalls.sql_target.restore import plan_restore, restore, take_point
from ringfence.syscalls.sql_target.session import close_targets
from support.tables import Dump, dump
from support.targets import policy_of

if TYPE_CHECKING:
    from conftest import Database
    from ringfence.syscalls.sql_target.restore import SqlRestorePlan

MORE = """
select c.relname, c.reloptions::text, obj_description(c.oid, 'pg_class'), pg_get_userbyid(c.relowner),
  (select array_agg(a::text order by a::text) from unnest(coalesce(c.relacl, acldefault(case c.relkind when 'S' then 's' else 'r' end::"char", c.relowner))) a)::text,
  (select array_agg((attname, attstorage, attacl::text, attcollation, col_description(c.oid, attnum))::text order by attnum)
    from pg_attribute where attrelid = c.oid and attnum > 0 and not attisdropped)::text,
  (select array_agg((conname, obj_description(k.oid, 'pg_constraint'))::text order by conname) from pg_constraint k where conrelid = c.oid)::text,
  (select (seqtypid::regtype, seqstart, seqincrement, seqmin, seqmax, seqcache, seqcycle)::text from pg_sequence where seqrelid = c.oid),
  (select (refobjid::regclass, attname)::text from pg_depend d join pg_attribute on (attrelid, attnum) = (refobjid, refobjsubid) where d.objid = c.oid and d.classid = 'pg_class'::regclass and deptype in ('a', 'i') and c.relkind = 'S')
from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname in ('public', 'Odd one') order by 1
"""
FULL = """
create schema "Odd one"; create type mood as enum ('so so', 'fine');
create table "Odd one"."up" (code text primary key); insert into "Odd one"."up" values ('a'), ('b');
create table "Odd one"."Whole t" (
  id int generated always as identity (start 5 increment 5) primary key,
  "gone" int, "Ser" bigserial, name varchar(20) collate "C" not null default 'it''s',
  m mood, up text references "Odd one"."up" on delete cascade deferrable initially deferred, self int references "Odd one"."Whole t",
  twice text generated always as (name || name) stored, at timestamptz default now(), tags text[], "n\\x" numeric(8,2),
  constraint "odd c" check (id > 0), unique (name, m)
) with (fillfactor = 70, autovacuum_enabled = false);
alter table "Odd one"."Whole t" drop column gone, alter column tags set storage external, alter column name set statistics 7;
create index "Part" on "Odd one"."Whole t" (lower(name) desc nulls last) include (m) where name <> 'x';
create unique index on "Odd one"."Whole t" (at, id);
insert into "Odd one"."Whole t" (name, m, up, self, tags, "n\\x") values
  ('one', 'fine', 'a', null, array['a,b', null, '"'], 1.50), ('two', 'so so', 'b', 5, '{}', 'NaN'), ('thrée', null, null, null, null, null);
delete from "Odd one"."Whole t" where id = 15;
comment on table "Odd one"."Whole t" is 'it''s all'; comment on column "Odd one"."Whole t".name is 'a name';
comment on constraint "odd c" on "Odd one"."Whole t" is 'odd'; comment on index "Odd one"."Part" is 'part';
comment on sequence "Odd one"."Whole t_Ser_seq" is 'counts';
"""
LATE = 'alter table "Odd one"."Whole t" add constraint late check (id > 5) not valid;'

NOTHING = "create function f() returns trigger language plpgsql as 'begin return null; end'"


def look(crm: Database) -> tuple[Dump, list[Any]]:
    """All that stands there, as an independent walker sees it."""
    with psycopg.connect(crm.dsn) as connection:
        found = dump(connection)
    return found, crm.run(MORE.replace("%", "%%"))


async def plan(crm: Database, *, since: int = 0) -> SqlRestorePlan:
    steps = [step for step in range(crm.step, since, -1) if crm.store.load(f"p{step}") is not None]
    return await plan_restore(crm.resource, [crm.store.require(f"p{step}").extra for step in steps])


async def undo(crm: Database, *, since: int = 0) -> SqlRestorePlan:
    found = await plan(crm, since=since)
    report = await restore(crm.resource, found)
    assert (len(report.items), len(report.tables)) == (len(found.items), len(found.tables))
    assert report.conflicts == ()
    return found


async def test_a_whole_table_is_dropped_and_comes_back(crm: Database) -> None:
    role = crm.run("select 'clerk_' || substr(md5(current_database()), 1, 8)")[0][0]
    crm.run(FULL + f'create role {role}; create role "{role} 2"')
    try:
        crm.run(
            f'{LATE} grant select, insert on "Odd one"."Whole t" to {role}; grant update (name) on "Odd one"."Whole t" to "{role} 2" with grant option;'
            f'grant usage on "Odd one"."Whole t_Ser_seq" to {role}; grant select on "Odd one"."Whole t" to public'
        )
        before = look(crm)
        await crm.write('drop table "Odd one"."Whole t"')
        assert ("Odd one", "Whole t") not in look(crm)[0].rows
        found = await undo(crm)
        assert found.describe() == [
            {"table": "crm/Odd one.Whole t", "key": {}, "action": "create", "kind": "table"}
        ]
        assert look(crm) == before
        # Where its sequences stood they stand again.
        crm.run("""insert into "Odd one"."Whole t" (name) values ('next')""")
        assert crm.run("""select id, "Ser" from "Odd one"."Whole t" where name = 'next'""") == [(20, 4)]
    finally:
        crm.run(f'drop owned by {role}, "{role} 2"; drop role {role}, "{role} 2"')


async def test_a_role_with_ordinary_rights_is_enough(crm: Database) -> None:
    role = crm.run("select 'clerk_' || substr(md5(current_database()), 1, 8)")[0][0]
    crm.run(
        f"create role {role} login; grant create on schema public to {role}; create table theirs (id int primary key)"
    )
    crm.env.sql = {"crm": SqlResource(name="crm", dsn=crm.dsn.replace("//ringfence@", f"//{role}@"))}
    try:
        await crm.write("create table mine (id serial primary key, n int)")
        await crm.write("insert into mine (n) values (1), (2)")
        before, step = look(crm), crm.step
        await crm.write("drop table mine")
        with pytest.raises(CallFailed, match="permission denied"):
            await crm.write("drop table theirs")
        resource = crm.env.sql["crm"]
        await restore(resource, await plan_restore(resource, [crm.store.require(f"p{step + 1}").extra]))
        assert look(crm) == before
    finally:
        await close_targets()
        crm.run(f"drop owned by {role}; drop role {role}")


async def test_a_table_that_was_made_goes_and_comes(stock: Database) -> None:
    before = look(stock)
    await stock.write(
        "create table if not exists sales (id int generated by default as identity primary key, good int references stock (id), n int check (n > 0))"
    )
    assert stock.run(
        "select conrelid::regclass::text from pg_constraint where confrelid = 'stock'::regclass"
    ) == [("sales",)]
    await stock.write("insert into sales (good, n) values (1, 5), (2, 6)")
    await stock.write("update sales set n = 7 where id = 1")
    await stock.write("delete from stock where id = 3")
    after = look(stock)
    found = await plan(stock)
    point = await take_point(stock.resource, found)
    assert [entry["action"] for entry in found.describe()] == ["remove", "create"]
    await restore(stock.resource, found)
    assert look(stock) == before
    await restore(stock.resource, await plan_restore(stock.resource, [point]))
    assert look(stock) == after
    # Once more from where it stands.
    assert (await plan(stock)).tables == found.tables
    await undo(stock)
    assert look(stock) == before
    assert (await plan(stock)).empty


async def test_writes_before_the_drop_are_undone_in_what_comes_back(stock: Database) -> None:
    await stock.write("update stock set n = n + 1")
    await stock.write("delete from stock where id = 2")
    await stock.write("insert into stock values (9, 'nine')")
    stock.run("insert into stock values (4, 'theirs'); update stock set name = 'theirs' where id = 3")
    await stock.write("drop table stock")
    await undo(stock)
    # What others wrote in between stays as they wrote it.
    assert stock.dump("stock") == ["(1,nut,5,0.10)", "(2,bolt,7,0.20)", "(3,theirs,,3.00)", "(4,theirs,,)"]


async def test_rows_of_others_come_back_with_a_table_that_was_made_and_dropped(stock: Database) -> None:
    await stock.write("create table mine (id int primary key)")
    await stock.write("insert into mine values (1)")
    stock.run("insert into mine values (2)")
    await stock.write("drop table mine")
    await undo(stock)
    assert stock.dump("mine") == ["(2)"]


async def test_back_to_any_step(stock: Database) -> None:
    looks = {0: look(stock)}
    for statement in (
        "update stock set n = n + 1",
        "drop table stock",
        "create table stock (id text primary key, serial serial)",
        "insert into stock values ('a'), ('b')",
        "delete from stock where id = 'a'",
        "drop table stock",
        "create table other (id int primary key)",
        "insert into other values (1)",
    ):
        await stock.write(statement)
        looks[stock.step] = look(stock)
    for step in (7, 5, 4, 3, 2, 1, 0):
        now = look(stock)
        found = await plan(stock, since=step)
        point = await take_point(stock.resource, found)
        await restore(stock.resource, found)
        # Sequences don't go back but with the table that has them.
        assert replace(look(stock)[0], sequences={}) == replace(looks[step][0], sequences={}), step
        assert look(stock)[1] == looks[step][1]
        await restore(stock.resource, await plan_restore(stock.resource, [point]))
        assert look(stock) == now, step


async def test_what_others_made_is_kept(stock: Database) -> None:
    await stock.write("create table mine (id int primary key)")
    await stock.write("insert into mine values (1)")
    for theirs, back in (
        ("insert into mine values (2)", "delete from mine where id = 2"),
        ("alter table mine add column n int", "alter table mine drop column n"),
        ("create index i on mine (id)", "drop index i"),
        ("grant select on mine to public", "revoke select on mine from public"),
    ):
        stock.run(theirs)
        now = look(stock)
        found = await plan(stock)
        assert (found.items, found.tables) == ((), ())
        assert "no longer what was made" in found.conflicts[0].reason
        stock.run(back)
        # Between the plan and its carrying out as well.
        good = await plan(stock)
        stock.run(theirs)
        report = await restore(stock.resource, good)
        assert (report.tables, [c.table.name for c in report.conflicts]) == ((), ["mine"])
        assert look(stock) == now
        stock.run(back)
    stock.run("create view v as select * from mine")
    with pytest.raises(Conflict, match="view v depends"):
        await undo(stock)
    stock.run("drop view v; create table note (id int references mine)")
    with pytest.raises(Conflict, match="depends on it"):
        await undo(stock)
    stock.run("drop table note")
    await undo(stock)


async def test_a_name_that_somebody_else_has_now(stock: Database) -> None:
    await stock.write("drop table stock")
    for theirs, back in (
        ("create table stock (id int)", "drop table stock"),
        ("create view stock as select 1 as id", "drop view stock"),
        ("create sequence stock_pkey", "drop sequence stock_pkey"),
    ):
        stock.run(theirs)
        found = await plan(stock)
        assert (found.tables, [c.key for c in found.conflicts]) == ((), [()])
        assert "its name" in found.conflicts[0].reason
        stock.run(back)
        good = await plan(stock)
        stock.run(theirs)
        assert len((await restore(stock.resource, good)).conflicts) == 1
        stock.run(back)
    await undo(stock)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("create table x (a int) partition by range (a)", "no ordinary table"),
        ("create table y (a int); create table x () inherits (y)", "inherits"),
        ("create unlogged table x (a int)", "unlogged"),
        ("create table x (a int); alter table x enable row level security", "row policies"),
        ("create table x (a int); alter table x replica identity full", "replica identity"),
        ("create table x (a int, b int); create statistics s on a, b from x", "statistics"),
        (
            f"create table x (a int); {NOTHING}; create trigger t after insert on x execute function f(); alter table x disable trigger t",
            "trigger",
        ),
        ("create table x (a int); create rule r as on insert to x do instead nothing", "rule"),
        (
            "create function f() returns int language sql as 'select 1'; create table x (a int default f())",
            "calls a function",
        ),
        ("create table x ()", "no columns"),
        (
            "create table y (a int primary key); create table x (a int references y); alter table x disable trigger all",
            "switched off",
        ),
        ("create table y (a int); create table x (a y[])", "rows of another table"),
        ("create view x as select 1 as a", "no ordinary table"),
        ("create table x (a int check (a > 0) no inherit); comment on type x is 'x'", "row type"),
    ],
)
async def test_what_can_not_be_made_again_is_not_dropped(crm: Database, made: str, why: str) -> None:
    crm.run(made)
    before = look(crm)
    with pytest.raises(SnapshotFailed, match=why):
        await crm.write("drop table x")
    assert look(crm) == before
    assert crm.store.points() == []


async def test_what_it_refers_to_and_what_refers_to_it(stock: Database) -> None:
    stock.run("create view v as select * from stock")
    with pytest.raises(CallFailed, match="depend on it"):
        await stock.write("drop table stock")
    with pytest.raises(NoSuchResource, match="no table `none`"):
        await stock.write("drop table none")
    await stock.write("drop table if exists none")
    assert stock.store.points() == []
    stock.policy = policy_of("sql.write: {database: crm, tables: [mine]}")
    with pytest.raises(Denied, match="stock"):
        await stock.write("create table mine (id int primary key, good int references stock)")
    with pytest.raises(Denied):
        await stock.write("drop table stock")
    stock.run("create function f(int) returns int immutable language sql as 'select 1'")
    with pytest.raises(InvalidRequest, match="user-defined"):
        await stock.write("create table mine (id int primary key, n int default f(1))")
    with pytest.raises(SnapshotFailed, match="rows of another table"):
        await stock.write("create table mine (id int primary key, s stock)")
    with pytest.raises(InvalidRequest, match="no parameters"):
        await stock.write("create table mine (id int primary key, n int default %s)", 5)


async def test_a_column_is_dropped_only_by_a_person(stock: Database) -> None:
    arguments = sql_write.Arguments(database="crm", statement="alter table stock drop column if exists price")
    planned = sql_write.plan(arguments, stock.env)
    assert planned.effect is Effect.DESTROY
    assert planned.no_return == (
        "can't be undone: the column `price` of `stock` goes with all its values, and a column can't be put back in its place"
    )
    await stock.write("update stock set n = 0 where id = 1")
    # As if a person had allowed it.
    call, arguments = stock.prepare_write(arguments.statement)
    await sql_write.run(call, arguments)
    assert call.points == []
    assert stock.run("select * from stock where id = 1") == [(1, "nut", 0)]
    found = await plan(stock)
    assert found.empty
    assert "columns" in found.conflicts[0].reason


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ('alter table stock add "On hand" numeric(8, 2) not null default 1.5', "add column of the column `On hand`"),
        ("alter table stock rename column n to m", "rename column of the column `n`"),
        ("create unique index named on stock (lower(name)) where n >= 0", "create index of the index `named`"),
    ],
)  # fmt: skip
async def test_a_table_is_changed_only_by_a_person(stock: Database, statement: str, said: str) -> None:
    await stock.write("update stock set name = 'x' where id = 1")
    before = look(stock)
    call, arguments = stock.prepare_write(statement)
    assert call.plan.effect is Effect.DESTROY
    assert call.plan.no_return.startswith(f"can't be undone: no rollback takes back the {said} of `stock`")
    # As if a person had allowed it.
    await sql_write.run(call, arguments)
    assert call.points == []
    assert look(stock) != before
    found = await plan(stock)
    if "index" in statement:
        await undo(stock)
        assert stock.run("select name from stock where id = 1") == [("nut",)]
    else:
        assert found.empty
        assert "columns" in found.conflicts[0].reason


async def test_what_a_person_allows_still_calls_nothing_of_others(stock: Database) -> None:
    stock.run("create function f(int) returns int immutable language sql as 'select 1'")
    stock.run("create domain d as int check (f(value) = 1)")
    for statement in (
        "alter table stock add m int default f(1)",
        "alter table stock add m d default 1",
        "create index i on stock (f(n))",
    ):
        with pytest.raises(InvalidRequest, match="user-defined"):
            await stock.write(statement)
    with pytest.raises(CallFailed, match="already exists"):
        await stock.write("alter table stock add n int")
    with pytest.raises(NoSuchResource, match="no table `none`"):
        await stock.write("create index i on none (id)")


@pytest.mark.parametrize("statement", ["drop table stock", "create table x (id int)"])
@pytest.mark.parametrize("at", ["before_effect", "after_effect"])
async def test_a_crash_around_the_commit(stock: Database, statement: str, at: str) -> None:
    before = look(stock)
    call, arguments = await stock.crash(statement, at)
    found = await sql_write.recover(call, arguments)
    if at == "before_effect":
        assert found is Rerun.RERUN
        assert look(stock) == before
    else:
        assert not isinstance(found, Rerun)
        assert call.points[0][0] == ["crm/stock" if "drop" in statement else "crm/x"]
        assert look(stock) != before
    await undo(stock)
    assert look(stock) == before
