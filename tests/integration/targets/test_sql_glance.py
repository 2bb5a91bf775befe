"""Statements on tables that are known already are judged at one glance: what changed since then is seen all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.rules import parse_rule
from ringfence.syscalls.errors import CallFailed, Denied, InvalidRequest, SnapshotFailed
from ringfence.syscalls.sql_common import Table
from ringfence.syscalls.sql_target import write
from ringfence.syscalls.sql_target.session import Session, transaction
from ringfence.syscalls.sql_target.tables import is_plain, looking

if TYPE_CHECKING:
    from conftest import Database

PEEK = """
create function peek(int, int) returns int language plpgsql stable
  as 'begin return (select amount from public.salaries limit 1); end'
"""


@pytest.fixture
async def known(crm: Database) -> Database:
    """A table that was written to before, and another that no rule allows."""
    crm.run("create table stock (id int primary key, n int); insert into stock values (1, 1), (2, 2)")
    crm.run("create table salaries (id int primary key, amount int); insert into salaries values (1, 4711)")
    crm.policy = AgentPolicy(
        "agent",
        [("g1", parse_rule("sql.*: {database: crm, tables: [stock]}"))],
        [],
        [],
    )
    assert (await crm.write("update stock set n = n + 1")).row_count == 2
    assert (await crm.read("select n from stock where id = 1")).rows == [[2]]
    return crm


async def _never(*_: object) -> None:
    raise AssertionError("looked at one by one")


async def test_it_takes_a_glance(known: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "check_functions", _never)
    monkeypatch.setattr(write, "judge_plan", _never)
    for statement in (
        "update stock set n = n + %s where id = 1",
        "insert into stock as s values (3, %s) on conflict (id) do update set n = abs(excluded.n)",
        "delete from stock where n = %s - 2 returning *",
    ):
        await known.write(statement, 5)
    record = known.record(known.step - 2)
    assert (record["changes"][0]["before"], record["changes"][0]["after"]) == ([["1", "2"]], [["1", "7"]])
    assert known.dump("stock") == ["(1,7)", "(3,5)"]


async def test_another_column_is_in_the_point(known: Database) -> None:
    known.run("alter table stock drop column n; alter table stock add m int default 7, add o int default 8")
    await known.write("update stock set m = 9 where id = 1")
    (change,) = known.record()["changes"]
    assert (change["columns"], change["before"]) == (["id", "m", "o"], [["1", "7", "8"]])
    with pytest.raises(CallFailed, match='column "n" of relation "stock" does not exist'):
        await known.write("update stock set n = 9 where id = 1")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ("alter table stock drop constraint stock_pkey", SnapshotFailed, "primary key"),
        ("create view v as select 1; create rule r as on update to stock do also select 1", SnapshotFailed, "rule `r`"),
        ("alter table stock rename to other; create view stock as select * from other", SnapshotFailed, "a view"),
        ("create trigger t before update on stock for each row execute function suppress_redundant_updates_trigger()", SnapshotFailed, "trigger `t`"),
        (f"{PEEK}; alter table stock add check (peek(n, 1) is not null) not valid", SnapshotFailed, "function `peek`"),
        (f"{PEEK}; alter table stock add m int default peek(1, 1)", SnapshotFailed, "function `peek`"),
        ("drop table stock", CallFailed, "does not exist"),
        (f"{PEEK}; create operator + (leftarg = int, rightarg = int, function = peek)", InvalidRequest, "operator `public.[+]`"),
    ],
    ids=["key", "rule", "view", "trigger", "check", "default", "gone", "operator"],
)  # fmt: skip
async def test_what_stands_in_the_way_since_then_does(
    known: Database, change: str, error: type[Exception], said: str
) -> None:
    known.run(change)
    with pytest.raises(error, match=said):
        await known.write("update stock set n = n + 1")


async def test_a_reference_that_deletes_is_seen_since_then(known: Database) -> None:
    assert (await known.write("delete from stock where id = 1")).row_count == 1
    known.run("create table child (of int references stock on delete cascade)")
    with pytest.raises(SnapshotFailed, match="`child_of_fkey` of `child` would cascade rows"):
        await known.write("delete from stock where id = 2")


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ("alter table stock drop column n", True),
        ("alter table stock alter n type bigint, alter n set not null, add t text, add u uuid unique", True),
        ("create table other (id int default 7 check (id > 0) primary key)", True),
        ("alter table stock drop constraint stock_pkey; create unique index on stock (n, id)", True),
        ("alter table stock add primary key (id)", True),
        ("alter table stock add check (n > 0)", False),
        ("alter table stock add constraint late check (n > 9) not valid", False),
        ("alter table stock alter n set default 5", False),
        ("alter table stock add g int generated always as (n + 1) stored", False),
        ("alter table stock add i int generated always as identity", True),
        ("create type mood as enum ('sad'); alter table stock add m mood", False),
        ("create domain positive as int check (value > 0)", False),
        ("create table child (of int references stock)", False),
        ("create table parent (id int primary key); alter table stock add foreign key (n) references parent not valid", False),
        ("alter table stock add unique (n) deferrable", False),
        ("create trigger t before update on stock for each row execute function suppress_redundant_updates_trigger()", False),
        ("create rule r as on update to stock do also select 1", False),
        ("create table heir () inherits (stock)", True),
        ("alter table stock rename to other; create view stock as select * from other", False),
        ("drop table stock", False),
    ],
)  # fmt: skip
async def test_what_is_asked_of_a_plain_table_is_answered_as_in_full(
    crm: Database, change: str, plain: bool
) -> None:
    if change != "alter table stock add primary key (id)":
        crm.run("create table stock (id int primary key, n int)")
    else:
        crm.run("create table stock (id int, n int)")
    table = Table("public", "stock")
    crm.run(change)
    async with transaction(crm.resource, mode="read only") as session:
        full, short = await session.ask(looking(table), looking(table, plain=True))
    assert is_plain(full) is is_plain(short) is plain
    assert full == short or not plain


async def test_other_tables_stay_behind_their_rules(known: Database) -> None:
    for statement in (
        "update stock set n = (select amount from salaries) where id = 1",
        "delete from stock using salaries where amount = n",
    ):
        with pytest.raises(Denied):
            await known.write(statement)
    known.run("create view seen as select amount as n from salaries; create table t (x int)")
    known.policy = AgentPolicy(
        "agent",
        [("g1", parse_rule(f"sql.*: {{database: crm, tables: [{table}]}}")) for table in ("stock", "seen")],
        [],
        [],
    )
    for _ in range(2):
        with pytest.raises(Denied):
            await known.write("update stock set n = seen.n from seen where id = 1")
        with pytest.raises(Denied):
            await known.read("select n from seen")
    assert known.dump("stock") == ["(1,2)", "(2,3)"]


async def test_a_function_is_not_called_while_it_is_planned(known: Database) -> None:
    """An immutable one is called by the planner, with constants."""
    known.run("create table called (x int); create sequence calls")
    known.run(
        "create function f(int) returns int language plpgsql immutable "
        "as 'begin perform pg_catalog.nextval(''public.calls''); return 1; end'"
    )
    for statement in ("select f(1)", "select n from stock where n = public.f(1)"):
        with pytest.raises(InvalidRequest, match=r"function `public\.f` is user-defined"):
            await known.read(statement)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"function `public\.f` is user-defined"):
            await known.write("update stock set n = 1 where n = f(1)")
    assert known.run("select is_called from calls") == [(False,)]


async def test_an_answer_of_the_target_that_looks_like_the_guards_is_told_as_it_is(known: Database) -> None:
    for _ in range(2):
        with pytest.raises(CallFailed, match="look closer"):
            await known.read("select 'ringfence: look closer at all statements'::int")


async def test_where_somebody_made_a_cast_all_is_looked_at_one_by_one(
    known: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target fails no second time for it."""
    known.run("create type c as (x int); create function c_of(c) returns int language sql as 'select 1'")
    known.run("create cast (c as int) with function c_of(c)")
    failed: list[str] = []
    again = Session.again

    async def counted(self: Session) -> None:
        failed.append("")
        await again(self)

    monkeypatch.setattr(Session, "again", counted)
    for number in range(3):
        assert (await known.read(f"select n + {number} as n from stock where id = 1")).rows == [[2 + number]]
        assert (await known.write(f"update stock set n = n + {number} - {number}")).row_count == 2
    assert len(failed) == 1
