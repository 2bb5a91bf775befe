"""Round trips to a target: what comes of connections and statements that end in the middle."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest
from ringfence.syscalls.errors import SnapshotFailed
from ringfence.syscalls.sql_target.session import transaction
from ringfence.syscalls.sql_target.wire import LimitReached
from support.kernels import eventually

if TYPE_CHECKING:
    from conftest import Database

OURS = "from pg_stat_activity where application_name = 'ringfence' and datname = current_database()"


async def _until(crm: Database, state: str, *, some: bool) -> None:
    """Wait until some of our connections, or none, are in a state."""

    def found() -> bool:
        return bool(crm.run(f"select 1 {OURS} and {state}")) is some

    await asyncio.to_thread(eventually, found, f"connections with {state}: not {some}")


async def test_a_kept_connection_that_has_gone_is_replaced_unnoticed(crm: Database) -> None:
    crm.run("create table stock (id int primary key, n int); insert into stock values (1, 1)")
    assert (await crm.read("select n from stock")).rows == [[1]]
    crm.run(f"select pg_terminate_backend(pid, 30000) {OURS}")
    assert (await crm.write("update stock set n = 2")).row_count == 1
    crm.run(f"select pg_terminate_backend(pid, 30000) {OURS}")
    assert (await crm.read("select n from stock")).rows == [[2]]


async def test_a_connection_that_goes_later_is_not(crm: Database) -> None:
    """What has begun to run is never sent twice."""
    async with transaction(crm.resource, mode="read write") as session:
        (pid,) = (await session.ask(("select pg_backend_pid()", ())))[0].rows[0]
        crm.run(f"select pg_terminate_backend({pid}, 30000)")
        with pytest.raises(psycopg.OperationalError):
            await session.ask(("select 1", ()))


async def test_nothing_runs_after_a_failure_and_what_was_not_prepared_is_prepared_later(
    crm: Database,
) -> None:
    async with transaction(crm.resource, mode="read write") as session:
        for _ in range(2):
            with pytest.raises(psycopg.errors.DivisionByZero):
                await session.ask(("select 1 / 0", ()), ("create table made ()", ()), ("select $1", ["x"]))
            await session.again()
        assert [rows.rows for rows in await session.ask(("select $1", ["x"]), ("select 2", ()))] == [
            [("x",)],
            [("2",)],
        ]
        await session.once("commit")
    assert crm.run("select to_regclass('made')") == [(None,)]


async def test_an_answer_beyond_its_bounds_ends_the_statement(crm: Database) -> None:
    many = "select generate_series(1, 100000000)"
    for rows_max, bytes_max in ((100, 1 << 20), (1 << 20, 1000)):
        with pytest.raises(LimitReached):
            async with transaction(crm.resource, mode="read only") as session:
                await session.query(many, rows_max=rows_max, bytes_max=bytes_max)
    await _until(crm, "state <> 'idle'", some=False)
    async with transaction(crm.resource, mode="read only") as session:
        assert len((await session.query("select generate_series(1, 20)", rows_max=20)).rows) == 20


async def test_what_is_cancelled_ends_at_the_target(crm: Database) -> None:
    async def slow() -> None:
        async with transaction(crm.resource, mode="read only") as session:
            await session.query("select pg_sleep(600)")

    task = asyncio.create_task(slow())
    await _until(crm, "wait_event = 'PgSleep'", some=True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _until(crm, "state <> 'idle'", some=False)


async def test_a_large_statement_is_sent_while_a_large_answer_comes(crm: Database) -> None:
    """Neither end waits for the other."""
    text = "x" * 4_000_000
    async with transaction(crm.resource, mode="read only") as session:
        answers = await session.ask(*(("select repeat($1, 2)", [text]) for _ in range(3)))
    assert [len(str(rows.rows[0][0])) for rows in answers] == [2 * len(text)] * 3


async def test_a_write_looks_at_its_table_after_it_has_the_lock(crm: Database) -> None:
    """Not as it was when its transaction began: somebody who held the lock may have made a trigger since."""
    crm.run("create table stock (id int primary key, n int); insert into stock values (1, 1)")
    await crm.write("update stock set n = 2")
    makes = "create function more() returns trigger language plpgsql as 'begin return new; end'"
    with psycopg.connect(crm.dsn) as other:
        other.execute(makes)
        other.execute("create trigger more before update on stock for each row execute function more()")
        writing = asyncio.create_task(crm.write("update stock set n = 3"))
        await _until(crm, "wait_event_type = 'Lock'", some=True)
    with pytest.raises(SnapshotFailed, match="its trigger `more`"):
        await writing
    assert crm.dump("stock") == ["(1,2)"]
