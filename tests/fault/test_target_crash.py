"""A target that crashes right after it named a transaction gives its id to no other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.sql_target.outcome import Status, settle, transaction_id
from ringfence.syscalls.sql_target.session import close_targets, transaction
from support.databases import server
from support.targets import Database

pytestmark = [pytest.mark.fault, pytest.mark.postgres, pytest.mark.timeout(120)]


async def test_the_id_of_a_lost_transaction_is_not_taken_for_that_of_another() -> None:
    import psycopg

    with server() as made:
        dsn = made.target("crm")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("create table counted (id serial primary key)")
        resource = SqlResource(name="crm", dsn=dsn)
        named: list[Any] = []

        async def begin_and_lose() -> None:
            async with transaction(resource, mode="read write") as session:
                await session.execute("insert into counted default values")
                own = await transaction_id(session)
                named.extend((own.identity, own.xid))
                made.kill()
                await session.execute("select 1")

        with pytest.raises((psycopg.Error, CallFailed)):
            await begin_and_lose()
        identity, xid = named
        with psycopg.connect(dsn, autocommit=True) as connection:
            for _ in range(20):
                connection.execute("insert into counted default values")
            row = connection.execute("select pg_current_xact_id()::text::bigint > %s", [int(xid)]).fetchone()
            assert row == (True,)
        assert await settle(resource, identity, xid, 5) is Status.ABORTED
        await close_targets()


@pytest.mark.parametrize("statement", ["update counted set id = id + 100", "truncate counted"])
async def test_the_id_in_a_point_is_not_given_to_another_transaction(tmp_path: Path, statement: str) -> None:
    """The target dies as soon as a write's record is about to be kept: no later transaction has its id."""
    import psycopg

    with server() as made:
        database = Database(made.target("crm"), SnapshotStore(tmp_path / "points"))
        database.run("create table counted (id int primary key)")
        database.run("insert into counted values (1), (2)")
        kept: list[int] = []
        real = database.store.put_record

        def kill(point: str, record: Any) -> Any:
            kept.append(int(record["xid"]))
            made.kill()
            return real(point, record)

        database.store.put_record = kill
        with pytest.raises(CallFailed, match="nothing was changed"):
            await database.write(statement)
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            for number in range(20):
                connection.execute("insert into counted values (%s)", [1000 + number])
            row = connection.execute("select pg_current_xact_id()::text::bigint > %s", kept).fetchone()
            assert row == (True,)
        assert database.run("select count(*) from counted where id < 10") == [(2,)]
        assert database.store.points() == [f"p{database.step}"]
        await close_targets()
