"""The lean generator against the echo, as processes: what it reports is what it did."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from ringfence.agent import wire
from ringfence.v1 import syscalls_pb2 as pb

ROOT = Path(__file__).parents[3]


def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_echo_drives_the_generator():
    done = run("bench.echo", "--streams", "3", "--calls", "20")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["streams"], report["calls"], report["failures"]) == (3, 60, {})
    assert (report["fs.read"]["calls"], report["state.put"]["calls"]) == (48, 12)
    assert 0 < report["p50_ms"] <= report["p99_ms"] <= report["max_ms"]


def test_the_generator_sends_what_a_kernel_takes_and_counts_failures(kernel, refusal):
    def deny(_):
        raise refusal("Denied", "no")

    kernel.welcome = pb.Welcome(next_step=300)
    kernel.bodies["fs.read"] = lambda _: {"data": "eA=="}
    kernel.bodies["state.put"] = deny
    targets = json.dumps([{"socket": str(kernel.path), "token": "token-of-this-start"}])
    done = run(
        "bench.lean", "--targets", "-", "--calls", "10", "--key", "k/{n}", "--path", "a.txt", text=targets
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["failures"] == {"Denied: no": 2}
    assert kernel.places() == [("0", 300 + n) for n in range(10)]
    assert [call.id for call in kernel.calls] == list(range(1, 11))
    assert kernel.arguments(0) == {"path": "a.txt"}
    assert kernel.arguments(4)["key"] == "k/0"


def test_a_refused_stream_is_said(kernel):
    done = run(
        "bench.lean", "--targets", "-", text=json.dumps([{"socket": str(kernel.path), "token": "old"}])
    )
    assert done.returncode == 1
    assert "UNAUTHENTICATED" in done.stderr


@pytest.mark.parametrize("module", ["bench.lean", "bench.echo"])
def test_help_is_there(module: str):
    done = run(module, "--help")
    assert done.returncode == 0
    assert "--" in done.stdout


def test_the_library_names_the_version_it_is_installed_as():
    assert metadata.version("ringfence") == wire.VERSION
