"""What the target's own catalog says of a statement: what it calls, and which relations its plan touches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.sql_common import (
    Kind,
    Statement,
    Table,
    check_name,
    read_questions,
    refuse_system_tables,
)
from ringfence.syscalls.sql_growth import refuse_growth
from ringfence.syscalls.sql_target.behind import asked_of_types, refuse_acting_types, views_behind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ringfence.syscalls.base import Call
    from ringfence.syscalls.sql_target.session import Asked, Session
    from ringfence.syscalls.sql_target.wire import Rows

PLAN_TIMEOUT_S: Final = 5
"""Longest planning of a statement, which computes what depends on constants alone."""

# Volatile, but they only draw or look at the clock.
_HARMLESS: Final = frozenset(
    {"random", "clock_timestamp", "timeofday", "gen_random_uuid", "uuidv4", "uuidv7"}
)
# In a write also what advances a sequence, as any insert does, and what tells which way a merge went.
_HARMLESS_IN_WRITES: Final = _HARMLESS | {"nextval", "merge_action"}
# Functions that run a statement they are given, or tell about settings, whatever the catalog calls them.
_REFUSED_PREFIXES: Final = (
    "pg_",
    "query_to_xml",
    "cursor_to_xml",
    "table_to_xml",
    "schema_to_xml",
    "database_to_xml",
    "lo_",
    "dblink",
    "binary_upgrade_",
    "has_",
)
_REFUSED: Final = frozenset({"current_setting", "set_config", "ts_stat", "ts_rewrite", "txid_status"})
_KNOWN_GOOD: Final = frozenset({"pg_typeof", "pg_column_size", "pg_size_pretty", "pg_size_bytes"})

_FUNCTIONS: Final = """
select n.nspname, p.proname, p.provolatile
from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
where p.proname = any ($1::name[])
"""
# `row.name` calls a function `name` that takes a row.
_ATTRIBUTES: Final = """
select n.nspname, p.proname
from pg_catalog.pg_proc p
join pg_catalog.pg_namespace n on n.oid = p.pronamespace
join pg_catalog.pg_type t on t.oid = p.proargtypes[0]
where p.proname = any ($1::name[]) and n.nspname = 'public' and t.typtype in ('c', 'p')
  and p.pronargs - p.pronargdefaults <= 1
"""
_OPERATORS: Final = """
select n.nspname, o.oprname
from pg_catalog.pg_operator o
join pg_catalog.pg_namespace n on n.oid = o.oprnamespace
join pg_catalog.pg_proc p on p.oid = o.oprcode
join pg_catalog.pg_language l on l.oid = p.prolang
where o.oprname = any ($1::name[]) and n.nspname <> 'pg_catalog'
  and (p.provolatile = 'v' or p.prosecdef or l.lanname not in ('internal', 'c'))
"""
_PARENTS: Final = """
with recursive up as (
  select c.oid as child, c.oid from pg_catalog.pg_class c
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  where (n.nspname, c.relname) in (select * from unnest($1::name[], $2::name[]))
  union
  select up.child, i.inhparent from up join pg_catalog.pg_inherits i on i.inhrelid = up.oid
)
select cn.nspname, c.relname, pn.nspname, p.relname
from up
join pg_catalog.pg_class c on c.oid = up.child join pg_catalog.pg_namespace cn on cn.oid = c.relnamespace
join pg_catalog.pg_class p on p.oid = up.oid join pg_catalog.pg_namespace pn on pn.oid = p.relnamespace
"""


async def check_functions(
    session: Session, statement: Statement, first: Sequence[Asked] = ()
) -> Sequence[Rows]:
    """Refuse calls of functions and operators that do more than compute from what they are given, in views too.

    Args:
        session: the transaction.
        statement: what is going to run.
        first: what is asked before, in the same round trip.

    Returns:
        The answers to `first`.

    Raises:
        InvalidRequest: one of them is user-defined, volatile, or runs statements of its own.
    """
    wanted = [*_asked(statement), asked_of_types(statement)]
    answers = await session.ask(*first, *wanted)
    _judge_calls(statement, answers[len(first) :])
    refuse_acting_types(answers[-1])
    for view in await views_behind(session, statement):
        found = await session.ask(*_asked(view), asked_of_types(view))
        _judge_calls(view, found)
        refuse_acting_types(found[-1])
    return answers[: len(first)]


def _asked(statement: Statement) -> list[Asked]:
    """What the catalog is asked of a statement; only what it has."""
    functions = {name for _, name in statement.functions}
    named = ((_FUNCTIONS, functions), (_ATTRIBUTES, statement.attributes), (_OPERATORS, statement.operators))
    return [(query, [sorted(names)]) for query, names in named if names]


def _judge_calls(statement: Statement, answers: Sequence[Rows]) -> None:
    """Judge what the catalog answered to `_asked`."""
    harmless = harmless_in(statement)
    rest = iter(answers)
    if statement.functions:
        known: dict[str, list[tuple[str, str]]] = {}
        for schema, name, volatility in next(rest).rows:
            known.setdefault(str(name), []).append((str(schema), str(volatility)))
        for wanted, name in sorted(statement.functions):
            for schema, volatility in known.get(name, ()):
                if schema == wanted or (not wanted and schema in ("pg_catalog", "public")):
                    _check_function(schema, name, volatility, harmless)
    for names, what in ((statement.attributes, "function"), (statement.operators, "operator")):
        found = next(rest).rows if names else []
        if found:
            raise InvalidRequest(
                f"the {what} `{found[0][0]}.{found[0][1]}` is user-defined; these are refused in this release, leave it out"
            )


def _check_function(schema: str, name: str, volatility: str, harmless: frozenset[str]) -> None:
    if schema != "pg_catalog":
        raise InvalidRequest(
            f"the function `{schema}.{name}` is user-defined; these are refused in this release, leave it out"
        )
    if name in harmless or name in _KNOWN_GOOD:
        return
    if volatility == "v" or acts(name):
        raise InvalidRequest(
            f"the function `{name}` is refused: it does more than compute from its arguments; leave it out"
        )


EXPLAIN: Final = "explain (verbose, costs off, format json) "


def acts(name: str) -> bool:
    """Whether a function of the catalog does more than compute, whatever the catalog says of it."""
    return name not in _HARMLESS | _KNOWN_GOOD and (name in _REFUSED or name.startswith(_REFUSED_PREFIXES))


def harmless_in(statement: Statement) -> frozenset[str]:
    """Functions that a statement may call though they are volatile."""
    return _HARMLESS if statement.kind is Kind.READ else _HARMLESS_IN_WRITES


async def judge_plan(
    call: Call,
    database: str,
    session: Session,
    statement: Statement,
    parameters: Sequence[Any],
    text: str,
) -> None:
    """Ask the target which relations a statement really touches, and policy about those not judged yet.

    Views are seen through. The locks of the plan keep its relations as they are until the transaction ends.

    Args:
        call: whose statement it is.
        database: the resource's name.
        session: the transaction it will run in.
        statement: as it was classified.
        parameters: its parameters.
        text: what will be run.

    Raises:
        Denied: policy refuses one of them.
        InvalidRequest: one of them is a system table, the write goes to another table than the one judged, or the statement
            makes large values out of constants.
        Deadline: it can't be planned in time.
    """
    refuse_growth(statement.lexed, parameters)
    answer = await session.at_most(PLAN_TIMEOUT_S, EXPLAIN + text, parameters)
    await judge_planned(call, database, session, statement, answer)


async def judge_planned(
    call: Call, database: str, session: Session, statement: Statement, answer: Rows
) -> None:
    """As `judge_plan`, where the target has been asked."""
    touched, written = relations_of_plan(msgspec.json.decode(answer.rows[0][0] or "[]"))
    target = statement.target
    if written != ([] if target is None else [target]):
        raise InvalidRequest("the statement writes to another table than it names; write to the table itself")
    # An update or delete scans its own table once to find the rows; any further scan of it is a read.
    if target is not None and statement.kind is not Kind.INSERT and touched[target]:
        touched[target] -= 1
    refuse_system_tables(touched)
    judged = set(statement.reads)
    unjudged = [table for table, count in touched.items() if count and table not in judged]
    if unjudged:
        parents = await _parents(session, unjudged)
        # A partition is a part of the table that was judged; a table behind a view is not the view.
        unjudged = [table for table in unjudged if not parents.get(table, set()) & judged]
    if unjudged:
        await call.require(read_questions(database, unjudged))


async def _parents(session: Session, tables: Sequence[Table]) -> dict[Table, set[Table]]:
    parameters = [[table.schema for table in tables], [table.name for table in tables]]
    found: dict[Table, set[Table]] = {}
    for row in (await session.query(_PARENTS, parameters)).rows:
        schema, name, parent_schema, parent = map(str, row)
        found.setdefault(Table(schema, name), set()).add(Table(parent_schema, parent))
    return found


def relations_of_plan(plan: Any) -> tuple[Counter[Table], list[Table]]:
    """How often a plan scans which relations, and which it writes.

    Raises:
        InvalidRequest: a relation's name can't be judged.
    """
    touched: Counter[Table] = Counter()
    written: list[Table] = []
    for node in _nodes(plan):
        name = node.get("Relation Name")
        if name is None:
            continue
        table = Table(str(node.get("Schema", "")), str(name))
        check_name(table.schema)
        check_name(table.name)
        if node.get("Node Type") == "ModifyTable":
            written.append(table)
        else:
            touched[table] += 1
    return touched, written


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(cast("list[Any]", item))
        elif isinstance(item, dict):
            members = cast("dict[str, Any]", item)
            yield members
            pending.extend(members.values())
