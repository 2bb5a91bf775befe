"""Lanes: which concurrent task of the program a call belongs to.

INVARIANT: a lane's id follows from the order in which its ancestors created tasks and from nothing else, so
that a program started again meets its own journaled calls, however its tasks interleave. A lane is used by
one thread or one task only.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ringfence.agent.errors import InvalidRequest, NoLane

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

ROOT: Final = "0"


class Lane:
    """One concurrent task's numbering.

    Attributes:
        id: `0` for the main task, else the parent's id, a dot and the creation index.
        next_step: number of its next call.
        next_child: creation index of its next child.
    """

    __slots__ = ("id", "next_child", "next_step")

    def __init__(self, lane: str = ROOT, *, next_step: int = 0, next_child: int = 0) -> None:
        self.id = lane
        self.next_step = next_step
        self.next_child = next_child

    def child(self) -> Lane:
        """Create the next child lane."""
        lane = Lane(f"{self.id}.{self.next_child}")
        self.next_child += 1
        return lane


class Running:
    """The child lanes that haven't ended. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._lanes: dict[str, None] = {}

    def add(self, lane: Lane) -> None:
        """Count a lane in."""
        with self._mutex:
            self._lanes[lane.id] = None

    def remove(self, lane: Lane) -> None:
        """Count a lane out."""
        with self._mutex:
            self._lanes.pop(lane.id, None)

    def first(self) -> str | None:
        """Give the lane that has run longest, None where there is none."""
        with self._mutex:
            return next(iter(self._lanes), None)


def check_quiet(lane: Lane, running: Running) -> None:
    """See that a checkpoint may be saved from here.

    A restart from the checkpoint gives new tasks new lanes: what a task under way had done would be done
    again.

    Raises:
        InvalidRequest: not the main task, or other tasks are still running.
    """
    if lane.id != ROOT:
        raise InvalidRequest(
            f"lane `{lane.id}` can't save a checkpoint: save it from the main task, after joining the others"
        )
    other = running.first()
    if other is not None:
        raise InvalidRequest(
            f"lane `{other}` is still running: join it before `checkpoint.save`, or it would run twice"
        )


class ThreadLanes:
    """Lanes of threads. `enter` binds one to the calling thread."""

    def __init__(self, root: Lane) -> None:
        self._here = threading.local()
        self._here.lane = root
        self.root = root
        self.running = Running()
        self._mutex = threading.Lock()
        self._live = 1
        self.on_change: Callable[[int], None] | None = None

    def count(self, more: int) -> None:
        """Count lanes that go on: one that waits for another lane doesn't, for the other's calls hold it."""
        with self._mutex:
            self._live += more
            if self.on_change is not None:
                self.on_change(self._live)

    @contextmanager
    def joining(self) -> Generator[None]:
        """The calling thread's lane waits for another one inside. A thread without a lane doesn't count anyway."""
        counted = getattr(self._here, "lane", None) is not None
        if counted:
            self.count(-1)
        try:
            yield
        finally:
            if counted:
                self.count(1)

    def current(self) -> Lane:
        """Give the calling thread's lane.

        Raises:
            NoLane: the thread wasn't started by `rf.thread` or `rf.parallel`.
        """
        try:
            return self._here.lane
        except AttributeError:
            name = threading.current_thread().name
            raise NoLane(
                f"thread `{name}` has no lane: start it with `rf.thread(…)` or `rf.parallel([…])`"
            ) from None

    def enter(self, lane: Lane) -> None:
        """Bind a lane to the calling thread."""
        self._here.lane = lane

    def leave(self) -> None:
        """Unbind the calling thread."""
        del self._here.lane


class TaskLanes:
    """Lanes of asyncio tasks: a task factory gives each new task the next child lane of its creator."""

    def __init__(self, root: Lane) -> None:
        self._lanes: weakref.WeakKeyDictionary[asyncio.Task[Any], Lane] = weakref.WeakKeyDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._previous: Callable[..., Any] | None = None
        self.root = root
        self.running = Running()

    def install(self) -> None:
        """Make the calling task the main one and give lanes to all tasks created from now on."""
        task = asyncio.current_task()
        if task is None:
            raise NoLane("`agent.boot_async()` was not entered in a task: use `asyncio.run(main())`")
        self._lanes[task] = self.root
        self._loop = asyncio.get_running_loop()
        self._previous = self._loop.get_task_factory()
        self._loop.set_task_factory(self._create)

    def uninstall(self) -> None:
        """Stop giving lanes; those given stay with their tasks."""
        if self._loop is not None and self._loop.get_task_factory() == self._create:
            self._loop.set_task_factory(self._previous)

    def busy(self, waiting: frozenset[str]) -> int:
        """Count tasks that can go on by themselves, besides those whose lane waits in a call.

        One that waits for anything inside the program doesn't: some other task, or a call, holds it.
        """
        return sum(
            1
            for task, lane in self._lanes.items()
            if lane.id not in waiting and not task.done() and getattr(task, "_fut_waiter", None) is None
        )

    def current(self) -> Lane:
        """Give the calling task's lane.

        Raises:
            NoLane: the task was created before `boot_async`, or by a callback of the event loop.
        """
        task = asyncio.current_task()
        lane = None if task is None else self._lanes.get(task)
        if lane is None:
            name = "" if task is None else f" `{task.get_name()}`"
            raise NoLane(
                f"task{name} has no lane: create it from a task inside the `agent.boot_async()` block"
            )
        return lane

    def _create(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Future[Any]:
        creator = asyncio.current_task(loop)
        parent = None if creator is None else self._lanes.get(creator)
        make = self._previous or _plain_task
        task: asyncio.Future[Any] = make(loop, coroutine, **options)
        if parent is not None and isinstance(task, asyncio.Task):
            lane = parent.child()
            self._lanes[task] = lane
            self.running.add(lane)
            task.add_done_callback(lambda _: self.running.remove(lane))
        return task


def _plain_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coroutine, loop=loop, **options)
