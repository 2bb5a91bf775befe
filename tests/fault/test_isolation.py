"""Transactions of many agents on two kernels, with kills, are as if they had run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ringfence.agent import Conflict
from support.isolation import Lists, lists

pytestmark = [
    pytest.mark.fault,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def scene() -> Iterator[Lists]:
    with lists() as made:
        yield made


def test_who_only_reads_sees_one_state(scene: Lists) -> None:
    """Two keys that are only ever changed together: a block that saw one before and one after the change must fail."""
    one = scene.scenes[0].hold(allow=['state.get: "**"'])
    two = scene.scenes[1].hold(allow=['state.*: "**"'])
    for key in ("pair/left", "pair/right"):
        two.rf.state.put(key, 1)

    def change() -> None:
        with two.rf.state.transaction() as writing:
            for key in ("pair/left", "pair/right"):
                writing.put(key, writing.get(key) + 1)

    def read(meanwhile: Callable[[], None], *keys: str) -> None:
        with one.rf.state.transaction() as reading:
            seen.append(reading.get(keys[0]))
            meanwhile()
            seen.append(reading.get(keys[1]))

    seen = list[int]()
    try:
        one.refused(Conflict, lambda: read(change, "pair/left", "pair/right"))
        # And one key that is read twice.
        one.refused(Conflict, lambda: read(change, "pair/left", "pair/left"))
        assert seen == [1, 2, 2, 3]
        read(lambda: None, "pair/left", "pair/right")
        assert seen[4:] == [3, 3]
    finally:
        for made in scene.scenes:
            made.release()


def test_transactions_are_serialisable_under_kills(scene: Lists) -> None:
    assert scene.run(7, agents=6, transactions=12, strikes=6) == []


def test_the_checker_sees_what_bare_reads_and_writes_lose(scene: Lists) -> None:
    """The control: the same work without transactions."""
    found = scene.run(8, agents=6, transactions=12, strikes=0, isolated=False)
    assert any(text.startswith(("lost", "cycle")) for text in found)
