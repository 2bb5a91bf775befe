from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "unit" / "fs" / "world.py"


def _load():
    """Load the helper once under a name of its own: test directories are no packages."""
    if "fs_world" not in sys.modules:
        spec = importlib.util.spec_from_file_location("fs_world", _PATH)
        module = importlib.util.module_from_spec(spec)
        sys.modules["fs_world"] = module
        spec.loader.exec_module(module)
    return sys.modules["fs_world"]


_load()


@pytest.fixture
def make_world(tmp_path):
    """Makes worlds with rules of the test's own."""
    made = []

    def make(**rules):
        from fs_world import World

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
