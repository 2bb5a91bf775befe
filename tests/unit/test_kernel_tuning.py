"""Memory is given back when many agents have come to rest, and not for a few."""

from __future__ import annotations

import asyncio

import pytest
from ringfence.kernel import tuning
from ringfence.kernel.journal.copyrows import forget_words
from ringfence.kernel.tuning import MANY, Rests, give_back


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(tuning, "QUIET_S", 0.0)
    return []


async def quiet() -> None:
    """All that was to be done at once has been done."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(0, over.set)
    await over.wait()
    await asyncio.sleep(0)


async def test_many_that_came_to_rest_are_tidied_up_after_once(forgotten: list[int]) -> None:
    rests = Rests(lambda: forgotten.append(1))
    for _ in range(MANY):
        rests.one_more()
    await quiet()
    assert forgotten == [1]
    rests.one_more()
    await quiet()
    assert forgotten == [1]


async def test_few_that_come_one_by_one_count_together(forgotten: list[int]) -> None:
    rests = Rests(lambda: forgotten.append(1))
    for _ in range(MANY - 1):
        rests.one_more()
        await quiet()
    assert forgotten == []
    rests.one_more()
    await quiet()
    assert forgotten == [1]


async def test_cycles_of_those_that_rest_are_gone(forgotten: list[int]) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            forgotten.append(2)

    rests = Rests(forget_words)
    Cycle()
    for _ in range(MANY):
        rests.one_more()
    await quiet()
    assert forgotten == [2]


def test_free_memory_is_given_back_or_nothing_is_done() -> None:
    give_back()
