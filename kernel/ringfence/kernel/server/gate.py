"""What one agent may make the kernel hold at its door: streams, calls, and bytes of arguments.

Nothing is refused for it: whoever is beyond a bound waits, and what it sends waits in its own buffers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable

from ringfence.kernel.config import ARGUMENT_BYTES_IN_FLIGHT_MAX, CALLS_IN_FLIGHT_MAX

STREAMS_MAX = 16
"""Streams of one agent that are served at a time; the library opens one for each process."""

UNARY_MAX = 16
"""Calls without a stream of one agent that are served at a time."""

LARGE_MAX = 2
"""Messages of one agent longer than a window that come in at a time; others wait in the client's own buffers."""

READS_MAX = 8
"""Reads of files and artifacts of one agent that run, or whose answers wait for their reader, at a time."""

READ_S = 5.0
"""After which a read that has no answer yet, as one that waits for a person, no longer keeps others waiting."""

CHORES_PER_S = 5000
"""Frames without a call that are taken of one agent within a second, all its connections together; then it waits."""

CHORES_MAX = 10_000
"""The same at once."""

COMPLAIN_EVERY_S = 60.0
"""How often the kernel's log gets a line about what comes in at one agent's door."""


class Hold:
    """What one call holds of its agent's bounds."""

    __slots__ = ("_gate", "_size")

    def __init__(self, gate: Gate, size: int) -> None:
        self._gate = gate
        self._size = size
        gate.change(1, size)

    def shrink(self, size: int) -> None:
        """The call has let go of its arguments but for `size` bytes."""
        if size < self._size:
            self._gate.shrink(self._size - size)
            self._size = size

    def end(self) -> None:
        """The call is over. More than once does nothing."""
        if self._size >= 0:
            self._gate.change(-1, -self._size)
            self._size = -1


class Gate:
    """Calls under way of one agent, over all its streams.

    Attributes:
        open: whether one more call may be read. It may then be larger than what is left, once for each stream.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._bytes = 0
        self._waiting: dict[Callable[[], None], None] = {}
        self.open = True

    async def wait(self) -> None:
        """Wait until it is open."""
        while not self.open:
            room = asyncio.Event()
            self.when_open(room.set)
            await room.wait()

    def when_open(self, call: Callable[[], None]) -> None:
        """Have `call` called, once, after it has opened; it may be closed again by then."""
        self._waiting[call] = None

    def forget(self, call: Callable[[], None]) -> None:
        """Have `call` not called: it may be closed for hours, and who waits may be gone long before."""
        self._waiting.pop(call, None)

    def shrink(self, size: int) -> None:
        """A call gives back so many bytes."""
        if self.open:
            self._bytes -= size
        else:
            self.change(0, -size)

    def change(self, calls: int, size: int) -> None:
        """Count what a call takes or gives back."""
        self._calls = under_way = self._calls + calls
        self._bytes = held = self._bytes + size
        is_open = under_way < CALLS_IN_FLIGHT_MAX and held < ARGUMENT_BYTES_IN_FLIGHT_MAX
        if is_open is not self.open:
            self.open = is_open
            if is_open and self._waiting:
                loop = asyncio.get_running_loop()
                waiting, self._waiting = self._waiting, {}
                for call in waiting:
                    loop.call_soon(call)


class Places:
    """A bounded number of places; who finds none waits, in the order of coming."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: dict[object, Callable[[], None]] = {}
        self._taken: set[object] = set()
        self._handing = False

    def take(self, who: object, begin: Callable[[], None]) -> None:
        """Have `begin` called when there is a place for `who`: at once, or when another leaves."""
        if self._free:
            self._free -= 1
            self._taken.add(who)
            begin()
        else:
            self._waiting[who] = begin

    def leave(self, who: object) -> None:
        """Give the place of `who` back, or the wait for one. Without either nothing happens."""
        if who in self._taken:
            self._taken.discard(who)
            self._free += 1
        else:
            self._waiting.pop(who, None)
        if self._handing:
            return
        # INVARIANT: one loop hands places on, since whoever gets one may leave at once: else a queue were a depth.
        self._handing = True
        try:
            while self._free and self._waiting:
                following = next(iter(self._waiting))
                self.take(following, self._waiting.pop(following))
        finally:
            self._handing = False


class Reads:
    """Places of calls whose answers may be megabytes: what was read stays in memory until the client takes it."""

    def __init__(self) -> None:
        self._under_way: dict[object, float] = {}
        self._waiting: deque[tuple[object, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._handing = False

    def enter(self, who: object) -> bool:
        """Take a place for `who` where one is free."""
        under_way = self._under_way
        if len(under_way) >= READS_MAX:
            return False
        under_way[who] = time.monotonic()
        return True

    def take(self, who: object, begin: Callable[[], None]) -> None:
        """Have `begin` called when there is a place for `who`."""
        if self.enter(who):
            begin()
            return
        self._waiting.append((who, begin))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(READ_S, self._look)

    def answered(self, who: object) -> None:
        """There is an answer: it counts until it is written, however long that takes."""
        if who in self._under_way:
            self._under_way[who] = math.inf

    def leave(self, who: object) -> None:
        """The answer is written."""
        self._under_way.pop(who, None)
        if not self._waiting or self._handing:
            return
        self._handing = True  # as with `Places`
        try:
            while self._waiting and len(self._under_way) < READS_MAX:
                self.take(*self._waiting.popleft())
        finally:
            self._handing = False

    def _look(self) -> None:
        self._timer = None
        for who, since in list(self._under_way.items()):
            if time.monotonic() - since >= READ_S:
                self.leave(who)
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(READ_S, self._look)


class Calm:
    """What an agent may have the kernel do beside calls: frames that carry none, streams, connections. Beyond it, it waits.

    It is a bucket: what is spent comes back with time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = float(CHORES_MAX)
        self._at = clock()

    def spend(self, chores: float) -> None:
        """Count work; there may be more of it than is left."""
        self._left -= chores

    def debt_s(self) -> float:
        """Give how long nothing more should be taken, 0.0 where there is something left."""
        if self._left >= 0:
            return 0.0
        now = self._clock()
        self._left = min(self._left + (now - self._at) * CHORES_PER_S, CHORES_MAX)
        self._at = now
        return max(-self._left / CHORES_PER_S, 0.0)


class Bounds:
    """All bounds of one agent's door, over its connections and streams.

    Attributes:
        gate: calls under way.
        streams: places of streams that carry calls.
        unary: places of calls without a stream.
        large: places of messages longer than a window that are coming in.
        reads: places of calls whose answers may be megabytes.
        calm: chores.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self.streams = Places(STREAMS_MAX)
        self.unary = Places(UNARY_MAX)
        self.large = Places(LARGE_MAX)
        self.reads = Reads()
        self.calm = Calm()


class Complaints:
    """The lines of the kernel's log about one agent's door: at most one a minute, whatever comes in."""

    def __init__(self, log: logging.Logger, agent: str) -> None:
        self._log = log
        self._agent = agent
        self._silent_until = 0.0
        self._withheld = 0

    def say(self, text: str, *, trace: bool = False) -> None:
        """Write a line, with the traceback of the exception being handled where `trace` is set."""
        if time.monotonic() < self._silent_until:
            self._withheld += 1
            return
        more = f" ({self._withheld} more since the last line)" if self._withheld else ""
        self._log.log(
            logging.ERROR if trace else logging.WARNING, "%s: %s%s", self._agent, text, more, exc_info=trace
        )
        self._silent_until = time.monotonic() + COMPLAIN_EVERY_S
        self._withheld = 0
