"""The pool's look at a connection before it is lent: by its socket, and by a question only where that says something."""

from __future__ import annotations

import asyncio
import select
from typing import Any

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool
from ringfence.kernel.journal.database import borrowed, connect_pool

pytestmark = pytest.mark.postgres


async def test_what_the_server_ended_is_not_lent_and_what_lives_is_not_asked(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    ask = AsyncConnectionPool.check_connection

    async def counted(connection: Any) -> None:
        asked.append(connection.info.backend_pid)
        await ask(connection)

    monkeypatch.setattr(AsyncConnectionPool, "check_connection", counted)
    pool = await connect_pool(dsn, size_max=1)
    try:
        async with borrowed(pool) as connection:
            first, socket = connection.info.backend_pid, connection.fileno()
        async with borrowed(pool) as connection:
            assert connection.info.backend_pid == first
        assert asked == []
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
            await other.execute("select pg_terminate_backend(%s)", [first])
        told = select.poll()
        told.register(socket, select.POLLIN)
        assert await asyncio.to_thread(told.poll, 30_000)
        async with borrowed(pool) as connection:
            assert connection.info.backend_pid != first
            await connection.execute("select 1")
        assert asked == [first]
    finally:
        await pool.close()
