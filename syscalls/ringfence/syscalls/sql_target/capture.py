"""How the rows that a statement changes are captured: as they were, and as they are afterwards.

The statement itself tells: a delete what it removed, an insert what it added, and from PostgreSQL 18 on every statement both.
Before that an update's rows are read and locked first, and what it changed is held against them. A truncate tells nothing; its
rows are read under a lock that keeps everybody else away.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ringfence.syscalls.errors import SnapshotFailed
from ringfence.syscalls.sql_common import Kind, Statement
from ringfence.syscalls.sql_target.outcome import making_durable
from ringfence.syscalls.sql_target.session import Session, quoted
from ringfence.syscalls.sql_target.wire import Bounds, RawRow, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.syscalls.sql_lexer import Lexed
    from ringfence.syscalls.sql_target.tables import TableInfo

TELLS_BOTH: Final = 180000
"""First version of the server whose statements return a row as it was and as it is."""

_OLD: Final = "ringfence old"
_NEW: Final = "ringfence new"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What is run in place of a statement, and how its answer is read.

    Attributes:
        text: the statement with the table's own columns appended to what it returns.
        before: whether these tell the rows as they were.
        after: whether they tell them as they are; behind those as they were, where they tell both.
        changed: names of those columns that are told as they are, where they tell both; the others stay as they were.
        reads_first: whether the rows are read and locked before.
    """

    text: str
    before: bool = False
    after: bool = False
    changed: tuple[str, ...] = ()
    reads_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a statement did: its rows before and after, and its answer without what was appended."""

    before: list[RawRow]
    after: list[RawRow]
    answer: Rows
    row_count: int


def capture_of(statement: Statement, info: TableInfo, server: int) -> Capture:
    """Put together what is run.

    Args:
        statement: what was asked for.
        info: its table.
        server: the target's version.

    Raises:
        SnapshotFailed: this server can't tell what the statement changes.
    """
    shape, kind = statement.write, statement.kind
    if shape is None or kind is Kind.TRUNCATE:
        return Capture(text=f"truncate table {info.sql}", reads_first=True)
    name = shape.alias or shape.table
    conflicts = any(token.is_word("conflict") for token in statement.lexed.tokens)
    if kind is Kind.DELETE:
        return Capture(text=_returning(statement, info.list_columns(name)), before=True)
    if kind is Kind.INSERT and not conflicts:
        return Capture(text=_returning(statement, info.list_columns(name)), after=True)
    if server >= TELLS_BOTH:
        old, new, names = _names(statement)
        # INVARIANT: without triggers and rules an update leaves all columns alone that it doesn't set; generated ones aren't kept.
        some = shape.sets if kind is Kind.UPDATE and shape.sets is not None else info.columns
        changed = tuple(name for name in info.columns if name in some)
        both = ", ".join((info.list_columns(old), *(quoted(new, name) for name in changed)))
        return Capture(text=_returning(statement, both, names), before=True, after=True, changed=changed)
    if kind is Kind.MERGE or shape.upserts:
        what = "merge" if kind is Kind.MERGE else "on conflict do update"
        raise SnapshotFailed(
            f"`{what}` needs a target of PostgreSQL 18 or later: before that it doesn't tell what stood in `{info.table}`; "
            "nothing was changed, use an update and an insert"
        )
    return Capture(
        text=_returning(statement, info.list_columns(name)), after=True, reads_first=kind is Kind.UPDATE
    )


def _returning(statement: Statement, own: str, names: str = "") -> str:
    shape, text = statement.write, statement.lexed.text
    if shape is None:
        raise AssertionError
    # On lines of their own: what was asked can't reach beyond its line.
    asked = f"{text[slice(*shape.returning)]}\n," if shape.returning else ""
    return "\n".join((text[: shape.body_end], f"returning {names}", asked, own))


def _names(statement: Statement) -> tuple[str, str, str]:
    """The names of a row as it was and as it is, and how to say so in RETURNING.

    INVARIANT: where anything before RETURNING might be called `old` or `new`, they get names that nothing else has.
    """
    shape = statement.write
    end = 0 if shape is None else shape.body_end
    taken = any(
        token.is_name and token.value in ("old", "new")
        for token in statement.lexed.tokens
        if token.end <= end
    )
    return (
        (_OLD, _NEW, f"with (old as {quoted(_OLD)}, new as {quoted(_NEW)})") if taken else ("old", "new", "")
    )


async def run(
    session: Session,
    statement: Statement,
    capture: Capture,
    info: TableInfo,
    parameters: Sequence[Any],
    bounds: Bounds,
) -> Captured:
    """Run a statement and capture what it does. On return the id of its transaction is on the target's disk.

    Raises:
        LimitReached: it changes too much.
        SnapshotFailed: what it changed is not what was captured.
    """
    first = await _read(session, statement, info, parameters, bounds) if capture.reads_first else []
    if statement.kind is Kind.TRUNCATE:
        await session.ask((capture.text, ()), *making_durable(session))
        before = [row[1:] for row in first]
        return Captured(before=before, after=[], answer=Rows((), (), []), row_count=len(before))
    # In the same round trip: another one takes longer than the target does to write it.
    also = making_durable(session)
    found = await session.query(
        capture.text, parameters, rows_max=bounds.rows, bytes_max=bounds.size, also=also
    )
    width = len(info.columns)
    told = width + len(capture.changed) if capture.before and capture.after else width
    shown = len(found.columns) - told
    own = range(shown, shown + width)
    before = _columns(found.rows, own) if capture.before else []
    after = _columns(found.rows, own) if capture.after and not capture.before else []
    if capture.before and capture.after:
        new = {name: shown + width + at for at, name in enumerate(capture.changed)}
        after = _columns(found.rows, [new.get(name, shown + at) for at, name in enumerate(info.columns)])
        _check_pairs(info, before, after)
        if statement.kind is not Kind.UPDATE:
            # Of a row that wasn't there, or no longer is, the key is null.
            place = info.key_places[0]
            before = [row for row in before if row[place] is not None]
            after = [row for row in after if row[place] is not None]
    elif capture.reads_first:
        before = [row[1:] for row in first]
        await _check_read(session, info, first, after)
    asked = _columns(found.rows, range(shown)) if shown else []
    answer = Rows(found.columns[:shown], found.oids[:shown], asked)
    return Captured(before=before, after=after, answer=answer, row_count=len(found.rows))


def _columns(rows: list[RawRow], places: Sequence[int]) -> list[RawRow]:
    """Some columns of rows; the rows themselves where these are all."""
    if not rows or list(places) == list(range(len(rows[0]))):
        return rows
    if len(places) == 1:
        return [(row[places[0]],) for row in rows]
    return list(map(operator.itemgetter(*places), rows))


async def _read(
    session: Session, statement: Statement, info: TableInfo, parameters: Sequence[Any], bounds: Bounds
) -> list[RawRow]:
    """The rows that a statement is going to change or remove, locked, each behind where it lies."""
    shape, lexed = statement.write, statement.lexed
    if shape is None:
        raise AssertionError
    ranges = [shape.prefix, shape.others or (0, 0), shape.condition or (0, 0)]
    (prefix, others, condition), used = _parts(lexed, ranges, parameters)
    name = quoted(shape.alias or shape.table)
    words = [prefix, f"select {name}.ctid,", info.list_columns(shape.alias or shape.table), "from", info.sql]
    if shape.alias:
        words += ["as", name]
    if shape.others:
        words += [",", others]
    if shape.condition:
        # On lines of its own: the condition can't reach beyond its parentheses, which the lexer found
        # balanced.
        words += ["where (", condition, ")"]
    if statement.kind is not Kind.TRUNCATE:
        words += ["for update of", name]
    text = "\n".join(words)
    found = (await session.query(text, used, rows_max=bounds.rows, bytes_max=bounds.size)).rows
    # Joined with other tables, a row may be found more than once.
    return list({row[0]: row for row in found}.values()) if shape.others else found


def _parts(
    lexed: Lexed, ranges: Sequence[tuple[int, int]], parameters: Sequence[Any]
) -> tuple[list[str], list[Any]]:
    """Parts of a statement with their parameters numbered anew, and those parameters."""
    texts: list[str] = []
    used: list[Any] = []
    for start, end in ranges:
        pieces: list[str] = []
        at = start
        for token in lexed.tokens:
            if token.kind == "param" and start <= token.start < end:
                used.append(parameters[int(token.value[1:]) - 1])
                pieces += [lexed.text[at : token.start], f"${len(used)}"]
                at = token.end
        texts.append("".join(pieces) + lexed.text[at:end])
    return texts, used


async def _check_read(
    session: Session, info: TableInfo, first: Sequence[RawRow], after: Sequence[RawRow]
) -> None:
    """Hold what an update did against the rows that were read.

    Raises:
        SnapshotFailed: they are not the same rows, so the copy would not undo it.
    """
    same = len(first) == len(after)
    places = info.key_places
    was = {tuple(row[place + 1] for place in places): row[1:] for row in first}
    now = {tuple(row[place] for place in places): row for row in after}
    if same and was.keys() == now.keys():
        _check_pairs(info, list(was.values()), [now[key] for key in was])
        return
    if same:
        # Keys were changed: as many rows as were read, and none of those read lies where it lay.
        words = ("select count(*) from", info.sql, "where ctid = any ($1::pg_catalog.tid[])")
        still = await session.value(" ".join(words), [[row[0] for row in first]])
        same = still == "0"
    if not same:
        raise SnapshotFailed(
            f"the update changed other rows of `{info.table}` than were copied; "
            "nothing was changed, name the rows by conditions that stay the same"
        )
    _check_moved(info)
    for reference in info.references:
        if reference.on_update:
            raise _cascades(info, reference.name, str(reference.child), reference.on_update)


def _check_pairs(info: TableInfo, before: Sequence[RawRow], after: Sequence[RawRow]) -> None:
    """Hold rows against what they became.

    Raises:
        SnapshotFailed: that could not be undone.
    """
    fixed = info.places([name for name in info.columns if name in info.fixed and name not in info.key])
    following = [reference for reference in info.references if reference.on_update]
    if info.inserts and info.deletes and not fixed and not following:
        return
    place = info.key_places[0]
    pairs = [
        (old, new)
        for old, new in zip(before, after, strict=True)
        if old[place] is not None and new[place] is not None
    ]
    if not (info.inserts and info.deletes) and _differ(pairs, info.key_places):
        _check_moved(info)
    if _differ(pairs, fixed):
        raise SnapshotFailed(
            f"an identity of `{info.table}` that is always generated would get another value, which nothing can put back; "
            "nothing was changed, leave that column out"
        )
    for reference in following:
        if _differ(pairs, info.places([mine for _, mine in reference.columns])):
            raise _cascades(info, reference.name, str(reference.child), reference.on_update)


def _differ(pairs: Sequence[tuple[RawRow, RawRow]], places: Sequence[int]) -> bool:
    return any(old[place] != new[place] for place in places for old, new in pairs)


def _check_moved(info: TableInfo) -> None:
    """Refuse other keys where the role can't take the new rows out and put the old ones back.

    Raises:
        SnapshotFailed: it can't.
    """
    if not (info.inserts and info.deletes):
        raise SnapshotFailed(
            f"rows of `{info.table}` would get other primary keys, and the target's role may not both insert and delete "
            "there, so couldn't put them back; nothing was changed, leave the key out"
        )


def _cascades(info: TableInfo, name: str, child: str, action: str) -> SnapshotFailed:
    return SnapshotFailed(
        f"`{name}` of `{child}` would {action} rows that refer to `{info.table}`; "
        "no verified copy of these can be made in this release, nothing was changed"
    )
