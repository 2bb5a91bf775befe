"""The kill matrix, at a size that fits CI: SIGKILL from outside at every named failpoint, for every recovery class.

All of it runs with `python -m bench.faults --full`; the machinery is the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import matrix
from support.jobs import ACTIONS, POINTS, kind_of, passes
from support.matrix import Column, Ground
from support.victims import kill_all, zygotes

pytestmark = [
    pytest.mark.fault,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

CELLS = [
    *(("kernel", "fresh", point) for point in POINTS),
    *(("agent", "fresh", point) for point in POINTS),
    ("sandboxes", "fresh", "before_outcome"),
    ("database", "fresh", "before_intent"),
    ("database", "fresh", "before_outcome"),
    ("kernel", "replaying", "before_effect"),
    ("sandboxes", "replaying", "after_intent"),
    ("kernel", "takeover", "before_effect"),
    ("database", "takeover", "before_outcome"),
]


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with matrix.ground() as made:
        yield made


@pytest.mark.parametrize(("victim", "mode", "point"), CELLS)
def test_nothing_is_repeated_and_nothing_lost(ground: Ground, victim: str, mode: str, point: str) -> None:
    """C34: once where the target takes keys or can be asked, else `unknown`; never again in silence."""
    found = Column(ground, victim, point, mode).run()
    assert found.well, found
    if victim == "kernel" and mode != "replaying":
        # What can't be known is reported: each of these calls, and no other.
        kinds = [name for name in ACTIONS if kind_of(name) == "unknown" and passes(name, point)]
        assert len(found.unknown) == (len(kinds) if point in matrix.UNSURE else 0)


def test_new_sandboxes_come_from_a_new_zygote(ground: Ground) -> None:
    """The last kernel of the matrix: what forks its sandboxes dies, and nobody notices."""
    assert kill_all(zygotes(ground.kernel)) > 0
    assert Column(ground, "agent", "after_outcome", "zygote").run().well
