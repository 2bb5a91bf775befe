from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import psycopg
import pytest
from ringfence.kernel.journal.types import JournalError
from ringfence.kernel.postgres import EmbeddedPostgres, PostgresError
from ringfence.kernel.postgres.leftovers import server_pids

pytestmark = [pytest.mark.postgres]


async def ask(dsn: str, query: str) -> object:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        cursor = await connection.execute(query)
        row = await cursor.fetchone() if cursor.description else None
        return row[0] if row else None


async def test_a_cluster_is_made_once_and_kept(short_path):
    postgres = EmbeddedPostgres(short_path / "data")
    assert (postgres.pid, postgres.version, postgres.ready) == (None, "", False)
    dsn = await postgres.start()
    assert await postgres.start() == dsn
    assert postgres.ready
    assert postgres.version == str(await ask(dsn, "show server_version"))
    assert postgres.version.startswith("18.")
    await ask(dsn, "create table kept as select 7 as n")
    first = postgres.pid
    await postgres.stop()
    await postgres.stop()
    assert (postgres.pid, postgres.ready) == (None, False)
    assert server_pids(short_path / "data" / "postgres" / "data") == []
    with pytest.raises(psycopg.OperationalError):
        await ask(dsn, "select 1")

    again = EmbeddedPostgres(short_path / "data")
    assert await again.start() == dsn
    assert again.pid != first
    assert await ask(dsn, "select n from kept") == 7
    await again.stop()


async def test_its_settings_are_durable_and_it_listens_on_nothing_but_the_socket(postgres_server):
    dsn = postgres_server.dsn("postgres")
    wanted = {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "data_checksums": "on",
        "listen_addresses": "",
        "max_connections": "100",
        "server_encoding": "UTF8",
        "TimeZone": "UTC",
        "log_min_error_statement": "panic",
        # Files of the log are handed on, never removed and made again: who makes one holds up all that commit.
        "min_wal_size": "512MB",
        "max_wal_size": "512MB",
    }
    assert {name: await ask(dsn, f"show {name}") for name in wanted} == wanted
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        await ask(dsn, "alter system set fsync = off")
    with pytest.raises(OSError, match="refused"), socket.socket() as client:
        client.connect(("127.0.0.1", 5432))


async def test_only_its_owner_reaches_it(short_path):
    outside = short_path.stat().st_mode
    postgres = EmbeddedPostgres(short_path / "data")
    await postgres.start()
    root = short_path / "data" / "postgres"
    try:
        assert stat.S_IMODE((short_path / "data").stat().st_mode) == 0o700
        for name in ("data", "run", "log"):
            assert stat.S_IMODE((root / name).stat().st_mode) == 0o700, name
        assert stat.S_IMODE((root / "run" / ".s.PGSQL.5432").stat().st_mode) == 0o700
        assert short_path.stat().st_mode == outside
        status = Path(f"/proc/{postgres.pid}/status").read_text()
        uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
        assert "0" not in uids
        assert set(uids) == {str((root / "data").stat().st_uid)}
        assert "NoNewPrivs:\t1" in status
        environment = Path(f"/proc/{postgres.pid}/environ").read_bytes()
        assert b"HOME=" not in environment
    finally:
        await postgres.stop()


async def test_databases_are_created_once_and_named_plainly(postgres_server):
    server = postgres_server.postgres
    assert postgres_server.run(server.create_database("inventory_once")) is True
    assert postgres_server.run(server.create_database("inventory_once")) is False
    assert await ask(server.dsn("inventory_once"), "select current_user") == "ringfence"
    for name in ("", "Upper", "a-b", 'a"b', "x" * 64, "a;drop database postgres"):
        with pytest.raises(JournalError, match="can't be a database's name"):
            postgres_server.run(server.create_database(name))
    postgres_server.drop("inventory_once")


async def test_the_kernels_user_may_be_any_role(postgres_server):
    dsn = postgres_server.dsn("postgres")
    await ask(dsn, "create role reader_of_tests login")
    try:
        mine = postgres_server.dsn("postgres", "reader_of_tests")
        assert await ask(mine, "select current_user") == "reader_of_tests"
    finally:
        await ask(dsn, "drop role reader_of_tests")


async def test_a_directory_in_use_names_its_user(short_path, children):
    postgres = EmbeddedPostgres(short_path / "data")
    await postgres.start()
    try:
        with pytest.raises(
            PostgresError, match=rf"`.*data` is in use by process {os.getpid()}: stop that with"
        ):
            await EmbeddedPostgres(short_path / "data").start()
        said = await asyncio.to_thread(children.start(short_path / "data").hear)
        assert f"is in use by process {os.getpid()}" in said["error"]
        assert await ask(postgres.dsn(), "select 1") == 1
    finally:
        await postgres.stop()


async def test_a_start_that_is_cancelled_leaves_nothing(short_path):
    data_dir = short_path / "data"
    fresh = data_dir / "postgres" / "data.new"
    starting = asyncio.create_task(EmbeddedPostgres(data_dir).start())
    while not (fresh / "global").is_dir():  # initdb is at work
        await asyncio.sleep(0)
        assert not starting.done()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not (data_dir / "postgres" / "data").exists()
    assert server_pids(fresh) == []
    postgres = EmbeddedPostgres(data_dir)
    assert await ask(await postgres.start(), "select 1") == 1
    assert not fresh.exists()
    await postgres.stop()


async def test_waiting_for_a_server_that_is_not_running_is_an_error(short_path):
    postgres = EmbeddedPostgres(short_path / "data")
    with pytest.raises(PostgresError, match="is not running"):
        await postgres.wait_ready()
    await postgres.start()
    await postgres.wait_ready()
    await postgres.stop()
    with pytest.raises(PostgresError, match="is not running"):
        await postgres.wait_ready()


async def test_a_path_too_long_for_a_socket_gets_a_short_private_one(short_path, monkeypatch):
    data_dir = short_path / ("long" * 40) / "data"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    postgres = EmbeddedPostgres(data_dir)
    dsn = await postgres.start()
    try:
        assert len(dsn) < 150
        assert await ask(dsn, "select 1") == 1
        private = short_path / f"ringfence-{os.geteuid()}"
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        (link,) = private.iterdir()
        assert link.readlink() == data_dir / "postgres" / "run"
        link.unlink()
        assert await ask(postgres.dsn(), "select 1") == 1  # made again when someone tidied it away
        private.chmod(0o755)
        with pytest.raises(PostgresError, match=r"too long for a socket, and `.*`, .*, is not private"):
            postgres.dsn()
        private.chmod(0o700)
    finally:
        await postgres.stop()


async def test_logs_are_pruned(short_path):
    postgres = EmbeddedPostgres(short_path / "data")
    await postgres.start()
    await postgres.stop()
    log = short_path / "data" / "postgres" / "log"
    for number in range(40):
        (log / f"postgres-20200101-0000{number:02d}.log").write_text("old")
    await postgres.start()
    await postgres.stop()
    names = sorted(path.name for path in log.iterdir())
    assert len(names) <= 11
    assert names[-1] > "postgres-2026"
