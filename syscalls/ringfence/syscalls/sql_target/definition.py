"""What a table is, whole: everything that its catalog says of it, so that it can be made again and held against what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
from ringfence.syscalls.errors import SnapshotFailed
from ringfence.syscalls.sql_target.session import quoted

if TYPE_CHECKING:
    from ringfence.syscalls.sql_common import Table
    from ringfence.syscalls.sql_target.session import Session

Definition: TypeAlias = dict[str, Any]
"""JSON of a table: owner, options, comment, rights, columns, constraints, indexes and sequences. See `_WHOLE`."""

_COMPRESSES: Final = 140000
"""First version of the server whose columns have a compression."""

# Whatever has no place in the parts below is `odd`: a table that has it can't be made again here.
_WHOLE: Final = """
select pg_catalog.jsonb_build_object(
  'kind', c.relkind,
  'owner', pg_catalog.pg_get_userbyid(c.relowner),
  'options', c.reloptions,
  'comment', pg_catalog.obj_description(c.oid, 'pg_class'),
  'granted', c.relacl is not null,
  'rights', (
    select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(x.grantor::regrole::text, case when x.grantee <> 0 then x.grantee::regrole::text end,
      x.privilege_type, x.is_grantable) order by x.privilege_type, x.grantee::regrole::text)
    from pg_catalog.aclexplode(coalesce(c.relacl, pg_catalog.acldefault('r', c.relowner))) x),
  'columns', (
    select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
      'name', a.attname,
      'type', pg_catalog.format_type(a.atttypid, a.atttypmod),
      'collation', case when a.attcollation <> t.typcollation then (
        select pg_catalog.format('%I.%I', n.nspname, k.collname) from pg_collation k join pg_namespace n on n.oid = k.collnamespace
        where k.oid = a.attcollation) end,
      'required', a.attnotnull,
      'default', pg_catalog.pg_get_expr(d.adbin, d.adrelid),
      'generated', a.attgenerated,
      'identity', a.attidentity,
      'storage', case when a.attstorage <> t.typstorage then a.attstorage end,
      'compression', {compression},
      'statistics', nullif(a.attstattarget, -1),
      'comment', pg_catalog.col_description(c.oid, a.attnum),
      'rights', (
        select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(x.grantor::regrole::text, case when x.grantee <> 0 then x.grantee::regrole::text end,
          x.privilege_type, x.is_grantable) order by x.privilege_type, x.grantee::regrole::text)
        from pg_catalog.aclexplode(a.attacl) x)
    ) order by a.attnum)
    from pg_attribute a join pg_type t on t.oid = a.atttypid
    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
  'constraints', (
    select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
      'name', k.conname, 'kind', k.contype, 'definition', pg_catalog.pg_get_constraintdef(k.oid),
      'refers', (select pg_catalog.jsonb_build_array(n.nspname, r.relname) from pg_class r join pg_namespace n on n.oid = r.relnamespace
        where r.oid = k.confrelid and k.confrelid <> c.oid),
      'comment', pg_catalog.obj_description(k.oid, 'pg_constraint')) order by k.conname)
    from pg_constraint k where k.conrelid = c.oid and k.contype <> 't'),
  'indexes', (
    select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
      'name', r.relname, 'definition', pg_catalog.pg_get_indexdef(r.oid), 'comment', pg_catalog.obj_description(r.oid, 'pg_class'),
      'constraint', (select k.conname from pg_constraint k where k.conindid = r.oid and k.conrelid = c.oid and k.contype in ('p', 'u', 'x'))) order by r.oid)
    from pg_index i join pg_class r on r.oid = i.indexrelid where i.indrelid = c.oid),
  'sequences', (
    select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
      'schema', n.nspname, 'name', r.relname, 'column', a.attname, 'identity', o.deptype = 'i',
      'type', pg_catalog.format_type(s.seqtypid, null),
      'start', s.seqstart, 'increment', s.seqincrement, 'least', s.seqmin, 'most', s.seqmax, 'cache', s.seqcache, 'cycle', s.seqcycle,
      'owner', pg_catalog.pg_get_userbyid(r.relowner),
      'granted', r.relacl is not null,
      'comment', pg_catalog.obj_description(r.oid, 'pg_class'),
      'rights', (
        select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(x.grantor::regrole::text, case when x.grantee <> 0 then x.grantee::regrole::text end,
          x.privilege_type, x.is_grantable) order by x.privilege_type, x.grantee::regrole::text)
        from pg_catalog.aclexplode(coalesce(r.relacl, pg_catalog.acldefault('s', r.relowner))) x)) order by n.nspname, r.relname)
    from pg_depend o join pg_class r on r.oid = o.objid and r.relkind = 'S' join pg_namespace n on n.oid = r.relnamespace
    join pg_sequence s on s.seqrelid = r.oid join pg_attribute a on a.attrelid = c.oid and a.attnum = o.refobjsubid
    where o.classid = 'pg_class'::pg_catalog.regclass and o.refclassid = 'pg_class'::pg_catalog.regclass and o.refobjid = c.oid
      and o.deptype in ('a', 'i')),
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
  'odd', (
    select odd.why from (values
      (c.relkind <> 'r', 'it is no ordinary table'),
      (c.relpersistence <> 'p', 'it is temporary or unlogged'),
      (exists (select from pg_inherits i where i.inhrelid = c.oid or i.inhparent = c.oid),
        'it is a partition, or inherits or is inherited from'),
      (c.reloftype <> 0, 'it is made of a type'),
      (c.relam <> (select m.oid from pg_am m where m.amname = 'heap'), 'it has an access method of its own'),
      (c.reltablespace <> 0 or exists (
        select from pg_index i join pg_class r on r.oid = i.indexrelid where i.indrelid = c.oid and r.reltablespace <> 0),
        'it or an index of it lies in another tablespace'),
      (c.relrowsecurity or c.relforcerowsecurity or exists (select from pg_policy p where p.polrelid = c.oid), 'it has row policies'),
      (c.relreplident <> 'd', 'it has a replica identity'),
      (exists (select from pg_trigger g where g.tgrelid = c.oid and not g.tgisinternal), 'it has a trigger'),
      (exists (select from pg_trigger g where (g.tgrelid = c.oid or g.tgconstrrelid = c.oid) and g.tgisinternal and g.tgenabled <> 'O'),
        'checks of a foreign key of it are switched off'),
      (exists (select from pg_rewrite w where w.ev_class = c.oid), 'it has a rule'),
      (exists (select from pg_statistic_ext e where e.stxrelid = c.oid), 'it has extended statistics'),
      (exists (select from pg_publication_rel p where p.prrelid = c.oid), 'it is published'),
      (exists (select from pg_subscription_rel s where s.srrelid = c.oid), 'a subscription writes to it'),
      (exists (select from pg_attribute a join pg_type t on t.oid = a.atttypid left join pg_type e on e.oid = t.typelem and t.typcategory = 'A'
          join pg_class r on r.oid in (t.typrelid, e.typrelid) and r.relkind <> 'c' where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
        'a column of it is made of rows of another table'),
      (exists (select from pg_seclabel l where l.classoid = 'pg_class'::pg_catalog.regclass and l.objoid = c.oid), 'it has a security label'),
      (exists (select from pg_class o where o.oid = c.reltoastrelid and o.reloptions is not null), 'its long values have options of their own'),
      (exists (select from pg_attribute a where a.attrelid = c.oid and a.attoptions is not null), 'a column has options'),
      (exists (select from pg_type t where t.oid = c.reltype and (t.typacl is not null or pg_catalog.obj_description(t.oid, 'pg_type') is not null)),
        'its row type has rights or a comment'),
      (exists (select from pg_index i where i.indrelid = c.oid and (i.indisclustered or not i.indisvalid or not i.indisready)),
        'an index of it is clustered or not valid'),
      (exists (select from pg_index i join pg_attribute a on a.attrelid = i.indexrelid
          where i.indrelid = c.oid and (a.attoptions is not null or coalesce(a.attstattarget, -1) <> -1)), 'an index of it has settings of its own'),
      (exists (select from pg_depend o where o.classid = 'pg_class'::pg_catalog.regclass and o.objid = c.oid and o.deptype = 'e'),
        'it belongs to an extension'),
      (exists (
        select from pg_depend o
        left join pg_operator r on o.refclassid = 'pg_operator'::pg_catalog.regclass and r.oid = o.refobjid
        join pg_proc p on p.oid = case when o.refclassid = 'pg_proc'::pg_catalog.regclass then o.refobjid else r.oprcode::oid end
        join pg_language l on l.oid = p.prolang
        where l.lanname not in ('internal', 'c') and (p.provolatile = 'v' or p.pronamespace <> 'pg_catalog'::pg_catalog.regnamespace) and (
          o.classid = 'pg_attrdef'::pg_catalog.regclass and o.objid in (select d.oid from pg_attrdef d where d.adrelid = c.oid)
          or o.classid = 'pg_constraint'::pg_catalog.regclass and o.objid in (select k.oid from pg_constraint k where k.conrelid = c.oid)
          or o.classid = 'pg_class'::pg_catalog.regclass and o.objid = c.oid and o.objsubid > 0
          or o.classid = 'pg_class'::pg_catalog.regclass and o.objid in (select i.indexrelid from pg_index i where i.indrelid = c.oid))),
        'a default, a check, a generated column or an index of it calls a function that somebody wrote'),
      (exists (select from pg_event_trigger e where e.evtenabled <> 'D'), 'the target has event triggers, which may change anything')
    ) odd (bad, why) where odd.bad limit 1)
)::text
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2
"""
_LISTS: Final = ("columns", "constraints", "indexes", "sequences", "rights")
_STANDS: Final = "select last_value::text, is_called::text from"
_TAKEN: Final = """
select pg_catalog.min(c.relname) from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = any ($2::pg_catalog.name[])
"""


async def definition_of(session: Session, table: Table) -> Definition | None:
    """What a relation is; None where there is none. Sequences that belong to it come with where they stand."""
    query = _WHOLE.replace(
        "{compression}", "nullif(a.attcompression, '')" if session.server >= _COMPRESSES else "null"
    )
    found = await session.value(query, [table.schema, table.name])
    if found is None:
        return None
    definition: Definition = msgspec.json.decode(found)
    for name in _LISTS:
        definition[name] = definition[name] or []
    if not definition["odd"]:
        await _where_sequences_stand(session, definition)
    return definition


async def _where_sequences_stand(session: Session, definition: Definition) -> None:
    sequences = definition["sequences"]
    asked = [(" ".join((_STANDS, _sequence(one))), ()) for one in sequences]
    for one, answer in zip(sequences, await session.ask(*asked) if asked else [], strict=True):
        one["last"], one["called"] = answer.rows[0][0], answer.rows[0][1] == "true"


def refuse_odd(table: Table, definition: Definition) -> None:
    """Refuse a table that can't be made again.

    Raises:
        SnapshotFailed: it has something that none of the parts of a definition says.
    """
    if definition["odd"]:
        raise SnapshotFailed(
            f"no verified copy of `{table}` can be made in this release: {definition['odd']}; nothing was changed"
        )


def same_table(one: Definition | None, other: Definition | None) -> bool:
    """Whether two definitions are one, wherever their sequences stand, and whether or not rights that are as usual were ever named."""
    return _still(one) == _still(other)


def _still(definition: Definition | None) -> Definition | None:
    if definition is None:
        return None
    moving = ("last", "called", "granted")
    sequences = [{k: v for k, v in one.items() if k not in moving} for one in definition["sequences"]]
    return {**definition, "sequences": sequences, "granted": None}


def columns_of(definition: Definition) -> list[tuple[str, str]]:
    """Names and types of the columns whose values are kept: those that are not generated."""
    return [(one["name"], one["type"]) for one in definition["columns"] if not one["generated"]]


async def name_taken(session: Session, table: Table, definition: Definition) -> str | None:
    """A name that the table's own parts had and that something has now, beside the table's; None: they are free."""
    names = [one["name"] for one in definition["indexes"]]
    names += [one["name"] for one in definition["sequences"] if one["schema"] == table.schema]
    return await session.value(_TAKEN, [table.schema, names])


def _sequence(one: dict[str, Any]) -> str:
    return quoted(one["schema"], one["name"])


# -- making it again ------------------------------------------------------------------------------------------------------


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def before_rows(table: Table, definition: Definition) -> list[str]:
    """Statements that make a table, without what only holds once its rows are there."""
    constraints = definition["constraints"]
    nulls = [one for one in constraints if one["kind"] == "n"]
    named = bool(nulls)
    parts = [_column(one, definition, named=named) for one in definition["columns"]]
    parts += [f"constraint {quoted(one['name'])} {one['definition']}" for one in nulls]
    options = ", ".join(
        f"{quoted(name)} = {_text(value)}"
        for name, _, value in (option.partition("=") for option in definition["options"] or ())
    )
    serials = [one for one in definition["sequences"] if not one["identity"]]
    made = [f"create sequence {_sequence(one)} as {one['type']} {_counting(one)}" for one in serials]
    name = quoted(table.schema, table.name)
    made.append(f"create table {name} ({', '.join(parts)})" + (f" with ({options})" if options else ""))
    made += [f"alter sequence {_sequence(one)} owned by {name}.{quoted(one['column'])}" for one in serials]
    return made


def _column(one: dict[str, Any], definition: Definition, *, named: bool) -> str:
    words = [quoted(one["name"]), one["type"]]
    if one["collation"]:
        words.append(f"collate {one['collation']}")
    if one["generated"]:
        words.append(f"generated always as ({one['default']}) {_KEPT[one['generated']]}")
    elif one["default"] is not None:
        words.append(f"default {one['default']}")
    for sequence in definition["sequences"] if one["identity"] else ():
        if sequence["identity"] and sequence["column"] == one["name"]:
            always = "always" if one["identity"] == "a" else "by default"
            options = f"sequence name {_sequence(sequence)} {_counting(sequence)}"
            words.append(f"generated {always} as identity ({options})")
    # Where the target keeps them as constraints with names, they stand behind the columns.
    if one["required"] and not named:
        words.append("not null")
    return " ".join(words)


_KEPT: Final = {"s": "stored", "v": "virtual"}


def _counting(one: dict[str, Any]) -> str:
    return (
        f"start with {one['start']} increment by {one['increment']} minvalue {one['least']} maxvalue {one['most']} "
        f"cache {one['cache']} {'cycle' if one['cycle'] else 'no cycle'}"
    )


def after_rows(table: Table, definition: Definition) -> list[str]:
    """Statements that make the rest of it: keys, checks, indexes, where sequences stand, comments, owner and rights."""
    name = quoted(table.schema, table.name)
    constraints = {
        one["name"]: f"alter table {name} add constraint {quoted(one['name'])} {one['definition']}"
        for one in definition["constraints"]
    }
    # In their old order: the first unique one may be the key by which rows are known.
    made = [
        one["definition"] if one["constraint"] is None else constraints[one["constraint"]]
        for one in definition["indexes"]
    ]
    # A foreign key may refer to any unique index of its own table.
    for kind in ("c", "f"):
        made += [constraints[one["name"]] for one in definition["constraints"] if one["kind"] == kind]
    made += [
        f"select pg_catalog.setval({_text(_sequence(one))}, {one['last']}, {'true' if one['called'] else 'false'})"
        for one in definition["sequences"]
    ]
    for one in definition["columns"]:
        alter = f"alter table {name} alter column {quoted(one['name'])}"
        if one["storage"]:
            made.append(f"{alter} set storage {_STORAGE[one['storage']]}")
        if one["compression"]:
            made.append(f"{alter} set compression {_COMPRESSION[one['compression']]}")
        if one["statistics"] is not None:
            made.append(f"{alter} set statistics {one['statistics']}")
    return made + _comments(name, table, definition) + _rights(name, definition)


_STORAGE: Final = {"p": "plain", "e": "external", "m": "main", "x": "extended"}
_COMPRESSION: Final = {"p": "pglz", "l": "lz4"}


def _comments(name: str, table: Table, definition: Definition) -> list[str]:
    of = [(f"table {name}", definition)]
    of += [(f"column {name}.{quoted(one['name'])}", one) for one in definition["columns"]]
    of += [(f"constraint {quoted(one['name'])} on {name}", one) for one in definition["constraints"]]
    of += [(f"index {quoted(table.schema, one['name'])}", one) for one in definition["indexes"]]
    of += [(f"sequence {_sequence(one)}", one) for one in definition["sequences"]]
    return [f"comment on {what} is {_text(one['comment'])}" for what, one in of if one["comment"] is not None]


def _rights(name: str, definition: Definition) -> list[str]:
    owner = quoted(definition["owner"])
    # Sequences go with their table to another owner.
    made = [f"alter table {name} owner to {owner}"]
    of = [(f"table {name}", "", definition)]
    of += [(f"sequence {_sequence(one)}", "", one) for one in definition["sequences"]]
    for what, _, one in of:
        if one["granted"]:
            made.append(f"revoke all on {what} from {owner}")
            made += _grants(what, "", one["rights"] or ())
    for one in definition["columns"]:
        made += _grants(f"table {name}", f" ({quoted(one['name'])})", one["rights"] or ())
    return made


def _grants(what: str, columns: str, rights: Any) -> list[str]:
    # Role names come as `regrole` prints them, quoted where that is needed.
    return [
        f"grant {right}{columns} on {what} to {'public' if to is None else to}"
        + (" with grant option" if again else "")
        for _, to, right, again in rights
    ]
