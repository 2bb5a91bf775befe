"""Which user of the host a sandbox's processes are."""

from __future__ import annotations


def form(uid: int | None) -> str:
    """The form of the wall `uid` for a sandbox.

    Args:
        uid: as in `Job`.
    """
    return "namespace" if uid is None else "own"
