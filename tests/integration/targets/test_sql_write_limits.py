"""The bounds of sql.write: sizes, room for the copy, locks, time, and a role with few rights."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import (
    Conflict,
    Deadline,
    SnapshotFailed,
)
from ringfence.syscalls.sql_target import write
from ringfence.syscalls.sql_target.restore import plan_restore, restore
from ringfence.syscalls.sql_target.session import CONNECTIONS_MAX, close_targets

if TYPE_CHECKING:
    from conftest import Database


BEFORE = ["(1,nut,5,0.10)", "(2,bolt,7,0.20)", "(3,cog,,3.00)"]


async def test_too_many_rows_for_a_point_are_refused(
    stock: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "COPY_ROWS_MAX", 2)
    for statement in (
        "delete from stock",
        "truncate stock",
        "insert into stock select id + 9, name from stock",
    ):
        with pytest.raises(SnapshotFailed, match="more than 2 rows"):
            await stock.write(statement)
    assert stock.dump("stock") == BEFORE
    assert (await stock.write("delete from stock where id > 1")).row_count == 2


async def test_too_many_bytes_for_a_point_are_refused(
    stock: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "COPY_BYTES_MAX", 100)
    with pytest.raises(SnapshotFailed, match="100 bytes"):
        await stock.write("update stock set name = repeat('x', 200) where id = 1")
    assert stock.dump("stock") == BEFORE


async def test_no_copy_no_write(stock: Database, tmp_path: Any) -> None:
    """C46: a snapshot store that can't keep the copy stops the write."""
    shutil.rmtree(tmp_path / "points", ignore_errors=True)
    (tmp_path / "points").write_text("a file stands where the store should be")
    with pytest.raises(SnapshotFailed, match="can't be kept"):
        await stock.write("delete from stock")
    assert stock.dump("stock") == BEFORE
    assert [entry.name for entry in tmp_path.iterdir()] == ["points"]


async def test_a_lock_that_is_never_given_is_a_conflict(
    stock: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.syscalls.sql_target.session.LOCK_TIMEOUT_S", 0.05)
    async with await psycopg.AsyncConnection.connect(stock.dsn) as other:
        await other.execute("lock table stock in access exclusive mode")
        with pytest.raises(Conflict, match="holds a lock"):
            await stock.write("delete from stock")


async def test_a_role_with_few_rights_is_enough(stock: Database) -> None:
    """The operator gives a role of its own; nothing here needs a superuser."""
    role = stock.run("select 'clerk_' || substr(md5(current_database()), 1, 8)")[0][0]
    stock.run(f"create role {role} login; grant select, insert, update, delete, truncate on stock to {role}")
    try:
        resource = SqlResource(name="crm", dsn=stock.dsn.replace("//ringfence@", f"//{role}@"))
        stock.env.sql = {"crm": resource}
        assert (await stock.read("select current_user::text")).rows == [[role]]
        before = stock.dump("stock")
        await stock.write("update stock set n = 1")
        await stock.write("insert into stock values (9, 'x')")
        await stock.write("delete from stock where id < 3")
        await stock.write("truncate stock")
        records = [stock.record(step) for step in range(stock.step, 1, -1)]
        await restore(resource, await plan_restore(resource, records))
        assert stock.dump("stock") == before
    finally:
        await close_targets()
        stock.run(f"drop owned by {role}; drop role {role}")


async def test_the_deadline_counts_the_wait_for_a_connection(stock: Database) -> None:
    holding = asyncio.Event()
    reached: list[str] = []

    async def hold(name: str) -> None:
        if name == "before_effect":
            reached.append(name)
            await holding.wait()

    tasks = [asyncio.create_task(stock.read("select 1", on_failpoint=hold)) for _ in range(CONNECTIONS_MAX)]
    while len(reached) < CONNECTIONS_MAX:
        await asyncio.sleep(0)
    for act in (stock.read("select 1", deadline_s=0.05), stock.write("delete from stock", deadline_s=0.05)):
        with pytest.raises(Deadline):
            await act
    holding.set()
    await asyncio.gather(*tasks)
    assert stock.dump("stock") == BEFORE
