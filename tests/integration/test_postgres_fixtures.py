from __future__ import annotations

import psycopg


async def _tables(dsn: str) -> set[str]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        cursor = await connection.execute("select tablename from pg_tables where schemaname = 'public'")
        return {str(row[0]) for row in await cursor.fetchall()}


async def test_each_test_gets_a_migrated_database_of_its_own(dsn, postgres_server, template_database):
    assert {"migrations", "agents"} <= await _tables(dsn)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("create table mine (id int)")
    assert "mine" in await _tables(dsn)
    assert "mine" not in await _tables(postgres_server.dsn(template_database))


def test_the_marker_comes_with_the_fixture(request, dsn):
    assert request.node.get_closest_marker("postgres") is not None
    with psycopg.connect(dsn) as connection:
        assert connection.info.server_version >= 180000
