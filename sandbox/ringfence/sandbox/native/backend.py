"""`NativeSandbox`: the Sandbox protocol on plain Linux."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from ringfence.sandbox.names import WORKSPACE
from ringfence.sandbox.native import cgroups, identity, launcher
from ringfence.sandbox.native.client import WardenClient
from ringfence.sandbox.native.invocation import FLAGS_ON, parse
from ringfence.sandbox.native.job import (
    KERNELS_OWN,
    ROOT_NAME,
    STDERR_NAME,
    STDOUT_NAME,
    UPPER_NAME,
    Job,
    Order,
)
from ringfence.sandbox.native.program import NativeProgram, end_recorded
from ringfence.sandbox.specs import (
    checked_directory,
    checked_environment,
    checked_inside,
    checked_limits,
    checked_mount,
    checked_readonly,
    checked_uid,
    checked_words,
)
from ringfence.sandbox.types import CommandResult, CommandSpec, ProgramSpec, SandboxError, Wall

_PROBE_TIMEOUT_S = 60
_PROBE_STALE_S = 3600
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class NativeSandbox:
    """Sandboxes made of Linux namespaces, Landlock, seccomp, and control groups or resource limits.

    A process beside the kernel, the warden, makes and watches all of them; it is started for the first one and again when
    it has died. When either of the two dies, so does every sandbox.

    Memory and process limits are held by control groups where the host permits them. Without them the number of
    processes is bounded by RLIMIT_NPROC, and memory by measuring: the warden sums what the whole tree uses up to fifty
    times a second and kills it over the limit, so a burst can pass the limit for a moment before it ends.

    A command whose changes grow over its disk limit is killed and reported as `ExitReason.DISK`; what it prints beyond
    a quarter of that limit is counted and dropped, beginning and end are kept, and it is not killed for it.

    A program that is this interpreter is forked from a warm one that has imported what agents need. Where that could make
    a difference (other variables or options of Python's, another interpreter, files that hide what is imported) it is executed.

    Args:
        data_dir: the kernel's data directory; records of running sandboxes lie in `sandboxes` below it.
        warm_environment: variables that decide how Python starts, with the values that agents' programs have; a program with
            others is executed. None: every program is. Trusted: the warm interpreter imports what it names.
        sub_uids: whether programs of an ordinary user's kernel run as sub-uids where there are any: what they are shown has
            to be readable for others then.
    """

    def __init__(
        self, data_dir: Path, warm_environment: Mapping[str, str] | None = FLAGS_ON, *, sub_uids: bool = True
    ) -> None:
        self._data = data_dir
        self._records = data_dir / "sandboxes"
        self._root = self._records / ROOT_NAME
        self._own: set[str] = set()
        self._wardens: set[str] = set()
        self._warden: WardenClient | None = None
        self._warm_environment = warm_environment
        self._sub_uids = sub_uids
        self._resolved = ("", "")
        """Of records and root, once they are there."""

    @property
    def name(self) -> str:
        """`native`."""
        return "native"

    @property
    def warden_pid(self) -> int:
        """Pid of the process that makes and watches the sandboxes, for people and tests; 0: there is none now."""
        return self._warden.pid if self._warden is not None and self._warden.alive else 0

    @property
    def direct(self) -> str:
        """Empty: its programs can work on an overlay of their own."""
        return ""

    def walls(self) -> Sequence[Wall]:
        """Try every wall on this host, each in a process of its own.

        Raises:
            SandboxError: the probe itself can't run.
        """
        self._prepare()
        done = subprocess.run(
            launcher.command("launcher", "run_probe"),
            input=json.dumps({"data": str(self._records), "sub_uids": self._sub_uids}).encode(),
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
        job["socket_dir"] = checked_directory(spec.socket_dir, "socket directory")
        if spec.overlay is None:
            job["image"] = checked_directory(spec.image, "program image")
            job["cwd"] = "/program"
        else:
            job["lower"] = checked_directory(spec.image, "program image")
            job["scratch"] = checked_directory(spec.overlay, "directory of the overlay")
            job["cwd"] = WORKSPACE
        outputs = (spec.stdout_fd, spec.stderr_fd)
        if spec.loopback is not None:
            job["loopback"] = spec.loopback.port
            outputs += (spec.loopback.hand_fd,)
        return await self._launch(job, spec.stdin, outputs)

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
        """End the warden, and with it what still runs; remove what is shared by sandboxes."""
        warden, self._warden = self._warden, None
        if warden is not None:
            await warden.close()
        await asyncio.to_thread(cgroups.remove_shared)

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
        self._sweep_unnamed()
        return sorted(agents)

    def _sweep_unnamed(self) -> None:
        """Remove what no record names."""
        for path in self._records.glob("probe-*"):
            # Left by one that died while it looked what this host can do. A look takes a moment; `doctor` may be at it now.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _PROBE_STALE_S:
                    shutil.rmtree(path, ignore_errors=True)
        try:
            cgroups.sweep(str(self._records), self._wardens)
        except OSError as error:
            raise SandboxError(
                f"control groups of an earlier kernel can't be emptied: {error}; run the kernel as the user that started it"
            ) from error

    async def _launch(self, job: Job, stdin: bytes, outputs: tuple[int, ...]) -> NativeProgram:
        if self._warden is None or not self._warden.alive:
            self._warden = WardenClient.start(self._warm_environment, sub_uids=self._sub_uids)
            self._wardens.clear()
            self._wardens.add(str(self._warden.pid))
        name = job["name"]
        self._own.add(name)
        lent: list[int] = []
        try:
            for title, content in (("job", _handed_over(job)), ("stdin", stdin)):
                lent.append(_sealed(title, content))
            program = await NativeProgram.launch(self._warden, self._order(job), (*lent, *outputs))
        except BaseException:
            self._own.discard(name)
            raise
        finally:
            for descriptor in lent:
                os.close(descriptor)
        program.when_gone(lambda: self._own.discard(name))
        return program

    def _order(self, job: Job) -> Order:
        """The part of a job that its supervisor has to know."""
        known = {name: value for name, value in job.items() if name in Order.__annotations__}
        known["readonly"] = [path for path in job["readonly"] if job["sources"].get(path, path) == path]
        # Commands start another program sooner or later; only agents' own are worth the memory.
        warm = self._warm_environment if job["image"] else None
        known["warm"] = warm is not None and parse(job["argv"], job["env"], warm) is not None
        return cast("Order", known)

    def _prepare(self) -> None:
        if not self._resolved[0] or not os.path.isdir(self._root):  # noqa: PTH112 - at each start
            self._records.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root.mkdir(mode=0o700, exist_ok=True)
            self._resolved = str(self._records.resolve()), str(self._root.resolve())

    def _job(self, spec: ProgramSpec | CommandSpec) -> Job:
        limits = checked_limits(spec.limits)
        self._prepare()
        return {
            "name": uuid.uuid4().hex,
            "agent": spec.agent,
            "records": self._resolved[0],
            "root": self._resolved[1],
            "argv": checked_words(spec.argv),
            "env": checked_environment(spec.env),
            "uid": checked_uid(spec.uid),
            "sub": False,
            "readonly": [
                *map(checked_readonly, spec.readonly),
                *(checked_readonly(at, spec.binds[at]) for at in spec.binds),
            ],
            "mounts": {checked_mount(at): str(source.resolve()) for at, source in spec.mounts.items()},
            "require": list(spec.require),
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
            "loopback": 0,
        }


def _handed_over(job: Job) -> bytes:
    return json.dumps({name: value for name, value in job.items() if name not in KERNELS_OWN}).encode()


def _sealed(title: str, content: bytes) -> int:
    """An anonymous file with this content that nobody can change any more."""
    descriptor = os.memfd_create(title, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
