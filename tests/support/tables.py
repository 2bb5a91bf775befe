"""Writes down what stands in a database, by its own catalog and COPY: nothing of the code that it is held against."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

_TABLES = """
select c.oid, n.nspname, c.relname, c.relpersistence::text, c.relrowsecurity
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and n.nspname not like 'pg\\_%' and n.nspname <> 'information_schema'
order by 2, 3
"""
_FACTS = """
select 'column', a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull::text, a.attidentity::text, a.attgenerated::text,
  pg_get_expr(d.adbin, d.adrelid)
from pg_attribute a left join pg_attrdef d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
where a.attrelid = %(oid)s and a.attnum > 0 and not a.attisdropped
union all select 'constraint', conname, pg_get_constraintdef(oid), convalidated::text, null, null, null from pg_constraint where conrelid = %(oid)s
union all select 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid), indisvalid::text, null, null, null
  from pg_index where indrelid = %(oid)s
union all select 'trigger', tgname, tgenabled::text, null, null, null, null from pg_trigger where tgrelid = %(oid)s and not tgisinternal
order by 1, 2
"""
_SEQUENCES = """
select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.relkind = 'S' order by 1, 2
"""
_SETTINGS = "set datestyle = 'ISO'; set extra_float_digits = 3; set timezone = 'UTC'; set bytea_output = 'hex'; set intervalstyle = 'iso_8601'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A database at one moment.

    Attributes:
        rows: by table, the lines of COPY in order.
        shapes: by table, its columns, constraints, indexes and triggers.
        sequences: by name, the last value and whether it was given out.
    """

    rows: dict[tuple[str, str], tuple[str, ...]]
    shapes: dict[tuple[str, str], tuple[Any, ...]]
    sequences: dict[tuple[str, str], tuple[int, bool]]


def dump(connection: psycopg.Connection[Any]) -> Dump:
    """Write down everything, in one snapshot."""
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    shapes: dict[tuple[str, str], tuple[Any, ...]] = {}
    sequences: dict[tuple[str, str], tuple[int, bool]] = {}
    connection.execute(f"begin isolation level repeatable read; {_SETTINGS}")
    for oid, schema, table, *more in connection.execute(_TABLES).fetchall():
        shapes[schema, table] = (*more, *connection.execute(_FACTS, {"oid": oid}).fetchall())
        query = sql.SQL("copy (select * from only {}) to stdout").format(sql.Identifier(schema, table))
        with connection.cursor().copy(query) as copy:
            text = b"".join(bytes(part) for part in copy).decode()
        rows[schema, table] = tuple(sorted(text.splitlines()))
    for schema, name in connection.execute(_SEQUENCES).fetchall():
        query = sql.SQL("select last_value, is_called from {}").format(sql.Identifier(schema, name))
        found = connection.execute(query).fetchone()
        assert found is not None
        sequences[schema, name] = found
    connection.execute("rollback")
    return Dump(rows=rows, shapes=shapes, sequences=sequences)


Place = tuple[tuple[str, str], tuple[str, ...]]
"""A row: its table and the text of its key."""


@dataclass
class Done:
    """What one write made of rows, as it was written down, and the point it has."""

    point: str
    rows: dict[Place, tuple[str | None, str | None]] = field(default_factory=dict)


def put(rows: dict[Place, str], place: Place, line: str | None) -> None:
    """Have a row as it should be."""
    rows.pop(place, None)
    if line is not None:
        rows[place] = line


def wanted_of(chosen: Sequence[Done], now: dict[Place, str]) -> tuple[dict[Place, str], set[Place]]:
    """What rows should be once some writes are undone, and which are kept because others changed them."""
    rows, conflicts = dict(now), set[Place]()
    for place in {place for done in chosen for place in done.rows}:
        steps = [done.rows[place] for done in chosen if place in done.rows]
        unbroken = all(one[1] == two[0] for one, two in itertools.pairwise(steps))
        if now.get(place) == steps[0][0]:
            continue
        if unbroken and now.get(place) == steps[-1][1]:
            put(rows, place, steps[0][0])
        else:
            conflicts.add(place)
    return rows, conflicts
