"""A process that owns one backend, as a kernel does: it can be an ordinary user, and it can be killed.

    backend_host.py MODE DATA

Orders come as lines of JSON on standard input, each with an id; answers go the same way, in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from backends import KINDS
from points import Points
from ringfence.sandbox import changes
from ringfence.sandbox.native import linux, seccomp
from ringfence.sandbox.types import CommandSpec, Limits, ProgramSpec, SandboxError


class Host:
    def __init__(self, mode: str, data: Path) -> None:
        self.box = KINDS[mode].make(data)
        self.points = Points(audit=False)
        self.number = 0
        self.programs: dict[int, Any] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def start(self, stdout: str, stderr: str, **spec: Any) -> dict[str, Any]:
        fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in (stdout, stderr)]
        try:
            spec = common(spec, "image", "socket_dir", *({"overlay"} & spec.keys()))
            program = await self.box.start(ProgramSpec(**spec, stdout_fd=fds[0], stderr_fd=fds[1]))
        finally:
            for fd in fds:
                os.close(fd)
        self.number += 1
        self.programs[self.number] = program
        return {"program": self.number, "identity": dict(program.identity)}

    async def forms(self, program: int) -> dict[str, str]:
        return dict(self.programs[program].forms)

    async def wait(self, program: int) -> dict[str, Any]:
        ended = await self.programs[program].wait()
        return {"reason": ended.reason.value, "code": ended.code}

    async def kill(self, program: int) -> None:
        await self.programs[program].kill()

    async def pause(self, program: int) -> None:
        await self.programs[program].pause()

    async def resume(self, program: int) -> None:
        await self.programs[program].resume()

    async def command(self, **spec: Any) -> dict[str, Any]:
        spec = common(spec, "lower", "scratch")
        done = await self.box.run_command(CommandSpec(**spec))
        return {
            "reason": done.exit.reason.value,
            "code": done.exit.code,
            "upper": str(done.upper),
            "stdout": str(done.stdout),
            "stderr": str(done.stderr),
            "stdout_bytes": done.stdout_bytes,
            "stderr_bytes": done.stderr_bytes,
        }

    async def cancel(self, order: int) -> None:
        task = self.tasks[order]
        task.cancel()
        await asyncio.wait([task])

    async def cut(self, order: str, at: int, arguments: dict[str, Any]) -> str:
        """Give an order and cancel it at a point; whether it was still under way. A program that runs is killed."""
        task = asyncio.create_task(getattr(self, order)(**arguments))
        self.points.arm(at, task.cancel)
        try:
            await asyncio.wait([task])
        finally:
            self.points.disarm()
        if task.cancelled():
            return "cancelled"
        if order == "start":
            await self.kill(task.result()["program"])
        task.result()
        return "done"

    async def cycles(self, count: int, at_once: int, ways: list[str], spec: dict[str, Any]) -> dict[str, int]:
        """Start and end programs over and over, some at once; how many ended in which way."""
        ended = dict.fromkeys(ways, 0)
        turns = iter(range(count))

        async def some() -> None:
            for turn in turns:
                way = ways[turn % len(ways)]
                await self.cycle(way, spec)
                ended[way] += 1

        await asyncio.gather(*(some() for _ in range(at_once)))
        self.programs.clear()
        # What is only in cycles of references waits for the collector, and is not kept.
        gc.collect()
        return ended

    async def cycle(self, way: str, spec: dict[str, Any]) -> None:
        spec = dict(spec)
        if way == "ended":
            spec["argv"] = ["/bin/true"]
        elif way == "missing":
            spec["argv"] = ["no-such-program"]
        elif way == "refused":
            spec["image"] = f"{spec['image']}/missing"
        if way in ("missing", "refused"):
            try:
                await self.start(**spec)
            except SandboxError:
                return
            raise AssertionError("it started")
        if way == "cancelled":
            task = asyncio.create_task(self.start(**spec))
            await asyncio.sleep(0.004)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                return
            program = self.programs[task.result()["program"]]
        else:
            program = self.programs[(await self.start(**spec))["program"]]
        if way == "paused":
            await program.pause()
        if way != "ended":
            await program.kill()
        await program.wait()

    async def sweep(self) -> list[str]:
        return list(await self.box.sweep())

    async def walls(self) -> list[dict[str, Any]]:
        found = await asyncio.to_thread(self.box.walls)
        return [dataclasses.asdict(wall) for wall in found]

    async def changes(self, upper: str, lower: str) -> str:
        return changes.read_changes(Path(upper), Path(lower)).to_json()

    async def apply(self, upper: str, live: str, changes_json: str, uid: int | None) -> None:
        found = changes.ChangeSet.from_json(changes_json)
        await asyncio.to_thread(lambda: changes.apply_changes(Path(upper), Path(live), found, uid=uid))

    async def discard(self, scratch: str) -> None:
        changes.discard(Path(scratch))

    async def lock_down(self) -> None:
        """From now on this process is on a host that refuses namespaces."""
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(seccomp.program())

    async def use_up_namespaces(self) -> None:
        """From now on this process is where the host's limit of user namespaces (sysctl user.max_user_namespaces) is 0."""
        uid, gid = os.getuid(), os.getgid()
        linux.unshare(linux.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        linux.drop_capabilities()

    async def peak_bytes(self) -> dict[str, int]:
        return {
            "own": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "ended children": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
            "children": max((peak_of(pid) for pid in children()), default=0),
        }

    async def answer(self, order: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": order["id"]}
        try:
            reply["result"] = await getattr(self, order["op"])(**order["arguments"])
        except asyncio.CancelledError:
            reply["error"], reply["kind"] = "cancelled", "CancelledError"
        except Exception as error:  # noqa: BLE001 - the test decides what it means
            reply["error"], reply["kind"] = str(error), type(error).__name__
        print(json.dumps(reply), flush=True)

    async def serve(self) -> None:
        reader = asyncio.StreamReader(limit=1 << 26)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while line := await reader.readline():
            order = json.loads(line)
            self.tasks[order["id"]] = asyncio.create_task(self.answer(order))


def children() -> list[int]:
    """Processes that this one has started and that still run, such as the native backend's warden."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def peak_of(pid: int) -> int:
    """In bytes; 0 of one that has ended since."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return 0


def common(spec: dict[str, Any], *paths: str) -> dict[str, Any]:
    spec = dict(spec)
    for name in paths:
        spec[name] = Path(spec[name])
    spec["readonly"] = [Path(path) for path in spec.get("readonly", [])]
    spec["binds"] = {Path(at): Path(source) for at, source in spec.get("binds", {}).items()}
    spec["mounts"] = {Path(at): Path(source) for at, source in spec.get("mounts", {}).items()}
    spec["limits"] = Limits(**spec.get("limits", {}))
    path = spec.pop("stdin_path", None)
    spec["stdin"] = Path(path).read_bytes() if path else spec.get("stdin", "").encode()
    return spec


if __name__ == "__main__":
    asyncio.run(Host(sys.argv[1], Path(sys.argv[2])).serve())
