"""What a warm interpreter rehearses is what a program does: it works, and it leaves nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ringfence.agent import rehearsal


def _open() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_a_rehearsal_goes_through_and_leaves_nothing_open() -> None:
    rehearsal.rehearse()
    before = _open()
    environment, threads = dict(os.environ), threading.active_count()
    for _ in range(3):
        rehearsal.rehearse()
    assert _open() == before
    assert threading.active_count() == threads
    assert dict(os.environ) == environment
