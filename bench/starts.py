"""Starting a sandboxed Python, beside starting a bare one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ringfence.kernel.config import AGENT_UID_BASE
from ringfence.kernel.environment import interpreter_directories
from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.types import ExitReason, ProgramSpec, SandboxError

from bench import kernels
from bench.host import Bench, BenchError, median, rank, timed
from bench.report import Section

FIRST_LINE = "print('ready', flush=True)"
LIBRARY = f"import grpc, ringfence.agent.runtime, ringfence.v1.syscalls_pb2; {FIRST_LINE}"
UID = AGENT_UID_BASE + 90_000

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: starter}
spec:
  run: {command: [python, agent.py]}
  permissions: {allow: [{fs.read: "/workspace/**"}]}
"""
PROGRAM = b"from ringfence import agent\nwith agent.boot() as rf:\n    rf.fs.read_text('agent.py')\n"


def measure(bench: Bench) -> Section:
    """Bare and sandboxed in turn, so that a busy moment hits both."""
    section = Section(
        name="starts", title="starting an agent's program in the native sandbox, beside a bare `python3`"
    )
    times = 8 if bench.quick else 30
    home = bench.directory("starts")
    image, sockets = home / "image", home / "run"
    for path in (image, sockets):
        path.mkdir(mode=0o755)
    sandbox = NativeSandbox(home / "k")
    (home / "k").mkdir(mode=0o711)
    for what, code in (("first line of Python", FIRST_LINE), ("library and gRPC imported", LIBRARY)):
        bench.say(what)
        bare, boxed = [], []
        for _ in range(times):
            bare.append(timed(lambda code=code: _bare(code)))
            boxed.append(asyncio.run(_boxed(sandbox, image, sockets, code)))
        section.rows.append(_row(what, bare, boxed))
    asyncio.run(sandbox.close())
    bench.say("submit")
    section.rows.append(
        _row("submitted, ran to its end (one call)", bare, _submitted(home, max(3, times // 3)))
    )
    section.notes.append(
        "the last line holds submission, workspace, sandbox, library and exit; its reference is bare Python with the library"
    )
    return section


def _row(what: str, bare: list[float], boxed: list[float]) -> dict[str, object]:
    return {
        "what": what,
        "bare ms": median(bare) * 1e3,
        "sandbox ms": median(boxed) * 1e3,
        "p99 ms": rank(boxed, 0.99) * 1e3,
        "more ms": (median(boxed) - median(bare)) * 1e3,
        "ratio": median(boxed) / median(bare),
    }


def _bare(code: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=kernels.environment(),
    )
    assert process.stdout is not None
    with process, process.stdout as output:
        output.readline()
        # What comes after the first line is not part of it, here and in the sandbox.
        process.kill()


async def _boxed(sandbox: NativeSandbox, image: Path, sockets: Path, code: str) -> float:
    reading, writing = os.pipe()
    try:
        spec = ProgramSpec(
            agent="bench",
            argv=[sys.executable, "-c", code],
            env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "GRPC_VERBOSITY": "NONE"},
            image=image,
            socket_dir=sockets,
            readonly=interpreter_directories(),
            uid=UID if os.geteuid() == 0 else None,
            stdout_fd=writing,
            stderr_fd=writing,
        )
        began = time.perf_counter()
        try:
            program = await sandbox.start(spec)
        except SandboxError as error:
            raise BenchError(f"the sandbox can't be had here: {error}") from error
        os.close(writing)
        writing = -1
        line = await asyncio.to_thread(os.read, reading, 200)
        taken = time.perf_counter() - began
        ended = await program.wait()
        if line != b"ready\n" or ended.reason is not ExitReason.EXIT:
            raise BenchError(f"the sandboxed Python said {line!r} and ended with {ended.reason}")
        return taken
    finally:
        for fd in (reading, writing):
            if fd >= 0:
                os.close(fd)


def _submitted(home: Path, times: int) -> list[float]:
    with kernels.running(home) as kernel:
        once: Callable[[], object] = lambda: kernel.operator.call(  # noqa: E731
            "Wait", 60.0, agent=kernel.submit(MANIFEST, {"agent.py": PROGRAM})
        )
        return [timed(once) for _ in range(times)]
