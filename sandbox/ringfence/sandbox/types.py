"""The sandbox protocol: what a backend is asked for and what it reports. The same for every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class SandboxError(Exception):
    """The backend can't do what was asked. The message names the missing wall and the fix; nothing was started."""


class SandboxLostError(SandboxError):
    """The sandbox died while it was made; nothing runs. Nothing speaks against making it again."""


class ExitReason(StrEnum):
    """Why a process ended."""

    EXIT = "exit"
    SIGNAL = "signal"
    MEMORY = "memory"
    TIMEOUT = "timeout"
    DISK = "disk"
    KILLED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended. `code` is the exit status, or minus the signal."""

    reason: ExitReason
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one sandbox. 0 means the backend's default, never unlimited."""

    memory_bytes: int = 256 << 20
    pids: int = 64
    cpu: float = 1.0
    disk_bytes: int = 1 << 30
    timeout_s: float = 7200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """An agent's own program.

    Attributes:
        agent: agent id; labels everything the backend makes, so that a later kernel finds it.
        argv: program and arguments, looked up in the image, then on the sandbox's PATH.
        env: the whole environment inside, nothing else.
        image: directory on this host seen read-only as `/program`, the working directory.
        socket_dir: directory on this host seen as `/run/ringfence`.
        readonly: host directories seen at the same path, read-only.
        uid: host uid to run as when the kernel is root; None: the kernel's own (in a user namespace).
        stdin: bytes for standard input.
        stdout_fd: write end for standard output; the backend duplicates it and the caller closes its own.
        stderr_fd: the same for standard error.
    """

    agent: str
    argv: Sequence[str]
    env: Mapping[str, str]
    image: Path
    socket_dir: Path
    readonly: Sequence[Path] = ()
    uid: int | None = None
    limits: Limits = field(default_factory=Limits)
    stdin: bytes = b""
    stdout_fd: int = 1
    stderr_fd: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """One command of exec.run, on an overlay of the live workspace.

    Attributes:
        lower: the live workspace, only read.
        scratch: empty directory of this call on the file system of `lower`; the upper layer and the output files
            are left in it for the caller, who removes it.
        cwd: directory inside, below `/workspace`.
        masks: absolute paths below `/workspace` that must not be readable or changeable inside.
    """

    agent: str
    argv: Sequence[str]
    env: Mapping[str, str]
    lower: Path
    scratch: Path
    cwd: str = "/workspace"
    masks: Sequence[str] = ()
    readonly: Sequence[Path] = ()
    uid: int | None = None
    limits: Limits = field(default_factory=Limits)
    stdin: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command left: its exit, where its output is, and the upper layer.

    `stdout` and `stderr` are files on this host with everything it wrote, bounded by the disk limit: of a longer stream
    they hold the beginning and the end. `stdout_bytes` and `stderr_bytes` count all of it; None: the file's size.
    """

    exit: Exit
    upper: Path
    stdout: Path
    stderr: Path
    stdout_bytes: int | None = None
    stderr_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """One wall of a backend on this host: whether it stands, and how to get it where it does not."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    required: bool = True


class Program(Protocol):
    """A running agent program."""

    @property
    def pid(self) -> int:
        """Pid of the sandbox's first process as this host sees it."""
        ...

    async def wait(self) -> Exit:
        """Wait for the end of the whole tree. May be awaited by several tasks."""
        ...

    async def kill(self) -> None:
        """End the whole tree, frozen or not; returns when nothing of it is left."""
        ...

    async def pause(self) -> None:
        """Freeze every process of the tree."""
        ...

    async def resume(self) -> None:
        """Thaw it."""
        ...


class Sandbox(Protocol):
    """A backend."""

    @property
    def name(self) -> str:
        """`native`, `docker` or `kubernetes`."""
        ...

    def walls(self) -> Sequence[Wall]:
        """Probe this host. Nothing is assumed: each wall is tried."""
        ...

    async def start(self, spec: ProgramSpec) -> Program:
        """Start an agent's program.

        Raises:
            SandboxError: a required wall is missing or the program can't be found; nothing runs.
        """
        ...

    async def run_command(self, spec: CommandSpec) -> CommandResult:
        """Run one command to its end. Cancelling the await ends the command's whole tree first.

        Raises:
            SandboxError: as for `start`.
        """
        ...

    async def sweep(self) -> Sequence[str]:
        """End what an earlier kernel of this data directory left; returns the agents whose leftovers were ended."""
        ...
