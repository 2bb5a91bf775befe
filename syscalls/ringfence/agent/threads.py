"""Threads with lanes: `rf.thread` and `rf.parallel`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ringfence.agent.lanes import Lane, ThreadLanes

T = TypeVar("T")
WORKERS: Final = 16


class Worker(Generic[T]):
    """A function under way in a thread of its own.

    Attributes:
        lane: id of its lane, as `ringfence steps` shows it.
    """

    def __init__(self, lanes: ThreadLanes, lane: Lane, function: Callable[[], T]) -> None:
        self._lanes = lanes
        self._lane = lane
        self._function = function
        self._value: T
        self._error: BaseException | None = None
        self._over = threading.Event()
        self.lane = lane.id
        lanes.running.add(lane)

    def start(self) -> Worker[T]:
        """Start it in a new thread."""
        # Counted before it runs: until then nobody may think that the others are all there are.
        self._lanes.count(1)
        try:
            threading.Thread(target=self._alone, name=f"ringfence-{self.lane}", daemon=True).start()
        except BaseException:
            self._lanes.count(-1)
            raise
        return self

    def _alone(self) -> None:
        try:
            self.run()
        finally:
            self._lanes.count(-1)

    def run(self) -> None:
        """Do it in the calling thread."""
        self._lanes.enter(self._lane)
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - `result` raises it again
            self._error = error
        finally:
            self._lanes.leave()
            self._lanes.running.remove(self._lane)
            self._over.set()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end, `timeout` seconds at most; gives whether it has ended."""
        if self._over.is_set():
            return True
        with self._lanes.joining():
            return self._over.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """Wait for its end and give what it returned, or raise what it raised.

        Raises:
            TimeoutError: it is still running after `timeout` seconds.
        """
        if not self.join(timeout):
            raise TimeoutError(f"lane `{self.lane}` is still running after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value


class Threads:
    """All threads of one program."""

    def __init__(self, lanes: ThreadLanes) -> None:
        self._lanes = lanes
        self._mutex = threading.Lock()
        self._workers: list[Worker[Any]] = []

    def thread(self, function: Callable[[], T]) -> Worker[T]:
        """Start a function in a thread with the next child lane of the caller."""
        worker = Worker(self._lanes, self._lanes.current().child(), function)
        with self._mutex:
            self._workers = [other for other in self._workers if not other.done]
            self._workers.append(worker)
        return worker.start()

    def parallel(self, functions: Iterable[Callable[[], T]], limit: int) -> list[T]:
        """Run functions side by side, at most `limit` at a time, and give their results in order.

        Lanes are given out before the first one starts, so the limit doesn't change them.
        """
        parent = self._lanes.current()
        workers = [Worker(self._lanes, parent.child(), function) for function in functions]
        waiting = iter(workers)
        mutex = threading.Lock()

        def drain() -> None:
            try:
                while True:
                    with mutex:
                        worker = next(waiting, None)
                    if worker is None:
                        return
                    worker.run()
            finally:
                self._lanes.count(-1)

        helpers = [
            threading.Thread(target=drain, name="ringfence-parallel", daemon=True)
            for _ in range(min(max(1, limit), len(workers)))
        ]
        self._lanes.count(len(helpers))
        for started, helper in enumerate(helpers):
            try:
                helper.start()
            except BaseException:
                self._lanes.count(started - len(helpers))
                raise
        for worker in workers:
            worker.join()
        return _results(workers)

    def join(self) -> None:
        """Wait for all that `thread` started, those started meanwhile as well."""
        while True:
            with self._mutex:
                worker = next((worker for worker in self._workers if not worker.done), None)
            if worker is None:
                return
            worker.join()


def _results(workers: list[Worker[T]]) -> list[T]:
    errors = list[tuple[str, BaseException]]()
    results = list[T]()
    for worker in workers:
        try:
            results.append(worker.result())
        except BaseException as error:  # noqa: BLE001 - raised below, when all have ended
            errors.append((worker.lane, error))
    if not errors:
        return results
    first = errors[0][1]
    for lane, error in errors[1:]:
        first.add_note(f"lane `{lane}` failed as well: {type(error).__name__}: {error}")
    raise first
