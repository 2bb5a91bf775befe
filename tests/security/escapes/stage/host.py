"""One kernel's worth of sandboxes: starts the victim, then a program and a command full of attempts, and tells what came out.

The orders are one JSON document on standard input; the answer is one on standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.types import CommandSpec, Limits, ProgramSpec

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


def start_victim(order: dict[str, Any]) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    place = Path(order["place"])
    uid = order["uid"]
    more: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
    process = subprocess.Popen(
        [
            order["python"],
            "-I",
            "-S",
            str(Path(__file__).with_name("victim.py")),
            str(place / "victim"),
            order["marker"],
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"CANARY": order["canary"]},
        cwd="/",
        **more,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, json.loads(line)


def lines(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in path.read_text(errors="replace").splitlines():
        found |= json.loads(line)
    return found


async def until(done: Callable[[], bool]) -> None:
    for _ in range(500):
        if done():
            return
        await asyncio.sleep(0.01)


def backend(name: str, data: Path) -> Any:
    """The backend that a kernel with this data directory would have."""
    if name == "native":
        return NativeSandbox(data)
    from ringfence.sandbox.docker import DockerSandbox, DockerSettings, image
    from ringfence.sandbox.docker.engine import Engine, usual_host

    return DockerSandbox(data, DockerSettings(image=image.find(Engine(usual_host()), image.TAG)))


async def run(order: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    box = backend(order["backend"], Path(order["place"]) / "data")
    answer: dict[str, Any] = {}
    try:
        for kind, names in order["attempts"].items():
            stdin = json.dumps({**facts, "attempts": names}).encode()
            run_one = run_command if kind.startswith("command") else run_program
            answer[kind] = await run_one(box, order, kind, stdin)
    finally:
        await box.close()
    return answer


def common(order: dict[str, Any], kind: str, stdin: bytes) -> dict[str, Any]:
    """What programs and commands have in common; a warm one is what the kernel's own interpreter becomes."""
    inside = Path(order["place"]) / "inside"
    script = str(inside / "security/escapes/attempts/run.py")
    warm = kind == "warm"
    return {
        "agent": "agent-1",
        "argv": ["python", script] if warm else [order["python"], "-I", "-S", script],
        "stdin": stdin,
        "env": {**ENV, **order["warm_env"]} if warm else {**ENV, "LANG": "C.UTF-8"},
        "readonly": [inside, *(Path(path) for path in order["interpreter"] if warm)],
        "uid": order["uid"],
        "limits": Limits(**order["limits"]),
    }


async def run_program(box: Any, order: dict[str, Any], kind: str, stdin: bytes) -> dict[str, Any]:
    place = Path(order["place"])
    out, err = place / f"{kind}.out", place / f"{kind}.err"
    fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in (out, err)]
    image, sockets = place / "image", place / "sockets"
    try:
        spec = ProgramSpec(
            **common(order, kind, stdin),
            image=image,
            socket_dir=sockets,
            stdout_fd=fds[0],
            stderr_fd=fds[1],
        )
        program = await box.start(spec)
    finally:
        for fd in fds:
            os.close(fd)
    ended = await program.wait()
    if kind.endswith("-alone"):
        # What ended the first process may say so a moment after it.
        await until(lambda: out.stat().st_size > 0)
    return told(ended, out, err)


async def run_command(box: Any, order: dict[str, Any], kind: str, stdin: bytes) -> dict[str, Any]:
    place = Path(order["place"])
    scratch = place / f"scratch-{kind}"
    scratch.mkdir()
    spec = CommandSpec(
        **common(order, kind, stdin), lower=place / "workspace", scratch=scratch, masks=order["masks"]
    )
    done = await box.run_command(spec)
    return told(done.exit, done.stdout, done.stderr)


def told(ended: Any, out: Path, err: Path) -> dict[str, Any]:
    said = err.read_text(errors="replace")[-2000:]
    return {"reason": ended.reason.value, "code": ended.code, "results": lines(out), "err": said}


def main() -> None:
    order = json.loads(sys.stdin.read())
    victim, facts = start_victim(order)
    try:
        answer = asyncio.run(run(order, {**order["facts"], **facts}))
    finally:
        assert victim.stdin is not None
        victim.stdin.close()
        victim.wait()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
