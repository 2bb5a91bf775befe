"""What lies in the nursery is found whenever it came, though the directory is read only when it has changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest
from ringfence.kernel import nursery
from ringfence.kernel.config import Layout
from ringfence.kernel.core import Core
from ringfence.kernel.nursery import Nurseries

LONG_AGO_NS = 10**18


def house(data: Path) -> Nurseries:
    (data / "agents").mkdir()
    layout = Layout(data=data, run=data / "run")
    return Nurseries(core=cast("Core", None), layout=layout, resources=lambda: pytest.fail("nobody asked"))


def test_what_comes_in_one_tick_with_the_look_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = house(tmp_path)
    agents = tmp_path / "agents"
    (agents / ".spawn-k-a-1-first").mkdir()
    now = agents.stat().st_mtime_ns
    monkeypatch.setattr(nursery.time, "time_ns", lambda: now + 1)
    assert found.here() == ["first"]
    (agents / ".spawn-k-a-1-second").mkdir()
    os.utime(agents, ns=(now, now))  # a coarse clock
    assert found.here() == ["first", "second"]


def test_a_directory_that_did_not_change_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = house(tmp_path)
    agents = tmp_path / "agents"
    (agents / ".spawn-k-a-1-first").mkdir()
    os.utime(agents, ns=(LONG_AGO_NS, LONG_AGO_NS))
    reads = 0
    real = Path.glob

    def counted(self: Path, pattern: str) -> object:
        nonlocal reads
        reads += 1
        return real(self, pattern)

    monkeypatch.setattr(Path, "glob", counted)
    assert [found.here() for _ in range(3)] == [["first"]] * 3
    assert reads == 1
    (agents / ".spawn-k-a-1-second").mkdir()
    assert found.here() == ["first", "second"]
    found.place("second")
    assert found.here() == ["first"]
    assert (agents / "second").is_dir()
