"""Calls on a real file tree, each in a process of its own that may be killed at any change it makes; for the tree machine.

As a script it is the forge: a process with one thread that forks one child per request, so that a call costs a fork and not an
interpreter. Commands run on a real overlay, in a mount namespace of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import os
import pickle
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ringfence.sandbox import openat
from ringfence.sandbox.native import linux
from ringfence.sandbox.types import CommandResult, CommandSpec, Exit, ExitReason, Limits
from ringfence.syscalls import errors, exec_run
from ringfence.syscalls.base import Effect, Plan, Rerun
from support import walker
from support.fs_world import ALLOW_ALL, Call, Env, World
from support.mutations import mutate

AGENT_UID = 247_000
CHANGES = frozenset(
    f"os.{name}"
    for name in (
        [
            "rename",
            "remove",
            "rmdir",
            "mkdir",
            "link",
            "symlink",
            "chmod",
            "chown",
            "utime",
            "setxattr",
            "removexattr",
            "truncate",
        ]
    )
)
"""Audit events before each of which a process may be killed; opening a file for writing is one too."""


# -- what runs a command ------------------------------------------------------------------------------------------


class Overlaid:
    """Runs a command's mutations on a real overlay of the workspace, and nothing else of a sandbox."""

    async def run_command(self, spec: CommandSpec) -> CommandResult:
        scratch = spec.scratch
        for name in ("upper", "work", "merged"):
            (scratch / name).mkdir(mode=0o700)
        facts = spec.lower.stat()
        upper = scratch / "upper"
        os.chown(upper, facts.st_uid, facts.st_gid)
        upper.chmod(facts.st_mode & 0o7777)
        (scratch / "format").write_text("trusted" if os.geteuid() == 0 else "user")
        for name in ("stdout", "stderr"):
            (scratch / name).touch()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                self._inside(spec)
                status = 0
            except BaseException:  # noqa: BLE001 - a child that says what went wrong
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        exit_ = Exit(reason=ExitReason.EXIT, code=0)
        return CommandResult(exit=exit_, upper=upper, stdout=scratch / "stdout", stderr=scratch / "stderr")

    @staticmethod
    def _inside(spec: CommandSpec) -> None:
        enter_namespaces()
        root = os.geteuid() == 0 and (spec.scratch / "format").read_text() == "trusted"
        options = f"lowerdir={spec.lower},upperdir={spec.scratch}/upper,workdir={spec.scratch}/work,index=off"
        options += ",redirect_dir=off,metacopy=off" if root else ",userxattr"
        merged = spec.scratch / "merged"
        linux.mount("overlay", str(merged), "overlay", 0, options)
        mutate(merged, pickle.loads(spec.stdin))  # noqa: S301 - of our own making
        (spec.scratch.parents[1] / "merged").write_bytes(pickle.dumps(walker.look(merged)))


def enter_namespaces() -> None:
    """A mount namespace of one's own, as an ordinary user below a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    newuser = 0 if uid == 0 else 0x10000000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000 | newuser) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if newuser:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    linux.mount(None, "/", None, (1 << 18) | 16384)  # private, recursive


# -- a call in a process of its own -------------------------------------------------------------------------------


class TreeEnv(Env):
    """An environment for commands too."""

    readonly: Sequence[Path] = ()
    require: Sequence[str] = ()
    http: dict[str, Any] = {}  # noqa: RUF012 - empty
    sql: dict[str, Any] = {}  # noqa: RUF012 - empty
    llm: dict[str, Any] = {}  # noqa: RUF012 - empty
    objects: dict[str, Any] = {}  # noqa: RUF012 - empty
    mcp: dict[str, Any] = {}  # noqa: RUF012 - empty
    a2a: dict[str, Any] = {}  # noqa: RUF012 - empty
    mounts: dict[str, Any] = {}  # noqa: RUF012 - empty
    command_env: dict[str, str] = {}  # noqa: RUF012 - empty
    sandbox = Overlaid()
    limits = Limits()
    scratch_root: Path
    direct = None
    uid: int | None = None

    def masked(self) -> list[str]:
        return []


class TreeCall(Call):
    """A call whose journal is a file."""

    deadline_s = 60.0
    answer_max = None
    effect = Effect.WRITE

    @property
    def journal(self) -> Path:
        return self.env.scratch_root.parent / f"progress-{self.step}"

    @property
    def progress(self) -> bytes | None:
        return self.journal.read_bytes() if self.journal.exists() else None

    async def record(self, progress: bytes) -> None:
        self.journal.write_bytes(progress)

    def raise_effect(self, effect: Effect) -> None:
        self.effect = effect


class TreeWorld:
    """What a kernel that has just started knows: the disk."""

    def __init__(self, base: Path) -> None:
        self.base = base
        world = World(base, allow=(*ALLOW_ALL, 'exec.run: "*"'), uid=agent_uid())
        self.env = TreeEnv(world.env.workspace, world.env.snapshots, world.env.policy)
        self.env.scratch_root = base / "scratch"
        self.env.uid = agent_uid()
        self.env.workspace.sweep()

    async def call(self, action: str, step: int, arguments: dict[str, Any]) -> str:
        """Plan, decide and run; answers `ok`, or which refusal it was."""
        body, given = self._body(action, arguments)
        try:
            call = TreeCall(self.env, body.plan(given, self.env), step)
            await call.require(call.plan.questions)
            await body.run(call, given)
        except errors.OutcomeUnknown:
            raise
        except errors.SyscallError as error:
            return f"{type(error).__name__}: {error.message}"
        return "ok"

    async def recover(self, action: str, step: int, arguments: dict[str, Any]) -> str:
        """What the next kernel does about a call without an outcome: `rerun`, or `ok` when it is finished."""
        body, given = self._body(action, arguments)
        call = TreeCall(self.env, Plan(resource="", questions=()), step)
        done = await body.recover(call, given)
        if done is Rerun.RERUN:
            call.journal.unlink(missing_ok=True)
            return "rerun"
        return "ok"

    @staticmethod
    def _body(action: str, arguments: dict[str, Any]) -> tuple[Any, Any]:
        from importlib import import_module

        body = import_module(f"ringfence.syscalls.{action.replace('.', '_')}")
        if body is exec_run:
            arguments = {"argv": ["mutate"], "stdin": pickle.dumps(arguments["mutations"])}
        return body, body.Arguments(**arguments)

    async def rollback(self, points: list[str], own: str) -> str:
        """Put back what some points hold, behind a point of its own, as the kernel does; may be run again."""
        store, workspace = self.env.snapshots, self.env.workspace
        plan = store.plan_restore(workspace, points)
        if plan.conflicts:
            return f"conflicts: {dict(plan.reasons)}"
        if store.load(own) is None and plan.items:
            expect = {item.path: item.before.before for item in plan.items}
            store.capture(own, workspace, [item.path for item in plan.items], expect=expect, beneath=False)
        if plan.items:
            store.restore(workspace, plan.items)
        return "ok"


def agent_uid() -> int | None:
    return AGENT_UID if os.geteuid() == 0 else None


def _die_at(number: int) -> None:
    """End this process by SIGKILL right before its change of this number, wherever in the code that is."""
    left = number
    me = os.getpid()

    def count() -> None:
        nonlocal left
        left -= os.getpid() == me
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        ):
            count()

    sys.addaudithook(hook)
    rename = openat.rename_new

    def rename_new(*arguments: Any) -> None:  # by ctypes, which no event tells of
        count()
        rename(*arguments)

    openat.rename_new = rename_new


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One thing to do in a child: a method of `TreeWorld` with its arguments; `die_at` 0: it lives."""

    base: Path
    method: str
    arguments: tuple[Any, ...]
    die_at: int = 0


def _answer(request: Request) -> str:
    world = TreeWorld(request.base)
    if request.die_at:
        _die_at(request.die_at)
    return asyncio.run(getattr(world, request.method)(*request.arguments))


class Forge:
    """The process that makes the children; one for a module of tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def do(self, base: Path, method: str, *arguments: Any, die_at: int = 0) -> str:
        """What the child answered, or `killed`."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        body = pickle.dumps(Request(base=base, method=method, arguments=arguments, die_at=die_at))
        stdin.write(struct.pack("<I", len(body)) + body)
        stdin.flush()
        (size,) = struct.unpack("<I", stdout.read(4))
        answer = stdout.read(size).decode()
        if answer.startswith("Traceback"):
            raise AssertionError(answer)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _serve() -> None:
    import importlib

    for name in ("fs_write", "fs_append", "fs_move", "fs_delete", "exec_run"):
        importlib.import_module(f"ringfence.syscalls.{name}")
    # Processes die here, the machine lives: what it would lose is not looked at, and waiting for its disk takes most of the time.
    os.fsync = openat.sync_filesystem = lambda _fd: None
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while size := stdin.read(4):
        request = pickle.loads(stdin.read(struct.unpack("<I", size)[0]))  # noqa: S301 - of our own making
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(out)
                said = _answer(request)
            except BaseException:  # noqa: BLE001 - a child that says what went wrong
                said = traceback.format_exc()
            os.write(into, said.encode("utf-8", "backslashreplace")[:60_000])
            os._exit(0)
        os.close(into)
        with open(out, "rb") as pipe:  # noqa: PTH123 - a descriptor
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            said = b"killed"
        stdout.write(struct.pack("<I", len(said)) + said)
        stdout.flush()


if __name__ == "__main__":
    # The classes that travel are those of the module, not of this script.
    from support import tree_world

    tree_world._serve()
