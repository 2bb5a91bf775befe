"""`rf.claim(...)`: work that one agent does at a time, for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from ringfence.agent import operations
from ringfence.agent.errors import Conflict, RingfenceError
from ringfence.agent.operations import Json, Operation, Script, moment

if TYPE_CHECKING:
    from types import TracebackType

    from ringfence.agent.aio_calls import AsyncCaller
    from ringfence.agent.calls import Caller

RETRY_S: Final = 5.0
"""Longest sleep between two tries for a claim that somebody holds, and with it how late a release is noticed."""

RETRY_LEAST_S: Final = 0.1
"""Shortest sleep."""


class Held:
    """A claim on a piece of work.

    Attributes:
        key: what is claimed.
        fence: number of this take of the key, larger than those before: give it to what can't ask the kernel, so that it refuses older ones.
        until: when it runs out, by the database's clock.
        ttl_s: for how long it was taken, in seconds.
    """

    def __init__(self, key: str, ttl_s: float, fence: int, until: datetime) -> None:
        self.key = key
        self.ttl_s = ttl_s
        self.fence = fence
        self.until = until


Claims: TypeAlias = Held | Iterable[Held]
"""One claim or several."""


def guards(claims: Claims) -> dict[str, int]:
    """Claims as arguments of a call carry them."""
    return {one.key: one.fence for one in ((claims,) if isinstance(claims, Held) else claims)}


def milliseconds(seconds: float) -> int:
    """A time in seconds as arguments carry it."""
    return max(0, round(seconds * 1000))


def taken(key: str, ttl_s: float) -> Operation[tuple[int, datetime]]:
    """Take a claim."""
    return Operation(
        "claim.take",
        {"key": key, "ttl_ms": milliseconds(ttl_s)},
        lambda r: (int(r["fence"]), moment(r["until"])),
    )


def renewed(claim: Held, ttl_s: float | None) -> Operation[datetime]:
    """Hold a claim longer."""
    ttl_ms = milliseconds(claim.ttl_s if ttl_s is None else ttl_s)
    arguments: Json = {"key": claim.key, "fence": claim.fence, "ttl_ms": ttl_ms}
    return Operation("claim.renew", arguments, lambda r: moment(r["until"]))


def released(claim: Held) -> Operation[bool]:
    """Give a claim back."""
    return Operation(
        "claim.release", {"key": claim.key, "fence": claim.fence}, lambda r: bool(r.get("released", False))
    )


def take(key: str, ttl_s: float, wait_s: float | None) -> Script[tuple[int, datetime]]:
    """Take a claim, or wait for it: every wait is a sleep that holds no process and outlasts restarts.

    Args:
        key: what is claimed.
        ttl_s: for how long, in seconds.
        wait_s: longest wait for whoever holds it; None: as long as it takes.

    Raises:
        Conflict: somebody holds it.
    """
    since: datetime | None = None
    while True:
        try:
            return (yield taken(key, ttl_s))
        except Conflict as refused:
            if wait_s == 0:
                raise
            now: datetime = yield operations.now()
            since = since or now
            left = RETRY_S if wait_s is None else wait_s - (now - since).total_seconds()
            if left <= 0:
                raise
            free_s = (moment(refused.metadata["until"]) - now).total_seconds()
        yield operations.sleep(max(RETRY_LEAST_S, min(free_s, left, RETRY_S)))


class Claim(Held):
    """A claim of a program with threads; `with rf.claim(...) as claim:` releases it at the end of the block."""

    def __init__(self, caller: Caller, key: str, ttl_s: float, fence: int, until: datetime) -> None:
        super().__init__(key, ttl_s, fence, until)
        self._caller = caller

    def renew(self, ttl_s: float | None = None) -> datetime:
        """Hold it for as long again, or for `ttl_s` seconds, from now on; gives until when.

        Raises:
            Conflict: it is lost.
        """
        self.until = self._caller.run(renewed(self, ttl_s))
        return self.until

    def release(self) -> bool:
        """Give it back; gives whether it was still held."""
        return self._caller.run(released(self))

    def __enter__(self) -> Self:
        """Hold it in the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back; where the block failed because the kernel is gone, its time frees it."""
        if kind is None or issubclass(kind, Exception):
            try:
                self.release()
            except RingfenceError:
                if kind is None:
                    raise


class AsyncClaim(Held):
    """A claim of an asyncio program; `async with await rf.claim(...) as claim:` releases it at the end of the block."""

    def __init__(self, caller: AsyncCaller, key: str, ttl_s: float, fence: int, until: datetime) -> None:
        super().__init__(key, ttl_s, fence, until)
        self._caller = caller

    async def renew(self, ttl_s: float | None = None) -> datetime:
        """Hold it for as long again, or for `ttl_s` seconds, from now on; gives until when.

        Raises:
            Conflict: it is lost.
        """
        self.until = await self._caller.run(renewed(self, ttl_s))
        return self.until

    async def release(self) -> bool:
        """Give it back; gives whether it was still held."""
        return await self._caller.run(released(self))

    async def __aenter__(self) -> Self:
        """Hold it in the block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back; where the block failed because the kernel is gone, its time frees it."""
        if kind is None or issubclass(kind, Exception):
            try:
                await self.release()
            except RingfenceError:
                if kind is None:
                    raise
