"""Every type of value and any sequence of writes, rolled back on a real PostgreSQL, byte for byte."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ringfence.syscalls.errors import CallFailed, NoSuchResource
from ringfence.syscalls.sql_target.restore import plan_restore, restore
from ringfence.syscalls.sql_target.session import Session

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


TYPES = [
    ("b", "boolean", "true"),
    ("i2", "smallint", "-32768"),
    ("i8", "bigint", "9223372036854775807"),
    ("f4", "real", "3.4028235e38"),
    ("f8", "double precision", "0.1"),
    ("nan", "double precision", "'NaN'"),
    ("num", "numeric", "123456789012345678901234567890.123456789"),
    ("num2", "numeric(10,3)", "1.5"),
    ("money", "money", "'-1234.50'"),
    ("c", "char(5)", "'ab'"),
    ("vc", "varchar(7)", "' a  b '"),
    ("txt", "text", "e'line\\n\\ttab \\\\ \\' \" , { } NULL é 日本 \\u200b'"),
    ("empty", "text", "''"),
    ("by", "bytea", "'\\x00ff5c27'"),
    ("ts", "timestamp", "'2026-01-02 03:04:05.123456'"),
    ("tz", "timestamptz", "'0044-03-15 12:00:00+00 BC'"),
    ("inf", "timestamptz", "'-infinity'"),
    ("d", "date", "'infinity'"),
    ("t", "time(3)", "'24:00:00'"),
    ("ttz", "timetz", "'03:04:05.5+02:30'"),
    ("iv", "interval", "'-1 year 2 mons -3 days 04:05:06.789'"),
    ("js", "json", '\'{"b": 1,  "a" : [1.0, 1e2], "b": 2}\''),
    ("jb", "jsonb", '\'{"b": 1.10, "a": null}\''),
    ("u", "uuid", "'0b8f4ae4-5b0c-4d0e-9d5e-0a0000000000'"),
    ("ia", "int[]", "'[0:1]={1,NULL}'"),
    ("ta", "text[]", "array['a,b', 'c\"d\\e', '', 'NULL', null, '{x}']"),
    ("ta2", "text[][]", "array[['a','b'],['c','d']]"),
    ("rng", "int4range", "'[1,5)'"),
    ("net", "inet", "'10.0.0.1/8'"),
    ("net1", "inet", "'10.0.0.1'"),
    ("bits", "bit(3)", "b'101'"),
    ("vbits", "varbit", "b'10'"),
    ("ts_v", "tsvector", "'a:1A fat:2'"),
    ("pt", "point", "'(1.5,-2)'"),
    ("en", "mood", "'so so'"),
    ("dom", "positive", "7"),
    ("comp", "pair", "row(1, 'a \"b\", c')"),
    ("reg", "regclass", "'pg_class'"),
    ("chr", '"char"', "'x'"),
    ("nm", "name", "'a name'"),
    ("lsn", "pg_lsn", "'16/B374D848'"),
]


async def test_every_type_comes_back_byte_for_byte(crm: Database) -> None:
    crm.run("create type mood as enum ('so so', 'fine')")
    crm.run("create domain positive as int check (value > 0)")
    crm.run("create type pair as (a int, b text)")
    columns = ", ".join(f'"{name}" {kind}' for name, kind, _ in TYPES)
    crm.run(f"create table every (id int generated always as identity primary key, {columns})")
    names = ", ".join(f'"{name}"' for name, _, _ in TYPES)
    values = ", ".join(value for _, _, value in TYPES)
    crm.run(f"insert into every ({names}) values ({values})")
    crm.run("insert into every default values")
    before = crm.dump("every")
    blanks = ", ".join(f'"{name}" = null' for name, _, _ in TYPES)
    for statement in (f"update every set {blanks}", "delete from every", "truncate every"):
        await crm.write(statement)
        assert crm.dump("every") != before
        await roll_back(crm, since=crm.step - 1)
        assert crm.dump("every") == before


async def test_what_is_put_back_is_on_disk(crm: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    name = crm.run("select current_database()")[0][0]
    crm.run(f'alter database "{name}" set synchronous_commit = off')
    crm.run("create table t (id int primary key)")
    crm.run("insert into t values (1)")
    at_the_end: list[str | None] = []
    once = Session.once

    async def executed(self: Session, query: str) -> None:
        if query == "commit":
            at_the_end.append(await self.value("select current_setting('synchronous_commit')"))
        await once(self, query)

    monkeypatch.setattr(Session, "once", executed)
    await crm.write("delete from t")
    await roll_back(crm)
    assert at_the_end == ["on", "on"]


async def test_settings_of_the_database_do_not_matter(crm: Database) -> None:
    name = crm.run("select current_database()")[0][0]
    for setting in (
        "datestyle = 'SQL, DMY'",
        "intervalstyle = 'sql_standard'",
        "extra_float_digits = -15",
        "bytea_output = 'escape'",
        "timezone = 'Asia/Kathmandu'",
        "search_path = 'nowhere'",
        "default_transaction_isolation = 'serializable'",
        "synchronous_commit = off",
    ):
        crm.run(f'alter database "{name}" set {setting}')
    crm.run("create table public.t (id int primary key, d timestamptz, f float8, b bytea, i interval)")
    crm.run(
        "insert into public.t values (1, '2026-02-01 00:00+00', 0.1::float8 + 0.2::float8, '\\x00ff', '1 mon -1 day')"
    )
    before = crm.dump("public.t")
    await crm.write("delete from t")
    change = crm.record()["changes"][0]
    assert change["before"] == [
        ["1", "2026-02-01 00:00:00+00", "0.30000000000000004", "\\x00ff", "1 mon -1 days"]
    ]
    await roll_back(crm)
    assert crm.dump("public.t") == before


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("insert into t values ({0}, {1}) on conflict do nothing"),
            st.integers(1, 5),
            st.integers(0, 9),
        ),
        st.tuples(st.just("update t set v = {1} where id >= {0}"), st.integers(1, 5), st.integers(0, 9)),
        st.tuples(st.just("delete from t where id = {0} or v = {1}"), st.integers(1, 5), st.integers(0, 9)),
        st.tuples(st.just("truncate t"), st.just(0), st.just(0)),
        st.tuples(st.just("drop table t"), st.just(0), st.just(0)),
        st.tuples(st.just("create table t (id int primary key, v int)"), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=6,
)
_names = itertools.count()


@given(steps=steps, cut=st.integers(0, 5))
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_any_writes_are_undone_to_any_step(crm: Database, steps: list[Any], cut: int) -> None:
    crm.run("drop table if exists t; create table t (id int primary key, v int)")
    crm.run("insert into t values (1, 1), (2, 2), (3, 3)")

    def there() -> list[str] | None:
        return crm.dump("t") if crm.run("select to_regclass('t') is not null")[0][0] else None

    states = [there()]
    first = crm.step
    for template, one, two in steps:
        # None of these is taken where the table is gone, nor is it made where it stands.
        with contextlib.suppress(NoSuchResource, CallFailed):
            await crm.write(template.format(one, two))
        states.append(there())
    cut = min(cut, len(steps))
    report = await roll_back(crm, since=first + cut)
    assert report.conflicts == ()
    assert there() == states[cut]
