"""A target that crashes right after it named a transaction gives its id to no other one."""

from __future__ import annotations

from typing import Any

import pytest
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.sql_target.outcome import Status, settle, transaction_id
from ringfence.syscalls.sql_target.session import close_targets, transaction
from support.databases import server

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
