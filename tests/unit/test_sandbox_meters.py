"""Many meters share a part of one processor, and none can take that of the others."""

from __future__ import annotations

import gc
import time

import pytest
from ringfence.sandbox.native import meters


class Costly(meters.Meter):
    """Takes as much processor time for a look as it is told."""

    def __init__(self, cost_s: float) -> None:
        super().__init__(1 << 30, (0.02, 0.25))
        self.cost_s = cost_s

    def measure(self) -> int:
        until = time.thread_time() + self.cost_s
        while time.thread_time() < until:
            pass
        return 0


def wait_of(meter: meters.Meter) -> float:
    before = time.monotonic()
    assert not meter.exceeded()
    return meter.due - before


@pytest.fixture(autouse=True)
def alone() -> None:
    gc.collect()


def test_one_meter_looks_as_often_as_its_bound_asks_for() -> None:
    assert wait_of(Costly(0.0)) == pytest.approx(0.25, abs=0.2)


def test_many_meters_wait_for_each_other_and_those_of_the_dead_do_not_count() -> None:
    many = [Costly(0.002) for _ in range(60)]
    for meter in many:
        meter.exceeded()
    last = Costly(0.0)
    assert wait_of(last) >= 60 * 0.002 * 10
    many.clear()
    gc.collect()
    assert wait_of(last) < 60 * 0.002 * 10


def test_one_that_costs_much_is_waited_for_a_little_only() -> None:
    slow = Costly(0.1)
    assert wait_of(slow) >= 0.5
    assert wait_of(Costly(0.0)) < 0.5
