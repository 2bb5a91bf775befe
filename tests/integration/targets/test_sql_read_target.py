"""sql.read against a real PostgreSQL: answers, limits, and what can't be read through it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.rules import parse_rule
from ringfence.syscalls import sql_read
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import (
    CallFailed,
    Deadline,
    Denied,
    InvalidRequest,
    NoSuchResource,
    Revoked,
)
from ringfence.syscalls.sql_lexer import lex
from ringfence.syscalls.sql_target import read as driver

if TYPE_CHECKING:
    from conftest import Database


def allow(*rules: str, deny: tuple[str, ...] = ()) -> AgentPolicy:
    grants = [(f"g{number}", parse_rule(rule)) for number, rule in enumerate(rules)]
    return AgentPolicy("agent", grants, [parse_rule(rule, "deny") for rule in deny], [])


async def test_a_read_answers_with_columns_and_rows(crm: Database) -> None:
    crm.run("create table invoices (id int primary key, total numeric(10,2), note text)")
    crm.run("insert into invoices values (1, 10.50, 'a'), (2, 20, null), (3, 30, 'ü')")
    result = await crm.read("select id, total, note from invoices where id > %s order by id", 1)
    assert result.columns == ["id", "total", "note"]
    assert result.rows == [[2, "20.00", None], [3, "30.00", "ü"]]
    assert not result.truncated


async def test_values_come_as_documented(crm: Database) -> None:
    cases: list[tuple[str, Any]] = [
        ("true", True),
        ("1::int2", 1),
        ("9223372036854775807::int8", 9223372036854775807),
        ("0.1::float8", 0.1),
        ("'NaN'::float8", "NaN"),
        ("'-Infinity'::float4", "-Infinity"),
        ("123456789012345678901234567890.10::numeric", "123456789012345678901234567890.10"),
        ("'{\"a\": [1, null]}'::jsonb", {"a": [1, None]}),
        ("'null'::json", None),
        ("'\\x00ff'::bytea", "AP8="),
        ("date '2026-01-02'", "2026-01-02"),
        ("timestamp '2026-01-02 03:04:05.5'", "2026-01-02T03:04:05.5"),
        ("timestamptz '2026-01-02 03:04:05+02'", "2026-01-02T01:04:05Z"),
        ("'infinity'::timestamptz", "infinity"),
        ("interval '1 day 2 hours'", "1 day 02:00:00"),
        ("array[1, null, 3]", [1, None, 3]),
        ("array[['a,b', 'c\"d'], ['', 'NULL']]", [["a,b", 'c"d'], ["", "NULL"]]),
        ("array[]::text[]", []),
        ("'[2:3]={7,8}'::int[]", [7, 8]),
        ("array['{\"x\":1}'::jsonb]", [{"x": 1}]),
        ("int4range(1, 5)", "[1,5)"),
        ("'0b8f4ae4-5b0c-4d0e-9d5e-0a0000000000'::uuid", "0b8f4ae4-5b0c-4d0e-9d5e-0a0000000000"),
        ("row(1, 'a b')", '(1,"a b")'),
    ]
    result = await crm.read("select " + ", ".join(expression for expression, _ in cases))
    assert result.rows == [[value for _, value in cases]]


async def test_parameters_of_every_json_kind(crm: Database) -> None:
    crm.run("create table t (id int primary key, tags text[], doc jsonb, n numeric, b bool)")
    crm.run("""insert into t values (1, '{a,b}', '{"k": [1]}', 1.5, true), (2, '{c}', '{}', null, false)""")
    assert (await crm.read("select id from t where id = any(%s)", [1, 5])).rows == [[1]]
    assert (await crm.read("select id from t where tags && %s", ["c", "x"])).rows == [[2]]
    assert (await crm.read("select id from t where doc @> %s", {"k": [1]})).rows == [[1]]
    assert (await crm.read("select id from t where n = %s", 1.5)).rows == [[1]]
    assert (await crm.read("select id from t where b = %s", False)).rows == [[2]]
    assert (await crm.read("select %s::text is null", None)).rows == [[True]]
    assert (await crm.read("select id from t where tags[1] like 'a%%' and id < %s", 9)).rows == [[1]]
    assert (await crm.read("select id from t where tags[1] like 'a%'")).rows == [[1]]
    with pytest.raises(CallFailed, match="answered"):
        await crm.read("select %s::int", "no number")


@pytest.mark.parametrize(
    "statement",
    [
        "with x as (select id from t) select id from x order by id",
        "table t order by id",
        "(select id from t order by id) -- with a comment",
        "select id from t /* and /* a nested */ one */ order by id;",
    ],
)
async def test_other_forms_of_a_read(crm: Database, statement: str) -> None:
    crm.run("create table t (id int primary key)")
    crm.run("insert into t values (1), (2)")
    assert (await crm.read(statement)).rows == [[1], [2]]


async def test_rows_are_limited(crm: Database) -> None:
    result = await crm.read("select * from generate_series(1, 50)", limit=3)
    assert (result.rows, result.truncated) == ([[1], [2], [3]], True)
    exact = await crm.read("select * from generate_series(1, 3)", limit=3)
    assert (len(exact.rows), exact.truncated) == (3, False)
    default = await crm.read("select * from generate_series(1, 20000)")
    assert (len(default.rows), default.truncated) == (driver.ROWS_MAX, True)
    with pytest.raises(InvalidRequest, match="limit"):
        await crm.read("select 1", limit=-1)


async def test_bytes_are_limited(crm: Database) -> None:
    crm.run("create table large as select 1 as id, repeat('x', 10000000) as text")
    with pytest.raises(CallFailed, match="larger than"):
        await crm.read("select text from large")
    with pytest.raises(CallFailed, match="larger than"):
        await crm.read("select repeat('x', 1000000) from generate_series(1, 20)")
    assert (await crm.read("select 1")).rows == [[1]]


async def test_a_table_that_is_not_allowed_is_not_read(crm: Database) -> None:
    crm.run("create table invoices (id int primary key); create table salaries (id int primary key)")
    crm.run("create schema hr; create table hr.people (id int primary key)")
    crm.policy = allow("sql.read: {database: crm, tables: [invoices]}")
    await crm.read("select * from invoices")
    for statement in (
        "select * from salaries",
        "select * from invoices, salaries",
        "select * from invoices where id in (select id from salaries)",
        "with x as (select * from salaries) select * from invoices",
        "select (select count(*) from salaries) from invoices",
        "select * from hr.people",
        'select * from "salaries"',
        "select * from SALARIES",
        "select 1 union select id from salaries",
        "select * from invoices i join lateral (select * from salaries s where s.id = i.id) x on true",
    ):
        with pytest.raises(Denied):
            await crm.read(statement)


async def test_a_view_is_seen_through(crm: Database) -> None:
    crm.run("create table salaries (id int primary key, amount int)")
    crm.run("create view harmless as select id, amount from salaries")
    crm.run("create materialized view copied as select id from salaries")
    crm.policy = allow("sql.read: {database: crm, tables: [harmless, copied]}")
    with pytest.raises(Denied, match="salaries"):
        await crm.read("select * from harmless")
    await crm.read("select * from copied")
    crm.policy = allow("sql.read: {database: crm, tables: [harmless, salaries]}")
    await crm.read("select * from harmless")
    crm.policy = allow("sql.read: {database: crm}", deny=("sql.read: {database: crm, tables: [salaries]}",))
    with pytest.raises(Denied, match="salaries"):
        await crm.read("select * from harmless")


async def test_partitions_belong_to_their_table(crm: Database) -> None:
    crm.run("create table events (id int, day int, primary key (id, day)) partition by range (day)")
    crm.run("create table events_1 partition of events for values from (0) to (10)")
    crm.run("create table events_2 partition of events for values from (10) to (20)")
    crm.run("insert into events values (1, 5), (2, 15)")
    crm.policy = allow("sql.read: {database: crm, tables: [events]}")
    assert (await crm.read("select id from events order by id")).rows == [[1], [2]]
    with pytest.raises(Denied):
        await crm.read("select id from events_1")


@pytest.mark.parametrize(
    "statement",
    [
        "select * from pg_catalog.pg_authid",
        "select * from pg_authid",
        "select * from information_schema.tables",
        "select * from catalog_view",
        "select pg_read_file('/etc/passwd')",
        "select pg_catalog.pg_read_file('/etc/passwd')",
        "select * from pg_ls_dir('/')",
        "select pg_sleep(60)",
        "select set_config('search_path', 'hr', false)",
        "select current_setting('data_directory')",
        "select query_to_xml('select * from t', true, true, '')",
        "select table_to_xml('t', true, true, '')",
        "select database_to_xml(true, true, '')",
        "select lo_import('/etc/passwd')",
        "select nextval('s')",
        "select setval('s', 5)",
        "select pg_notify('a', 'b')",
        "select pg_advisory_lock(1)",
        "select pg_terminate_backend(1)",
        "select ts_stat('select 1')",
        "select mine(1)",
        "select public.mine(1)",
        "select hr.mine(1)",
        "select * from mine(1)",
        "select t.of_row from t",
        "select (t).of_row from t",
        "select 1 @@@ 2",
        "select 1 operator(public.@@@) 2",
        'select "mine" (1)',
        "select mine /* x */ (1)",
        "select * from rows from (mine(1))",
        "select * from t where id = mine(id)",
        "select id from t order by mine(id)",
    ],
)
async def test_what_does_more_than_read_tables_is_refused(crm: Database, statement: str) -> None:
    crm.run("create table t (id int primary key); create sequence s; create schema hr")
    crm.run("insert into t values (1)")
    crm.run("create function mine(int) returns int language sql immutable as 'select 1'")
    crm.run("create function hr.mine(int) returns int language sql immutable as 'select 1'")
    crm.run("create function of_row(t) returns int language sql immutable as 'select 1'")
    crm.run("create function op(int, int) returns int language plpgsql as 'begin return 1; end'")
    crm.run("create operator @@@ (leftarg = int, rightarg = int, function = op)")
    crm.run("create view catalog_view as select rolname from pg_catalog.pg_roles")
    with pytest.raises((InvalidRequest, Denied)):
        await crm.read(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "select count(*), max(id), lower('A'), coalesce(null, 1), now() is not null from t",
        "select extract(year from date '2026-01-01'), substring('abc' from 2 for 1), trim(' a ')",
        "select json_agg(t), row_to_json(t) from t group by t.id",
        "select id, row_number() over (partition by id order by id) from t",
        "select random() is not null, gen_random_uuid() is not null",
        "select to_char(1.5::numeric(10, 2), '9.9'), cast('5' as integer), x'ff'::text, e'a\\n'",
        "select t.id, t.lower from (select id, 'x' as lower from t) t",
        "select 'it''s; -- not a comment /* nor this */', $$a;b$$, $x$ $$ $x$",
        "select id from t where id between 1 and 2 and id is distinct from 3 and not exists (select 1 where false)",
        "select * from unnest(array[1,2]) with ordinality as u(a, b)",
        "select generate_series from generate_series(1, 2)",
    ],
)
async def test_ordinary_reads_are_not_refused(crm: Database, statement: str) -> None:
    crm.run("create table t (id int primary key)")
    crm.run("insert into t values (1)")
    await crm.read(statement)


async def test_nothing_is_ever_written_by_a_read(crm: Database) -> None:
    """A view may hide anything; the transaction is the barrier."""
    crm.run("create table t (id int primary key)")
    crm.run(
        "create function sneaky() returns int language plpgsql volatile security definer as "
        "$$ begin insert into public.t values (1); return 1; end $$"
    )
    crm.run("create view trap as select sneaky() as x")
    with pytest.raises(InvalidRequest, match="is user-defined"):
        await crm.read("select * from trap")
    assert crm.dump("t") == []


async def test_policy_is_looked_at_once_more_before_it_runs(crm: Database) -> None:
    with pytest.raises(Revoked):
        await crm.read("select 1", live_error=Revoked("gone"))


async def test_a_statement_that_takes_too_long_ends(crm: Database) -> None:
    with pytest.raises(Deadline, match="took too long"):
        await crm.read("select count(*) from generate_series(1, 100000000) a", deadline_s=0.2)
    assert (await crm.read("select 1")).rows == [[1]]


async def test_a_cancelled_read_ends_in_the_target(crm: Database) -> None:
    running = asyncio.Event()

    async def reached() -> None:
        running.set()

    task = asyncio.create_task(
        crm.read(
            "select count(*) from generate_series(1, 100000000) a",
            on_failpoint=lambda name: reached() if name == "before_effect" else None,
        )
    )
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with await psycopg.AsyncConnection.connect(crm.dsn, autocommit=True) as connection:
        while True:
            cursor = await connection.execute(
                "select count(*) from pg_stat_activity where application_name = 'ringfence'"
                " and state = 'active'"
            )
            row = await cursor.fetchone()
            if row is not None and row[0] == 0:
                break
    assert (await crm.read("select 1")).rows == [[1]]


async def test_many_reads_at_once_share_a_few_connections(crm: Database) -> None:
    results = await asyncio.gather(*(crm.read("select %s::int", number) for number in range(40)))
    assert [result.rows[0][0] for result in results] == list(range(40))
    rows = crm.run("select count(*) from pg_stat_activity where application_name = 'ringfence'")
    assert 1 <= rows[0][0] <= 4


async def test_a_connection_that_broke_is_replaced(crm: Database) -> None:
    await crm.read("select 1")
    crm.run(
        "select pg_terminate_backend(pid, 30000) from pg_stat_activity where application_name = 'ringfence'"
    )
    assert (await crm.read("select 1")).rows == [[1]]


async def test_an_unreachable_target_is_one_line_without_its_address(crm: Database) -> None:
    crm.env.sql = {
        "crm": SqlResource(name="crm", dsn="host=127.0.0.1 port=1 user=hush password=hush dbname=x")
    }
    with pytest.raises(CallFailed) as caught:
        await crm.read("select 1")
    message = str(caught.value)
    assert "`crm` can't be reached" in message
    assert "127.0.0.1" not in message
    assert "hush" not in message
    assert "\n" not in message


async def test_errors_of_the_statement_come_through_on_one_line(crm: Database) -> None:
    for statement in ("select * from missing", "select 1 / 0", "select nope from (select 1) x"):
        with pytest.raises(CallFailed) as caught:
            await crm.read(statement)
        assert str(caught.value).startswith("`crm` answered: ")
        assert "\n" not in str(caught.value)
        assert caught.value.metadata["sqlstate"]


def test_an_undeclared_database_is_no_resource(crm: Database) -> None:
    with pytest.raises(NoSuchResource, match="declared: `crm`"):
        sql_read.plan(sql_read.Arguments(database="hr", statement="select 1"), crm.env)


_FRAGMENTS = [
    "'", "''", '"', '""', "$$", "$a$", "--", "/*", "*/", "\n", "\r", ";", "(", ")", "e'", "\\", "x'",
    "select 1", "1", " a", " as b", "$1", "$", "||", "+", "::text", "U&'", ".", ",",
]  # fmt: skip


async def test_one_statement_is_one_statement_for_the_server_too(crm: Database) -> None:
    """Whatever mix of quotes and comments passes as one statement, the server doesn't see a second one in it."""
    connection = psycopg.connect(crm.dsn, autocommit=True)
    accepted: list[str] = []

    @given(st.lists(st.sampled_from(_FRAGMENTS), max_size=10))
    @settings(max_examples=1500, deadline=None, database=None)
    def check(parts: list[str]) -> None:
        text = "select 1 " + "".join(parts)
        try:
            lexed = lex(text, 0)
        except InvalidRequest:
            return
        for sent in (text, lexed.text):
            try:
                # Without parameters this is the simple protocol, which would run a second statement.
                cursor = connection.execute(sent.encode())
            except psycopg.Error:
                continue
            accepted.append(sent)
            assert not cursor.nextset(), sent

    with connection:
        check()
    assert accepted
