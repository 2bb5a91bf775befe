"""Where the sandboxes of a measurement live: a backend, what a program is given, and doors of a real kernel to call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence.kernel.config import AGENT_UID_BASE
from ringfence.kernel.environment import (
    PROGRAM_ENVIRONMENT,
    command_environment,
    interpreter_directories,
    warm_environment,
)
from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.types import CommandSpec, Limits, Program, ProgramSpec, SandboxError

from bench.host import Bench, BenchError

UID = AGENT_UID_BASE + 90_000
INSIDE = "/run/ringfence"
FILES = {
    "first.py": "import sys\nprint('warm' if 'ringfence.agent.runtime' in sys.modules else 'cold', flush=True)\n",
    "library.py": "import ringfence.agent.runtime, ringfence.v1.syscalls_pb2\nprint('ready', flush=True)\n",
    "answered.py": (
        "from ringfence import agent\n"
        "with agent.boot() as rf:\n"
        "    rf.fs.read_bytes('bench.txt')\n"
        "    print('answered', flush=True)\n"
    ),
    "connected.py": (
        "import threading\n"
        "from ringfence import agent\n"
        "with agent.boot() as rf:\n"
        "    rf.fs.read_bytes('bench.txt')\n"
        "    print('answered', flush=True)\n"
        "    threading.Event().wait()\n"
    ),
    "idle.py": "import signal\nprint('ready', flush=True)\nsignal.pause()\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Of one agent of a real kernel that has no program yet."""

    directory: Path
    token: str

    def environment(self, directory: str) -> dict[str, str]:
        """For a program that sees the socket's directory at `directory`."""
        return {"RINGFENCE_SOCKET": f"{directory}/syscall.sock", "RINGFENCE_TOKEN": self.token}


@dataclass(slots=True, kw_only=True)
class Place:
    """Everything that is measured in.

    Attributes:
        image: directory with the programs of `FILES`.
        doors: each is used once: a second program of an agent would be answered from its journal.
        environment: of agents' programs.
        readonly: what an interpreter needs to be shown.
    """

    sandbox: NativeSandbox
    home: Path
    image: Path
    doors: Iterator[Door]
    environment: Mapping[str, str]
    readonly: Sequence[Path]
    closed: Path = field(init=False)

    def __post_init__(self) -> None:
        self.closed = self.home / "no-door"
        self.closed.mkdir(mode=0o755)

    @property
    def uid(self) -> int | None:
        """Of sandboxed programs."""
        return UID if os.geteuid() == 0 else None

    async def start(self, argv: Sequence[str], door: Door | None = None, *, number: int = 0) -> Started:
        """Start a program in the native sandbox, under the uid of the agent with this number.

        Raises:
            BenchError: it can't be had here.
        """
        reading, writing = os.pipe()
        more = door.environment(INSIDE) if door is not None else {}
        spec = ProgramSpec(
            agent="bench",
            argv=argv,
            env={**self.environment, **more},
            image=self.image,
            socket_dir=self.closed if door is None else door.directory,
            readonly=self.readonly,
            uid=None if self.uid is None else self.uid + number,
            stdout_fd=writing,
            stderr_fd=writing,
        )
        try:
            return Started(await self.sandbox.start(spec), reading)
        except SandboxError as error:
            os.close(reading)
            raise BenchError(f"the sandbox can't be had here: {error}") from error
        finally:
            os.close(writing)

    async def command(self, argv: Sequence[str]) -> None:
        """Run a command on an overlay of the image."""
        scratch = self.home / "scratch"
        scratch.mkdir(mode=0o700)
        spec = CommandSpec(
            agent="bench",
            argv=argv,
            env=self.environment,
            lower=self.image,
            scratch=scratch,
            uid=self.uid,
            limits=Limits(),
        )
        await self.sandbox.run_command(spec)
        await asyncio.to_thread(shutil.rmtree, scratch)


class Started:
    """A program in its sandbox, and its output."""

    def __init__(self, program: Program, output: int) -> None:
        self.program = program
        self._output = output

    async def line(self) -> str:
        """What it says first."""
        return (await asyncio.to_thread(os.read, self._output, 4096)).decode(errors="replace")

    async def kill(self) -> None:
        """End it."""
        await self.program.kill()
        self.close()

    def close(self) -> None:
        """Read no more of it."""
        os.close(self._output)


def doors(targets: Sequence[Mapping[str, Any]]) -> Iterator[Door]:
    """Those of `bench.serve`, open to whichever user a sandbox has."""
    for target in targets:
        socket = Path(target["socket"])
        with contextlib.suppress(PermissionError):
            socket.chmod(0o777)
            socket.parent.chmod(0o755)
        yield Door(directory=socket.parent, token=target["token"])
    raise BenchError("there are not enough doors; start the kernel with more agents")


@contextlib.asynccontextmanager
async def place(bench: Bench) -> AsyncGenerator[Place]:
    """One backend for the whole measurement, as a kernel has one; it has no doors yet."""
    home = bench.directory("sandbox")
    image = home / "image"
    image.mkdir(mode=0o755)
    for name, text in FILES.items():
        (image / name).write_text(text)
        (image / name).chmod(0o644)
    (home / "k").mkdir(mode=0o711)
    names = home / "names"
    names.mkdir(mode=0o755)
    sandbox = NativeSandbox(home / "k", warm_environment(names))
    found = Place(
        sandbox=sandbox,
        home=home,
        image=image,
        doors=iter(()),
        environment={**PROGRAM_ENVIRONMENT, **command_environment(names)},
        readonly=[*interpreter_directories(), names],
    )
    try:
        yield found
    finally:
        await sandbox.close()
