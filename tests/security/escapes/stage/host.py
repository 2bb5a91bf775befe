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

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


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


async def run(order: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    place = Path(order["place"])
    box = NativeSandbox(place / "data")
    inside = place / "inside"
    limits = Limits(**order["limits"])
    python = [order["python"], "-I", "-S", str(inside / "security/escapes/attempts/run.py")]
    answer: dict[str, Any] = {}
    for kind, names in order["attempts"].items():
        stdin = json.dumps({**facts, "attempts": names}).encode()
        common = {
            "agent": "agent-1",
            "argv": python,
            "stdin": stdin,
            "env": ENV,
            "readonly": [inside],
            "uid": order["uid"],
            "limits": limits,
        }
        if kind.startswith("program"):
            out, err = place / f"{kind}.out", place / f"{kind}.err"
            fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in (out, err)]
            program = await box.start(
                ProgramSpec(
                    **common,
                    image=place / "image",
                    socket_dir=place / "sockets",
                    stdout_fd=fds[0],
                    stderr_fd=fds[1],
                )
            )
            for fd in fds:
                os.close(fd)
            ended = await program.wait()
            if kind.endswith("-alone"):
                # What ended the first process may say so a moment after it.
                await until(lambda: out.stat().st_size > 0)  # noqa: B023
        else:
            scratch = place / f"scratch-{kind}"
            scratch.mkdir()
            done = await box.run_command(
                CommandSpec(**common, lower=place / "workspace", scratch=scratch, masks=order["masks"])
            )
            ended, out, err = done.exit, done.stdout, done.stderr
        answer[kind] = {
            "reason": ended.reason.value,
            "code": ended.code,
            "results": lines(out),
            "err": err.read_text(errors="replace")[-2000:],
        }
    await box.close()
    return answer


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
