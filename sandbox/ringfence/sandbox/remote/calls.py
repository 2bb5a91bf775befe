"""A kernel's side of one session: orders and their answers, programs, and their connections to syscall sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence.sandbox.remote import pumps, wire
from ringfence.sandbox.remote.channels import RELAY_WINDOW, Channel, Channels
from ringfence.sandbox.remote.relays import CONNECTIONS_MAX, SOCKET_NAME
from ringfence.sandbox.remote.session import Session, SessionLostError
from ringfence.sandbox.types import Exit, ExitReason, SandboxError, SandboxLostError

Values = dict[str, str | int | list[str] | dict[str, str]]
LOST = Exit(reason=ExitReason.KILLED, code=-9)
"""How a program is said to have ended of which nothing can be known any more; its host ends it."""


class ForgottenError(SandboxLostError):
    """The host has not kept a tree that an order named; it is to be offered again."""


@dataclass(slots=True, eq=False)
class Place:
    """What a kernel knows of a program that a host runs.

    Attributes:
        socket_dir: where connections of the program lead.
        doors: descriptor of the socket that what comes from its loopback leads to; None: it has no doors.
        ended: how it ended.
        connections: that it has now.
    """

    socket_dir: Path
    doors: int | None
    ended: asyncio.Future[Exit]
    connections: int = 0


class Calls:
    """One session as a kernel has it. Lost, it answers every order with `SandboxLostError`.

    Args:
        on_lost: called once when the session is lost.
    """

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self.name = ""
        self.session = Session(self._handle)
        self.channels = Channels(self.session, first=1)
        self.provides: tuple[str, ...] = ()
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[wire.Answer]] = {}
        self._places: dict[int, Place] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- orders ---------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """A number for an order."""
        return next(self._numbers)

    async def order(
        self,
        body: wire.Body,
        number: int | None = None,
        feed: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Values:
        """Have something done. Cancelling the await first gives the order up and waits for that.

        Args:
            body: what.
            number: of the order, where it is known already.
            feed: writes into channels that the order names; nothing may be written before the host knows of them.

        Raises:
            SandboxError: the host refuses, and says why.
            SandboxLostError: the host is gone.
            ForgottenError: it needs a tree again.
        """
        number = self.number() if number is None else number
        future: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        try:
            await self.session.send(wire.Order(call=number, body=body))
            feeding = None if feed is None else asyncio.create_task(feed())
            try:
                answer = await self._answered(number, future, feeding)
            finally:
                if feeding is not None:
                    feeding.cancel()
                    await asyncio.gather(feeding, return_exceptions=True)
        except SessionLostError as error:
            raise SandboxLostError(f"{error}; try again") from error
        except wire.WireError as error:
            raise SandboxError(
                "the program can't be executed: Argument list too long; shorten its arguments and environment"
            ) from error
        finally:
            self._answers.pop(number, None)
        if "forgotten" in answer.values:
            raise ForgottenError(answer.error)
        if answer.error:
            raise (SandboxLostError if answer.lost else SandboxError)(answer.error)
        return answer.values

    async def _answered(
        self, number: int, future: asyncio.Future[wire.Answer], feeding: asyncio.Task[None] | None
    ) -> wire.Answer:
        try:
            answer = await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.create_task(self._give_up(number, future)))
            raise
        fed = answer.error and feeding is not None and feeding.done() and not feeding.cancelled()
        if fed and feeding is not None and (why := feeding.exception()) is not None:
            raise why  # what could not be sent is why the host did not get it
        return answer

    async def _give_up(self, number: int, future: asyncio.Future[wire.Answer]) -> None:
        with contextlib.suppress(SessionLostError):
            await self.session.send(wire.Cancel(call=number))
            await future

    # -- programs -------------------------------------------------------------------------------------------------

    def expect(self, number: int, socket_dir: Path, doors: int | None = None) -> Place:
        """A program is about to be started under this number."""
        place = Place(socket_dir, doors, asyncio.get_running_loop().create_future())
        self._places[number] = place
        return place

    def forget(self, number: int) -> None:
        """It was not started after all."""
        self._places.pop(number, None)

    # -- messages -------------------------------------------------------------------------------------------------

    def _handle(self, message: wire.Counted) -> None:
        match message:
            case wire.Data() | wire.Credit() | wire.End() | wire.Reset():
                self.channels.take(message)
            case wire.Answer(call=call):
                future = self._answers.get(call)
                if future is not None and not future.done():
                    future.set_result(message)
            case wire.Ended(program=number, reason=reason, code=code):
                place = self._places.pop(number, None)
                if place is not None and not place.ended.done():
                    place.ended.set_result(_exit(reason, code))
            case wire.Open(channel=number, program=program, door=door):
                if number % 2:
                    raise wire.WireError("the sandbox host opened a stream by a number of the kernel's")
                channel = self.channels.make(number=number, sends=True, receives=True, window=RELAY_WINDOW)
                self._spawn(channel, self._places.get(program), door=door)
            case _:
                raise wire.WireError("a sandbox host does not say this")

    def _spawn(self, channel: Channel, place: Place | None, *, door: bool) -> None:
        task = asyncio.create_task(self._relay(channel, place, door=door))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, channel: Channel, place: Place | None, *, door: bool) -> None:
        """Carry a program's connection to a socket of its agent, and no other's."""
        closed = place is None or place.ended.done() or (door and place.doors is None)
        if place is None or closed or place.connections >= CONNECTIONS_MAX:
            await channel.reset()
            return
        place.connections += 1
        try:
            if door:
                reader, writer = await pumps.connect_to(f"/proc/self/fd/{place.doors}")
            else:
                reader, writer = await pumps.connect(str(place.socket_dir), SOCKET_NAME)
            await pumps.relay(reader, writer, channel)
        except OSError:
            await channel.reset()
        finally:
            place.connections -= 1

    def lose(self, why: str) -> None:
        """The session is over: whoever waits is told."""
        self.session.lose(why)
        self.channels.drop_all()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(SessionLostError(why))
                future.exception()  # nobody may be waiting any more
        for place in self._places.values():
            if not place.ended.done():
                place.ended.set_result(LOST)
        self._places.clear()
        self._on_lost()

    async def settle(self) -> None:
        """Wait until every connection of a program is closed here too; after `lose`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _exit(reason: str, code: int) -> Exit:
    try:
        return Exit(reason=ExitReason(reason), code=code)
    except ValueError as error:
        raise wire.WireError("a program ended in a way that does not exist") from error


def exit_of(values: Values) -> Exit:
    """How a command ended, from the answer to its order.

    Raises:
        WireError: the answer does not say.
    """
    match values.get("exit"):
        case [reason, code] if code.lstrip("-").isdigit():
            return _exit(reason, int(code))
        case _:
            raise wire.WireError("a command ended in a way that does not exist")
