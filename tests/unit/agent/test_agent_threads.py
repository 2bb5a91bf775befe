"""`rf.thread` and `rf.parallel`: order, errors, limits, and the end of the block."""

from __future__ import annotations

import threading

import pytest
from ringfence import agent


def test_results_come_in_order_and_the_limit_does_not_change_lanes(kernel):
    kernel.bodies["echo"] = lambda arguments: arguments
    with agent.boot() as rf:
        made = rf.parallel([lambda n=n: rf.call("echo", {"n": n})["n"] for n in range(10)], limit=2)
        assert made == list(range(10))
        assert rf.parallel([]) == []
    by_lane = {call.lane: n for n, call in enumerate(kernel.calls)}
    assert set(by_lane) == {f"0.{n}" for n in range(10)}
    for number, call in enumerate(kernel.calls):
        assert kernel.arguments(number) == {"n": int(call.lane[2:])}


def test_at_most_the_limit_run_at_once(kernel):
    mutex, running, most = threading.Lock(), set(), []
    barrier = threading.Barrier(3)

    def work() -> None:
        with mutex:
            running.add(threading.get_ident())
            most.append(len(running))
        barrier.wait()  # passes only where three run side by side
        with mutex:
            running.discard(threading.get_ident())

    with agent.boot() as rf:
        rf.parallel([work] * 9, limit=3)
    assert max(most) == 3


def test_the_first_error_in_order_is_raised_after_all_ended(kernel, refusal):
    ended = []

    def deny(arguments):
        raise refusal("Denied", f"no {arguments['n']}")

    kernel.bodies["echo"] = deny
    with agent.boot() as rf:

        def work(n: int) -> None:
            try:
                rf.call("echo", {"n": n}) if n % 2 else rf.now()
            finally:
                ended.append(n)

        with pytest.raises(agent.Denied, match="no 1") as caught:
            rf.parallel([lambda n=n: work(n) for n in range(5)])
    assert sorted(ended) == [0, 1, 2, 3, 4]
    assert caught.value.__notes__ == ["lane `0.3` failed as well: Denied: no 3"]


def test_a_thread_gives_its_result_or_its_error(kernel):
    gate = threading.Event()
    with agent.boot() as rf:
        worker = rf.thread(lambda a, *, b: (gate.wait(), a + b)[1], 1, b=2)
        assert worker.lane == "0.0"
        assert not worker.done
        with pytest.raises(TimeoutError, match=r"`0\.0` is still running"):
            worker.result(timeout=0.01)
        gate.set()
        assert worker.result() == 3
        with pytest.raises(ZeroDivisionError):
            rf.thread(lambda: 1 // 0).result()


def test_the_end_of_the_block_waits_for_threads_and_theirs(kernel):
    with agent.boot() as rf:

        def outer() -> None:
            rf.now()
            rf.thread(lambda: [rf.now() for _ in range(3)])

        rf.thread(outer)
    assert sorted(kernel.places()) == [("0.0", 0), ("0.0.0", 0), ("0.0.0", 1), ("0.0.0", 2)]


def test_a_thread_of_the_program_itself_is_told_how(kernel):
    caught: list[Exception] = []
    with agent.boot() as rf:

        def call() -> None:
            try:
                rf.now()
            except agent.NoLane as error:
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert "rf.thread" in str(caught[0])
    assert kernel.calls == []
