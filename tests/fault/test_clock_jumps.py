"""The host's clock is set by hours and years, ahead and back, while agents work and kernels die: no harm is done."""

from __future__ import annotations

import pytest
from support.clocks import JUMPS, clock_storm

pytestmark = [
    pytest.mark.fault,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def test_nothing_is_repeated_and_nothing_lost_when_the_clock_jumps() -> None:
    with clock_storm(seed=3) as storm:
        found = storm.run(len(JUMPS))
        assert storm.jumps == len(JUMPS)
        assert found.well, found
