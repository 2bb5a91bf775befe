"""Kills at instants that nobody chose; `python -m bench.faults --full` does thousands."""

from __future__ import annotations

import pytest
from support.instants import Storm
from support.matrix import ground

pytestmark = [
    pytest.mark.fault,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def test_nothing_is_repeated_and_nothing_lost_at_random_instants() -> None:
    with ground() as made:
        found = Storm(made, seed=20).run(12)
        assert found.well, found
