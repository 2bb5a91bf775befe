"""`sql.write`: run one changing statement on a declared database, behind a copy of the rows it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from ringfence.syscalls.base import Call, Effect, Env, Plan, Question, Rerun
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import CallFailed, InvalidRequest
from ringfence.syscalls.redaction import without_secrets
from ringfence.syscalls.sql_common import (
    Kind,
    Statement,
    database_of,
    read_questions,
    refuse_system_tables,
    taint_by,
)
from ringfence.syscalls.sql_known import known_or_classified
from ringfence.syscalls.sql_schema import Act
from ringfence.syscalls.sql_target.write import Written, write
from ringfence.syscalls.sql_target.write import recover as recover_write


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Database, one statement with `%s` for parameters, and the parameters in order."""

    database: str = ""
    statement: str = ""
    parameters: list[Any] = []


class Result(msgspec.Struct, frozen=True):
    """Rows changed, and what a RETURNING clause answered. See `sql_target.values` for the types."""

    row_count: int
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What `run` finds in the plan."""

    resource: SqlResource
    statement: Statement


def plan(arguments: Arguments, env: Env) -> Plan:
    """Classify the statement; the table it writes and each table it reads are questions.

    Raises:
        NoSuchResource: no such database is declared.
        InvalidRequest: the statement is refused or doesn't write.
    """
    resource = database_of(arguments.database, env)
    statement = known_or_classified(arguments.statement, len(arguments.parameters))
    if statement.kind is Kind.READ:
        raise InvalidRequest("a read is no write; make a sql.read call for it")
    target = statement.target
    if target is None:
        raise InvalidRequest("the statement names no table to write to; name one")
    reads = list(statement.reads)
    refuse_system_tables([target, *reads])
    shown = target.resource(resource.name)
    questions = (Question(action="sql.write", resource=shown),)
    if statement.ddl is not None:
        # A foreign key hinders changes of what it refers to.
        reads = [table for table in reads if table != target]
        questions += tuple(Question(action="sql.write", resource=t.resource(resource.name)) for t in reads)
    else:
        # Rows that were there before come back to the agent: that is reading them.
        shape = statement.write
        returns_old = statement.kind is not Kind.INSERT or (shape is not None and shape.upserts)
        if returns_old and shape is not None and shape.returning and target not in reads:
            reads.append(target)
    if reads:
        questions += read_questions(resource.name, reads)
    return Plan(
        resource=shown,
        questions=questions,
        effect=Effect.DESTROY if statement.destroys else None,
        no_return=_no_return(statement),
        data=Target(resource=resource, statement=statement),
    )


def _no_return(statement: Statement) -> str:
    shape = statement.ddl
    if shape is None or shape.act in (Act.CREATE, Act.DROP):
        return ""
    if shape.act is not Act.DROP_COLUMN:
        what = "index" if shape.act is Act.CREATE_INDEX else "column"
        return (
            f"can't be undone: no rollback takes back the {shape.act} of the {what} `{shape.column}` of `{statement.target}`, "
            + (
                "which an operator can drop"
                if what == "index"
                else "nor what was written to the table before"
            )
        )
    return (
        f"can't be undone: the column `{shape.column}` of `{statement.target}` goes with all its values, "
        "and a column can't be put back in its place"
    )


async def run(call: Call, arguments: Arguments) -> Result:
    """Run it; see `write` for how it can fail."""
    target: Target = call.plan.data
    try:
        written = await write(call, target.resource, target.statement, arguments.parameters)
    except CallFailed as error:
        # Its text may quote what stands there.
        taint_by(call, target.resource)
        raise without_secrets(call.env, error) from None
    if written.rows:
        taint_by(call, target.resource)
    return _result(written)


async def recover(call: Call, arguments: Arguments) -> Result | Rerun:
    """Ask the target whether it was committed.

    Raises:
        OutcomeUnknown: the target can't say.
        NoSuchResource: it can't be asked, because it is no longer declared or is unavailable.
    """
    # Not the plan's: there may be none, when what the statement was planned with is gone.
    resource = database_of(arguments.database, call.env)
    found = await recover_write(call, resource)
    if not isinstance(found, Rerun) and found.rows:
        taint_by(call, resource)
    return found if isinstance(found, Rerun) else _result(found)


def _result(written: Written) -> Result:
    return Result(row_count=written.row_count, columns=written.columns, rows=written.rows)
