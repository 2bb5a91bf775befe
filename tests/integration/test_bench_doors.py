"""What doors are measured beside: the same program asks the endpoint itself, and gets what it is measured for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.doors import PARTS
from bench.host import serving

PROGRAM = str(Path(__file__).parents[2] / "bench" / "doors" / "program.py")


@pytest.mark.parametrize(("kind", "each"), [("whole", 1), ("stream", PARTS), ("tool", 1)])
def test_programs_wait_for_each_other_and_count_what_they_get(tmp_path: Path, kind: str, each: int) -> None:
    with serving("bench.doors.endpoint", log=tmp_path / "log") as (endpoint, told):
        job = {"kind": kind, "of": 2, "seconds": 0.05, "parts": PARTS, "port": told["port"], "tool": "echo"}
        argv = [sys.executable, PROGRAM]
        with (
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one,
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
        ):
            assert one.stdin is not None
            one.stdin.write(json.dumps(job))
            one.stdin.close()
            assert one.stdout is not None
            found = [json.loads(other.communicate(json.dumps(job), 60)[0]), json.loads(one.stdout.read())]
        assert endpoint.stdout is not None
        assert {said["start"] for said in found} == {json.loads(endpoint.stdout.readline())["start"]}
    for said in found:
        assert said["calls"] >= 1
        assert said["units"] == said["calls"] * each
