"""Changes that a command left in the upper layer of its overlay: read them, judge them elsewhere, apply or discard."""

from __future__ import annotations

from ringfence.sandbox.changeset import Change, ChangesError, ChangeSet
from ringfence.sandbox.overlay_apply import (
    apply_changes,
    content_of,
    discard,
    expected,
    link_target,
    sync_upper,
)
from ringfence.sandbox.overlay_read import read_changes

__all__ = [
    "Change",
    "ChangeSet",
    "ChangesError",
    "apply_changes",
    "content_of",
    "discard",
    "expected",
    "link_target",
    "read_changes",
    "sync_upper",
]
