"""`NativeSandbox`: the Sandbox protocol on plain Linux."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from ringfence.sandbox.native import identity
from ringfence.sandbox.native.cgroups import remove_shared
from ringfence.sandbox.native.job import STDERR_NAME, STDOUT_NAME, UPPER_NAME, Job
from ringfence.sandbox.native.program import NativeProgram, end_recorded, launcher_command
from ringfence.sandbox.specs import (
    checked_directory,
    checked_environment,
    checked_inside,
    checked_limits,
    checked_readonly,
    checked_uid,
    checked_words,
)
from ringfence.sandbox.types import CommandResult, CommandSpec, ProgramSpec, SandboxError, Wall

_PROBE_TIMEOUT_S = 60


class NativeSandbox:
    """Sandboxes made of Linux namespaces, Landlock, seccomp, and control groups or resource limits.

    Memory and process limits are held by control groups where the host permits them. Without them the number of
    processes is bounded by RLIMIT_NPROC, and memory by measuring: the launcher sums what the whole tree uses up to fifty
    times a second and kills it over the limit, so a burst can pass the limit for a moment before it ends.

    A command whose changes grow over its disk limit is killed and reported as `ExitReason.DISK`; what it prints beyond
    a quarter of that limit is counted and dropped, beginning and end are kept, and it is not killed for it.

    Args:
        data_dir: the kernel's data directory; records of running sandboxes lie in `sandboxes` below it.
    """

    def __init__(self, data_dir: Path) -> None:
        self._data = data_dir
        self._records = data_dir / "sandboxes"
        self._root = self._records / "root"
        self._own: set[str] = set()

    @property
    def name(self) -> str:
        """`native`."""
        return "native"

    def walls(self) -> Sequence[Wall]:
        """Try every wall on this host, each in a process of its own.

        Raises:
            SandboxError: the probe itself can't run.
        """
        self._prepare()
        done = subprocess.run(
            launcher_command("run_probe", "ringfence-probe"),
            input=json.dumps({"data": str(self._records)}).encode(),
            capture_output=True,
            env={},
            check=False,
            timeout=_PROBE_TIMEOUT_S,
        )
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
            raise SandboxError(f"the sandbox probe failed: {lines[-1]}; report this with your Linux version")
        return [Wall(**wall) for wall in json.loads(done.stdout)]

    async def start(self, spec: ProgramSpec) -> NativeProgram:
        """Start an agent's program.

        Raises:
            SandboxError: a required wall is missing or the program can't be found; nothing runs.
        """
        job = self._job(spec)
        job["image"] = checked_directory(spec.image, "program image")
        job["socket_dir"] = checked_directory(spec.socket_dir, "socket directory")
        job["cwd"] = "/program"
        stdout = os.dup(spec.stdout_fd)
        stderr = os.dup(spec.stderr_fd)
        try:
            job["stdout_fd"], job["stderr_fd"] = stdout, stderr
            return await self._launch(job, spec.stdin, (stdout, stderr))
        finally:
            os.close(stdout)
            os.close(stderr)

    async def run_command(self, spec: CommandSpec) -> CommandResult:
        """Run one command to its end. Cancelling the await ends the command's whole tree first.

        Raises:
            SandboxError: as for `start`.
        """
        job = self._job(spec)
        job["lower"] = checked_directory(spec.lower, "workspace")
        job["scratch"] = checked_directory(spec.scratch, "scratch directory")
        job["cwd"] = checked_inside(spec.cwd, "working directory")
        job["masks"] = [checked_inside(mask, "mask") for mask in spec.masks]
        program = await self._launch(job, spec.stdin, ())
        try:
            exit_ = await program.wait()
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.create_task(program.kill()))
            raise
        stdout_bytes, stderr_bytes = program.written or (0, 0)
        return CommandResult(
            exit=exit_,
            upper=spec.scratch / UPPER_NAME,
            stdout=spec.scratch / STDOUT_NAME,
            stderr=spec.scratch / STDERR_NAME,
            stdout_bytes=stdout_bytes,
            stderr_bytes=stderr_bytes,
        )

    async def sweep(self) -> Sequence[str]:
        """End what an earlier kernel of this data directory left; returns the agents whose leftovers were ended.

        Raises:
            SandboxError: something can't be ended, say because it belongs to another user.
        """
        return await asyncio.to_thread(self._sweep)

    async def close(self) -> None:
        """Remove what is shared by sandboxes, when the last of them has ended."""
        await asyncio.to_thread(remove_shared)

    def _sweep(self) -> list[str]:
        agents: set[str] = set()
        for path in sorted(self._records.glob("*.json")):
            if path.stem in self._own:
                continue
            try:
                record = cast("identity.Record", json.loads(path.read_bytes()))
                if end_recorded(record):
                    agents.add(record["agent"])
            except FileNotFoundError:
                continue  # its launcher saw the kernel die and has cleaned up meanwhile
            except (OSError, ValueError, KeyError) as error:
                raise SandboxError(
                    f"a sandbox of an earlier kernel can't be ended (`{path}`: {error}); "
                    "run the kernel as the user that started it, or end it yourself and remove the file"
                ) from error
            identity.remove_record(str(self._records), path.stem)
        for path in self._records.glob("*.json.tmp"):
            if path.name.removesuffix(".json.tmp") not in self._own:
                path.unlink(missing_ok=True)
        return sorted(agents)

    async def _launch(self, job: Job, stdin: bytes, descriptors: tuple[int, ...]) -> NativeProgram:
        self._prepare()
        job["stdin_bytes"] = len(stdin)
        self._own.add(job["name"])
        try:
            program = await NativeProgram.launch(job, stdin, descriptors)
        except BaseException:
            self._own.discard(job["name"])
            raise
        program.when_gone(lambda: self._own.discard(job["name"]))
        return program

    def _prepare(self) -> None:
        self._records.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root.mkdir(mode=0o700, exist_ok=True)

    def _job(self, spec: ProgramSpec | CommandSpec) -> Job:
        limits = checked_limits(spec.limits)
        return {
            "name": uuid.uuid4().hex,
            "agent": spec.agent,
            "records": str(self._records.resolve()),
            "root": str(self._root.resolve()),
            "argv": checked_words(spec.argv),
            "env": checked_environment(spec.env),
            "uid": checked_uid(spec.uid),
            "readonly": [
                *map(checked_readonly, spec.readonly),
                *(checked_readonly(at, spec.binds[at]) for at in spec.binds),
            ],
            "sources": {str(at): str(source.resolve()) for at, source in spec.binds.items()},
            "cwd": "",
            "image": "",
            "socket_dir": "",
            "lower": "",
            "scratch": "",
            "masks": [],
            "memory_bytes": limits.memory_bytes,
            "pids": limits.pids,
            "cpu": limits.cpu,
            "disk_bytes": limits.disk_bytes,
            "timeout_s": limits.timeout_s,
            "stdin_bytes": 0,
            "stdout_fd": -1,
            "stderr_fd": -1,
        }
