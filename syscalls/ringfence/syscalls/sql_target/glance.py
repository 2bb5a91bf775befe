"""The first look at a statement: all that is asked of a target before it runs, in one round trip.

Nearly every statement calls nothing of anybody's and reads plain tables. The target itself is asked whether that is so, by a
statement that fails where it isn't, so that nothing behind it is run; then the statement is planned, as `catalog` judges it.
Where the look fails, all begins anew and is looked at one by one.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

import psycopg
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.sql_growth import refuse_growth
from ringfence.syscalls.sql_target import catalog
from ringfence.syscalls.sql_target.wire import Rows, Sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.syscalls.base import Call
    from ringfence.syscalls.sql_common import Statement
    from ringfence.syscalls.sql_target.session import Asked, Session

_CLOSER: Final = f"ringfence: look closer ({secrets.token_hex(8)})"
"""What the guard fails with; no statement of an agent can say the same."""
_AT_ALL: Final = "at all statements"

# A target would plan what is asked here anew each time, which takes longer than to answer; not so what agents wrote.
_AS_PLANNED: Final = "select pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true)"

# Casts, checks of domains and operators that somebody made have ids from 16384 on. The text of the error depends on a row, or the
# planner would raise it at once.
_GUARD: Final = """
select pg_catalog.set_config('plan_cache_mode', 'auto', true), pg_catalog.set_config('statement_timeout', $1, true), case when
  newest."cast" >= 16384 or newest."check" >= 16384 then ($7 || newest."cast" || 'at all statements')::integer
  when newest.operator >= 16384 and exists (select from pg_catalog.pg_operator o where o.oprname = any ($2::name[]) and o.oid >= 16384)
  or exists (
    select from pg_catalog.pg_proc p where p.proname = any ($3::name[])
    and (p.pronamespace <> 'pg_catalog'::regnamespace or p.oid >= 16384 or p.provolatile = 'v' and p.proname <> all ($4::name[])))
  or exists (
    select from pg_catalog.pg_proc p where p.proname = any ($5::name[]) and p.pronamespace <> 'pg_catalog'::regnamespace)
  or exists (select from unnest($6::name[]) named (name) join lateral (
    select from pg_catalog.pg_class c where c.relname = named.name and c.relkind = 'v' offset 0) view on true)
  then ($7 || newest."cast")::integer else 0 end
from (
  select (select pg_catalog.max(c.oid) from pg_catalog.pg_cast c)::bigint,
    (select pg_catalog.max(k.contypid) from pg_catalog.pg_constraint k)::bigint,
    (select pg_catalog.max(o.oid) from pg_catalog.pg_operator o)::bigint offset 0
) newest ("cast", "check", operator)
"""


async def glance(
    call: Call,
    database: str,
    session: Session,
    statement: Statement,
    parameters: Sequence[Any],
    text: str,
    also: Sequence[Asked] = (),
) -> Sequence[Rows] | None:
    """Look at a statement and judge its plan, as `check_functions` and `judge_plan` do.

    Args:
        call: whose statement it is.
        database: the resource's name.
        session: the transaction it will run in, which has not begun yet.
        statement: as it was classified.
        parameters: its parameters.
        text: what will be run.
        also: what else is asked of the catalog, in the same round trip.

    Returns:
        The answers to `also`; None: it has to be looked at closer, in a transaction that has not begun yet.

    Raises:
        Denied: policy refuses a relation that its plan touches.
        InvalidRequest: as `judge_plan`.
        Deadline: it can't be planned in time.
    """
    key = ("closer", statement.lexed.text)
    closer = key in session.pool.known or _AT_ALL in session.pool.known
    guard = None if closer else _guard(session, statement, parameters)
    if guard is None:
        return None
    _, usual = session.limits(catalog.PLAN_TIMEOUT_S)
    explain = Sent(text=catalog.EXPLAIN + text, parameters=parameters)
    try:
        _, *found, _, plan, _ = await session.ask((_AS_PLANNED, ()), *also, guard, explain, usual)
    except psycopg.errors.InvalidTextRepresentation as error:
        if _CLOSER not in str(error):
            raise
        session.pool.learn(_AT_ALL if _AT_ALL in str(error) else key, True)
        await session.again()
        return None
    await catalog.judge_planned(call, database, session, statement, plan)
    return found


def _guard(session: Session, statement: Statement, parameters: Sequence[Any]) -> Asked | None:
    functions = sorted({name for _, name in statement.functions})
    if any(map(catalog.acts, functions)):
        return None
    try:
        refuse_growth(statement.lexed, parameters)
    except InvalidRequest:
        return None  # what stands first in the way is said first
    limit = session.limits(catalog.PLAN_TIMEOUT_S)[0][1]
    return _GUARD, [
        *limit,
        sorted(statement.operators),
        functions,
        sorted(catalog.harmless_in(statement)),
        sorted(statement.attributes),
        sorted(
            {table.name for table in (*statement.reads, *([statement.target] if statement.target else []))}
        ),
        _CLOSER,
    ]
