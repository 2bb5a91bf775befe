"""A scripted agent, cut before and after each of its calls: what it leaves is what an uncut one leaves.

And that this would be seen if it weren't so: the same runs without journal and checkpoint, started anew, are caught.
`python -m bench.faults --full` runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cuts import PLACES, Cuts, ablation, cuts, orders

pytestmark = [
    pytest.mark.fault,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def scene() -> Iterator[Cuts]:
    with cuts() as made:
        yield made


@pytest.mark.parametrize(("victim", "places"), [("agent", PLACES[::2]), ("kernel", PLACES[1::2])])
def test_a_cut_run_leaves_what_an_uncut_one_leaves(scene: Cuts, victim: str, places: tuple[str, ...]) -> None:
    runs = orders(victim, places)
    scene.cut(victim, runs)
    found = scene.judge(runs)
    assert found.well, found


def test_without_resuming_every_run_that_was_begun_is_caught(scene: Cuts) -> None:
    resumed, anew = ablation(full=False)
    half = len(resumed) // 2
    scene.cut("agent", [*resumed[:half], *anew[:half]])
    scene.cut("kernel", [*resumed[half:], *anew[half:]])
    assert scene.judge(resumed).well
    caught = scene.judge(anew)
    # Nothing had been done at the first place: only there starting anew is as good.
    assert len(caught.repeated) == len([run for run in anew if run.place != PLACES[0]]) > 0
    assert not caught.lost
