"""`sql.read`: run one reading statement on a declared database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from ringfence.syscalls.base import Call, Env, Plan
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import CallFailed, InvalidRequest
from ringfence.syscalls.payload import Room
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
from ringfence.syscalls.sql_target.read import BYTES_MAX, read


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Database, one statement with `%s` for parameters, the parameters in order, and the most rows; 0: 10 000."""

    database: str = ""
    statement: str = ""
    parameters: list[Any] = []
    limit: int = 0


class Result(msgspec.Struct, frozen=True):
    """Columns, rows as lists of JSON values, and whether the limit cut them. See `sql_target.values` for the types."""

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What `run` finds in the plan."""

    resource: SqlResource
    statement: Statement


def plan(arguments: Arguments, env: Env) -> Plan:
    """Classify the statement; each table it names is a question.

    Raises:
        NoSuchResource: no such database is declared.
        InvalidRequest: the statement is refused or doesn't read.
    """
    resource = database_of(arguments.database, env)
    if arguments.limit < 0:
        raise InvalidRequest(
            f"`limit` is {arguments.limit}; give a positive number, or 0 for the kernel's own"
        )
    statement = known_or_classified(arguments.statement, len(arguments.parameters))
    if statement.kind is not Kind.READ:
        raise InvalidRequest(f"a {statement.kind} is no read; make a sql.write call for it")
    refuse_system_tables(statement.reads)
    questions = read_questions(resource.name, statement.reads)
    return Plan(
        resource=", ".join(str(question.resource) for question in questions),
        questions=questions,
        data=Target(resource=resource, statement=statement),
    )


def room(call: Call, arguments: Arguments) -> Room:
    """The largest answer of a target; what it reads can be refused its answer, so it does with any room."""
    del call, arguments
    return Room(most=BYTES_MAX, least=1)


async def run(call: Call, arguments: Arguments) -> Result:
    """Run it; see `read` for how it can fail."""
    target: Target = call.plan.data
    try:
        answer = await read(call, target.resource, target.statement, arguments.parameters, arguments.limit)
    except CallFailed as error:
        # Its text may quote what stands there.
        taint_by(call, target.resource)
        raise without_secrets(call.env, error) from None
    taint_by(call, target.resource)
    return Result(columns=answer.columns, rows=answer.rows, truncated=answer.truncated)
