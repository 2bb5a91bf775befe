"""`rf.messages`, `rf.tasks`, `rf.memory` and `rf.artifacts` for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfence.agent import exchange_operations as operations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ringfence.agent.aio_calls import AsyncCaller
    from ringfence.agent.kept import Content, Entry, Message, Stored
    from ringfence.agent.values import Found


class AsyncMessages:
    """Messages between agents, each received exactly once."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def send(self, to: str, text: str | None = None, *, json: Any = None) -> str:
        """Put a message into the mailbox of another agent; gives the message's id.

        Args:
            to: the agent's name or id.
            text: the message, or
            json: a JSON value instead.

        Raises:
            NoSuchResource: nobody is named so, or the agent has ended.
            InvalidRequest: several agents are named so, or the message is too large.
            QuotaExceeded: its mailbox is full.
        """
        return await self._caller.run(operations.send(to, text, json))

    async def receive(self, timeout_s: float | None = None, from_: str = "") -> Message | None:
        """Take the oldest message out of the own mailbox; waits where there is none.

        Args:
            timeout_s: longest wait in seconds; 0: none; None: as long as it takes.
            from_: only messages of this sender, by name or id; empty: of all.

        Returns:
            The message; None where none came in time.
        """
        return await self._caller.run(operations.receive(timeout_s, from_))


class AsyncTasks:
    """Tasks that clients gave this agent by A2A. Each begins with a message of theirs."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def update(
        self, task: str, state: str = "", text: str | None = None, *, json: Any = None, artifact: str = ""
    ) -> str:
        """Tell the client of a task how it stands, or give it a result; gives the task's state after it.

        Args:
            task: its id, as the message that began it says in `task`.
            state: `working`, `input-required`, `auth-required`, `completed`, `failed` or `rejected`; empty: as it was.
            text: what is told, or the result, or
            json: a JSON value instead.
            artifact: name of the result; empty: what is told is no result.

        Raises:
            NoSuchResource: this agent has no such task.
            Conflict: it has ended, as when its client canceled it.
            QuotaExceeded: too much was told of it.
        """
        return await self._caller.run(operations.update(task, state, text, json, artifact))


class AsyncMemory:
    """Texts that are kept and found again by their words."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def append(
        self,
        text: str,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        space: str = "",
        language: str = "",
    ) -> str:
        """Keep a text; gives the entry's id.

        Args:
            text: what to keep.
            tags: words to filter by.
            metadata: JSON values that come back with it.
            space: a space shared with other agents; empty: the agent's own.
            language: language whose word forms count as one; empty: words as they are.
        """
        return await self._caller.run(operations.append(text, tags, metadata, space, language))

    async def search(
        self,
        query: str = "",
        *,
        limit: int = 0,
        offset: int = 0,
        tags: Sequence[str] = (),
        space: str = "",
        language: str = "",
    ) -> Found[Entry]:
        """Find entries, best first; `.truncated` says whether there are more.

        Args:
            query: words, `"phrases"`, `or` and `-without`; empty: the newest entries.
            limit: most entries, up to 100; 0: 10.
            offset: how many of the best to pass over.
            tags: only entries with all of these.
            space: where to look; empty: the agent's own.
            language: as the entries were kept with.
        """
        return await self._caller.run(operations.search(query, limit, offset, tags, space, language))


class AsyncArtifacts:
    """Bytes kept under names; every put is a version."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def put(self, name: str, content: str | bytes, media_type: str = "") -> Stored:
        """Keep bytes, or a text as UTF-8, as the next version of a name."""
        return await self._caller.run(operations.put(name, content, media_type))

    async def get(self, name_or_ref: str, *, version: int = 0, offset: int = 0, limit: int = 0) -> Content:
        """Read an artifact of this agent: its bytes, with what is known of it as attributes.

        Args:
            name_or_ref: name, or the reference that `put` or a command gave.
            version: of the name; 0: the newest.
            offset: first byte.
            limit: most bytes; 0: all to the end.

        Raises:
            NoSuchResource: there is none.
        """
        return await self._caller.script(operations.get(name_or_ref, version, offset, limit))
