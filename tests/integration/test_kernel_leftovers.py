"""A kernel that stops leaves no sockets and no directories of theirs; one that starts removes what a dead one left."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from ringfence.kernel.leftovers import short_run_dir
from ringfence.sandbox.native import cgroups
from support.kernels import eventually, running
from support.scenes import manifest_of

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(120)]

SLEEPER = manifest_of("sleeper", ["sleep", "100000"])


def test_what_is_left_of_agents_and_kernels(postgres_server: object, dsn: str) -> None:
    top = Path(tempfile.mkdtemp(prefix="rf-l-", dir="/tmp"))
    # So long that sockets need another place: the one below the directory for temporary files.
    data = top / ("long-" * 20)
    place = short_run_dir(data)
    try:
        with running(data, dsn=dsn) as kernel:
            assert place.is_dir()
            agent = kernel.operator.submit(SLEEPER, {})
            assert [path.name[:1] for path in place.glob("a*")] == ["a"]
            kernel.operator.ask("Kill", agent=agent)
            eventually(lambda: not list(place.glob("a*")), "the directory of the agent's socket is left")
            kernel.operator.submit(SLEEPER, {})
            # A kernel that is killed can remove nothing; the next one of its directory does.
            kernel.kill()
            assert list(place.glob("a*"))
            (place / "a999").mkdir()
            (data / "agents" / ".incoming-half").mkdir()
            kernel.start()
            assert not (place / "a999").exists()
            assert not (data / "agents" / ".incoming-half").exists()
            assert kernel.stop() == 0
        assert not place.exists()
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(top)


def test_a_control_group_that_is_of_no_use_does_not_stay(tmp_path: Path) -> None:
    """Here as a plain directory, which never has the file that would set a limit."""
    made = cgroups._make("memory", str(tmp_path), "x")  # type: ignore[attr-defined] - what no host shows on demand
    assert made == ""
    assert list(tmp_path.iterdir()) == []
