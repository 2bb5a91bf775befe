"""Directories of sockets: where they lie when the data directory's path is too long, and that none of them stays."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from ringfence.kernel.config import Layout
from ringfence.kernel.operations.submit import STAGING


def short_run_dir(data: Path) -> Path:
    """A place for sockets of a data directory whose own path is too long for them."""
    name = hashlib.sha256(os.fsencode(data)).hexdigest()[:12]
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - its owner is checked
    return Path(base) / f"ringfence-{os.geteuid()}-{name}"


def remove_run(layout: Layout) -> None:
    """Remove the sockets' directory, and what agents' ends have left in it."""
    shutil.rmtree(layout.run, ignore_errors=True)


def sweep_directories(layout: Layout) -> None:
    """Remove what a dead kernel left: directories of sockets, and submissions that were on their way."""
    for place in (*layout.run.glob("a*"), *(layout.data / "agents").glob(f"{STAGING}*")):
        shutil.rmtree(place, ignore_errors=True)
