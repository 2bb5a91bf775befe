"""A checkpointer for LangGraph: a graph that is killed goes on at its last superstep.

    from ringfence.agent.langgraph import saver

    with saver() as checkpointer:
        graph = builder.compile(checkpointer=checkpointer)
        config = {"configurable": {"thread_id": "main"}}
        begun = checkpointer.get_tuple(config) is not None
        graph.invoke(None if begun else {"topic": "kettles"}, config, durability="sync")

Everything that LangGraph keeps is one checkpoint of the agent (`checkpoint.save`), saved at the end of each
superstep of the outermost graph. A restart gets it back, and does what came after it again: what was asked since,
of models or of tools behind the doors, is answered from the record where it is asked again. So a superstep that was
cut off begins anew with all of its tasks, and no effect of theirs is repeated.

It needs `pip install 'ringfence[langgraph]'`, and nothing of it is imported by the rest of the library.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from langgraph.checkpoint.memory import InMemorySaver
from ringfence.agent import operations, wire
from ringfence.agent.core import PATIENCE_S
from ringfence.agent.lanes import Lane
from ringfence.agent.session import Session
from ringfence.agent.state import Restored

FORMAT: Final = 1
"""Version of what is saved."""
HISTORY: Final = 8
"""Checkpoints of a thread and namespace that are kept."""
_DELTAS: Final = "counters_since_delta_snapshot"
_IN_A_RUN: Final = "__pregel_runtime"
"""What LangGraph has in the configuration of a graph that runs, and in no other."""
_DURABILITY: Final = "__pregel_durability"


def _packed(typed: tuple[str, bytes]) -> list[str]:
    return [typed[0], base64.b64encode(typed[1]).decode()]


def _unpacked(kind: str, data: str) -> tuple[str, bytes]:
    return kind, base64.b64decode(data)


def _over(caller: threading.Thread | asyncio.Task[Any]) -> bool:
    return not caller.is_alive() if isinstance(caller, threading.Thread) else caller.done()


class RingfenceSaver(InMemorySaver):
    """Keeps what LangGraph gives it in the agent's checkpoint. Made by `saver`.

    It has the agent's main lane for itself: other calls of such a program go through `rf-call` or MCP.

    Args:
        session: the connection to the kernel.
        history: how many checkpoints of each thread and namespace are kept, at least 1; None: all.
        each_change: whether it saves at each change: see `saver`.
    """

    def __init__(self, session: Session, history: int | None = HISTORY, *, each_change: bool = False) -> None:
        super().__init__()
        if history is not None and history < 1:
            raise ValueError(
                f"`history` is {history}: at least one checkpoint has to be kept, or None for all"
            )
        welcome = session.welcome
        self._session = session
        self._history = history
        self._each_change = each_change
        self._runs: dict[str, threading.Thread | asyncio.Task[Any]] = {}
        self._mutex = threading.RLock()
        self._lane = Lane(next_step=welcome.next_step, next_child=welcome.next_child)
        restored = Restored(welcome, FORMAT, None).restored
        if restored is not None:
            self.load(restored)

    # -- what LangGraph calls -----------------------------------------------------------------------------------------

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        """Keep a checkpoint. At the end of a superstep of the outermost graph it returns when all is on record.

        Raises:
            InvalidRequest: all that is kept has more than 1 MiB; take a shorter `history`.
            ValueError: the graph goes on while it is saved.
        """
        self._look(config)
        with self._mutex:
            made = super().put(config, checkpoint, metadata, new_versions)
            place = made["configurable"]
            self._prune(place["thread_id"], place["checkpoint_ns"])
            if self._each_change or not (place["checkpoint_ns"] or self._others_run(place["thread_id"])):
                self._save()
        return made

    def put_writes(
        self, config: Any, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Keep what a task has written. Errors as of `put`."""
        with self._mutex:
            super().put_writes(config, writes, task_id, task_path)
            # INVARIANT: other tasks of the superstep may be under way. What they asked before a checkpoint is not answered
            # again, so that one saved here would have them repeat it.
            if self._each_change:
                self._save()

    def delete_thread(self, thread_id: str) -> None:
        """Forget a thread; returns when that is on record."""
        with self._mutex:
            super().delete_thread(thread_id)
            self._save()

    def get_tuple(self, config: Any) -> Any:
        """Give a checkpoint, the newest where none is named; None where there is none.

        Raises:
            ValueError: it is for a graph that would go on while it is saved.
        """
        self._look(config)
        with self._mutex:
            place = config["configurable"]
            if _IN_A_RUN in place and not place.get("checkpoint_ns"):
                self._begins(place["thread_id"])
            return super().get_tuple(config)

    def list(self, config: Any, **more: Any) -> Iterator[Any]:
        """Give checkpoints, newest first."""
        with self._mutex:
            found = [*super().list(config, **more)]
        yield from found

    async def aget_tuple(self, config: Any) -> Any:
        """`get_tuple`, awaited."""
        return self.get_tuple(config)

    async def alist(self, config: Any, **more: Any) -> AsyncIterator[Any]:
        """`list`, awaited."""
        for found in self.list(config, **more):
            yield found

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        """`put`, awaited."""
        return await asyncio.to_thread(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: Any, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """`put_writes`, awaited."""
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        """`delete_thread`, awaited."""
        await asyncio.to_thread(self.delete_thread, thread_id)

    # -- what is kept -------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Give all that is kept, as JSON."""
        checkpoints = [
            [thread, space, name, *_packed(checkpoint), *_packed(metadata), parent]
            for thread, spaces in self.storage.items()
            for space, named in spaces.items()
            for name, (checkpoint, metadata, parent) in named.items()
        ]
        writes = [
            [*place, task, number, channel, *_packed(value), path]
            for place, made in self.writes.items()
            for (task, number), (_, channel, value, path) in made.items()
        ]
        blobs = [[*place, *_packed(value)] for place, value in self.blobs.items()]
        return {"checkpoints": checkpoints, "writes": writes, "blobs": blobs}

    def load(self, kept: dict[str, Any]) -> None:
        """Take what `dump` gave in place of what is there."""
        with self._mutex:
            self.storage.clear()
            self.writes.clear()
            self.blobs.clear()
            for thread, space, name, kind, data, meta_kind, meta_data, parent in kept["checkpoints"]:
                value = (_unpacked(kind, data), _unpacked(meta_kind, meta_data), parent)
                self.storage[thread][space][name] = value
            for thread, space, name, task, number, channel, kind, data, path in kept["writes"]:
                value = (task, channel, _unpacked(kind, data), path)
                self.writes[thread, space, name][task, number] = value
            for thread, space, channel, version, kind, data in kept["blobs"]:
                self.blobs[thread, space, channel, version] = _unpacked(kind, data)

    def _look(self, config: Any) -> None:
        """Refuse a graph that runs on while its checkpoint is being saved, before it does anything."""
        place = config["configurable"]
        if not self._each_change and _IN_A_RUN in place and place.get(_DURABILITY) != "sync":
            # What the next superstep asks meanwhile would count as asked before the checkpoint, and be repeated after a kill.
            raise ValueError(
                "the graph would go on before its checkpoint is on record, and repeat effects after a kill: "
                'say `durability="sync"` to `invoke`, `stream` and their kin'
            )

    def _begins(self, thread: str) -> None:
        """A graph begins to run. What the same caller ran before has ended, for it waited for it."""
        caller: threading.Thread | asyncio.Task[Any] = threading.current_thread()
        with suppress(RuntimeError):
            caller = asyncio.current_task() or caller
        with self._mutex:
            self._runs = {other: by for other, by in self._runs.items() if by is not caller}
            self._runs[thread] = caller

    def _others_run(self, thread: str) -> bool:
        """Whether graphs of other threads may be in the middle of a superstep: then nothing is saved, and a restart does more again."""
        return any(other != thread and not _over(caller) for other, caller in self._runs.items())

    def _save(self) -> None:
        operation = operations.checkpoint_save(self.dump(), FORMAT, self._lane.next_child)
        arguments = wire.encode(operation.action, operation.arguments)
        # INVARIANT: one call at a time, and no other kind of call in this lane: the next start goes on right behind the last one.
        wire.result_of(self._session.call(self._lane, operation.action, arguments))

    def _prune(self, thread: str, space: str) -> None:
        """Forget the oldest checkpoints of a thread, and what they alone need."""
        named = self.storage[thread][space]
        if self._history is None or len(named) <= self._history:
            return
        if any(self.serde.loads_typed(metadata).get(_DELTAS) for _, metadata, _ in named.values()):
            return  # channels of deltas are made again from all that went before
        for name in sorted(named)[: -self._history]:
            del named[name]
            self.writes.pop((thread, space, name), None)
        needed = {
            (channel, version)
            for checkpoint, _, _ in named.values()
            for channel, version in self.serde.loads_typed(checkpoint)["channel_versions"].items()
        }
        for place in [place for place in self.blobs if place[:2] == (thread, space)]:
            if place[2:] not in needed:
                del self.blobs[place]


@contextmanager
def saver(
    *, history: int | None = HISTORY, each_change: bool = False, patience_s: float = PATIENCE_S
) -> Generator[RingfenceSaver]:
    """Connect to the kernel that started this program, and give a checkpointer with what was saved last.

    The program must not use `agent.boot` beside it.

    Args:
        history: how many checkpoints of each thread and namespace are kept, at least 1; None: all.
        each_change: save at each change, what single tasks write too, and run with any `durability`: for programs with
            `restart: {resume: own}`, to which nothing is answered from the record.
        patience_s: how long to try when the kernel goes away, in seconds.

    Raises:
        KernelGone: not inside a sandbox, or nothing answers.
        BadCredential: the token isn't the one of this start.
        CheckpointUnreadable: what was saved is newer than this library.
    """
    session = Session(wire.settings_from_environment(), patience_s=patience_s)
    try:
        session.lanes_changed(1)
        yield RingfenceSaver(session, history, each_change=each_change)
    finally:
        session.close()
