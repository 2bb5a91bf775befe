"""What a table is like, and whether a verified copy of its rows can be made and put back."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from ringfence.syscalls.errors import NoSuchResource, SnapshotFailed
from ringfence.syscalls.sql_common import Kind, Table
from ringfence.syscalls.sql_target.session import Session, quoted
from ringfence.syscalls.sql_target.wire import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

_KINDS: Final = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "p": "a partitioned table",
    "S": "a sequence",
    "t": "internal",
    "c": "a type",
    "i": "an index",
}
_ACTIONS: Final = {"c": "cascade", "n": "set null", "d": "set default"}

# What a default, a check, a generated column or a column's type calls may read or write elsewhere, whatever it is declared as; functions of the
# catalog itself have no such dependency. What costs most is looked for only where there can be some: a foreign key that is enforced has
# triggers at either end. Row policies call functions in all good faith (who is it that asks?), so only volatile ones count there. Before PostgreSQL 15 a generated column has them itself. The key is the primary one, or else a unique one over columns that are never NULL.
# Whether a table may have any of that is said by `more`: where it hasn't, a shorter question is answered with the same words.
_ALWAYS: Final = """
select pg_catalog.jsonb_build_object(
  'kind', c.relkind,
  'inherits', exists (select from pg_inherits i where i.inhrelid = c.oid or i.inhparent = c.oid),
  'updates', pg_catalog.has_any_column_privilege(c.oid, 'update'),
  'deletes', pg_catalog.has_table_privilege(c.oid, 'delete'),
  'inserts', own.inserts, 'columns', own.columns,
  'more', own.types or c.relhastriggers or c.relhasrules or c.relchecks > 0 or pg_catalog.row_security_active(c.oid)
    or exists (select from pg_attrdef a where a.adrelid = c.oid) or exists (select from pg_constraint k where k.contypid >= 16384),
  'key', (
    select pg_catalog.jsonb_agg(a.attname order by k.place)
    from (
      select i.* from pg_index i
      where i.indrelid = c.oid and i.indisunique and i.indisvalid and i.indpred is null
        and (i.indisprimary or i.indimmediate and not exists (
          select from unnest(i.indkey) with ordinality u (attnum, place)
          left join pg_attribute n on n.attrelid = c.oid and n.attnum = u.attnum and n.attnum > 0
          where u.place <= i.indnkeyatts and n.attnotnull is not true))
      order by i.indisprimary desc, i.indexrelid limit 1
    ) i
    cross join lateral unnest(i.indkey) with ordinality k (attnum, place)
    join pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
    where k.place <= i.indnkeyatts),
"""
_FROM: Final = """
from pg_class c join pg_namespace n on n.oid = c.relnamespace
cross join lateral (
  select pg_catalog.bool_and(pg_catalog.has_column_privilege(c.oid, a.attnum, 'insert')) filter (where a.attgenerated = ''),
    pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attidentity) order by a.attnum)
      filter (where a.attgenerated = ''),
    coalesce(pg_catalog.bool_or(a.atttypid >= 16384), false)
  from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
) own (inserts, columns, types)
where n.nspname = $1 and c.relname = $2
"""
_WHERE_PLAIN: Final = """
  'unchecked', (select pg_catalog.min(k.conname) from pg_constraint k where not k.convalidated and k.conrelid = c.oid),
  'trigger', null, 'rule', null, 'policies', false, 'defers', false, 'references', null, 'calls', null, 'types', null, 'polices', null
)::text
"""
_MORE: Final = """
  'trigger', (select pg_catalog.min(t.tgname) from pg_trigger t where t.tgrelid = c.oid and not t.tgisinternal and t.tgenabled <> 'D'),
  'rule', (select pg_catalog.min(r.rulename) from pg_rewrite r where r.ev_class = c.oid and r.rulename <> '_RETURN'),
  'policies', pg_catalog.row_security_active(c.oid),
  'unchecked', case when not exists (select from pg_constraint k where k.contypid >= 16384) then (
    select pg_catalog.min(k.conname) from pg_constraint k where not k.convalidated and k.conrelid = c.oid) else (
    select pg_catalog.min(k.conname) from pg_constraint k where not k.convalidated and (k.conrelid = c.oid or k.contypid in (
      with recursive made (oid) as (
        select a.atttypid from pg_attribute a where a.attrelid = c.oid and a.attnum > 0
        union
        select part.oid from made join pg_type t on t.oid = made.oid, lateral (values (t.typbasetype), (t.typelem)) part (oid)
        where part.oid <> 0
      ) select oid from made))) end,
  'defers', exists (select from pg_constraint k where k.condeferrable and k.conrelid = c.oid)
    or c.relhastriggers and exists (select from pg_constraint k where k.condeferrable and k.confrelid = c.oid),
  'references', case when c.relhastriggers then (
    select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(n.nspname, child.relname, f.conname, f.confdeltype, f.confupdtype, (
        select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(mine.attname, theirs.attname) order by k.place)
        from unnest(f.conkey, f.confkey) with ordinality k (child, parent, place)
        join pg_attribute mine on mine.attrelid = f.conrelid and mine.attnum = k.child
        join pg_attribute theirs on theirs.attrelid = f.confrelid and theirs.attnum = k.parent)) order by f.oid)
    from pg_constraint f
    join pg_class child on child.oid = f.conrelid join pg_namespace n on n.oid = child.relnamespace
    where f.contype = 'f' and f.confrelid = c.oid) end,
  'calls', case when c.relhastriggers or c.relchecks > 0 or exists (select from pg_attrdef a where a.adrelid = c.oid) then (
    select pg_catalog.min(p.proname)
    from pg_depend d
    left join pg_operator o on d.refclassid = 'pg_operator'::pg_catalog.regclass and o.oid = d.refobjid
    join pg_proc p on p.oid = case when d.refclassid = 'pg_proc'::pg_catalog.regclass then d.refobjid else o.oprcode::oid end
    join pg_language l on l.oid = p.prolang
    where (p.provolatile = 'v' or p.pronamespace <> 'pg_catalog'::pg_catalog.regnamespace) and l.lanname not in ('internal', 'c')
      and (
        d.classid = 'pg_attrdef'::pg_catalog.regclass
        and d.objid in (select a.oid from pg_attrdef a where a.adrelid = c.oid)
        or d.classid = 'pg_constraint'::pg_catalog.regclass
        and d.objid in (select k.oid from pg_constraint k where k.conrelid = c.oid)
        or d.classid = 'pg_class'::pg_catalog.regclass and d.objid = c.oid and d.objsubid > 0
      )) end,
  'types', case when own.types then (
    with recursive made (oid) as (
      select a.atttypid from pg_attribute a
      where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.atttypid >= 16384
      union select part.oid from made join pg_type t on t.oid = made.oid cross join lateral (
        select t.typbasetype union all select t.typelem
        union all select f.atttypid from pg_attribute f where f.attrelid = t.typrelid and f.attnum > 0
        union all select r.rngsubtype from pg_range r where r.rngtypid = t.oid) part (oid) where part.oid >= 16384
    ), called (oid) as (
      select case when d.refclassid = 'pg_proc'::pg_catalog.regclass then d.refobjid else o.oprcode::oid end
      from made join pg_constraint k on k.contypid = made.oid
      join pg_depend d on d.classid = 'pg_constraint'::pg_catalog.regclass and d.objid = k.oid
      left join pg_operator o on d.refclassid = 'pg_operator'::pg_catalog.regclass and o.oid = d.refobjid
      union all select k.castfunc from made join pg_cast k on k.casttarget = made.oid and k.castcontext <> 'e'
    )
    select pg_catalog.min(p.proname) from called join pg_proc p on p.oid = called.oid join pg_language l on l.oid = p.prolang
    where l.lanname not in ('internal', 'c')) end,
  'polices', case when pg_catalog.row_security_active(c.oid) then (
    select pg_catalog.min(p.proname)
    from pg_policy y join pg_depend d on d.classid = 'pg_policy'::pg_catalog.regclass and d.objid = y.oid
    left join pg_operator o on d.refclassid = 'pg_operator'::pg_catalog.regclass and o.oid = d.refobjid
    join pg_proc p on p.oid = case when d.refclassid = 'pg_proc'::pg_catalog.regclass then d.refobjid else o.oprcode::oid end
    join pg_language l on l.oid = p.prolang
    where y.polrelid = c.oid and p.provolatile = 'v' and l.lanname not in ('internal', 'c')) end
)::text
"""
_PLAIN: Final = _ALWAYS + _WHERE_PLAIN + _FROM
_TABLE: Final = _ALWAYS + _MORE + _FROM


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the target's catalog says of a table."""

    kind: str
    more: bool
    inherits: bool
    trigger: str | None
    rule: str | None
    policies: bool
    unchecked: str | None
    inserts: bool | None
    defers: bool
    updates: bool
    deletes: bool
    columns: list[tuple[str, str, str]] | None
    key: list[str] | None
    references: list[tuple[str, str, str, str, str, list[tuple[str, str]]]] | None
    calls: str | None
    types: str | None
    polices: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A foreign key of another table (or the same) that refers to this one.

    Attributes:
        child: the table that refers.
        name: the constraint's.
        on_delete: `cascade`, `set null`, `set default`, or empty where deleting is refused by the target.
        on_update: the same for updates.
        columns: pairs of the child's column and the one it refers to.
    """

    child: Table
    name: str
    on_delete: str
    on_update: str
    columns: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableInfo:
    """A table whose rows can be copied and put back.

    Attributes:
        columns: names, generated ones left out.
        types: as `format_type` prints them.
        fixed: columns that no update may set: identities that are always generated.
        key: names of the primary key's columns, or of a unique key's whose columns are never NULL.
        inserts: whether the target's role may insert whole rows.
        updates: whether it may update some column, and so lock rows.
        deletes: whether it may delete rows.
        defers: whether some constraint may be checked as late as the commit.
        doubtful: why rows that stand in it might not be taken again; empty where they will be.
    """

    table: Table
    columns: tuple[str, ...]
    types: tuple[str, ...]
    fixed: frozenset[str]
    key: tuple[str, ...]
    references: tuple[Reference, ...]
    inserts: bool = True
    updates: bool = True
    deletes: bool = True
    defers: bool = True
    doubtful: str = ""

    @property
    def sql(self) -> str:
        """The table's name for a statement."""
        return quoted(self.table.schema, self.table.name)

    def list_columns(self, of: str = "") -> str:
        """The columns for a statement, qualified by an alias where one is given."""
        return ", ".join(quoted(of, name) if of else quoted(name) for name in self.columns)

    @property
    def key_places(self) -> tuple[int, ...]:
        """Where the key's columns stand in a row of `columns`."""
        return tuple(self.columns.index(name) for name in self.key)

    def places(self, names: Sequence[str]) -> tuple[int, ...]:
        """Where some of its columns stand in a row; those that are generated are passed over."""
        return tuple(self.columns.index(name) for name in names if name in self.columns)


def locking(table: Table, mode: str) -> tuple[str, tuple[()]]:
    """Lock a table, before anything is looked at: what the catalog says of it stays true from then on."""
    return f"lock table {quoted(table.schema, table.name)} in {mode} mode", ()


def looking(table: Table, *, plain: bool = False) -> tuple[str, tuple[str, str]]:
    """Ask what a table is like; `understand` understands the answer. Where it is thought to be `plain` the answer has to be so."""
    return _PLAIN if plain else _TABLE, (table.schema, table.name)


def is_plain(answer: Rows) -> bool:
    """Whether a table has none of what `looking` asks for only where it isn't thought to be plain."""
    return bool(answer.rows) and _PLAINLY in (answer.rows[0][0] or "")


_PLAINLY: Final = '"more": false'


async def inspect(session: Session, table: Table, lock: str) -> TableInfo:
    """Lock a table and look at it, for a restore.

    Raises:
        NoSuchResource: there is no such table.
        SnapshotFailed: its rows can't be put back in this release; the text says why.
    """
    asked = [locking(table, lock)] if lock else []
    return understand(table, (await session.ask(*asked, looking(table)))[-1], None)


def understand(table: Table, answer: Rows, kind: Kind | None) -> TableInfo:
    """What a table is like.

    Args:
        table: which.
        answer: to `looking`.
        kind: what a statement is going to do to it; None: a restore, which looks after references itself.

    Raises:
        NoSuchResource: there is no such table.
        SnapshotFailed: no verified copy can be made of it in this release; the text says why.
    """
    if not answer.rows:
        raise NoSuchResource(f"there is no table `{table}`")
    return _understood(table, answer.rows[0][0] or "", kind)


@functools.lru_cache(maxsize=256)
def _understood(table: Table, text: str, kind: Kind | None) -> TableInfo:
    facts = msgspec.json.decode(text, type=_Facts)
    _check_kind(table, facts)
    if not facts.key:
        raise _refused(table, "it has no primary key, and no unique one whose columns are never null")
    columns = facts.columns or []
    info = TableInfo(
        table=table,
        columns=tuple(name for name, _, _ in columns),
        types=tuple(kind for _, kind, _ in columns),
        fixed=frozenset(name for name, _, identity in columns if identity == "a"),
        key=tuple(facts.key),
        references=_references(facts),
        inserts=bool(facts.inserts),
        updates=facts.updates,
        deletes=facts.deletes,
        defers=facts.defers,
        doubtful="the target's role sees and writes only what its row policies let it"
        if facts.policies
        else f"rows that stand in it may break `{facts.unchecked}`, which was never validated"
        if facts.unchecked
        else "",
    )
    if not set(info.key) <= set(info.columns):
        raise _refused(table, "its primary key is a generated column")
    if kind is not None:
        _check_statement(info, facts, kind)
    return info


def _check_statement(info: TableInfo, facts: _Facts, kind: Kind) -> None:
    table = info.table
    if kind in _ADDS and facts.calls is not None:
        raise _refused(
            table,
            f"the function `{facts.calls}` of a default, a check or a generated column may read or change other rows",
        )
    if kind in _ADDS and facts.types is not None:
        raise _refused(
            table, f"the function `{facts.types}` of a column's type may read or change other rows"
        )
    if kind in _ADDS - {Kind.UPDATE} and not info.deletes:
        raise _refused(
            table, "the target's role may not delete from it, and so couldn't take inserted rows out again"
        )
    if kind in _REMOVES and not info.inserts:
        raise _refused(
            table,
            "the target's role may not insert whole rows into it, and so couldn't put removed ones back",
        )
    if kind is Kind.TRUNCATE and facts.policies:
        raise _refused(table, "a truncate removes rows that its row policies hide from the target's role")
    if kind in _REMOVES:
        for reference in info.references:
            if reference.on_delete:
                raise _refused(
                    table,
                    f"`{reference.name}` of `{reference.child}` would {reference.on_delete} rows that refer to it",
                )


_ADDS: Final = frozenset({Kind.INSERT, Kind.UPDATE, Kind.MERGE})
_REMOVES: Final = frozenset({Kind.DELETE, Kind.TRUNCATE, Kind.MERGE})


def _check_kind(table: Table, facts: _Facts) -> None:
    if facts.kind != "r":
        raise _refused(table, f"it is {_KINDS.get(facts.kind, 'no ordinary table')}")
    if facts.inherits:
        raise _refused(table, "it is a partition, or inherits or is inherited from")
    if facts.trigger is not None:
        raise _refused(table, f"its trigger `{facts.trigger}` may change other rows")
    if facts.rule is not None:
        raise _refused(table, f"its rule `{facts.rule}` may change other rows")
    if facts.polices is not None:
        why = f"the volatile function `{facts.polices}` of its row policies may change other rows; an operator can declare it `stable`"
        raise _refused(table, why)


def _references(facts: _Facts) -> tuple[Reference, ...]:
    return tuple(
        Reference(
            child=Table(schema, child),
            name=name,
            on_delete=_ACTIONS.get(on_delete, ""),
            on_update=_ACTIONS.get(on_update, ""),
            columns=tuple(pairs),
        )
        for schema, child, name, on_delete, on_update, pairs in facts.references or ()
    )


def _refused(table: Table, why: str) -> SnapshotFailed:
    return SnapshotFailed(
        f"no verified copy of `{table}` can be made in this release: {why}; nothing was changed"
    )
