"""One line of callers for each upstream, shared by all agents of this process, and when the next of them may go.

What holds them: the rate that the operator declared for the resource, an answer that asks to be left alone (429, or 503 with a time), and
limits of its own that an upstream tells in its answers. After it had asked to be left alone, calls start one after the other, each a
little later than the one before, so that the first can find out whether the storm is over before the rest is sent into it.

INVARIANT: nothing is sent to an upstream while it is to be left alone. What would wait longer than its deadline is refused at once.
INVARIANT: agents in the line take turns, one call each, however many calls one of them has there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from ringfence.syscalls.errors import QuotaExceeded
from ringfence.syscalls.ratelimits import quota_of

if TYPE_CHECKING:
    from ringfence.policy.units import Rate
    from ringfence.syscalls.base import Call
    from ringfence.syscalls.declared import A2aResource, HttpResource, LlmResource, McpResource

ATTEMPTS_MAX: Final = 4
"""How often one call is sent at most."""
HOLD_S_MAX: Final = 60.0
"""Longest wait for an upstream; a call that would wait longer is refused with the time to come back."""
SPACING_S: Final = 0.25
"""Between the starts of the first two calls that waited for an upstream which had asked to be left alone; each further one is shorter."""
QUICK_S: Final = 0.05
"""The same where it had only told that its limit is used up."""
SPACING_S_MIN: Final = 0.005
"""From here on they start as they come."""

ASK_S: Final = 0.5
"""A line without a part of its rate looks again after this."""

_EPS: Final = 1e-9
_jitter: Final = random.SystemRandom().random


class Ticket:
    """A place in the line. `number`: which of all calls that were let go it is; 0: it waits."""

    __slots__ = ("agent", "go", "number")

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.number = 0
        self.go = asyncio.Event()


class Sharing(Protocol):
    """Who shares rates with other kernels."""

    def wanted(self, upstream: Upstream) -> None:
        """Somebody waits for a rate of which this kernel has no part."""
        ...

    def told(self, upstream: Upstream, wait_s: float) -> None:
        """An upstream wants to be left alone."""
        ...


class Line:
    """Who waits for one upstream, and when the next may go.

    Attributes:
        rate: that the operator declared; None: none.
        part: how much of it this kernel goes by, from 0 to 1.
        gone: calls that were let go.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._agents: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self.rate: Rate | None = None
        self.part = 1.0
        self._tokens = 0.0
        self._at = 0.0
        self._until = 0.0  # to be left alone
        self._spaced_until = 0.0  # the next one of those that waited
        self._spacing = 0.0
        self.gone = 0
        self._heard = 0  # the newest call whose answer told of a limit
        self._left: float | None = None  # of that limit
        self._resets_at = 0.0

    def limit(self, rate: Rate | None) -> None:
        """Put a rate in force; None: there is none."""
        if rate == self.rate:
            return
        self._refill()
        before, self.rate = self.rate, rate
        burst = 0.0 if rate is None else rate.count * self.part
        self._tokens = burst if before is None else min(burst, self._tokens)
        self._at = self._clock()

    def _refill(self) -> None:
        if self.rate is None:
            return
        now, rate = self._clock(), self.rate
        whole = rate.count * self.part
        self._tokens = min(whole, self._tokens + (now - self._at) * whole / rate.per_s)
        self._at = now

    @property
    def starved(self) -> bool:
        """Whether somebody waits for a rate of which there is no part here."""
        return self.rate is not None and self.part <= 0 and bool(self._agents)

    def halt(self) -> float:
        """Go by no part of the rate any more. Returns the calls that were left of it."""
        self._refill()
        tokens, self._tokens, self.part = max(0.0, self._tokens), 0.0, 0.0
        return tokens

    def grant(self, part: float, tokens: float) -> None:
        """Go by a part of the rate, of which so many calls are left."""
        self._refill()
        self.part, self._tokens = part, tokens

    # -- what holds -----------------------------------------------------------------------------------------------

    @property
    def held_s(self) -> float:
        """Seconds for which the upstream is to be left alone."""
        left = self._left is not None and self._left < 1
        return max(0.0, self._until - self._clock(), self._resets_at - self._clock() if left else 0.0)

    def hold(self, seconds: float) -> None:
        """The upstream wants to be left alone; then by one after the other."""
        self._until = max(self._until, self._clock() + seconds)
        self._space(self._until, SPACING_S)

    def _space(self, begin: float, spacing: float) -> None:
        """Have the calls that wait begin one after the other, sooner and sooner."""
        self._spacing = max(self._spacing, spacing)
        self._spaced_until = max(self._spaced_until, begin + _jitter() * spacing / 2)

    def heard(self, number: int, headers: Mapping[str, str]) -> None:
        """Take over what an answer says of the upstream's own limit.

        Args:
            number: of the ticket of the call that was answered; calls that went later may not be counted yet.
            headers: of the answer, names in lower case.
        """
        quota = quota_of(headers)
        if quota is None or number < self._heard:
            return
        self._heard = number
        self._left = max(0.0, quota.remaining - (self.gone - number))
        self._resets_at = self._clock() + quota.reset_s
        if self._left < 1:
            self._space(self._resets_at, QUICK_S)

    def next_s(self) -> float:
        """Seconds until the next may go; 0: now."""
        now = self._clock()
        if self._left is not None and now >= self._resets_at:
            self._left = None
        at = max(self._until, self._spaced_until)
        if self._left is not None and self._left < 1:
            at = max(at, self._resets_at)
        if self.rate is not None:
            self._refill()
            at = max(at, now + self._until_tokens_s(1.0, self.rate))
        return max(0.0, at - now)

    def _until_tokens_s(self, count: float, rate: Rate) -> float:
        """Seconds until there are so many tokens; without a part of the rate nobody knows."""
        if self.part <= 0:
            return ASK_S
        return (count - self._tokens - _EPS) * rate.per_s / (rate.count * self.part)

    # -- the line -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(map(len, self._agents.values()))

    def join(self, agent: str) -> Ticket:
        """Stand in the line."""
        ticket = Ticket(agent)
        self._agents.setdefault(agent, deque()).append(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Stand in it no longer."""
        waits = self._agents.get(ticket.agent)
        if waits is not None and ticket in waits:
            waits.remove(ticket)
            if not waits:
                del self._agents[ticket.agent]

    def turns_before(self, ticket: Ticket) -> int:
        """How many go before this one, if nobody joins."""
        mine = self._agents[ticket.agent].index(ticket)
        order = list(self._agents)
        ahead = order[: order.index(ticket.agent)]
        return mine + sum(
            min(len(waits), mine + (1 if agent in ahead else 0))
            for agent, waits in self._agents.items()
            if agent != ticket.agent
        )

    def wait_s(self, ticket: Ticket) -> float:
        """About how long this one waits."""
        turns = self.turns_before(ticket)
        first, later = self.next_s(), min(turns, 5) * self._spacing
        if self.rate is not None:
            later = max(later, self._until_tokens_s(turns + min(1.0, self._tokens), self.rate))
        if self._left is not None and turns >= self._left:
            first = max(first, self._resets_at - self._clock())
        return first + later

    def let_go(self) -> Ticket | None:
        """Let the next one go, if it may; None: nobody may, or nobody waits."""
        if not self._agents or self.next_s() > 0:
            return None
        agent, waits = self._agents.popitem(last=False)
        ticket = waits.popleft()
        if waits:
            self._agents[agent] = waits  # behind all others
        self.gone += 1
        ticket.number = self.gone
        self._tokens -= 1
        if self._left is not None:
            self._left -= 1
        if self._spacing > 0:
            self._spaced_until = self._clock() + self._spacing * (0.75 + _jitter() / 2)
            self._spacing = self._spacing * 0.8 if self._spacing > SPACING_S_MIN else 0.0
        ticket.go.set()
        return ticket


@contextlib.asynccontextmanager
async def _unseen() -> AsyncGenerator[None]:
    yield


class Upstream:
    """One declared upstream: its line, and who lets the calls go.

    Attributes:
        key: what kernels know it by.
        used_at: when a call last wanted to go, on the monotonic clock.
    """

    def __init__(self, name: str, base: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self.key = f"{name} {base}"
        self.line = Line(clock)
        self.used_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def pump(self) -> None:
        """Let go who may go, and come back when the next may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self.line.let_go() is not None:
            pass
        if self.line.starved and _sharing:
            _sharing[0].wanted(self)
        if len(self.line):
            self._timer = asyncio.get_running_loop().call_later(max(self.line.next_s(), 0.001), self.pump)

    def told(self, wait_s: float) -> None:
        """The upstream wants to be left alone."""
        self.hold(wait_s)
        if _sharing:
            _sharing[0].told(self, wait_s)

    def hold(self, wait_s: float) -> None:
        """Leave it alone."""
        self.line.hold(wait_s)
        self.pump()

    def heard(self, number: int, headers: Mapping[str, str]) -> None:
        """An answer came; `number` is what `wait` gave its call."""
        self.line.heard(number, headers)
        self.pump()

    async def wait(self, call: Call) -> int:
        """Wait until this call may be sent. Returns its number, for `heard`.

        Raises:
            QuotaExceeded: that would take longer than its deadline, or than anyone is held.
        """
        return await self.turn(call.env.agent, call.deadline_s, call)

    async def turn(self, agent: str, deadline_s: float, call: Call | None = None) -> int:
        """As `wait`, also for what the kernel itself sends for an agent, without a call that shows that it waits."""
        self.used_at = time.monotonic()
        ticket = self.line.join(agent)
        try:
            self.pump()
            if ticket.number:
                return ticket.number
            most, wait_s = min(deadline_s, HOLD_S_MAX), self.line.wait_s(ticket)
            if wait_s > most:
                raise self.exceeded(0, wait_s)
            until_us = time.time_ns() // 1000 + int(wait_s * 1e6)
            async with (
                _unseen() if call is None else call.waiting("rate", f"upstream `{self._name}`", until_us)
            ):
                try:
                    async with asyncio.timeout(most):
                        await ticket.go.wait()
                except TimeoutError:
                    if not ticket.number:
                        raise self.exceeded(0, self.line.wait_s(ticket)) from None
            return ticket.number
        finally:
            self.line.leave(ticket)

    def exceeded(self, attempts: int, wait_s: float | None = None) -> QuotaExceeded:
        """What an agent is told when it can't be held any longer."""
        left = self.line.held_s
        if wait_s is not None and wait_s > left + SPACING_S:
            left = wait_s
        tried = f" after {attempts} attempts" if attempts else ""
        why = "is left alone for" if self.line.held_s > 0 else "has a turn in"
        return QuotaExceeded(
            f"`{self._name}` asks its callers to wait{tried} and {why} {left:.1f} s more; "
            "try again then; a restart of the kernel forgets it",
            resource=self._name,
            retry_after_ms=str(int(left * 1000) + 1),
            attempts=str(attempts),
        )


_upstreams: Final[dict[tuple[str, str], Upstream]] = {}
_sharing: Final[list[Sharing]] = []


def share(sharing: Sharing | None) -> None:
    """Have rates of this process' upstreams be parts of what kernels share; None: each is whole again."""
    _sharing[:] = [] if sharing is None else [sharing]
    for upstream in _upstreams.values():
        if sharing is None:
            upstream.line.grant(1.0, 0.0)
        else:
            upstream.line.halt()


def upstreams() -> Sequence[Upstream]:
    """Those that were called."""
    return tuple(_upstreams.values())


def upstream_of(resource: A2aResource | HttpResource | LlmResource | McpResource) -> Upstream:
    """The upstream of a declared resource: the same for every agent, under the rate that is in force."""
    key = resource.name, resource.base
    found = _upstreams.get(key)
    if found is None:
        found = _upstreams[key] = Upstream(*key)
        if _sharing:
            found.line.halt()
    found.line.limit(resource.rate)
    return found
