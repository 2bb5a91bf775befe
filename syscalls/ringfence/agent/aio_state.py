"""`rf.state` and `rf.checkpoint` for asyncio."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ringfence.agent import operations
from ringfence.agent.claims import guards
from ringfence.agent.lanes import check_quiet
from ringfence.agent.state import UPDATE_TRIES, Draft, Restored, Upgrader, updated

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from ringfence.agent.aio_calls import AsyncCaller
    from ringfence.agent.claims import Claims
    from ringfence.agent.values import Versioned
    from ringfence.v1.syscalls_pb2 import Welcome


class AsyncTransaction(Draft):
    """One block of `async with rf.state.transaction() as tx`; only `get` is awaited."""

    def __init__(self, caller: AsyncCaller) -> None:
        super().__init__()
        self._caller = caller

    async def get(self, key: str, default: Any = None) -> Any:
        """Read a key, as this block will leave it; the commit fails if another changes it meanwhile."""
        if self.own(key):
            return self.written(key, default)
        found = await self._caller.run(operations.state_get(key))
        self.seen(key, found)
        return found.value if found.found else default


class AsyncState:
    """The shared state: JSON values by key, each with a version."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def get(self, key: str, default: Any = None) -> Any:
        """Read a value; `default` where there is none."""
        found = await self.get_versioned(key)
        return found.value if found.found else default

    async def get_versioned(self, key: str) -> Versioned:
        """Read a value with its version, for `if_version`."""
        return await self._caller.run(operations.state_get(key))

    async def put(self, key: str, value: Any, *, if_version: int | None = None, claim: Claims = ()) -> int:
        """Write a value; gives its version.

        Args:
            key: where.
            value: JSON.
            if_version: the version that it replaces; 0: there never was one; None: whatever stands there.
            claim: of `rf.claim`, one or several, that must still be held.

        Raises:
            Conflict: the key isn't at `if_version` any more, or a claim is lost.
        """
        return await self._caller.run(operations.state_put(key, value, if_version, guards(claim)))

    async def delete(self, key: str, *, if_version: int | None = None, claim: Claims = ()) -> bool:
        """Remove a value; gives whether there was one.

        Raises:
            Conflict: the key isn't at `if_version` any more, or a claim is lost.
        """
        return await self._caller.run(operations.state_delete(key, if_version, guards(claim)))

    async def update(
        self,
        key: str,
        change: Callable[[Any], Any],
        *,
        default: Any = None,
        claim: Claims = (),
        tries: int = UPDATE_TRIES,
    ) -> Any:
        """Read a value, have `change` make another of it and write that, again where others were faster: no change is lost.

        Args:
            key: where.
            change: gets the value, or `default` where there is none, and gives the new one; it may run several times.
            default: what stands for no value.
            claim: of `rf.claim`, one or several, that must still be held.
            tries: how often at most.

        Returns:
            The value that was written.

        Raises:
            Conflict: a claim is lost, or others were faster each time.
        """
        return await self._caller.script(updated(key, change, default, guards(claim), tries))

    @asynccontextmanager
    async def transaction(self, *, claim: Claims = ()) -> AsyncGenerator[AsyncTransaction]:
        """Read and write several keys at once: what the block wrote is committed at its end, all or nothing.

        A block that raises commits nothing. One that only reads, more than once, fails as well where a key has changed since:
        what it saw stood there together.

        Args:
            claim: of `rf.claim`, one or several, that must still be held at the end.

        Raises:
            Conflict: at the end of the block, where a key it read has changed since, or a claim is lost; do the block again.
        """
        transaction = AsyncTransaction(self._caller)
        yield transaction
        commit = transaction.commit(guards(claim))
        if commit is not None:
            await self._caller.run(commit)


class AsyncCheckpoint(Restored):
    """The program's own state, from which a restart continues."""

    def __init__(
        self, caller: AsyncCaller, welcome: Welcome, version: int, upgraders: Mapping[int, Upgrader] | None
    ) -> None:
        super().__init__(welcome, version, upgraders)
        self._caller = caller

    async def save(self, state: Any, version: int | None = None) -> int:
        """Save the state: a restart gets it back and replays only what follows. Gives the step.

        A restarted program runs from its first line and gets the state in `restored`. The calls it then
        makes have to be those that followed this save, or they are `Diverged`: do set-up calls only where
        `restored` is None, and keep what they gave in the state.

        Only the main task can save, while no other task of the program is running.

        Args:
            state: JSON values.
            version: schema version; None: the one given to `agent.boot_async`.

        Raises:
            InvalidRequest: other tasks are still running, or the state isn't JSON.
        """
        lane = self._caller.lanes.current()
        check_quiet(lane, self._caller.lanes.running)
        number = self.version if version is None else version
        return await self._caller.step(operations.checkpoint_save(state, number, lane.next_child))
