"""`ringfence demo`: the whole story in a process of its own, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ringfence.console.demo_warden import processes

REPOSITORY = Path(__file__).parents[2]
SHIPPED = REPOSITORY / "kernel" / "ringfence" / "console" / "demo_agent"
EXAMPLE = REPOSITORY / "examples" / "inventory"

real = [
    pytest.mark.slow,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.fault,
    pytest.mark.timeout(300),
]

CLAIMS = (
    "agent killed -9 and resumed: zero repeated effects",
    "kernel killed -9: every answered call is in the journal",
    "kernel killed -9 and resumed: zero repeated effects",
    "a `delete from` ran behind a verified point",
    "directory removals ran behind verified points",
    "every rollback point can be read back",
    "a call outside policy is denied and named",
    "a token-bearing file is out of reach",
    "tokens appear nowhere: file, secret, kernel's environment",
    "a revoked right is gone when `revoke` returns",
    "files are back: bytes, modes, owners, times, links, empty directories",
    "rows are back byte for byte",
    "a revoked right stays revoked after the rollback",
    "a notice that was sent is recognised as sent",
    "a model's tokens and dollars are counted as its host counts them",
    "a parked call outlives its kernel and runs once when approved",
    "a spent budget parks a runaway before the next call, and raised lets it go on",
    "a scheduled agent holds no process until its time",
    "`audit verify` holds",
    "one changed byte of an exported file is found and named",
    "nothing is left running, and no file",
)


def argv(*words: str) -> list[str]:
    return [sys.executable, "-m", "ringfence.console", "demo", *words]


def naming(place: Path) -> list[int]:
    """Living processes whose command line names a directory."""
    found = []
    for pid, _, state in processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if state != "Z" and os.fsencode(place) in words:
            found.append(pid)
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The demo's document, run from another directory, in a data directory that it makes and removes."""
    place = tmp_path_factory.mktemp("demo")
    data = place / "data"
    done = subprocess.run(
        argv("--json", "--data", str(data)), cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert not data.exists()
    assert naming(data) == []
    return json.loads(done.stdout)


class TestWholeStory:
    pytestmark = real

    def test_every_fact_holds(self, told: dict[str, Any]) -> None:
        assert [fact for fact in told["facts"] if not fact["ok"]] == []
        assert told["ok"] is True
        assert told["error"] is None

    def test_every_claim_is_among_them(self, told: dict[str, Any]) -> None:
        assert set(CLAIMS) - {fact["fact"] for fact in told["facts"]} == set()
        assert all(fact["checked"] and fact["figure"] for fact in told["facts"])

    def test_it_worked_on_what_is_installed(self, told: dict[str, Any]) -> None:
        figures = told["figures"]
        assert figures["distributions"] > 10
        assert figures["hashed_files"] > 500
        assert "| psycopg-" in figures["report"] or "| psycopg |" in figures["report"]
        assert figures["expected_effects"] == figures["effects"] == figures["distributions"]
        assert figures["deliveries"] == figures["effects"] + 1


class TestInterruption:
    pytestmark = real

    def test_an_interrupt_leaves_nothing(self, tmp_path: Path) -> None:
        data = tmp_path / "data"
        demo = subprocess.Popen(
            argv("--data", str(data)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 120
        while not (data / "data" / "kernel.json").exists():
            assert demo.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=120)
        assert demo.returncode == 130, errors
        assert not data.exists()
        assert naming(data) == []


def test_a_directory_with_something_in_it_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    done = subprocess.run(argv("--data", str(tmp_path)), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    assert (tmp_path / "mine").read_text() == "keep"


def test_the_example_is_the_agent_that_ships() -> None:
    shipped = {path.name: path.read_bytes() for path in SHIPPED.iterdir() if path.is_file()}
    example = {path.name: path.read_bytes() for path in EXAMPLE.iterdir() if path.is_file()}
    example.pop("README.md")
    assert example == shipped
