"""Agents forked from one warm interpreter share nothing that one of them could find or change."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.kernel.environment import interpreter_directories
from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.types import Program, ProgramSpec

pytestmark = [pytest.mark.timeout(120), pytest.mark.sandbox]

UIDS = [247302, None] if os.geteuid() == 0 else [None]
ENV = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
PROBE = """
import ctypes, json, os, random, sys, tempfile, uuid
numbers = [random.getrandbits(64), random.SystemRandom().getrandbits(64), uuid.uuid4().int, os.urandom(8).hex()]
name = next(tempfile._get_candidate_names())
# Each word is there with all bits turned, and memory is turned as well: what is searched for lies nowhere by itself.
words = {key: bytes.fromhex(word) for key, word in json.loads(sys.stdin.readline()).items()}
turned = bytes(byte ^ 255 for byte in range(256))
secret = sys.stdin.readline()
found, shared = [], []
with open("/proc/self/maps") as maps: lines = maps.read().splitlines()
# One page may lie on the end of another: searched as a stream, a needle's length carried over.
with open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in lines:
        span, rights, *rest = line.split()
        if "w" in rights and "s" in rights: shared.append(line)
        if rights[0] != "r" or rest[-1] in ("[vvar]", "[vsyscall]", "[vvar_vclock]"): continue
        start, end = (int(part, 16) for part in span.split("-"))
        carried = b""
        for place in range(start, end, 1 << 20):
            try:
                memory.seek(place)
                part = carried + memory.read(min(1 << 20, end - place)).translate(turned)
            except OSError:
                break
            found += [key for key, word in words.items() if word in part and key not in found]
            carried = part[-100:]
libc = ctypes.CDLL(None)
death = ctypes.c_int()
libc.prctl(2, ctypes.byref(death), 0, 0, 0)
def status(): return dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "found": sorted(found), "shared": shared, "numbers": numbers, "name": name, "parent": os.getppid(),
    "warm": "ringfence.agent.runtime" in sys.modules,
    "open": [n for n in os.listdir("/proc/self/fd") if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}")],
    "threads": len(os.listdir("/proc/self/task")), "death": death.value,
    "status": {k: v for k, v in status().items() if k in ("SigBlk", "SigCgt", "CapEff", "CapBnd", "Seccomp", "NoNewPrivs", "TracerPid")},
    "here": [os.getcwd(), os.readlink("/proc/self/root"), os.readlink("/proc/self/cwd")],
    "exe": os.path.exists("/proc/self/exe/..") , "timers": open("/proc/self/timers").read(),
}), flush=True)
# Held until it is told to end, with its secrets in memory.
import signal
signal.pause()
"""


class Agent:
    """A running probe."""

    def __init__(self, program: Program, out: Path, place: Path) -> None:
        self.program = program
        self.out = out
        self.place = place

    async def report(self) -> dict[str, Any]:
        for _ in range(2000):
            if self.out.read_bytes().endswith(b"\n"):
                return json.loads(self.out.read_text())
            await asyncio.sleep(0.01)
        raise TimeoutError(self.out.with_name("err").read_text())


async def start(box: NativeSandbox, place: Path, uid: int | None, own: str, needles: dict[str, str]) -> Agent:
    """A probe with secrets that all carry `own`; the needles are written so that they aren't there by themselves."""
    place.mkdir(mode=0o755)
    (place / f"image-{own}").mkdir(mode=0o755)
    fds = [os.open(place / name, os.O_WRONLY | os.O_CREAT) for name in ("out", "err")]
    hidden = {key: bytes(byte ^ 255 for byte in word.encode()).hex() for key, word in needles.items()}
    spec = ProgramSpec(
        agent=f"agent-{own}",
        argv=["python", "-c", PROBE, f"argument-{own}"],
        env={**ENV, "PATH": f"{Path(os.sys.executable).parent}:/usr/bin:/bin", "TOKEN": f"token-{own}"},  # type: ignore[attr-defined]
        image=place / f"image-{own}",
        socket_dir=place / f"image-{own}",
        readonly=interpreter_directories(),
        uid=uid,
        stdin=f"{json.dumps(hidden)}\ninput-{own}\n".encode(),
        stdout_fd=fds[0],
        stderr_fd=fds[1],
    )
    try:
        return Agent(await box.start(spec), place / "out", place)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.fixture(params=UIDS, ids=["root" if uid else "user" for uid in UIDS], scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """Two agents that live at the same time, and a third that the first's end made room for."""
    top = Path(tempfile.mkdtemp(prefix="ringfence-warm-"))
    top.chmod(0o755)
    kernel = f"kernel-{secrets.token_hex(8)}"
    os.environ["CANARY"] = kernel
    try:
        yield asyncio.run(meet(top, request.param, kernel))
    finally:
        del os.environ["CANARY"]
        subprocess.run(["rm", "-rf", str(top)], check=True)


async def meet(top: Path, uid: int | None, kernel: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    box = NativeSandbox(top / "data")
    one, two = secrets.token_hex(8), secrets.token_hex(8)
    first = await start(box, top / "one", uid, one, {"own token": f"token-{one}"})
    try:
        first_report = await first.report()
        kinds = ("token", "argument", "input", "agent", "image")
        needles = {f"{kind} of another": f"{kind}-{one}" for kind in kinds}
        needles |= {f"own {kind}": f"{kind}-{two}" for kind in ("token", "argument", "input")}
        needles |= {"kernel": kernel, "data directory": str(top / "data")}
        second = await start(box, top / "two", uid, two, needles)
        try:
            return first_report, await second.report(), one
        finally:
            await second.program.kill()
    finally:
        await first.program.kill()
        await box.close()


def test_they_are_warm(reports: Any) -> None:
    assert reports[0]["warm"]
    assert reports[1]["warm"]


def test_nothing_of_another_agent_or_of_the_kernel_is_in_its_memory(reports: Any) -> None:
    found = set(reports[1]["found"])
    # The control: what is its own is found, so the search works.
    assert {"own token", "own argument", "own input"} <= found
    assert {word for word in found if not word.startswith("own ")} == set()


def test_no_memory_is_shared(reports: Any) -> None:
    assert reports[0]["shared"] == reports[1]["shared"] == []


def test_random_numbers_differ(reports: Any) -> None:
    first, second = reports[0], reports[1]
    assert [one for one, other in zip(first["numbers"], second["numbers"], strict=True) if one == other] == []
    assert first["name"] != second["name"]


def test_nothing_is_left_of_what_forked_it(reports: Any) -> None:
    for report in reports[:2]:
        assert report["open"] == []
        assert report["threads"] == 1
        assert report["parent"] == 1
        assert report["timers"] == ""
        assert report["here"] == ["/program", "/", "/program"]
        status = report["status"]
        assert (status["Seccomp"], status["NoNewPrivs"], status["TracerPid"]) == ("2", "1", "0")
        assert {int(status[name], 16) for name in ("CapEff", "CapBnd", "SigBlk")} == {0}
        assert int(status["SigCgt"], 16) & ~(1 << 1 | 1 << 32 | 1 << 33) == 0
