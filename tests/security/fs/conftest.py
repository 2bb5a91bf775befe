from __future__ import annotations

from support.fs_fixtures import make_world, world

__all__ = ["make_world", "world"]
