"""Running one changing statement in a target, behind a verified copy of the rows it changes.

One transaction: lock the table, look at it, judge the plan, copy the rows, run the statement, check that it
changed exactly the copied rows, keep the record in our store, look at policy once more, commit. Whatever
stands in the way rolls back, and nothing happened. The transaction's id is in the record before the commit,
so the target can always be asked.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psycopg
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.syscalls.base import Call, Rerun
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import CallFailed, Conflict, InvalidRequest, OutcomeUnknown, SnapshotFailed
from ringfence.syscalls.redaction import redactor_for
from ringfence.syscalls.refusals import outcome_unknown
from ringfence.syscalls.sql_common import Kind, Statement
from ringfence.syscalls.sql_target.catalog import check_functions, judge_plan
from ringfence.syscalls.sql_target.outcome import SETTLE_S, Status, identify, settle, transaction_id
from ringfence.syscalls.sql_target.records import KIND, Change, Record, Touched, record_from
from ringfence.syscalls.sql_target.session import (
    LimitReached,
    RawRow,
    Rows,
    Session,
    quoted,
    transaction,
    within,
)
from ringfence.syscalls.sql_target.tables import TableInfo, inspect, lock_table
from ringfence.syscalls.sql_target.values import row_to_json, to_parameter

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from ringfence.syscalls.sql_lexer import Lexed

COPY_ROWS_MAX: Final = 50_000
COPY_BYTES_MAX: Final = 64 << 20
COMMIT_TIMEOUT_S: Final = 60.0
ATTEMPTS: Final = 3
_AROUND: Final = 128  # bytes of a result beside its columns and rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a write answers: how many rows, and those of its RETURNING clause as JSON values."""

    row_count: int
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One attempt at a write."""

    call: Call
    resource: SqlResource
    statement: Statement
    parameters: Sequence[Any]
    session: Session
    limit: asyncio.Timeout


async def write(
    call: Call, resource: SqlResource, statement: Statement, parameters: Sequence[Any]
) -> Written:
    """Run a write.

    Raises:
        SnapshotFailed: no verified copy of its rows can be made; nothing was changed.
        Denied: policy refuses a relation that its plan touches; nothing was changed.
        InvalidRequest: it calls what is refused; nothing was changed.
        CallFailed: the target can't be reached or answered with an error; nothing was changed.
        Conflict: other transactions were in the way; nothing was changed.
        Deadline: it took too long; nothing was changed.
        OutcomeUnknown: the connection broke at the commit and the target can't say how it ended.
    """
    if statement.kind is Kind.DDL:
        raise SnapshotFailed(
            "no verified copy can be made before a statement that changes the schema, in this release; "
            "an operator can run it"
        )
    values = [to_parameter(value) for value in parameters]
    # INVARIANT: under REPEATABLE READ the statement sees the very rows that were copied. TRUNCATE sees beyond
    # any snapshot, so its copy is taken under an exclusive lock, with a snapshot from after the lock.
    mode = (
        "isolation level read committed"
        if statement.kind is Kind.TRUNCATE
        else "isolation level repeatable read"
    )
    for attempt in range(1, ATTEMPTS + 1):
        try:
            async with (
                within(resource, call.deadline_s) as limit,
                transaction(resource, mode=mode, timeout_s=call.deadline_s) as session,
            ):
                job = _Job(
                    call=call,
                    resource=resource,
                    statement=statement,
                    parameters=values,
                    session=session,
                    limit=limit,
                )
                return await _attempt(job)
        except Conflict as conflict:
            if attempt == ATTEMPTS or conflict.metadata.get("retry") != "yes":
                raise
    raise AssertionError  # the loop returns or raises


async def recover(call: Call, resource: SqlResource) -> Written | Rerun:
    """Find out what became of a write that a crash cut off.

    Raises:
        OutcomeUnknown: the target can't say.
        SnapshotFailed: the record can't be read.
    """
    try:
        manifest = await asyncio.to_thread(call.env.snapshots.load, _point(call))
    except SnapshotError as error:
        raise SnapshotFailed(str(error)) from None
    if manifest is None:
        # INVARIANT: the record is durable before the commit is sent, so without it nothing was committed.
        return Rerun.RERUN
    record = record_from(manifest.extra)
    status = await settle(resource, record.identity, record.xid, min(SETTLE_S, call.deadline_s))
    if status is Status.ABORTED:
        return Rerun.RERUN
    if status is not Status.COMMITTED:
        raise _unknown(call, resource)
    call.add_point(_covers(resource, record), KIND, manifest.size_bytes)
    return Written(row_count=record.row_count, columns=record.columns, rows=record.rows)


async def _attempt(job: _Job) -> Written:
    session, statement = job.session, job.statement
    target = statement.target
    if target is None or statement.write is None:
        raise InvalidRequest("the statement names no table to write to; name one")
    truncates = statement.kind is Kind.TRUNCATE
    await lock_table(session, target, "access exclusive" if truncates else "row exclusive")
    info = await inspect(session, target, statement.kind)
    await session.execute(
        "select set_config('synchronous_commit', 'on', true) where current_setting('synchronous_commit') = 'off'"
    )
    text, own = _statement_text(statement, info)
    if not truncates:
        await check_functions(session, statement)
        await judge_plan(job.call, job.resource.name, session, statement, job.parameters, text)
    try:
        before = await _copy(job, info)
        await _judge_made(job, info, before)
        answer = await _run(job, text)
    except LimitReached:
        raise SnapshotFailed(
            f"the statement changes more than {COPY_ROWS_MAX} rows or {COPY_BYTES_MAX} bytes, which is too much "
            "for one rollback point; nothing was changed, do it in parts"
        ) from None
    changed = [row[len(row) - own :] for row in answer.rows]
    after = _check_changed(statement.kind, info, before, changed)
    # What the target would check only at the commit is checked now, while it can still be answered as an
    # error.
    await session.execute("set constraints all immediate")
    returning = len(answer.columns) - own
    hide = redactor_for(job.call.env, ())
    written = Written(
        row_count=len(before) if truncates else len(answer.rows),
        columns=hide.value(list(answer.columns[:returning])),
        rows=hide.value([row_to_json(row[:returning], answer.oids[:returning]) for row in answer.rows])
        if returning
        else [],
    )
    # Rows that a budget of bytes does not cover are refused while nothing is changed yet.
    if job.call.answer_max is not None:
        await job.call.afford(_AROUND + len(msgspec.json.encode((written.columns, written.rows))))
    await _keep_and_commit(job, info, written, before, after)
    return written


async def _run(job: _Job, text: str) -> Rows:
    if job.statement.kind is Kind.TRUNCATE:
        await job.session.execute(text)
        return Rows((), (), [])
    return await job.session.query(text, job.parameters, rows_max=COPY_ROWS_MAX, bytes_max=COPY_BYTES_MAX)


def _statement_text(statement: Statement, info: TableInfo) -> tuple[str, int]:
    """The statement with the table's own columns appended to what it returns, and how many these are."""
    shape = statement.write
    if shape is None or statement.kind is Kind.TRUNCATE:
        return f"truncate table {info.sql}", 0
    text = statement.lexed.text
    own = info.list_columns(shape.alias or shape.table)
    asked = f"{text[slice(*shape.returning)]}\n," if shape.returning else ""
    return "\n".join((text[: shape.body_end], "returning", asked, own)), len(info.columns)


async def _copy(job: _Job, info: TableInfo) -> list[RawRow]:
    """The rows that the statement is going to change or remove, locked."""
    shape, lexed = job.statement.write, job.statement.lexed
    if shape is None or job.statement.kind is Kind.INSERT:
        return []
    ranges = [shape.prefix] + ([shape.condition] if shape.condition else [])
    texts, parameters = _parts(lexed, ranges, job.parameters)
    name = shape.alias or shape.table
    words = [texts[0], "select", info.list_columns(name), "from", info.sql]
    if shape.alias:
        words += ["as", quoted(shape.alias)]
    if shape.condition:
        # On lines of its own: the condition can't reach beyond its parentheses, which the lexer found
        # balanced.
        words += ["where (", texts[1], ")"]
    if job.statement.kind is not Kind.TRUNCATE:
        words += ["for update of", quoted(name)]
    found = await job.session.query(
        "\n".join(words), parameters, rows_max=COPY_ROWS_MAX, bytes_max=COPY_BYTES_MAX
    )
    return found.rows


async def _judge_made(job: _Job, info: TableInfo, before: Sequence[RawRow]) -> None:
    """Hold conditions on what the thread made itself against the very rows that are locked now.

    Raises:
        Denied: one of them refuses it.
        NeedsApproval: one of them asks.
    """
    if job.call.asks_what_it_made:
        identity = await identify(job.session)
        change = _change(info, before, ())
        await job.call.judge_made(Touched(resource=job.resource.name, identity=identity, change=change))


def _change(info: TableInfo, before: Sequence[RawRow], after: Sequence[RawRow]) -> Change:
    return Change(
        schema=info.table.schema,
        table=info.table.name,
        columns=list(info.columns),
        types=list(info.types),
        key=list(info.key),
        before=[list(row) for row in before],
        after=[list(row) for row in after],
    )


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


def _check_changed(
    kind: Kind, info: TableInfo, before: Sequence[RawRow], changed: Sequence[RawRow]
) -> list[RawRow]:
    """Hold what the statement did against what was copied; returns the rows that are there afterwards.

    Raises:
        SnapshotFailed: they are not the same rows, so the copy would not undo it.
    """
    if kind is Kind.INSERT:
        return list(changed)
    if kind is Kind.TRUNCATE:
        return []
    copied = {info.key_of(row): row for row in before}
    touched = {info.key_of(row): row for row in changed}
    if len(touched) != len(changed) or copied.keys() != touched.keys():
        raise SnapshotFailed(
            f"the {kind} changed other rows of `{info.table}` than were copied, or their primary keys; "
            "nothing was changed, name the rows by conditions that stay the same"
        )
    if kind is Kind.DELETE:
        if copied != touched:
            raise SnapshotFailed(
                f"rows of `{info.table}` changed while they were copied; nothing was changed"
            )
        return []
    for reference in info.references:
        if not reference.on_update:
            continue
        places = [
            info.columns.index(referred) for _, referred in reference.columns if referred in info.columns
        ]
        if any(copied[key][place] != row[place] for key, row in touched.items() for place in places):
            raise SnapshotFailed(
                f"`{reference.name}` of `{reference.child}` would {reference.on_update} rows that refer to "
                f"`{info.table}`; no verified copy of these can be made in this release, nothing was changed"
            )
    return list(changed)


async def _keep_and_commit(
    job: _Job, info: TableInfo, written: Written, before: Sequence[RawRow], after: Sequence[RawRow]
) -> None:
    call, session, resource = job.call, job.session, job.resource
    xid = await transaction_id(session)
    record = Record(
        kind=KIND,
        resource=resource.name,
        identity=await identify(session),
        xid=xid,
        statement=job.statement.kind.value,
        row_count=written.row_count,
        columns=written.columns,
        rows=written.rows,
        changes=[_change(info, before, after)],
    )
    try:
        manifest = await asyncio.to_thread(call.env.snapshots.put_record, _point(call), record.to_json())
    except SnapshotError as error:
        raise SnapshotFailed(
            f"the copy of `{info.table}` can't be kept: {error}; nothing was changed"
        ) from None
    call.add_point(_covers(resource, record), KIND, manifest.size_bytes)
    await call.failpoint("before_effect")
    await call.check_live()
    # INVARIANT: from here on no deadline ends the call: what was sent to the target is followed to its end.
    job.limit.reschedule(None)
    try:
        await _to_its_end(_commit(session))
    except (psycopg.OperationalError, psycopg.InterfaceError, TimeoutError):
        status = await settle(resource, record.identity, record.xid, SETTLE_S)
        if status is Status.ABORTED:
            raise CallFailed(
                f"database `{resource.name}` broke the connection before the commit; nothing was changed"
            ) from None
        if status is not Status.COMMITTED:
            raise _unknown(call, resource) from None
    await call.failpoint("after_effect")


async def _commit(session: Session) -> None:
    async with asyncio.timeout(COMMIT_TIMEOUT_S):
        await session.execute("commit")


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work to its end: a commit that was sent can't be taken back, so a cancellation comes too late for it."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None:
                current.uncancel()
        except Exception:  # noqa: BLE001, S110 - raised by the last line
            pass
    task.result()


def _point(call: Call) -> str:
    return f"p{call.step}"


def _covers(resource: SqlResource, record: Record) -> list[str]:
    return [change.name.resource(resource.name) for change in record.changes]


def _unknown(call: Call, resource: SqlResource) -> OutcomeUnknown:
    what = f"whether the write in `{resource.name}` was committed can't be found out; look at its rows"
    return outcome_unknown(call, what)
