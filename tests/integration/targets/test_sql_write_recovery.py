"""sql.write cut off at any moment: what recovery finds out, and what a lost connection or a cancellation leaves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.rules import parse_rule
from ringfence.syscalls import sql_write
from ringfence.syscalls.base import Rerun
from ringfence.syscalls.errors import (
    CallFailed,
    OutcomeUnknown,
)
from ringfence.syscalls.sql_target import capture, outcome, write
from ringfence.syscalls.sql_target.session import close_targets

if TYPE_CHECKING:
    from conftest import Database


def allow(*rules: str) -> AgentPolicy:
    return AgentPolicy("agent", [(f"g{n}", parse_rule(rule)) for n, rule in enumerate(rules)], [], [])


BEFORE = ["(1,nut,5,0.10)", "(2,bolt,7,0.20)", "(3,cog,,3.00)"]


async def test_nothing_recorded_means_run_again(stock: Database) -> None:
    call, arguments = stock.prepare_write("delete from stock")
    assert await sql_write.recover(call, arguments) is Rerun.RERUN


async def test_recorded_but_not_committed_means_run_again(stock: Database) -> None:
    call, arguments = await stock.crash("delete from stock where id < 3 returning id", "before_effect")
    assert stock.dump("stock") == BEFORE
    assert await sql_write.recover(call, arguments) is Rerun.RERUN
    result = await sql_write.run(call, arguments)
    assert sorted(result.rows) == [[1], [2]]
    assert stock.dump("stock") == BEFORE[2:]


async def test_committed_but_no_outcome_is_answered_from_the_record(stock: Database) -> None:
    call, arguments = await stock.crash(
        "update stock set n = n + 1 where id < 3 returning id, n", "after_effect"
    )
    rows = stock.dump("stock")
    result = await sql_write.recover(call, arguments)
    assert isinstance(result, sql_write.Result)
    assert (result.row_count, result.columns) == (2, ["id", "n"])
    assert sorted(result.rows) == [[1, 6], [2, 8]]
    assert stock.dump("stock") == rows
    assert [(covers, kind) for covers, kind, _ in call.points] == [(["crm/stock"], "sql")]


async def test_another_database_can_not_say_what_happened(stock: Database, target_server: Any) -> None:
    call, arguments = await stock.crash("delete from stock", "after_effect")
    other = target_server.create()
    try:
        moved = sql_write.SqlResource(name="crm", dsn=target_server.dsn(other))
        stock.env.sql = {"crm": moved}
        again, _ = stock.prepare_write("delete from stock")
        again.step = call.step
        with pytest.raises(OutcomeUnknown, match="ringfence resolve"):
            await sql_write.recover(again, arguments)
    finally:
        await close_targets()
        target_server.drop(other)


async def test_a_transaction_from_the_future_is_unknown(stock: Database) -> None:
    call, arguments = await stock.crash("delete from stock", "after_effect")
    record = stock.record(call.step)
    stock.store.put_record(f"p{call.step}", {**record, "xid": "99999999999"})
    call.deadline_s = 0.1
    with pytest.raises(OutcomeUnknown, match=rf"ringfence resolve agent {call.step} --as done\|not-done"):
        await sql_write.recover(call, arguments)


async def test_a_transaction_still_under_way_is_waited_for(stock: Database) -> None:
    """The target may still be committing when recovery asks: the answer comes when it has ended."""
    call, arguments = await stock.crash("delete from stock where id = 1", "before_effect")
    other = await psycopg.AsyncConnection.connect(stock.dsn)
    cursor = await other.execute("select pg_current_xact_id()::text")
    row = await cursor.fetchone()
    assert row is not None
    record = stock.record(call.step)
    stock.store.put_record(f"p{call.step}", {**record, "xid": row[0]})
    asked = asyncio.Event()
    real = outcome.status_of

    async def watch(session: Any, xid: str) -> outcome.Status:
        status = await real(session, xid)
        if status is outcome.Status.RUNNING:
            asked.set()
        return status

    outcome.status_of = watch
    try:
        task = asyncio.create_task(sql_write.recover(call, arguments))
        waiting = asyncio.create_task(asked.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await other.commit()
        assert isinstance(await task, sql_write.Result)
    finally:
        outcome.status_of = real
        await other.close()


@pytest.mark.parametrize("reached", [True, False], ids=["committed", "not committed"])
async def test_a_connection_lost_at_the_commit_is_settled_by_asking(
    stock: Database, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    """The answer to COMMIT never arrives: with and without the commit itself having arrived."""

    async def lossy(session: Any) -> None:
        connection = session._wire.connection
        if reached:
            await session.execute("commit")
        else:
            stock.run(f"select pg_terminate_backend({connection.info.backend_pid})")
        await connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(write, "_commit", lossy)
    if reached:
        assert (await stock.write("delete from stock")).row_count == 3
        assert stock.dump("stock") == []
    else:
        with pytest.raises(CallFailed, match="nothing was changed"):
            await stock.write("delete from stock")
        assert stock.dump("stock") == BEFORE


async def test_no_point_is_kept_before_the_id_is_on_the_targets_disk(
    stock: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "making_durable", lambda _session: (("select 1 / 0", ()),))
    for statement in ("delete from stock", "truncate stock"):
        with pytest.raises(CallFailed, match="division by zero"):
            await stock.write(statement)
    assert stock.store.points() == []
    assert stock.dump("stock") == BEFORE


async def test_a_call_that_ends_while_the_id_is_written_leaves_nothing(
    stock: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = (("select pg_advisory_xact_lock(7)", ()),)
    with monkeypatch.context() as held, psycopg.connect(stock.dsn, autocommit=True) as other:
        other.execute("select pg_advisory_lock(7)")
        held.setattr(capture, "making_durable", lambda _session: asks)
        task = asyncio.create_task(stock.write("delete from stock"))
        waits = "select exists (select from pg_locks where locktype = 'advisory' and not granted)"
        while other.execute(waits).fetchone() != (True,):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stock.store.points() == []
    assert (await stock.write("delete from stock where id = 1")).row_count == 1
    assert stock.store.points() == [f"p{stock.step}"]


async def test_a_cancellation_during_the_commit_comes_too_late(
    stock: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = asyncio.Event(), asyncio.Event()
    real = write._commit

    async def slow(session: Any) -> None:
        started.set()
        await go.wait()
        await real(session)

    monkeypatch.setattr(write, "_commit", slow)
    task = asyncio.create_task(stock.write("delete from stock"))
    await started.wait()
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    assert (await task).row_count == 3
    assert stock.dump("stock") == []


async def test_a_cancellation_before_the_commit_rolls_back(stock: Database) -> None:
    reached = asyncio.Event()

    async def wait() -> None:
        reached.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(
        stock.write(
            "delete from stock", on_failpoint=lambda name: wait() if name == "before_effect" else None
        )
    )
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stock.dump("stock") == BEFORE
