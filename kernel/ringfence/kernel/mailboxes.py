"""Wakes agents of this kernel that wait for messages, whoever sent them.

A message of the same kernel wakes at once. One for an agent of another kernel is announced by a notification after its
commit; should that be lost, the other kernel finds the message when it looks by itself, every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec
from ringfence.kernel.journal.types import AgentKey, JournalError, KernelKey

if TYPE_CHECKING:
    from ringfence.kernel.journal.store import Store
    from ringfence.kernel.journal.store_notify import Listener

log = logging.getLogger(__name__)

CHANNEL: Final = "ringfence_message"
LOOK_EVERY_S: Final = 5.0
NAMES_MAX: Final = 4096


class Woken(msgspec.Struct, frozen=True):
    """The part of an answer of atomic work that names a mailbox which got something: agent, and the kernel that owns it."""

    wake: tuple[int, int | None] | None = None


def woken_by(done: object) -> list[tuple[int, int | None]]:
    """Whom atomic work wakes by what it answered."""
    if not isinstance(done, dict) or "wake" not in done:
        return []
    wake = msgspec.convert(done, Woken).wake
    return [] if wake is None else [wake]


class Mailbox:
    """What this kernel knows of one agent's mailbox: that something may have come."""

    __slots__ = ("_waiting", "arrivals", "seen")

    def __init__(self) -> None:
        self.arrivals = 0
        self.seen: tuple[int, int] | None = None  # as the last look of this kernel found it
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def awaited(self) -> bool:
        """Whether a call waits for it."""
        return bool(self._waiting)

    @property
    def stirred(self) -> bool:
        """Whether a call that waits for it is about to look."""
        return any(future.done() for future in self._waiting)

    def came(self) -> None:
        """Something may have come."""
        self.arrivals += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def changed(self, seen: int, timeout_s: float | None) -> bool:
        """Wait until `arrivals` is no longer `seen`; False: the time ran out first."""
        if self.arrivals != seen:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            self._waiting.remove(future)
        return self.arrivals != seen


class Mailboxes:
    """All mailboxes of this kernel's agents.

    Attributes:
        arrived: called with every agent that may have got a message.
        sleeping: gives agents that are asleep without a call that waits here, which a message has to wake all the same.
    """

    def __init__(self, store: Store, kernel: KernelKey) -> None:
        self._store = store
        self._kernel = kernel
        self._boxes: dict[AgentKey, Mailbox] = {}
        self._names: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener: Listener | None = None
        self.arrived: Callable[[AgentKey], None] = lambda _key: None
        self.sleeping: Callable[[], Iterable[AgentKey]] = tuple

    def of(self, key: AgentKey) -> Mailbox:
        """The mailbox of one agent."""
        return self._boxes.setdefault(key, Mailbox())

    async def name_of(self, agent: str) -> str | None:
        """Name of the agent with this id; None: no agent has it."""
        name = self._names.get(agent)
        if name is None:
            name = await self._store.agent_name(agent)
            if name is not None:
                if len(self._names) >= NAMES_MAX:
                    self._names.clear()
                self._names[agent] = name
        return name

    # -- waking ---------------------------------------------------------------------------------------------------

    def wake(self, key: AgentKey) -> None:
        """An agent of this kernel may have got something."""
        self.of(key).came()
        self.arrived(key)

    def announce(self, key: AgentKey, owner: int | None) -> None:
        """Wake an agent, on whichever kernel it is. Called once its message is committed."""
        if owner == self._kernel:
            self.wake(key)
        elif owner is not None:
            self._spawn(self._tell(key))

    async def _tell(self, key: AgentKey) -> None:
        try:
            await self._store.notify(CHANNEL, str(key))
        except JournalError as error:
            log.warning("a message for agent %d is not announced: %s; its kernel will find it", key, error)

    # -- looking --------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen to other kernels, and look now and then."""
        self._listener = self._store.listen([CHANNEL], self._notified)
        await self._listener.ready()
        self._spawn(self._look_again())

    async def close(self) -> None:
        """Stop."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            await self._listener.stop()

    def _notified(self, _channel: str, payload: str) -> None:
        if payload:
            key = AgentKey(int(payload))
            if key in self._boxes:
                self.wake(key)
            return
        # After a reconnect nobody knows what was announced.
        for key, box in list(self._boxes.items()):
            if box.awaited:
                self.wake(key)

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.look()
            except JournalError as error:
                log.warning("looking for messages failed: %s", error)

    async def look(self) -> None:
        """Wake whom something has come for that nobody announced.

        Raises:
            JournalError: the database is away.
        """
        keys = {key for key, box in self._boxes.items() if box.awaited} | set(self.sleeping())
        if not keys:
            return
        found = await self._store.messages_waiting(sorted(keys))
        for key in keys:
            box, now = self.of(key), found.get(key)
            before, box.seen = box.seen, now
            if now is not None and now != before:
                self.wake(key)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
