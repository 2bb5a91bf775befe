"""What stands behind the names in a statement: views, and types whose checks and casts call functions.

INVARIANT: a function that somebody wrote may read any table, so none is called by a statement, neither by its own words nor by
those of a view or by a type that it names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.sql_common import Statement, Table
from ringfence.syscalls.sql_known import known_or_classified

if TYPE_CHECKING:
    from ringfence.syscalls.sql_target.session import Asked, Session
    from ringfence.syscalls.sql_target.wire import Rows

_VIEWS_MAX: Final = 64
"""Views that are seen through for one statement."""

_VIEWS: Final = """
select n.nspname, c.relname, pg_catalog.pg_get_viewdef(c.oid)
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind = 'v' and (n.nspname, c.relname) in (select * from unnest($1::name[], $2::name[]))
"""
# A type that is named, and what it is made of; a table's own type only where something is made one of it. Where nobody has made a
# cast or a domain's check, whose ids begin at 16384, none of the rest is looked at.
_TYPES: Final = """
with recursive made (oid) as (
  select t.oid from pg_catalog.pg_type t
  join pg_catalog.pg_namespace n on n.oid = t.typnamespace
  left join pg_catalog.pg_class c on c.oid = t.typrelid
  where n.nspname <> 'pg_catalog'
    and (t.typname = any ($1::name[]) and (c.oid is null or c.relkind = 'c') or t.typname = any ($2::name[]))
  union
  select part.oid from made join pg_catalog.pg_type t on t.oid = made.oid, lateral (
    select t.typelem union all select t.typbasetype
    union all select a.atttypid from pg_catalog.pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0
    union all select r.rngsubtype from pg_catalog.pg_range r where r.rngtypid = t.oid
  ) part (oid) where part.oid <> 0
), columns (oid) as (
  select distinct a.atttypid from pg_catalog.pg_attribute a
  join pg_catalog.pg_class c on c.oid = a.attrelid
  join pg_catalog.pg_type t on t.oid = a.atttypid
  where c.relname = any ($1::name[]) and a.attnum > 0 and t.typnamespace <> 'pg_catalog'::regnamespace
), acting (oid, name) as (
  select p.oid, p.proname from pg_catalog.pg_proc p join pg_catalog.pg_language l on l.oid = p.prolang
  where l.lanname not in ('internal', 'c')
)
select acting.name, t.typname
from made
join pg_catalog.pg_type t on t.oid = made.oid
join pg_catalog.pg_constraint k on k.contypid = made.oid
join pg_catalog.pg_depend d on d.classid = 'pg_catalog.pg_constraint'::regclass and d.objid = k.oid
  and d.refclassid = 'pg_catalog.pg_proc'::regclass
join acting on acting.oid = d.refobjid
where exists (select from pg_catalog.pg_constraint g where g.contypid >= 16384)
union all
select acting.name, t.typname
from pg_catalog.pg_cast k
join acting on acting.oid = k.castfunc
join pg_catalog.pg_type t on t.oid in (k.castsource, k.casttarget)
where exists (select from pg_catalog.pg_cast g where g.oid >= 16384) and t.typnamespace <> 'pg_catalog'::regnamespace
  and (t.oid in (select oid from made) or k.castcontext = 'i' and t.oid in (select oid from columns))
limit 1
"""


async def views_behind(session: Session, statement: Statement) -> list[Statement]:
    """The queries of all views that a statement reads, and of those behind them.

    Raises:
        InvalidRequest: one of them can't be read with certainty, or there are too many.
    """
    found: dict[Table, Statement] = {}
    wanted = list(statement.reads)
    while wanted:
        (answer,) = await session.ask((_VIEWS, [[t.schema for t in wanted], [t.name for t in wanted]]))
        wanted = list[Table]()
        for schema, name, text in answer.rows:
            view = Table(str(schema), str(name))
            if view in found:
                continue
            if len(found) == _VIEWS_MAX:
                raise InvalidRequest(f"more than {_VIEWS_MAX} views stand behind the statement; read tables")
            found[view] = _query_of(view, str(text))
            wanted += found[view].reads
    return list(found.values())


def _query_of(view: Table, text: str) -> Statement:
    try:
        return known_or_classified(text, 0)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"the view `{view}` can't be seen through, read its tables: {error.message}"
        ) from None


def asked_of_types(statement: Statement) -> Asked:
    """What the catalog is asked about the types that a statement names."""
    named: set[str] = set()
    made: set[str] = set()
    tokens = statement.lexed.tokens
    for before, token, after in zip((None, *tokens), tokens, (*tokens[1:], None), strict=False):
        if token.kind not in ("word", "quoted"):
            continue
        named.add(token.value)
        cast = before is not None and before.value in (":", "as", ".")
        if cast or (after is not None and after.kind == "string"):
            made.add(token.value)
    return _TYPES, [sorted(named), sorted(made)]


def refuse_acting_types(answer: Rows) -> None:
    """Refuse types whose checks or casts run somebody's function.

    Raises:
        InvalidRequest: one is named, or a column has one that is cast by itself.
    """
    if answer.rows:
        kind, function = answer.rows[0][1], answer.rows[0][0]
        raise InvalidRequest(
            f"the type `{kind}` calls the function `{function}`, which is user-defined; these are refused in this release, "
            "leave it out"
        )
