"""The sandbox protocol: what a backend is asked for and what it reports. The same for every backend.

Every path and descriptor here is one of the kernel's host. A backend binds, copies or carries them to where its sandboxes
run: nothing may assume that these share a file system, a pid namespace, user ids or a clock with the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class SandboxError(Exception):
    """The backend can't do what was asked. The message names the missing wall and the fix; nothing was started."""


class SandboxLostError(SandboxError):
    """The sandbox died, or its host can't be reached, while it was made; nothing runs. It may be made again."""


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
class Loopback:
    """Doors on the loopback of a program's own network namespace, the only device there.

    Attributes:
        port: of 127.0.0.1 that listens inside. The program can make TCP sockets and no others besides unix ones.
        hand_fd: a unix socket that gets the listening one, as SCM_RIGHTS with a byte, before the program runs: whoever has its
            other end accepts what the program connects, with nothing in between. The backend duplicates it.
    """

    port: int
    hand_fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """An agent's own program.

    Attributes:
        agent: agent id; labels everything the backend makes, so that a later kernel finds it.
        argv: program and arguments, looked up in the image, then on the sandbox's PATH.
        env: the whole environment inside, nothing else.
        image: directory whose content is seen read-only as `/program`, the working directory.
        socket_dir: directory that holds `syscall.sock`, which listens already. The program reaches it as
            `/run/ringfence/syscall.sock`, by a bind or through a relay.
        overlay: empty directory on the file system of `image`: the program works on a writable overlay of the image, seen as
            `/workspace`, its working directory, and there is no `/program`. The upper layer is left in it as a command's is.
            None: the image is all, and nothing is writable. For a backend whose `direct` is empty.
        readonly: directories seen at the same path, read-only.
        binds: directories seen read-only at another path, by that path; for a backend that runs another one's sandboxes.
        uid: uid to run as when the kernel is root; None: the kernel's own (in a user namespace). A backend whose
            sandboxes run under user ids of another host chooses one there and leaves this one aside.
        stdin: bytes for standard input.
        stdout_fd: write end for standard output; the backend duplicates it and the caller closes its own. A program that
            writes faster than it is read waits.
        stderr_fd: the same for standard error.
        loopback: None: no network at all, and no socket but unix ones.
    """

    agent: str
    argv: Sequence[str]
    env: Mapping[str, str]
    image: Path
    socket_dir: Path
    overlay: Path | None = None
    readonly: Sequence[Path] = ()
    mounts: Mapping[Path, Path] = field(default_factory=dict[Path, Path])
    require: Sequence[str] = ()
    binds: Mapping[Path, Path] = field(default_factory=dict[Path, Path])
    uid: int | None = None
    limits: Limits = field(default_factory=Limits)
    stdin: bytes = b""
    stdout_fd: int = 1
    stderr_fd: int = 2
    loopback: Loopback | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """One command of exec.run, on an overlay of the live workspace.

    Attributes:
        lower: the live workspace, only read. Nothing changes it while the command runs.
        scratch: empty directory of this call on the file system of `lower`; the upper layer, in the format of an overlay
            as `ringfence.sandbox.overlay_read` reads it, and the output files are left in it for the caller, who removes it.
        cwd: directory inside, below `/workspace`.
        masks: absolute paths below `/workspace` that must not be readable or changeable inside.
        mounts, require: as for programs.
    """

    agent: str
    argv: Sequence[str]
    env: Mapping[str, str]
    lower: Path
    scratch: Path
    cwd: str = "/workspace"
    masks: Sequence[str] = ()
    readonly: Sequence[Path] = ()
    mounts: Mapping[Path, Path] = field(default_factory=dict[Path, Path])
    require: Sequence[str] = ()
    binds: Mapping[Path, Path] = field(default_factory=dict[Path, Path])
    uid: int | None = None
    limits: Limits = field(default_factory=Limits)
    stdin: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command left: its exit, where its output is, and the upper layer.

    `stdout` and `stderr` are files on the kernel's host with everything it wrote, bounded by the disk limit: of a longer stream
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
    """One wall of a backend where its sandboxes run: whether it stands, and how to get it where it does not.

    Attributes:
        fix: what to do for it, or for a stronger form of it.
        required: no sandbox starts without it, whatever a manifest says.
        form: in which of several accepted forms it stands, such as `cgroup-v2`; empty: there is only one.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""
    required: bool = True
    form: str = ""


def meets(form: str, demanded: str) -> bool:
    """Whether a wall in `form` is what was demanded: `cgroup` is met by each of its versions."""
    return demanded in ("", form) or form.startswith(f"{demanded}-")


class Program(Protocol):
    """A running agent program."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What a person finds the sandbox by, such as `{"pid": 12}` or `{"container": "…"}`; empty before it runs.

        `pid` is there only where it is one of the kernel's host. For people: a kernel never acts upon it.
        """
        ...

    @property
    def forms(self) -> Mapping[str, str]:
        """In which form each wall that has several stands around this program: what the audit keeps."""
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
        """`native`, `docker` or `remote`."""
        ...

    @property
    def direct(self) -> str:
        """Why its programs can't work on an overlay of their own (`ProgramSpec.overlay`); empty: they can."""
        ...

    def walls(self) -> Sequence[Wall]:
        """Probe where the sandboxes run. Nothing is assumed: each wall is tried. Blocks: call it in a thread."""
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

    async def close(self) -> None:
        """Give back what the backend itself holds, when the last of its sandboxes has ended."""
        ...
