"""One session of a kernel at a host: takes its orders, and ends everything when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from ringfence.sandbox.overlay_apply import discard
from ringfence.sandbox.remote import content, orders, pumps, trees, upper, wire
from ringfence.sandbox.remote.channels import Bytes, Channel, ChannelLostError, Channels
from ringfence.sandbox.remote.lodging import Lodging
from ringfence.sandbox.remote.mirror import Draft, Mirror
from ringfence.sandbox.remote.relays import Relay, lend
from ringfence.sandbox.remote.session import Session, SessionLostError
from ringfence.sandbox.types import (
    CommandSpec,
    ExitReason,
    Loopback,
    Program,
    ProgramSpec,
    SandboxError,
    SandboxLostError,
)

log = logging.getLogger(__name__)

ORDERS_MAX = 2048
Values = Mapping[str, str | int | list[str] | dict[str, str]]


class ForgottenError(SandboxLostError):
    """A tree is not there any more; the kernel offers it again."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Guest:
    """A program of the kernel's."""

    agent: str
    program: Program
    relay: Relay
    seen: list[Mirror]
    pumps: list[asyncio.Task[None]]
    watcher: asyncio.Task[None] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, kw_only=True, eq=False)
class Stay:
    """One session.

    Attributes:
        lodging: of its kernel.
        lease_s: how long it outlives its connection.
        name: for the kernel to go on with it.
        swept: agents whose programs were ended because the session did.
    """

    lodging: Lodging
    lease_s: float
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    swept: list[str] = field(default_factory=list[str])
    session: Session = field(init=False)
    channels: Channels = field(init=False)
    _guests: dict[int, _Guest] = field(default_factory=dict[int, _Guest])
    _orders: dict[int, asyncio.Task[Values]] = field(default_factory=dict[int, "asyncio.Task[Values]"])
    _answering: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])
    _lease: asyncio.TimerHandle | None = None
    _expiry: asyncio.Task[None] | None = None
    _connection: tuple[asyncio.StreamWriter, asyncio.Event] | None = None

    def __post_init__(self) -> None:
        """Make what follows from the other parts."""
        self.session = Session(self._handle)
        self.channels = Channels(self.session, first=2)

    # -- connections ----------------------------------------------------------------------------------------------

    def attach(self, writer: asyncio.StreamWriter) -> None:
        """A connection is about to be used: the lease stands still."""
        self._connection = (writer, asyncio.Event())
        if self._lease is not None:
            self._lease.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: int) -> None:
        """Use the connection of `attach` until it ends; then the lease runs."""
        assert self._connection is not None  # noqa: S101 - attached
        gone = self._connection[1]
        try:
            why = await self.session.run(reader, writer, received_there=received, silence_s=self.lease_s / 2)
        finally:
            self._connection = None
            gone.set()
        log.info("a connection of kernel `%s` ended: %s", self.lodging.kernel, why)
        if self.session.lost is not None:
            await self._end_late(why)
        else:
            self._lease = asyncio.get_running_loop().call_later(self.lease_s, self._expire)

    async def cut(self) -> None:
        """End the connection in use, so that another can take its place."""
        if self._connection is not None:
            writer, gone = self._connection
            writer.transport.abort()
            await gone.wait()

    def _expire(self) -> None:
        if self._connection is None and self.session.lost is None:
            log.warning("kernel `%s` was not heard of for %g s", self.lodging.kernel, self.lease_s)
            self._expiry = asyncio.create_task(self._end_late("its lease ran out"))

    async def _end_late(self, why: str) -> None:
        """End it where nobody waits for that."""
        try:
            await self.end(why)
        except SandboxError as error:
            log.error("%s; the next session tries again", error)  # noqa: TRY400 - the line says all

    async def end(self, why: str) -> None:
        """End every sandbox of the session; returns when nothing of it is left. May be called again.

        Raises:
            SandboxError: something can't be ended.
        """
        self.session.lose(why)
        if self._lease is not None:
            self._lease.cancel()
        self.channels.drop_all()
        for task in list(self._orders.values()):
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await self._end_guests()

    async def _end_guests(self) -> None:
        guests = list(self._guests.values())
        self.swept = sorted({*self.swept, *(guest.agent for guest in guests)})
        kills = await asyncio.gather(*(guest.program.kill() for guest in guests), return_exceptions=True)
        for problem in kills:
            # INVARIANT: what can't be ended is never taken for ended; no other session begins before it is.
            if isinstance(problem, BaseException):
                raise SandboxError(f"a sandbox of an earlier session can't be ended: {problem}") from problem
        watchers = [guest.watcher for guest in guests if guest.watcher is not None]
        await asyncio.gather(*watchers, return_exceptions=True)

    # -- messages -------------------------------------------------------------------------------------------------

    def _handle(self, message: wire.Counted) -> None:
        match message:
            case wire.Data() | wire.Credit() | wire.End() | wire.Reset():
                self.channels.take(message)
            case wire.Order(call=call, body=body):
                if call in self._orders or call in self._guests or len(self._orders) >= ORDERS_MAX:
                    raise wire.WireError("too many orders at once, or one number for two")
                # Channels are there before the next message, which may be for one of them.
                order = asyncio.create_task(self._work(call, body))
                self._orders[call] = order
                answering = asyncio.create_task(self._answer(call, order))
                self._answering.add(answering)
                answering.add_done_callback(self._answering.discard)
            case wire.Cancel(call=call):
                if (task := self._orders.get(call)) is not None:
                    task.cancel()
            case _:
                raise wire.WireError("a kernel does not say this")

    def _work(self, call: int, body: wire.Body) -> Coroutine[Any, Any, Values]:
        make = self.channels.make
        match body:
            case wire.Offer():
                listing = make(number=body.listing, receives=True)
                needs = make(number=body.needs, sends=True)
                return self._offer(body, listing, needs, make(number=body.content, receives=True))
            case wire.StartProgram():
                stdin = make(number=body.stdin, receives=True)
                out = [make(number=number, sends=True) for number in (body.stdout, body.stderr)]
                return self._start(call, body, stdin, out)
            case wire.RunCommand():
                stdin = make(number=body.stdin, receives=True)
                return self._command(call, body, stdin, make(number=body.upper, sends=True))
            case wire.Act():
                return self._act(body)
            case wire.Bye():
                return self._bye()

    async def _answer(self, call: int, order: asyncio.Task[Values]) -> None:
        """Say how an order went. This itself is never cancelled: an order may be before it has begun."""
        error, lost = "", False
        found: Values = {}
        try:
            found = await order
        except asyncio.CancelledError:
            error, lost = "the order was given up", True
        except ForgottenError as refusal:
            error, lost, found = str(refusal), True, {"forgotten": 1}
        except SandboxError as refusal:
            error, lost = str(refusal), isinstance(refusal, SandboxLostError)
        except (wire.WireError, ChannelLostError, content.ChangedError) as broken:
            error, lost = f"what was sent to the sandbox host can't be used: {broken}; try again", True
        except OSError as problem:
            reason = (problem.strerror or str(problem)).lower()
            error = f"the sandbox host can't do this: {reason} (`{problem.filename}`); look at its disk"
        except Exception:
            # INVARIANT: every order is answered, so that no kernel waits for ever; what it was is in the log.
            log.exception("an order failed")
            error = "the sandbox host failed; report this with its log"
        finally:
            self._orders.pop(call, None)
        with contextlib.suppress(SessionLostError):
            await self.session.send(wire.Answer(call=call, values=dict(found), error=error, lost=lost))

    # -- orders ---------------------------------------------------------------------------------------------------

    async def _offer(self, body: wire.Offer, listing: Channel, needs: Channel, files: Channel) -> Values:
        lodging = self.lodging
        try:
            base = lodging.mirrors.find(body.base, body.agent) if body.base else None
            if body.base and base is None:
                return {"tree": ""}  # forgotten meanwhile: the kernel tells all of it
            draft = lodging.mirrors.draft(base, body.agent)
            stream = Bytes(listing)
            while (frame := await stream.frame(wire.FRAME_BYTES_MAX)) is not None:
                try:
                    draft.apply(trees.decode(frame))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise wire.WireError(f"a listing makes no sense: {error}") from error
            async with lodging.offering():
                await self._fill(draft, needs, Bytes(files))
                # Half a tree helps nobody: giving up waits until it is whole.
                tree = await asyncio.shield(asyncio.create_task(lodging.build(draft)))
        finally:
            for channel in (listing, needs, files):
                await channel.reset()
        return {"tree": tree.name}

    async def _fill(self, draft: Draft, needs: Channel, files: Bytes) -> None:
        """Take in the content that is not there yet."""
        store = self.lodging.store
        wanted = await asyncio.to_thread(draft.needs, store)
        await needs.send(b"".join(wanted))
        await needs.end()
        for digest in wanted:
            with store.incoming() as (fd, path):
                budget = content.Budget(self.lodging.file_bytes_max)
                if await content.receive(files, fd, budget) != digest:
                    raise wire.WireError("a file changed while it was sent")
                store.keep(path, digest)

    def _trees(self, agent: str, names: list[str]) -> list[Mirror]:
        found = [self.lodging.mirrors.find(name, agent) for name in names]
        seen = [tree for tree in found if tree is not None]
        if len(seen) < len(names):
            raise ForgottenError("the sandbox host has forgotten files of this sandbox; try again")
        return seen

    async def _start(self, call: int, body: wire.StartProgram, stdin: Channel, out: list[Channel]) -> Values:
        seen = self._trees(body.agent, [body.image, *body.binds.values(), *body.mounts.values()])
        for tree in seen:
            tree.users += 1
        relay = Relay(self.session, self.channels, call, self.lodging.sockets(call))
        pipes: list[int] = []
        tasks: list[asyncio.Task[None]] = []
        ours, theirs = socket.socketpair()
        try:
            await relay.open(seen[0].uid)
            for channel in out:
                reading, writing = os.pipe2(os.O_CLOEXEC)
                pipes.append(writing)
                tasks.append(asyncio.create_task(pumps.from_pipe(reading, channel)))
            program = await self.lodging.sandbox.start(
                ProgramSpec(
                    agent=self.lodging.label(body.agent),
                    argv=[os.fsdecode(word) for word in body.argv],
                    env={os.fsdecode(name): os.fsdecode(value) for name, value in body.env.items()},
                    image=seen[0].path,
                    socket_dir=relay.directory,
                    readonly=[Path(os.fsdecode(path)) for path in body.provided],
                    binds=orders.at(body.binds, seen[1:]),
                    mounts=orders.at(body.mounts, seen[1 + len(body.binds) :]),
                    require=body.require,
                    uid=seen[0].uid,
                    limits=orders.limits(body.limits),
                    stdin=await orders.stdin(stdin, body.stdin_bytes),
                    stdout_fd=pipes[0],
                    stderr_fd=pipes[1],
                    loopback=Loopback(port=body.doors, hand_fd=theirs.fileno()) if body.doors else None,
                )
            )
            if body.doors:
                await lend(relay, program, ours)
        except BaseException:
            for tree in seen:
                tree.users -= 1
            await orders.to_its_end(relay.close())
            raise
        finally:
            ours.close()
            theirs.close()
            for fd in pipes:
                os.close(fd)
        guest = _Guest(agent=body.agent, program=program, relay=relay, seen=seen, pumps=tasks)
        self._guests[call] = guest
        guest.watcher = asyncio.create_task(self._watch(call, guest))
        return {"identity": f"{self.name[:8]}-{call}", "forms": dict(program.forms), "doors": body.doors}

    async def _watch(self, call: int, guest: _Guest) -> None:
        ended = await guest.program.wait()
        try:
            await guest.relay.close()
        finally:
            for tree in guest.seen:
                tree.users -= 1
            self._guests.pop(call, None)
            guest.gone.set()
        with contextlib.suppress(SessionLostError):
            message = wire.Ended(program=call, reason=ended.reason.value, code=ended.code)
            await self.session.send(message)
        # Its writers are gone, so what is left is in the pipes, or nobody reads it any more.
        await asyncio.gather(*guest.pumps, return_exceptions=True)

    async def _command(self, call: int, body: wire.RunCommand, stdin: Channel, left: Channel) -> Values:
        seen = self._trees(body.agent, [body.lower, *body.binds.values(), *body.mounts.values()])
        for tree in seen:
            tree.users += 1
        scratch = self.lodging.scratch(call)
        try:
            scratch.mkdir(mode=0o700)
            done = await self.lodging.sandbox.run_command(
                CommandSpec(
                    agent=self.lodging.label(body.agent),
                    argv=[os.fsdecode(word) for word in body.argv],
                    env={os.fsdecode(name): os.fsdecode(value) for name, value in body.env.items()},
                    lower=seen[0].path,
                    scratch=scratch,
                    cwd=os.fsdecode(body.cwd),
                    masks=seen[0].masks("/workspace"),
                    readonly=[Path(os.fsdecode(path)) for path in body.provided],
                    binds=orders.at(body.binds, seen[1:]),
                    mounts=orders.at(body.mounts, seen[1 + len(body.binds) :]),
                    require=body.require,
                    uid=seen[0].uid,
                    limits=orders.limits(body.limits),
                    stdin=await orders.stdin(stdin, body.stdin_bytes),
                )
            )
            await upper.send(left, scratch, self.lodging.store, layer=done.exit.reason is not ExitReason.DISK)
            await left.end()
        finally:
            for tree in seen:
                tree.users -= 1
            await orders.to_its_end(_drop(left, scratch))
        return {"exit": orders.exit_words(done.exit), **orders.sizes(done.stdout_bytes, done.stderr_bytes)}

    async def _act(self, body: wire.Act) -> Values:
        guest = self._guests.get(body.program)
        if guest is not None:
            match body.what:
                case "kill":
                    await guest.program.kill()
                    await guest.gone.wait()  # its socket is what is left of it
                case "pause":
                    await guest.program.pause()
                case "resume":
                    await guest.program.resume()
                case _:
                    raise SandboxError(f"a sandbox host can't `{body.what}`")
        return {}

    async def _bye(self) -> Values:
        await self._end_guests()
        return {}


async def _drop(left: Channel, scratch: Path) -> None:
    try:
        await left.reset()
    finally:
        await asyncio.to_thread(discard, scratch)
