"""Running one reading statement in a target: READ ONLY, its plan judged before it runs, its answer bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.redaction import redactor_for
from ringfence.syscalls.sql_target.catalog import check_functions, judge_plan
from ringfence.syscalls.sql_target.glance import glance
from ringfence.syscalls.sql_target.session import transaction, within
from ringfence.syscalls.sql_target.values import row_to_json, to_parameter
from ringfence.syscalls.sql_target.wire import LimitReached

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.syscalls.base import Call
    from ringfence.syscalls.declared import SqlResource
    from ringfence.syscalls.sql_common import Statement

ROWS_MAX: Final = 10_000
BYTES_MAX: Final = 8 << 20

# The driver takes a row into memory whole, so a row that is too large must not leave the target. The text of
# the error depends on the row, or the planner would raise it at once.
_TOO_LARGE: Final = "ringfence: row too large"
_GUARD: Final = (
    ') as "ringfence row" where case when octet_length(("ringfence row".*)::text) > '
    f"{BYTES_MAX} then ('{_TOO_LARGE}' || left((\"ringfence row\".*)::text, 0))::integer else 0 end = 0 limit"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Rows as JSON values; `truncated` where there were more than asked for."""

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool


async def read(
    call: Call, resource: SqlResource, statement: Statement, parameters: Sequence[Any], limit: int
) -> Answer:
    """Run a read.

    Raises:
        Denied: policy refuses a relation that its plan touches.
        BudgetExhausted: a budget of bytes has not so much left.
        InvalidRequest: it calls what is refused, or would write.
        CallFailed: the target can't be reached or answered with an error, or the answer is too large.
        Deadline: it took too long.
        Conflict: another transaction is in the way.
    """
    while True:
        # A budget of bytes may have less left than an answer may be large; it is asked again where that was too little.
        left = call.answer_max
        most = BYTES_MAX if left is None else min(BYTES_MAX, left)
        try:
            return await _read(call, resource, statement, parameters, limit, most)
        except LimitReached:
            if most == BYTES_MAX:
                raise _too_large(resource) from None
            call.receiving(most)
            await call.afford(min(2 * most + 1, BYTES_MAX))


async def _read(
    call: Call,
    resource: SqlResource,
    statement: Statement,
    parameters: Sequence[Any],
    limit: int,
    most: int,
) -> Answer:
    rows_max = min(limit or ROWS_MAX, ROWS_MAX)
    values = [to_parameter(value) for value in parameters]
    query = _bounded(statement.lexed.text, rows_max + 1)
    async with (
        within(resource, call.deadline_s),
        transaction(resource, mode="read only", timeout_s=call.deadline_s) as session,
    ):
        if await glance(call, resource.name, session, statement, values, query) is None:
            await check_functions(session, statement)
            await judge_plan(call, resource.name, session, statement, values, query)
        await call.failpoint("before_effect")
        await call.check_live()
        try:
            found = await session.query(query, values, bytes_max=most, last=True)
        except psycopg.errors.InvalidTextRepresentation as error:
            if _TOO_LARGE in str(error):
                raise _too_large(resource) from None
            raise
    await call.failpoint("after_effect")
    hide = redactor_for(call.env, ())
    return Answer(
        columns=hide.value(list(found.columns)),
        rows=hide.value([row_to_json(row, found.oids) for row in found.rows[:rows_max]]),
        truncated=len(found.rows) > rows_max,
    )


def _bounded(text: str, rows_max: int) -> str:
    # The statement stands on lines of its own, and what follows it can't be taken for a part of it.
    return "\n".join(('select "ringfence row".* from (', text, _GUARD, str(rows_max)))


def _too_large(resource: SqlResource) -> CallFailed:
    return CallFailed(f"the answer of `{resource.name}` is larger than {BYTES_MAX} bytes; ask for less")
