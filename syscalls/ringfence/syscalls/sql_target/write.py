"""Running one changing statement in a target, behind a verified copy of the rows it changes.

One transaction: lock the table, look at it, judge the plan, run the statement and capture its rows as they were and as they
are, keep the record in our store, look at policy once more, commit. Whatever stands in the way rolls back, and nothing
happened. The transaction's id is in the record before the commit, so the target can always be asked.
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
from ringfence.syscalls.sql_common import Kind, Statement, Table
from ringfence.syscalls.sql_target.capture import Capture, Captured, capture_of, run
from ringfence.syscalls.sql_target.catalog import check_functions, judge_plan
from ringfence.syscalls.sql_target.ddl import change_schema
from ringfence.syscalls.sql_target.glance import glance
from ringfence.syscalls.sql_target.outcome import (
    SETTLE_S,
    Own,
    Status,
    asking_own,
    check_now,
    identify,
    own_of,
    settle,
    transaction_id,
)
from ringfence.syscalls.sql_target.records import KIND, Change, Record, TableChange, Touched, record_from
from ringfence.syscalls.sql_target.restore import prove
from ringfence.syscalls.sql_target.session import Session, transaction, within
from ringfence.syscalls.sql_target.tables import TableInfo, is_plain, locking, looking, understand
from ringfence.syscalls.sql_target.values import row_to_json, to_parameter
from ringfence.syscalls.sql_target.wire import Bounds, LimitReached, Rows

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from ringfence.sandbox.snapshots import PointManifest

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
    if statement.ddl is not None and parameters:
        raise InvalidRequest(
            "a statement that changes the schema takes no parameters; write the values into it"
        )
    values = [to_parameter(value) for value in parameters]
    # INVARIANT: under REPEATABLE READ the statement sees the very rows that were read first. TRUNCATE sees beyond
    # any snapshot, and so does DDL: their copies are taken under an exclusive lock, with a snapshot from after the lock.
    mode = (
        "isolation level read committed"
        if statement.kind in (Kind.TRUNCATE, Kind.DDL)
        else "isolation level repeatable read"
    )
    target = statement.target
    if target is None:
        raise InvalidRequest("the statement names no table to write to; name one")
    lock = locking(target, "access exclusive" if statement.kind is Kind.TRUNCATE else "row exclusive")
    first = None if statement.kind is Kind.DDL else lock
    for attempt in range(1, ATTEMPTS + 1):
        try:
            async with (
                within(resource, call.deadline_s) as limit,
                transaction(resource, mode=mode, timeout_s=call.deadline_s, lock=first) as session,
            ):
                job = _Job(
                    call=call,
                    resource=resource,
                    statement=statement,
                    parameters=values,
                    session=session,
                    limit=limit,
                )
                return await (_attempt(job) if statement.ddl is None else _attempt_schema(job))
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
    if covers := _covers(resource, record):
        call.add_point(covers, KIND, manifest.size_bytes)
    return Written(row_count=record.row_count, columns=record.columns, rows=record.rows)


async def _attempt(job: _Job) -> Written:
    session, statement = job.session, job.statement
    target = statement.target
    if target is None or statement.write is None:
        raise InvalidRequest("the statement names no table to write to; name one")
    looked = await _looked(job, target)
    info, own, capture = looked.info, looked.own, looked.capture
    bounds = Bounds(rows=COPY_ROWS_MAX, size=COPY_BYTES_MAX)
    try:
        done = await run(session, statement, capture, info, job.parameters, bounds)
    except LimitReached:
        raise SnapshotFailed(
            f"the statement changes more than {COPY_ROWS_MAX} rows or {COPY_BYTES_MAX} bytes, which is too much "
            "for one rollback point; nothing was changed, do it in parts"
        ) from None
    change = _change(info, done)
    await _judge_made(job, change)
    if info.doubtful:
        await prove(session, info, change, job.resource)
    hide = redactor_for(job.call.env, ())
    answer = done.answer
    written = Written(
        row_count=done.row_count,
        columns=hide.value(list(answer.columns)),
        rows=hide.value([row_to_json(row, answer.oids) for row in answer.rows]) if answer.columns else [],
    )
    # Rows that a budget of bytes does not cover are refused while nothing is changed yet.
    if job.call.answer_max is not None:
        await job.call.afford(_AROUND + len(msgspec.json.encode((written.columns, written.rows))))
    if info.defers:
        await check_now(session)
    await _keep_and_commit(job, written, own, changes=[change])
    return written


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """What the look at a statement and its table found: nothing that stands in its way."""

    info: TableInfo
    own: Own
    capture: Capture


async def _looked(job: _Job, target: Table) -> _Looked:
    """Judge a statement, at one glance where its table is known."""
    session, statement = job.session, job.statement
    known = session.pool.known.get(target)
    text = ""
    answers: Sequence[Rows] | None = None
    plain = known is not None and is_plain(known)
    if known is not None and statement.kind is not Kind.TRUNCATE:
        asked = (looking(target, plain=plain), *asking_own(session))
        try:
            text = capture_of(statement, understand(target, known, statement.kind), session.server).text
            answers = await glance(
                job.call, job.resource.name, session, statement, job.parameters, text, asked
            )
        except (psycopg.ProgrammingError, SnapshotFailed):
            # It may be another table by now; if not, it is said again.
            await session.again()
    closer = answers is None
    if answers is None:
        asked = (looking(target), *asking_own(session))
        answers = await check_functions(session, statement, asked)
    found, *owns = answers
    if plain and not closer and found.rows and not is_plain(found):
        # INVARIANT: what isn't plain any more is asked about in full before anything runs.
        (found,) = await session.ask(looking(target))
    info, own = understand(target, found, statement.kind), await own_of(session, owns)
    capture = capture_of(statement, info, session.server)
    # INVARIANT: what was planned and judged is the very text that is run, put together from what the table is now.
    if statement.kind is not Kind.TRUNCATE and (closer or capture.text != text):
        await judge_plan(job.call, job.resource.name, session, statement, job.parameters, capture.text)
    if known is None or known.rows != found.rows:
        session.pool.learn(target, found)
    return _Looked(info=info, own=own, capture=capture)


async def _attempt_schema(job: _Job) -> Written:
    written = Written(row_count=0, columns=[], rows=[])
    try:
        done = await change_schema(job.session, job.statement, job.resource, COPY_ROWS_MAX, COPY_BYTES_MAX)
    except LimitReached:
        raise SnapshotFailed(
            f"the table has more than {COPY_ROWS_MAX} rows or {COPY_BYTES_MAX} bytes, which is too much "
            "for one rollback point; nothing was changed, an operator can run it"
        ) from None
    if done.idle:
        await job.call.check_live()
        return written
    for touched in done.touched:
        await _judge_made(job, touched)
    own = await transaction_id(job.session)
    await _keep_and_commit(job, written, own, tables=[] if done.change is None else [done.change])
    return written


async def _judge_made(job: _Job, change: Change) -> None:
    """Hold conditions on what the thread made itself against the very rows that are changed.

    Raises:
        Denied: one of them refuses it.
        NeedsApproval: one of them asks.
    """
    if job.call.asks_what_it_made:
        identity = await identify(job.session)
        await job.call.judge_made(Touched(resource=job.resource.name, identity=identity, change=change))


def _change(info: TableInfo, done: Captured) -> Change:
    return Change(
        schema=info.table.schema,
        table=info.table.name,
        columns=list(info.columns),
        types=list(info.types),
        key=list(info.key),
        before=done.before,
        after=done.after,
    )


async def _keep_and_commit(
    job: _Job,
    written: Written,
    own: Own,
    *,
    changes: Sequence[Change] = (),
    tables: Sequence[TableChange] = (),
) -> None:
    call, session, resource = job.call, job.session, job.resource
    record = Record(
        kind=KIND,
        resource=resource.name,
        identity=own.identity,
        xid=own.xid,
        statement=_named(job.statement),
        row_count=written.row_count,
        columns=written.columns,
        rows=written.rows,
        changes=list(changes),
        tables=list(tables),
    )
    manifest = await _keep(job, record)
    if covers := _covers(resource, record):
        call.add_point(covers, KIND, manifest.size_bytes)
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


async def _keep(job: _Job, record: Record) -> PointManifest:
    store, point = job.call.env.snapshots, _point(job.call)
    try:
        return await asyncio.to_thread(lambda: store.put_record(point, record.to_json()))
    except SnapshotError as error:
        raise SnapshotFailed(
            f"the copy of `{job.statement.target}` can't be kept: {error}; nothing was changed"
        ) from None


def _named(statement: Statement) -> str:
    if statement.ddl is not None:
        return statement.ddl.act.value
    shape = statement.write
    return "upsert" if shape is not None and shape.upserts else statement.kind.value


async def _commit(session: Session) -> None:
    async with asyncio.timeout(COMMIT_TIMEOUT_S):
        await session.once("commit")


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
    """What its point covers; nothing where nothing could undo it."""
    return [change.name.resource(resource.name) for change in (*record.changes, *record.tables)]


def _unknown(call: Call, resource: SqlResource) -> OutcomeUnknown:
    what = f"whether the write in `{resource.name}` was committed can't be found out; look at its rows"
    return outcome_unknown(call, what)
