"""The way to the database breaks at a commit, the database is restarted while agents are taken over, its disk is full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ringfence.agent import RingfenceError
from support.cutter import CONFIG, FILES, MOMENTS, Cutter, allowed, cut_rounds, cutter
from support.databases import Server, server
from support.kernels import eventually
from support.recoveries import recover
from support.scenes import Held, Scene, scene_on, short_directory
from support.target import Target

pytestmark = [
    pytest.mark.fault,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def database() -> Iterator[Server]:
    with server() as made:
        yield made


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("counter") / "plain")
    yield made
    made.close()


@pytest.fixture(scope="module")
def way(database: Server) -> Iterator[Cutter]:
    with cutter(database.dsn) as made:
        yield made


@pytest.fixture(scope="module")
def held(way: Cutter, counter: Target) -> Iterator[Held]:
    with scene_on(way.dsn, config=CONFIG.format(base=counter.base)) as scene:
        yield scene.hold(allow=allowed(counter), files=FILES)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_connection_cut_at_a_commit_repeats_and_loses_nothing(
    held: Held, way: Cutter, counter: Target, moment: str
) -> None:
    """Every commit of a round of calls in turn: its answer never comes, and the kernel finds out what became of it."""
    found = cut_rounds(held, way, counter, moment, 8)
    assert found.well, found
    assert not found.unknown
    assert {step["outcome"] for step in held.steps()} == {"ok"}
    assert held.operator.ask("AuditVerify")["ok"]


def test_a_database_restarted_in_the_middle_of_recoveries(database: Server) -> None:
    """C38, at thirty; `python -m bench.faults --full` does it with 250."""
    with scene_on(database.dsn) as scene:
        found = recover(scene, database, 30)
        assert found.well, found
        assert scene.operator.ask("AuditVerify")["ok"]


# -- a full disk ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[None]:
    options = f"size={megabytes}m,mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(path: Path) -> None:
    """Take all the room that is left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_disk_under_the_database_loses_nothing(counter: Target) -> None:
    """Calls fail as unavailable or wait, and do nothing; with room again everything goes on, each effect there once."""
    with short_directory() as directory, small_disk(directory, 160):
        made = Server(directory)
        try:
            with scene_on(made.dsn, config=CONFIG.format(base=counter.base)) as scene:
                work_on_a_full_disk(scene, counter, directory / "ballast")
        finally:
            made.close()


def work_on_a_full_disk(scene: Scene, counter: Target, ballast: Path) -> None:
    held = scene.hold(allow=allowed(counter), files=FILES)
    big = "b" * 100_000
    held.rf.state.put("big", big)
    fill(ballast)
    answered, refused = 0, list[str]()
    # Each new version takes room: the disk is full before long.
    while len(refused) < 3:
        try:
            held.rf.state.put("big", f"{answered + 1} {big}")
            answered += 1
        except RingfenceError as error:
            refused.append(error.reason)
        assert answered < 2_000
    assert set(refused) == {"JournalUnavailable"}
    # No intent, no effect.
    with contextlib.suppress(RingfenceError):
        held.rf.http.post(f"{counter.base}/plain/full", json={})
    sent = len(counter.deliveries("/plain/full"))
    ballast.unlink()
    eventually(
        lambda: scene.operator.ask("Status")["database"]["state"] == "ok", "the database does not come back"
    )
    # What was answered is there, and what failed as unavailable is not.
    assert int(held.rf.state.get("big").split()[0]) == answered
    held.rf.http.post(f"{counter.base}/plain/after", json={})
    posts = [step for step in held.steps() if step["action"] == "http.post"]
    assert sent == len(
        [step for step in posts if step["resource"].endswith("/full") and step["outcome"] == "ok"]
    )
    assert scene.operator.ask("AuditVerify")["ok"]
