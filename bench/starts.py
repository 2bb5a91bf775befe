"""An agent from submission to its end, beside a bare Python that does the same. `bench.sandbox` has the sandbox alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from bench import kernels
from bench.host import Bench, BenchError, median, rank, timed
from bench.report import Section

LIBRARY = "import grpc, ringfence.agent.runtime, ringfence.v1.syscalls_pb2"

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: starter}
spec:
  run: {command: [python, agent.py]}
  permissions: {allow: [{fs.read: "/workspace/**"}]}
"""
CALLS = {
    "submitted, ran to its end (no call)": b"pass\n",
    "submitted, ran to its end (one call)": (
        b"from ringfence import agent\nwith agent.boot() as rf:\n    rf.fs.read_text('agent.py')\n"
    ),
}


def measure(bench: Bench) -> Section:
    """Bare and submitted in turn, so that a busy moment hits both."""
    section = Section(
        name="starts", title="an agent from submission to its end, beside a bare `python3` with the library"
    )
    times = 8 if bench.quick else 30
    with kernels.running(bench.directory("starts")) as kernel:
        for what, program in CALLS.items():
            once: Callable[[], object] = lambda program=program: kernel.operator.call(  # noqa: E731
                "Wait", 60.0, agent=kernel.submit(MANIFEST, {"agent.py": program})
            )
            code = "pass" if program == b"pass\n" else LIBRARY
            bare: list[float] = []
            submitted: list[float] = []
            for turn in range(times):
                bench.say(f"{what}, {turn + 1} of {times}")
                bare.append(timed(lambda code=code: _bare(code)))
                submitted.append(timed(once))
            section.rows.append(_row(what, bare, submitted))
    section.notes.append(
        "a submission holds manifest, workspace, sandbox, program, its end and what is kept of it"
    )
    return section


def _row(what: str, bare: list[float], submitted: list[float]) -> dict[str, object]:
    return {
        "what": what,
        "bare ms": median(bare) * 1e3,
        "agent ms": median(submitted) * 1e3,
        "p99 ms": rank(submitted, 0.99) * 1e3,
        "more ms": (median(submitted) - median(bare)) * 1e3,
        "ratio": median(submitted) / median(bare),
    }


def _bare(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], env=kernels.environment(), check=False, capture_output=True
    )
    if done.returncode:
        raise BenchError(f"`{code}` fails: {done.stderr.decode('utf-8', 'replace').strip()[-200:]}")
