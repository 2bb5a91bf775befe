"""Waiting awake for the database's answer: as long as it helps, and not where others want the processor. Time is counted, not passed."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop
from ringfence.kernel.journal.vigil import AWAKE_S, REST_MAX, SPAN, TAKEN_S, Ran, Vigil


class World:
    """A loop that has something to do after so many looks, on a processor that others want or not."""

    def __init__(self) -> None:
        self.answers_after, self.look_s, self.stands = 10, 2e-6, 0
        self.now, self.looks = 0.0, 0
        self.ran = Ran(0, 0)
        self.vigil = Vigil(self.ready, lambda: self.ran, lambda: self.now)

    def ready(self) -> bool:
        self.looks += 1
        self.now += self.look_s
        return self.looks >= self.answers_after

    def keep(self) -> bool:
        self.looks = 0
        self.ran = Ran(self.ran.ran + 100, self.ran.stood + self.stands)
        return self.vigil.keep()

    def until_awake(self) -> int:
        """How many waits it sleeps through."""
        for times in range(2 * REST_MAX * SPAN):
            self.keep()
            if self.looks:
                return times
        raise AssertionError("it is never done again")

    def until_asleep(self) -> int:
        for times in range(4 * SPAN):
            self.keep()
            if not self.looks:
                return times
        raise AssertionError("it never rests")


def test_it_begins_by_looking_how_crowded_it_is():
    world = World()
    assert world.until_awake() == SPAN - 1
    world = World()
    world.stands = 100
    for _ in range(10 * SPAN):
        world.keep()
        assert not world.looks


def test_it_ends_as_soon_as_there_is_something_to_do():
    world = World()
    world.until_awake()
    for _ in range(10 * SPAN):
        assert world.keep()
        assert world.looks == 10


def test_it_ends_where_nothing_comes_in_time():
    world = World()
    world.until_awake()
    world.answers_after = 10**9
    began = world.now
    assert not world.keep()
    assert AWAKE_S <= world.now - began <= AWAKE_S + 2 * world.look_s


def test_it_ends_where_somebody_else_had_the_processor():
    world = World()
    world.until_awake()
    world.look_s = 2 * TAKEN_S
    assert not world.keep()
    assert world.looks == 1


def test_it_rests_where_others_want_the_processor_and_comes_back_when_they_are_gone():
    world = World()
    world.until_awake()
    world.stands = 100
    assert world.until_asleep() <= 2 * SPAN
    for _ in range(10 * SPAN):
        world.keep()
        assert not world.looks
    world.stands = 0
    assert world.until_awake() <= REST_MAX * SPAN
    assert world.keep()


def test_it_rests_longer_each_time_that_most_of_it_was_in_vain():
    world = World()
    world.answers_after = 10**9
    rests: list[int] = []
    for _ in range(11):
        rests.append(world.until_awake())
        world.until_asleep()
    spans = [(rest + 1) // SPAN for rest in rests]
    assert spans[:4] == [1, 1, 2, 4]
    assert spans[-1] == REST_MAX


def test_there_is_none_for_a_loop_that_can_not_be_looked_at():
    loop = asyncio.new_event_loop()
    try:
        assert Vigil.of(loop) is None
    finally:
        loop.close()


@pytest.mark.parametrize(("processors", "there"), [(1, False), (2, True), (None, False)])
def test_there_is_none_with_one_processor(monkeypatch, processors, there):
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    loop = uvloop.new_event_loop()
    try:
        assert (Vigil.of(loop) is not None) is there
    finally:
        loop.close()


def test_what_comes_in_on_the_real_loop_ends_it():
    async def run() -> bool:
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        with here, there:
            await loop.create_connection(asyncio.Protocol, sock=here)
            await asyncio.get_running_loop().run_in_executor(
                None, lambda: None
            )  # it is among what is waited for
            vigil = Vigil.of(loop)
            assert vigil is not None
            while vigil._resting:
                vigil.keep()
            there.send(b"x")
            return vigil.keep()

    assert uvloop.run(run())
