"""Places hold what a dictionary of records would, in a few bytes each."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.places import GAP_MAX, Held, Places

LANES = ("0", "0.0", "call-1")
STEPS = st.one_of(st.integers(0, 40), st.sampled_from([GAP_MAX - 1, GAP_MAX + 2, 5 * GAP_MAX, (1 << 31) - 1]))
HELD = st.builds(Held, st.integers(1, 1 << 40), st.integers(1, 1 << 62), st.booleans(), st.booleans())


@given(st.lists(st.tuples(st.sampled_from(LANES), STEPS, st.none() | HELD), max_size=60))
def test_places_are_as_a_dictionary(orders: list[tuple[str, int, Held | None]]) -> None:
    places, model = Places(), dict[tuple[str, int], Held]()
    for lane, step, held in orders:
        if held is None:
            assert places.pop((lane, step)) == model.pop((lane, step), None)
        else:
            places.put((lane, step), held)
            model[lane, step] = held
        assert dict(places.items()) == model
        assert set(places) == set(model)
        assert places.get((lane, step)) == model.get((lane, step))
        assert ((lane, step) in places) == ((lane, step) in model)


def test_a_hundred_thousand_steps_are_less_than_three_megabytes() -> None:
    places = Places()
    for step in range(100_000):
        places.put(("0", step), Held(step + 1, 2 * step, False, False))
    lane = places._lanes["0"]
    assert sum(map(sys.getsizeof, (lane.steps, lane.positions, lane.flags))) < 3_000_000
