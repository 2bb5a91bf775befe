"""Ways round the rules of a database: whatever stands between a statement and a table that no rule allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.rules import parse_rule
from ringfence.syscalls.errors import InvalidRequest, SnapshotFailed

if TYPE_CHECKING:
    from conftest import Database

# Functions that read a table for whoever calls them.
PEEK = """
create table salaries (id int primary key, amount int); insert into salaries values (1, 4711);
create table t (id int primary key, n int); insert into t values (1, 1);
create function peek(int) returns int language plpgsql stable security definer
  as 'begin return (select amount from public.salaries where id = $1); end';
create function wrong(int) returns int language plpgsql immutable
  as 'begin return (select amount from public.salaries where id = $1); end';
"""
DOMAIN = "create domain d as int check (peek(value) = 4711)"
CAST = """
create type c as (x int); create function c_of(int) returns c language plpgsql stable as 'begin return row(peek($1))::c; end';
create cast (int as c) with function c_of(int)
"""
OPERATOR = """
create function op(int, int) returns int language sql stable as 'select amount from salaries where id = $1';
create operator @@@ (leftarg = int, rightarg = int, function = op); create view v as select 1 @@@ 1 as n
"""
CTE = "create view v as with x as (select peek(1) as n) select n from x"


@pytest.fixture
def guarded(crm: Database) -> Database:
    """All is allowed but one table."""
    crm.policy = AgentPolicy(
        "agent",
        [("g", parse_rule("sql.*: {database: crm}"))],
        [parse_rule("sql.*: {database: crm, tables: [salaries]}", "deny")],
    )
    return crm


MARK = (
    "create table marks (n int primary key); create function mark(int) returns int language plpgsql as "
    "$$ begin insert into marks values (coalesce($1, 0)) on conflict do nothing; return 1; end $$; "
)


@pytest.mark.parametrize(
    ("setup", "statement"),
    [
        ("create view v as select peek(id) as n from t", "select n from v"),
        ("create view v as select peek(id) as n from t", "select n from public.v"),
        ("create view v as select id as n from t where peek(id) = 4711", "select n from v"),
        ("create view w as select peek(id) as n from t; create view v as select n from w", "select n from v"),
        ("create view v as select n from (select peek(1) as n) x", "select n from v"),
        ("create view v as select wrong(1) as n", "select n from v"),
        ("create view v as select query_to_xml('select * from salaries', true, true, '') as n", "select n from v"),
        (CTE, "with y as (table v) select n from y"),
        (OPERATOR, "select n from v"),
        (DOMAIN, "select 1::d as n"),
        (DOMAIN, "select 1::public.d as n"),
        (DOMAIN, "select cast(id as d) as n from t"),
        (DOMAIN, "select '{1}'::d[] as n"),
        (DOMAIN, "select d '1' as n"),
        (DOMAIN, "select n from jsonb_to_record('{\"n\": 1}') x(n d)"),
        (f"{DOMAIN}; create domain e as d", "select 1::e as n"),
        (f"{DOMAIN}; create type c as (x d)", "select '(1)'::c as n"),
        (f"{DOMAIN}; create table has_d (x d)", "select '(1)'::has_d as n"),
        (f"{DOMAIN}; create view v as select id::d as n from t", "select n from v"),
        (CAST, "select 1::c as n"),
        (CAST, "select id::c as n from t"),
        (f"{CAST.strip()} as implicit; create table has_c (x c)", "select (x = 1) as n from has_c"),
        ("create aggregate total(int) (sfunc = int4pl, stype = int)", "select total(id) as n from t"),
    ],
)  # fmt: skip
async def test_a_read_reaches_no_table_through_something_else(
    guarded: Database, setup: str, statement: str
) -> None:
    guarded.run(PEEK + setup)
    with pytest.raises(InvalidRequest, match=r"user-defined|is refused|not understood"):
        await guarded.read(statement)


@pytest.mark.parametrize(
    ("setup", "statement"),
    [
        ("create view v as select peek(1) as n", "insert into t (id, n) select 2, n from v"),
        ("create view v as select peek(1) as n", "update t set n = (select n from v)"),
        ("create view v as select peek(1) as n", "delete from t where n in (select n from v) returning n"),
        (DOMAIN, "update t set n = 1::d"),
        (CAST, "update t set n = (id::c).x"),
    ],
)
async def test_a_write_reaches_none_either(guarded: Database, setup: str, statement: str) -> None:
    guarded.run(PEEK + setup)
    with pytest.raises(InvalidRequest, match="user-defined"):
        await guarded.write(statement)
    assert guarded.dump("t") == ["(1,1)"]


@pytest.mark.parametrize(
    ("columns", "statement"),
    [
        ("n int, leak int generated always as (wrong(n)) stored", "insert into x (id, n) values (2, 1)"),
        ("n int, leak int generated always as (wrong(n)) stored", "update x set n = 1"),
        ("n int default wrong(1)", "insert into x (id) values (2)"),
        ("n int default peek(1)", "insert into x (id) values (2)"),
        ("n int check (wrong(n) <> 1)", "insert into x (id, n) values (2, 1)"),
        ("n int, leak int default (1 @@@ 1)", "insert into x (id) values (2)"),
    ],
)
async def test_a_write_has_no_column_filled_from_one(guarded: Database, columns: str, statement: str) -> None:
    guarded.run(PEEK + OPERATOR)
    guarded.run(f"create table x (id int primary key, {columns})")
    with pytest.raises(SnapshotFailed, match=r"of a default, a check or a generated column"):
        await guarded.write(statement)
    assert guarded.dump("x") == []


@pytest.mark.parametrize(
    ("columns", "statement"),
    [
        ("n int, m marked", "insert into x (id, m) values (2, 1)"),
        ("n int, m marked[]", "update x set m = array[1]"),
        ("n int, m shaped", "update x set m = n"),
    ],
)
async def test_a_write_fills_no_column_whose_type_calls_one(
    guarded: Database, columns: str, statement: str
) -> None:
    guarded.run(MARK + "create domain marked as int check (mark(value) > 0); create type shaped as (n int)")
    guarded.run("create function shape(int) returns shaped language sql as 'select row(mark($1))::shaped'")
    guarded.run("create cast (int as shaped) with function shape(int) as assignment")
    guarded.run(f"create table x (id int primary key, {columns}); insert into x (id, n) values (1, 1)")
    guarded.run("delete from marks")
    with pytest.raises(SnapshotFailed, match=r"of a column's type"):
        await guarded.write(statement)
    assert guarded.dump("marks") == []


async def test_views_and_types_that_call_nobody_are_read(guarded: Database) -> None:
    guarded.run(PEEK)
    guarded.run(
        "create domain d as int check (value > 0); create type mood as enum ('ok'); create table has_d (x d, m mood)"
    )
    guarded.run("insert into has_d values (1, 'ok')")
    guarded.run(
        "create view w as select lower(m::text) as m, x + n % 2 as n, x::text like '%1%' as hit from has_d, t"
    )
    guarded.run(
        "create view v as select m, n, hit, row_number() over (order by n) as nr from w where m = 'ok'::text"
    )
    assert (await guarded.read("select m, n, hit, nr from v")).rows == [["ok", 2, True, 1]]
    assert (await guarded.read("select 2::d as d, 'ok'::mood as mood, x from has_d")).rows == [[2, "ok", 1]]
