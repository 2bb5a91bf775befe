"""What a table is like, and whether a verified copy of its rows can be made and put back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ringfence.syscalls.errors import NoSuchResource, SnapshotFailed
from ringfence.syscalls.sql_common import Kind, Table
from ringfence.syscalls.sql_target.session import RawRow, Session, quoted

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

_TABLE: Final = """
select c.oid, c.relkind,
  exists (select from pg_catalog.pg_inherits i where i.inhrelid = c.oid or i.inhparent = c.oid),
  (select min(t.tgname) from pg_catalog.pg_trigger t
   where t.tgrelid = c.oid and not t.tgisinternal and t.tgenabled <> 'D'),
  (select min(r.rulename) from pg_catalog.pg_rewrite r where r.ev_class = c.oid and r.rulename <> '_RETURN')
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2
"""
_COLUMNS: Final = """
select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attidentity
from pg_catalog.pg_attribute a
where a.attrelid = $1::oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
order by a.attnum
"""
# What a default, a check or a generated column calls may read or write elsewhere, whatever it is declared as; functions of the
# catalog itself have no such dependency.
_CALLS: Final = """
select min(p.proname)
from pg_catalog.pg_depend d
left join pg_catalog.pg_operator o on d.refclassid = 'pg_catalog.pg_operator'::regclass and o.oid = d.refobjid
join pg_catalog.pg_proc p
  on p.oid = case when d.refclassid = 'pg_catalog.pg_proc'::regclass then d.refobjid else o.oprcode::oid end
join pg_catalog.pg_language l on l.oid = p.prolang
where (p.provolatile = 'v' or p.pronamespace <> 'pg_catalog'::regnamespace) and l.lanname not in ('internal', 'c')
  and (
    d.classid = 'pg_catalog.pg_attrdef'::regclass
    and d.objid in (select a.oid from pg_catalog.pg_attrdef a where a.adrelid = $1::oid)
    or d.classid = 'pg_catalog.pg_constraint'::regclass
    and d.objid in (select c.oid from pg_catalog.pg_constraint c where c.conrelid = $1::oid)
  )
"""
_KEY: Final = """
select a.attname
from pg_catalog.pg_index i
cross join lateral unnest(i.indkey) with ordinality k (attnum, place)
join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
where i.indrelid = $1::oid and i.indisprimary and i.indisvalid and k.place <= i.indnkeyatts
order by k.place
"""
_REFERENCES: Final = """
select n.nspname, c.relname, f.conname, f.confdeltype, f.confupdtype, child.attname, parent.attname
from pg_catalog.pg_constraint f
join pg_catalog.pg_class c on c.oid = f.conrelid join pg_catalog.pg_namespace n on n.oid = c.relnamespace
cross join lateral unnest(f.conkey, f.confkey) with ordinality k (child, parent, place)
join pg_catalog.pg_attribute child on child.attrelid = f.conrelid and child.attnum = k.child
join pg_catalog.pg_attribute parent on parent.attrelid = f.confrelid and parent.attnum = k.parent
where f.contype = 'f' and f.confrelid = $1::oid
order by f.oid, k.place
"""


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
        key: names of the primary key's columns.
    """

    table: Table
    columns: tuple[str, ...]
    types: tuple[str, ...]
    fixed: frozenset[str]
    key: tuple[str, ...]
    references: tuple[Reference, ...]

    @property
    def sql(self) -> str:
        """The table's name for a statement."""
        return quoted(self.table.schema, self.table.name)

    def list_columns(self, of: str = "") -> str:
        """The columns for a statement, qualified by an alias where one is given."""
        return ", ".join(quoted(of, name) if of else quoted(name) for name in self.columns)

    def key_of(self, row: Sequence[str | None]) -> tuple[str, ...]:
        """The values of the primary key in a row of `columns`; they are never NULL."""
        return tuple(str(row[self.columns.index(name)]) for name in self.key)


async def lock_table(session: Session, table: Table, mode: str) -> None:
    """Lock a table, before anything is looked at: what the catalog says of it stays true from then on."""
    await session.execute(f"lock table {quoted(table.schema, table.name)} in {mode} mode")


async def inspect(session: Session, table: Table, kind: Kind | None) -> TableInfo:
    """Look at a table that is locked.

    Args:
        session: the transaction.
        table: what to look at.
        kind: what a statement is going to do to it; None: a restore, which looks after references itself.

    Raises:
        NoSuchResource: there is no such table.
        SnapshotFailed: no verified copy can be made of it in this release; the text says why.
    """
    found = (await session.query(_TABLE, [table.schema, table.name])).rows
    if not found:
        raise NoSuchResource(f"there is no table `{table}`")
    oid = _check_kind(table, found[0])
    columns = (await session.query(_COLUMNS, [oid])).rows
    key = tuple(str(row[0]) for row in (await session.query(_KEY, [oid])).rows)
    if not key:
        raise _refused(table, "it has no primary key")
    info = TableInfo(
        table=table,
        columns=tuple(str(row[0]) for row in columns),
        types=tuple(str(row[1]) for row in columns),
        fixed=frozenset(str(row[0]) for row in columns if row[2] == "a"),
        key=key,
        references=await _references(session, oid),
    )
    if not set(key) <= set(info.columns):
        raise _refused(table, "its primary key is a generated column")
    if kind in (Kind.INSERT, Kind.UPDATE):
        function = await session.value(_CALLS, [oid])
        if function is not None:
            raise _refused(
                table,
                f"the function `{function}` of a default, a check or a generated column may read or change other rows",
            )
    if kind in (Kind.DELETE, Kind.TRUNCATE):
        for reference in info.references:
            if reference.on_delete:
                raise _refused(
                    table,
                    f"`{reference.name}` of `{reference.child}` would {reference.on_delete} rows that refer to it",
                )
    return info


def _check_kind(table: Table, facts: RawRow) -> str:
    oid, relkind, inherits, trigger, rule = facts
    if relkind != "r":
        raise _refused(table, f"it is {_KINDS.get(str(relkind), 'no ordinary table')}")
    if inherits == "t":
        raise _refused(table, "it is a partition, or inherits or is inherited from")
    if trigger is not None:
        raise _refused(table, f"its trigger `{trigger}` may change other rows")
    if rule is not None:
        raise _refused(table, f"its rule `{rule}` may change other rows")
    return str(oid)


async def _references(session: Session, oid: str) -> tuple[Reference, ...]:
    grouped: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for row in (await session.query(_REFERENCES, [oid])).rows:
        schema, child, name, on_delete, on_update, column, referred = map(str, row)
        grouped.setdefault((schema, child, name, on_delete, on_update), []).append((column, referred))
    return tuple(
        Reference(
            child=Table(schema, child),
            name=name,
            on_delete=_ACTIONS.get(on_delete, ""),
            on_update=_ACTIONS.get(on_update, ""),
            columns=tuple(columns),
        )
        for (schema, child, name, on_delete, on_update), columns in grouped.items()
    )


def _refused(table: Table, why: str) -> SnapshotFailed:
    return SnapshotFailed(
        f"no verified copy of `{table}` can be made in this release: {why}; nothing was changed"
    )
