"""Sets off bombs, one after the other, each in a sandbox of its own, while an honest agent goes on beside them.

The orders are one JSON document on standard input; the answer is one on standard output: how each bomb ended, and whether the
honest agent did its work before, during and after it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.types import Limits, Program, ProgramSpec

HONEST = """
import os, socket, time
while True:
    # A bit of everything that a bomb could have used up.
    pid = os.fork()
    if pid == 0: os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with open("/tmp/work", "wb") as file: file.write(bytes(1 << 20))
    os.unlink("/tmp/work")
    data = bytearray(4 << 20)
    one, other = socket.socketpair()
    one.sendall(b"x" * 4096); assert other.recv(4096)
    one.close(); other.close()
    print("beat", flush=True)
    time.sleep(0.02)
"""
ENDLESS = ("forks", "output", "processor")
"""Those that go on at their limit until their time is over."""
_SHORT_S, _LONG_S = 1.0, 60.0
_START = "import os, socket, sys, time, mmap\nheld = []\n"
BOMBS = {
    "memory": "while True: held.append(bytearray(b'x' * (1 << 20)))",
    "memory of many": "for _ in range(6): os.fork()\nwhile True: held.append(bytearray(b'x' * (1 << 18)))",
    "shared memory": "while True:\n page = mmap.mmap(-1, 1 << 20); page.write(b'x' * (1 << 20)); held.append(page)",
    "sockets": """
for _ in range(3): os.fork()
while True:
    one, other = socket.socketpair(); held += (one, other)
    for each in (one, other):
        each.setblocking(False)
        try:
            while True: each.send(b'x' * 65536)
        except OSError: pass
""",
    "forks": "while True:\n try: os.fork()\n except OSError: pass",
    "tmp": "out = open('/tmp/bomb', 'wb')\nwhile True: out.write(b'x' * (1 << 20))",
    "names": "n = 0\nwhile True:\n os.mknod(f'/tmp/{n}'); n += 1",
    "descriptors": "for _ in range(5): os.fork()\nwhile True: held.append(os.pipe())",
    "output": "while True: os.write(1, b'x' * 65536)",
    "processor": "for _ in range(5): os.fork()\nwhile True: pass",
}


async def start(
    box: NativeSandbox, order: dict[str, Any], name: str, code: str, uid: int | None
) -> tuple[Program, Path]:
    place = Path(order["place"])
    out = place / f"{name}.out"
    # What a kernel reads from is a pipe; a file here is bounded by the file limit of the sandbox all the same.
    fd = os.open(out, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        spec = ProgramSpec(
            agent=name,
            argv=[order["python"], "-I", "-S", "-c", code],
            env={"PATH": "/usr/bin:/bin"},
            image=place / "image",
            socket_dir=place / "sockets",
            uid=uid,
            limits=Limits(
                memory_bytes=96 << 20,
                pids=48,
                disk_bytes=64 << 20,
                timeout_s=_SHORT_S if name in ENDLESS else _LONG_S,
            ),
            stdout_fd=fd,
            stderr_fd=fd,
        )
        return await box.start(spec), out
    finally:
        os.close(fd)


def beats(out: Path) -> int:
    return out.read_bytes().count(b"beat\n")


async def more(out: Path, wanted: int) -> bool:
    """Whether the honest agent does its work so many times again within a while."""
    goal = beats(out) + wanted
    for _ in range(3000):
        if beats(out) >= goal:
            return True
        await asyncio.sleep(0.01)
    return False


async def run(order: dict[str, Any]) -> dict[str, Any]:
    box = NativeSandbox(Path(order["place"]) / "data", warm_environment=None)
    answer: dict[str, Any] = {}
    honest, work = await start(box, order, "honest", HONEST, order["uid"])
    try:
        for name, code in BOMBS.items():
            uid = order["uid"] and order["uid"] + 1
            bomb, _ = await start(box, order, name.replace(" ", "-"), _START + code, uid)
            ended = asyncio.ensure_future(bomb.wait())
            during = await more(work, 2)
            exit_ = await ended
            answer[name] = {
                "reason": exit_.reason.value,
                "code": exit_.code,
                "during": during,
                "after": await more(work, 2),
            }
    finally:
        await honest.kill()
        await box.close()
    return answer


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.stdin.read())))))
