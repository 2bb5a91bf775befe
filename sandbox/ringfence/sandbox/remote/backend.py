"""`RemoteSandbox`: the Sandbox protocol on a sandbox host elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from ringfence.sandbox.remote import pumps, wire
from ringfence.sandbox.remote.calls import Calls, ForgottenError, Values, exit_of
from ringfence.sandbox.remote.channels import ChannelLostError
from ringfence.sandbox.remote.link import PLACE, Link, RemoteSettings, ask, connect, settings_used
from ringfence.sandbox.remote.program import RemoteProgram
from ringfence.sandbox.remote.relays import bound
from ringfence.sandbox.remote.sending import Sender
from ringfence.sandbox.remote.session import SessionLostError
from ringfence.sandbox.remote.upper import STDERR_NAME, STDOUT_NAME, UPPER_NAME, Receiver
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
from ringfence.sandbox.types import (
    CommandResult,
    CommandSpec,
    Exit,
    Limits,
    ProgramSpec,
    SandboxError,
    SandboxLostError,
    Wall,
)

log = logging.getLogger(__name__)

_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin")
_TRIES = 3
_SLACK_BYTES = 64 << 20
_T = TypeVar("_T")


class RemoteSandbox:
    """Sandboxes on another machine. Nothing is shared with it but one connection over mutual TLS.

    Program image, workspace and directories to show are sent, each content once; the syscall socket is relayed; output and
    what a command changed come back. What policy hides is never sent. Sandboxes run under users of that host's choice.

    Args:
        data_dir: the kernel's data directory; what is kept of this kernel lies in `remote` below it.
        settings: where the host is.
    """

    def __init__(self, data_dir: Path, settings: RemoteSettings) -> None:
        self._settings = settings
        self._link = Link(settings, data_dir / PLACE)
        self._sender: tuple[Calls, Sender] | None = None

    @property
    def name(self) -> str:
        """`remote`."""
        return "remote"

    @property
    def direct(self) -> str:
        """Why a program can't work on an overlay of its own."""
        return "a program's files are on another host; use `backend: native`"

    def walls(self) -> Sequence[Wall]:
        """Let the host try every wall. Blocks; not to be called where an event loop runs.

        Raises:
            SandboxError: the host can't be asked.
        """
        return asyncio.run(self._walls())

    async def _walls(self) -> Sequence[Wall]:
        reader, writer, host = await connect(self._settings)
        try:
            version = getattr(writer.get_extra_info("ssl_object"), "version", lambda: "TLS")()
            peer = f"the sandbox host `{self._settings.address}`"
            reply = await ask(reader, writer, wire.Probe(version=wire.VERSION), peer)
        finally:
            writer.transport.abort()
        if not isinstance(reply, wire.Walls):
            raise SandboxError(f"{peer} gave an answer to another question; look at its version")
        try:
            found = [Wall(**wall) for wall in reply.walls]  # pyright: ignore[reportArgumentType] - checked below
        except TypeError as error:
            raise SandboxError(
                f"{peer} names walls that this kernel does not know; use one version"
            ) from error
        own = Wall(name="mutual tls", ok=True, detail=f"{version} with `{host}` at {self._settings.address}")
        return [own, *found]

    async def start(self, spec: ProgramSpec) -> RemoteProgram:
        """Start an agent's program.

        Raises:
            SandboxError: a wall is missing there, the program can't be found, or a certificate is at fault; nothing runs.
            SandboxLostError: the host can't be reached.
        """
        if spec.overlay is not None:
            raise SandboxError(f"the sandbox `{self.name}` has no overlay for a program: {self.direct}")
        _check(spec)
        checked_directory(spec.image, "program image")
        checked_directory(spec.socket_dir, "socket directory")
        if spec.loopback is None:
            return await self._insist(spec.agent, lambda calls, sender: self._start(calls, sender, spec))
        listener, door = _door(spec.socket_dir)
        with listener:
            try:
                start = partial(self._start, spec=spec, door=door)
                program = await self._insist(spec.agent, start)
            except BaseException:
                os.close(door)
                raise
            # INVARIANT: it listens already; what the host carried from there meanwhile waits in it.
            with socket.socket(fileno=os.dup(spec.loopback.hand_fd)) as hand:
                socket.send_fds(hand, [b"\0"], [listener.fileno()])
        return program

    async def run_command(self, spec: CommandSpec) -> CommandResult:
        """Run one command to its end. Cancelling the await ends the command's whole tree first.

        Raises:
            SandboxError: as for `start`.
        """
        _check(spec)
        checked_directory(spec.lower, "workspace")
        checked_directory(spec.scratch, "scratch directory")
        if any(spec.scratch.iterdir()):
            raise SandboxError(
                f"the sandbox's wall `scratch directory` can't be raised: `{spec.scratch}` is in use; it must be empty"
            )
        checked_inside(spec.cwd, "working directory")
        return await self._insist(spec.agent, lambda calls, sender: self._command(calls, sender, spec))

    async def sweep(self) -> Sequence[str]:
        """End what an earlier kernel of this data directory left; returns the agents whose leftovers were ended.

        A host that can't be reached ends them by itself when their lease runs out, and before it serves this kernel.
        """
        try:
            await self._link.calls(patience_s=0)
        except SandboxError as error:
            log.warning("sandboxes of an earlier kernel could not be asked for: %s", error)
            return []
        ended, self._link.ended_before = sorted(self._link.ended_before), set()
        return ended

    async def close(self) -> None:
        """End the session, and with it every sandbox."""
        await self._link.close()

    # -- one attempt ----------------------------------------------------------------------------------------------

    async def _insist(self, agent: str, attempt: Callable[[Calls, Sender], Awaitable[_T]]) -> _T:
        """Try again where the host has merely forgotten a tree that it was sent."""
        for left in reversed(range(_TRIES)):
            calls = await self._link.calls()
            if self._sender is None or self._sender[0] is not calls:
                self._sender = (calls, Sender(calls))
            sender = self._sender[1]
            try:
                return await attempt(calls, sender)
            except ForgottenError:
                if not left:
                    raise
                sender.forget(agent)
            except (wire.WireError, ChannelLostError, SessionLostError) as error:
                raise SandboxLostError(
                    f"the sandbox host `{self._settings.address}`: {error}; try again"
                ) from error
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    async def _start(
        self, calls: Calls, sender: Sender, spec: ProgramSpec, door: int | None = None
    ) -> RemoteProgram:
        shown = await self._shown(calls, sender, spec)
        number = calls.number()
        make = calls.channels.make
        stdin, out, err = make(sends=True), make(receives=True), make(receives=True)
        place = calls.expect(number, spec.socket_dir, door)
        try:
            async with sender.use(spec.agent, spec.image) as image:
                values = await calls.order(
                    wire.StartProgram(
                        agent=spec.agent,
                        argv=[os.fsencode(word) for word in spec.argv],
                        env={os.fsencode(name): os.fsencode(value) for name, value in spec.env.items()},
                        image=image,
                        binds=shown.binds,
                        mounts=shown.mounts,
                        provided=shown.provided,
                        require=list(spec.require),
                        limits=_limited(spec.limits),
                        stdin=stdin.number,
                        stdin_bytes=len(spec.stdin),
                        stdout=out.number,
                        stderr=err.number,
                        doors=0 if spec.loopback is None else spec.loopback.port,
                    ),
                    number,
                    lambda: pumps.send_bytes(stdin, spec.stdin),
                )
            self._check_doors(spec, values)
        except BaseException:
            calls.forget(number)
            for channel in (stdin, out, err):
                await asyncio.shield(asyncio.create_task(channel.reset()))
            with contextlib.suppress(SandboxError):
                await asyncio.shield(asyncio.create_task(_end(calls, number)))
            raise
        output = [
            asyncio.create_task(pumps.to_descriptor(channel, os.dup(fd)))
            for channel, fd in ((out, spec.stdout_fd), (err, spec.stderr_fd))
        ]
        if door is not None:
            place.ended.add_done_callback(lambda _: os.close(door))
        identity = {"host": self._link.host, "id": str(values.get("identity", ""))}
        forms = values.get("forms")
        return RemoteProgram(calls, number, place, identity, forms if isinstance(forms, dict) else {}, output)

    def _check_doors(self, spec: ProgramSpec, values: Values) -> None:
        """Refuse a host of an earlier version, which starts the program without what it does not know."""
        if spec.loopback is not None and values.get("doors") != spec.loopback.port:
            raise SandboxError(
                f"the sandbox host `{self._settings.address}` can't lend doors; give it this version of Ringfence, "
                "or leave `sandbox.doors` out"
            )

    async def _command(self, calls: Calls, sender: Sender, spec: CommandSpec) -> CommandResult:
        shown = await self._shown(calls, sender, spec)
        masks = [checked_inside(mask, "mask") for mask in spec.masks]
        hidden = frozenset(os.fsencode(mask.removeprefix("/workspace/")) for mask in masks)
        make = calls.channels.make
        stdin, left = make(sends=True), make(receives=True)
        most = 2 * checked_limits(spec.limits).disk_bytes + _SLACK_BYTES
        receiver = Receiver(spec.scratch, spec.uid, most)
        async with sender.use(spec.agent, spec.lower, hidden) as lower:
            body = wire.RunCommand(
                agent=spec.agent,
                argv=[os.fsencode(word) for word in spec.argv],
                env={os.fsencode(name): os.fsencode(value) for name, value in spec.env.items()},
                lower=lower,
                binds=shown.binds,
                mounts=shown.mounts,
                provided=shown.provided,
                require=list(spec.require),
                cwd=os.fsencode(spec.cwd),
                limits=_limited(spec.limits),
                stdin=stdin.number,
                stdin_bytes=len(spec.stdin),
                upper=left.number,
            )
            taking = asyncio.create_task(receiver.run(left))
            try:
                values = await calls.order(body, feed=lambda: pumps.send_bytes(stdin, spec.stdin))
                await taking
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise SandboxError(
                    f"what the command left can't be kept in `{spec.scratch}`: {reason}"
                ) from error
            finally:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
                for channel in (stdin, left):
                    await asyncio.shield(asyncio.create_task(channel.reset()))
        return _result(spec, exit_of(values), values)

    async def _shown(self, calls: Calls, sender: Sender, spec: ProgramSpec | CommandSpec) -> _Shown:
        found = _Shown()
        wanted: dict[str, Path] = {str(at): source for at, source in spec.binds.items()}
        for path in map(checked_readonly, spec.readonly):
            if any(path == top or path.startswith(f"{top}/") for top in (*_SYSTEM, *calls.provides)):
                found.provided.append(os.fsencode(path))
            else:
                wanted[path] = Path(path)
        for at, source in wanted.items():
            found.binds[os.fsencode(at)] = await sender.shared(source)
        for at, source in spec.mounts.items():
            found.mounts[os.fsencode(checked_mount(at))] = await sender.shared(source)
        return found


def used(data_dir: Path) -> RemoteSandbox | None:
    """The backend that earlier kernels of a data directory used; None: they never did.

    Raises:
        SandboxError: what is kept of it can't be read.
    """
    settings = settings_used(data_dir)
    return None if settings is None else RemoteSandbox(data_dir, settings)


@dataclass(slots=True)
class _Shown:
    """Directories that the host has itself, and trees by the path inside that they are seen at."""

    provided: list[bytes] = field(default_factory=list[bytes])
    binds: dict[bytes, str] = field(default_factory=dict[bytes, str])
    mounts: dict[bytes, str] = field(default_factory=dict[bytes, str])


def _door(directory: Path) -> tuple[socket.socket, int]:
    """A listening socket that no path leads to, and a descriptor that it can be connected to by.

    Raises:
        SandboxError: it can't be made.
    """
    name = f"doors-{secrets.token_hex(8)}"
    try:
        listener = bound(directory, name)
        try:
            handle = os.open(directory / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except BaseException:
            listener.close()
            raise
        finally:
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise SandboxError(
            f"a socket for its doors can't be made in `{directory}`: {error.strerror}"
        ) from error
    return listener, handle


async def _end(calls: Calls, number: int) -> None:
    await calls.order(wire.Act(program=number, what="kill"))


def _result(spec: CommandSpec, ended: Exit, values: Values) -> CommandResult:
    sizes = [values.get(name) for name in ("stdout_bytes", "stderr_bytes")]
    stdout_bytes, stderr_bytes = (size if isinstance(size, int) else None for size in sizes)
    return CommandResult(
        exit=ended,
        upper=spec.scratch / UPPER_NAME,
        stdout=spec.scratch / STDOUT_NAME,
        stderr=spec.scratch / STDERR_NAME,
        stdout_bytes=stdout_bytes,
        stderr_bytes=stderr_bytes,
    )


def _check(spec: ProgramSpec | CommandSpec) -> None:
    checked_uid(spec.uid)
    checked_limits(spec.limits)
    checked_words(spec.argv)
    checked_environment(spec.env)
    for path in spec.readonly:
        checked_readonly(path)


def _limited(limits: Limits) -> wire.Limited:
    return wire.Limited(
        memory_bytes=limits.memory_bytes,
        pids=limits.pids,
        cpu=limits.cpu,
        disk_bytes=limits.disk_bytes,
        timeout_s=limits.timeout_s,
    )
