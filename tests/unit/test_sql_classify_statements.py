"""What a statement is taken for: its kind, its tables, and what is refused before any database sees it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.syscalls import sql_read, sql_write
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.sql_common import Kind, classify, table_of
from ringfence.syscalls.sql_known import known_or_classified
from ringfence.syscalls.sql_lexer import STATEMENT_BYTES_MAX, lex
from ringfence.syscalls.sql_schema import Act
from ringfence.syscalls.sql_shape import shape_of_write
from ringfence.syscalls.sql_target.catalog import relations_of_plan
from ringfence.syscalls.sql_target.values import to_json

ENV: Any = SimpleNamespace(sql={"crm": SqlResource(name="crm", dsn="")})


@pytest.mark.parametrize(
    ("statement", "tables"),
    [
        ("select 1", []),
        ("select * from t", ["t"]),
        ("SELECT * FROM T", ["t"]),
        ('select * from "T"', ["T"]),
        ("select * from public.t, other.t", ["t", "other.t"]),
        ("select * from t as x join u on x.id = u.id left join v using (id)", ["t", "u", "v"]),
        ("select (select max(a) from u) from t where exists (select 1 from v)", ["t", "u", "v"]),
        ("with x as (select * from t) select * from x", ["t"]),
        ("with x as (select 1), y as (select * from x) select * from y", []),
        ("with x as (select * from y), y as (select 1) select * from x, y", ["y"]),
        ("with recursive x as (select 1 union all select * from x) select * from x", []),
        ("select * from secret, (with secret as (select 1) select * from secret) s", ["secret"]),
        ("with t as (select * from t) select * from t", ["t"]),
        ("with t as (select 1) select * from public.t", ["t"]),
        ("select * from (with t as (select 1) select * from t) x, t", ["t"]),
        ("(select * from t) union all (select * from u) order by 1", ["t", "u"]),
        ("table t", ["t"]),
        ("values (1), ((select max(id) from t))", ["t"]),
        ("select * from generate_series(1, 2), unnest(array[1]) u", []),
        ("select * from only t, lateral (select * from u where u.id = t.id) x", ["t", "u"]),
        ("select * from t tablesample system (1)", ["t"]),
        ("select 'from secret' from t -- from secret", ["t"]),
        ("select * from /* secret */ t", ["t"]),
        ("select $$ from secret $$, e'\\' from secret ' from t", ["t"]),
        ("select * from pg_class", ["pg_catalog.pg_class"]),
    ],
)
def test_the_tables_of_a_read(statement: str, tables: list[str]) -> None:
    found = classify(statement, 0)
    assert found.kind is Kind.READ
    assert sorted(map(str, found.reads)) == sorted(tables)


@pytest.mark.parametrize(
    ("statement", "kind", "target", "reads"),
    [
        ("insert into t values (1)", Kind.INSERT, "t", []),
        ("insert into s.t (a) select b from u", Kind.INSERT, "s.t", ["u"]),
        ("insert into t default values returning *", Kind.INSERT, "t", []),
        ("insert into t values (1) on conflict (a) do update set a = 1", Kind.INSERT, "t", []),
        ("update t set a = u.a from u where u.b = t.b", Kind.UPDATE, "t", ["u"]),
        ("delete from t using u, t as x where u.b = t.b", Kind.DELETE, "t", ["u", "t"]),
        ("merge into t as x using u on x.a = u.a when matched then delete", Kind.MERGE, "t", ["u"]),
        (
            (
                "with y as (select a from u) merge into s.t using y on t.a = y.a when not matched then insert values (y.a) "
                "when matched then update set a = 1 returning t.a"
            ),
            Kind.MERGE,
            "s.t",
            ["u"],
        ),
        ("insert into t select * from t", Kind.INSERT, "t", ["t"]),
        ("with x as (select * from u) insert into t select * from x", Kind.INSERT, "t", ["u"]),
        ("insert into t values (1) on conflict do nothing", Kind.INSERT, "t", []),
        ("insert into t values (1) on conflict on constraint k do nothing returning a", Kind.INSERT, "t", []),
        ("update t set a = 1", Kind.UPDATE, "t", []),
        ('update only "S"."T" as x set a = (select max(b) from u) where x.c = 1', Kind.UPDATE, "S.T", ["u"]),
        ("update t set a = b is distinct from c where d", Kind.UPDATE, "t", []),
        ("delete from t", Kind.DELETE, "t", []),
        (
            "delete from t where id in (select id from u) returning (select 1 from v)",
            Kind.DELETE,
            "t",
            ["u", "v"],
        ),
        ("delete from t where exists (select 1 from t t2 where t2.id < t.id)", Kind.DELETE, "t", ["t"]),
        ("truncate t", Kind.TRUNCATE, "t", []),
        ("truncate table only s.t continue identity restrict", Kind.TRUNCATE, "s.t", []),
    ],
)
def test_the_tables_of_a_write(statement: str, kind: Kind, target: str, reads: list[str]) -> None:
    found = classify(statement, 0)
    assert (found.kind, str(found.target)) == (kind, target)
    assert sorted(map(str, found.reads)) == sorted(reads)


@pytest.mark.parametrize(
    ("statement", "act", "target", "reads"),
    [
        ("create table t (a int)", Act.CREATE, "t", []),
        (
            "create table if not exists s.\"T\" (a int references u, b text check (b like '%x'), foreign key (a) references s.v (id)) with (x = 7)",
            Act.CREATE,
            "s.T",
            ["u", "s.v"],
        ),
        ("DROP\nTABLE t", Act.DROP, "t", []),
        ("drop table if exists s.t restrict;", Act.DROP, "s.t", []),
        ("alter table t drop a", Act.DROP_COLUMN, "t", []),
        ('alter table if exists only s.t drop column if exists "A b" restrict', Act.DROP_COLUMN, "s.t", []),
        ("alter table t add b numeric(8, 2) not null default 0", Act.ADD_COLUMN, "t", []),
        ('alter table s.t add column if not exists "A b" text[]', Act.ADD_COLUMN, "s.t", []),
        ("alter table if exists t rename a to b", Act.RENAME_COLUMN, "t", []),
        ('alter table t rename column "A" to "B"', Act.RENAME_COLUMN, "t", []),
        ("create index i on t (a)", Act.CREATE_INDEX, "t", []),
        (
            "create unique index if not exists i on s.t using btree (lower(a) desc, b) include (c) where a > 0",
            Act.CREATE_INDEX,
            "s.t",
            [],
        ),
    ],
)
def test_what_changes_the_schema(statement: str, act: Act, target: str, reads: list[str]) -> None:
    found = classify(statement, 0)
    assert found.kind is Kind.DDL
    assert found.ddl is not None
    assert (found.ddl.act, str(found.target), list(map(str, found.reads))) == (act, target, reads)
    assert found.destroys is (act is not Act.CREATE)


@pytest.mark.parametrize(
    "statement",
    [
        "create",
        "create table",
        "create table t",
        "create table t ()) x",
        "create temp table t (a int)",
        "create unlogged table t (a int)",
        "create table t as select 1",
        "create table t (a int) as select 1",
        "create table t of s",
        "create table t partition of s for values in (1)",
        "create table t (a int) inherits (s)",
        "create table t (a int) partition by list (a)",
        "create table t (a int) tablespace x",
        "create table t (a int) with (fillfactor = 7) on commit drop",
        "create table t (a int, like s including all)",
        "create table t (like s)",
        "create table db.s.t (a int)",
        "create table t (a int references)",
        "create index on t (a)",
        "create index concurrently i on t (a)",
        "create index i on only t (a)",
        "create index i on t (a) tablespace x",
        "create index i on t",
        "create unique table t (a int)",
        "create view v as select 1",
        "create schema s create table t (a int)",
        "create function f() returns int language sql as 'select 1'",
        "create or replace view v as select 1",
        "drop table t, u",
        "drop table t cascade",
        "drop table a.b.c",
        "drop view v",
        "drop schema s cascade",
        "drop database d",
        "alter table t add b",
        "alter table t add b int, add c int",
        "alter table t add b int, drop c",
        "alter table t add b int references s",
        "alter table t add column b int check (b > 0)",
        "alter table t add b int generated always as identity",
        "alter table t add b int primary key",
        "alter table t add constraint c check (a > 0)",
        "alter table t add primary key (a)",
        "alter table t add foreign key (a) references s",
        "alter table t rename a to b, rename c to d",
        "alter table t rename column a",
        "alter table t rename constraint a to b",
        "alter table t drop a, drop b",
        "alter table t drop a cascade",
        "alter table t drop constraint c",
        "alter table t rename to u",
        "alter table t owner to x",
        "alter table t disable trigger all",
        "alter role r superuser",
        "alter system set x = 1",
        "comment on table t is 'x'",
        "reindex table t",
        "refresh materialized view v",
        "security label on table t is 'x'",
        "import foreign schema s from server x into y",
    ],
)
def test_what_changes_the_schema_and_is_refused(statement: str) -> None:
    with pytest.raises(InvalidRequest):
        classify(statement, 0)


@pytest.mark.parametrize(
    "statement",
    [
        "",
        " ; ",
        "-- nothing",
        "select 1; select 2",
        "select 1; -- x\n delete from t",
        "select 1;;delete from t",
        "select 'a' ; drop table t --'",
        "copy t to stdout",
        "COPY (select 1) TO PROGRAM 'id'",
        "do $$ begin end $$",
        "set role postgres",
        "set session authorization x",
        "reset all",
        "show all",
        "call p()",
        "listen x",
        "notify x",
        "lock table t",
        "explain select 1",
        "explain analyze delete from t",
        "vacuum t",
        "analyze t",
        "grant select on t to x",
        "revoke select on t from x",
        "prepare x as select 1",
        "execute x",
        "declare c cursor for select 1",
        "begin",
        "commit",
        "savepoint s",
        "load 'x'",
        "discard all",
        "with x as (delete from t returning *) select * from x",
        "merge into t using (delete from u returning *) x on true when matched then delete",
        "with x as (merge into t using u on true when matched then delete returning t.a) select * from x",
        "with x as (insert into t values (1) returning *) select * from x",
        "with x as (update t set a = 1 returning *) update u set a = 1",
        "select * into u from t",
        "select a into temp u from t",
        "select * from t for update",
        "select * from t for no key update skip locked",
        "select * from (select * from t for share) x",
        "delete from t where current of c",
        "truncate t, u",
        "truncate t cascade",
        "truncate t restart identity",
        "delete from db.s.t",
        "select * from db.s.t",
        'select * from "a.b"',
        'select * from "a/b"',
        'select * from "a\u200bb"',
        'select * from ""',
        f'select * from "{"x" * 64}"',
        f"select * from {'x' * 64}",
        "select * from sécret",
        "select\u00a01",
        "select U&'\\0061'",
        'select * from U&"\\0061"',
        "select (1",
        "select 1)",
        "select [1",
        "select 'a",
        'select "a',
        "select $$a",
        "select $a$ b $$",
        "select /* a /* b */",
        "select e'\\'",
        "select $1",
        "selekt 1",
        "(((",
        "select" + "(" * 3000 + "1" + ")" * 3000,
        "x" * (STATEMENT_BYTES_MAX + 1),
    ],
)
def test_what_is_refused(statement: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        classify(statement, 0)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400


def test_parameters_are_numbered_in_order() -> None:
    lexed = lex("select %s, 'a%%' /* nothing */ from t where x = %s", 2)
    assert lexed.text == "select $1, 'a%' from t where x = $2"
    assert lex("select 'a%' like '%s'", 0).text == "select 'a%' like '%s'"


@pytest.mark.parametrize(
    "statement",
    [
        "insert into t (a, b, c) values (%s,%s,%s)",
        "insert into t (a,b,c)values(%s,%s,%s)",
        "update t set a=%s where b=%s and c=%s",
        "delete from t where a in(%s,%s,%s)",
    ],
)
def test_parameters_may_stand_without_blanks(statement: str) -> None:
    assert classify(statement, 3).target is not None


def test_a_dollar_quote_between_parameters_is_still_refused() -> None:
    with pytest.raises(InvalidRequest):
        classify("select %s,$x$ from secret $x$,%s; select 1", 2)
    assert classify("select %s,$x$ from secret $x$,%s from t", 2).reads == (table_of("", "t"),)


@pytest.mark.parametrize(
    ("statement", "count"),
    [
        ("select 1", 1),
        ("select %s", 2),
        ("select %s, %s", 1),
        ("select '%s'", 1),
        ("select 1 -- %s", 1),
        ("select %d", 1),
        ("select 5 % 2, %s", 1),
        ("select $1, %s", 1),
        ("select %s, $1", 1),
        ('select "%s"', 1),
        ("select %(name)s", 1),
        ("select 1", 257),
    ],
)
def test_parameters_that_do_not_fit_are_refused(statement: str, count: int) -> None:
    with pytest.raises(InvalidRequest):
        classify(statement, count)


def test_calls_attributes_and_operators_are_collected() -> None:
    found = classify('select f(a), S.G (b), "H"(c), t.k, (t).m, 1 =-1, x || y from t', 0)
    assert {("", "f"), ("s", "g"), ("", "H")} <= found.functions
    assert {"k", "m"} <= found.attributes
    assert found.operators == {"=", "||"}


@pytest.mark.parametrize(
    ("statement", "condition", "returning"),
    [
        ("delete from t", None, None),
        ("delete from t where a = 1", "a = 1", None),
        (
            "delete from t where a = (select 1 from u where b) returning *",
            "a = (select 1 from u where b)",
            "*",
        ),
        ('update t set a = case when b then 1 end where c returning a, b as "where"', "c", 'a, b as "where"'),
        ("update t set a = 'where' where b = 'returning' -- where", "b = 'returning'", None),
        ("update t set (a, b) = (select 1, 2 from u where x) returning a", None, "a"),
    ],
)
def test_writes_are_cut_into_their_parts(
    statement: str, condition: str | None, returning: str | None
) -> None:
    found = classify(statement, 0)
    shape = found.write
    assert shape is not None

    def text(part: tuple[int, int] | None) -> str | None:
        return None if part is None else found.lexed.text[slice(*part)].strip()

    assert (text(shape.condition), text(shape.returning)) == (condition, returning)


def test_questions_of_a_read() -> None:
    def asked(statement: str) -> list[tuple[str, Any]]:
        plan = sql_read.plan(sql_read.Arguments(database="crm", statement=statement), ENV)
        return [(question.action, question.resource) for question in plan.questions]

    assert asked("select 1") == [("sql.read", "crm")]
    assert asked("select * from t, hr.u, t x") == [("sql.read", "crm/t"), ("sql.read", "crm/hr.u")]


@pytest.mark.parametrize("body", [sql_read, sql_write])
def test_system_tables_are_refused(body: Any) -> None:
    for table in ("pg_authid", "pg_catalog.pg_class", "information_schema.tables", "pg_toast.x", "pg_temp.x"):
        statement = f"select * from {table}" if body is sql_read else f"delete from {table}"
        with pytest.raises(InvalidRequest, match="system table"):
            body.plan(body.Arguments(database="crm", statement=statement), ENV)


def test_each_body_takes_its_own_statements_only() -> None:
    with pytest.raises(InvalidRequest, match=r"sql\.write"):
        sql_read.plan(sql_read.Arguments(database="crm", statement="delete from t"), ENV)
    with pytest.raises(InvalidRequest, match=r"sql\.write"):
        sql_read.plan(sql_read.Arguments(database="crm", statement="drop table t"), ENV)
    with pytest.raises(InvalidRequest, match=r"sql\.read"):
        sql_write.plan(sql_write.Arguments(database="crm", statement="select 1"), ENV)


pieces = st.lists(
    st.sampled_from(
        [
            "select ",
            "1",
            "'",
            "''",
            '"',
            "$$",
            "$a$",
            "--",
            "/*",
            "*/",
            "\n",
            ";",
            "(",
            ")",
            "e'",
            "\\",
            "%s",
            "t",
            " ",
            "é",
        ]
    ),
    max_size=12,
).map("".join)


@given(pieces)
def test_anything_is_either_cut_whole_or_refused(text: str) -> None:
    """No text brings the lexer down; what it accepts, it accepts again in its normal form, unchanged."""
    try:
        lexed = lex(text, 0)
    except InvalidRequest:
        return
    assert lex(lexed.text, 0).text == lexed.text
    assert not any(token.value == ";" and token.kind == "punct" for token in lexed.tokens)
    for token in lexed.tokens:
        assert 0 <= token.start < token.end <= len(lexed.text)


@given(st.text(max_size=40))
def test_no_text_is_an_unexpected_error(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        classify(text, 0)


def test_relations_of_a_plan() -> None:
    plan = [
        {
            "Plan": {
                "Node Type": "ModifyTable",
                "Operation": "Delete",
                "Relation Name": "t",
                "Schema": "public",
                "Plans": [
                    {"Node Type": "Seq Scan", "Relation Name": "t", "Schema": "public"},
                    {"Node Type": "Index Scan", "Relation Name": "u", "Schema": "hr"},
                    {"Node Type": "Result", "Plans": [{"Relation Name": "u", "Schema": "hr"}]},
                ],
            }
        }
    ]
    touched, written = relations_of_plan(plan)
    assert {str(table): count for table, count in touched.items()} == {"t": 1, "hr.u": 2}
    assert [str(table) for table in written] == ["t"]
    with pytest.raises(InvalidRequest):
        relations_of_plan([{"Relation Name": "a.b", "Schema": "public"}])


def test_values_whose_type_is_not_known_are_text() -> None:
    assert to_json("(1,2)", 600) == "(1,2)"
    assert to_json(None, 23) is None
    assert to_json("(3,4),(1,2);(5,6),(3,4)", 603) == "(3,4),(1,2);(5,6),(3,4)"
    assert to_json("{(3,4),(1,2);(7,8),(5,6)}", 1020) == ["(3,4),(1,2)", "(7,8),(5,6)"]
    assert to_json('{"a":1e999}', 3802) == '{"a":1e999}'


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        ("a = 1", {"a"}),
        (
            'A = f(b, c), "B, x" = (select d, e from u where f = 1), c[1] = 2, d.x = 3',
            {"a", "B, x", "c", "d"},
        ),
        ("(a, b) = (1, 2), c = row(d, 1), (e) = row(1)", {"a", "b", "c", "e"}),
        ("a = (b = c), d = b = c from u where g = 1, 2", {"a", "d"}),
        ("a = b is distinct from c, e = array[f, g] where h = 1", {"a", "e"}),
        ("a = 1, b = 2 returning c, d", {"a", "b"}),
    ],
)
def test_columns_that_an_update_sets(sets: str, names: set[str]) -> None:
    assert shape_of_write(lex(f"update t set {sets}", 0), "update").sets == names


def test_what_is_known_of_a_statement_is_what_it_is() -> None:
    for text, count in (
        ("select 1 from t", 0),
        ("select %s from t", 1),
        (f"select '{'x' * 3000}' from t", 0),
    ):
        for _ in range(2):
            assert known_or_classified(text, count) == classify(text, count)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="are given"):
            known_or_classified("select %s from t", 2)
