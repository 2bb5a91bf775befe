"""`rollback --all --to TIME` from the command line: every agent that did something since, and no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from support.scenes import Scene, console, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

FILES = ['fs.*: "/workspace/**"']


@pytest.fixture
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def test_all_that_did_something_since_are_put_back(scene: Scene) -> None:
    held = [scene.hold(name=name, allow=FILES, files={"a": "old"}) for name in ("first", "second", "third")]
    held[2].rf.fs.write_text("a", "before")
    moment = datetime.now(UTC).isoformat()
    for one in held[:2]:
        one.rf.fs.write_text("a", "new")
    words = ("rollback", "--all", "--to", moment, "--data", str(scene.kernel.data))
    shown = console(*words, "--preview", "--json")
    assert shown.returncode == 0, shown.stderr
    ids = {one.id for one in held[:2]}
    assert {document["agent"] for document in json.loads(shown.stdout)} == ids
    assert [(one.live / "a").read_text() for one in held] == ["new", "new", "before"]
    done = console(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert {document["agent"] for document in json.loads(done.stdout)} == ids
    assert [(one.live / "a").read_text() for one in held] == ["old", "old", "before"]
    assert [scene.show(one.id)["state"] for one in held] == ["paused", "paused", "running"]
    again = console(*words)
    assert (again.returncode, "no agent did anything" in again.stderr) == (0, True)


def test_what_all_takes_is_said_in_one_line(scene: Scene) -> None:
    data = ("--data", str(scene.kernel.data))
    for words, told in (
        (("rollback", "--to", "1"), "--all"),
        (("rollback", "a", "--all", "--to", "1"), "--all"),
        (("rollback", "--all", "--to", "7"), "is no time"),
        (("rollback", "--all", "--to", "2026-01-31T08:00:00Z", "--path", "a"), "--path"),
    ):
        done = console(*words, *data)
        assert (done.returncode, told in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr
