"""Fixtures over `fs_world`, for the tests of files wherever they stand."""

from __future__ import annotations

import pytest
from support.fs_world import World


@pytest.fixture
def make_world(tmp_path):
    """Makes worlds with rules of the test's own."""
    made = []

    def make(**rules):
        base = tmp_path / f"w{len(made)}"
        base.mkdir()
        made.append(World(base, **rules))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world):
    return make_world()
