"""What an earlier kernel left is ended and removed; where sockets lie when the data directory's path is too long."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
from pathlib import Path

from ringfence.kernel.backends import Backends
from ringfence.kernel.config import Layout
from ringfence.kernel.operations.submit import STAGING

log = logging.getLogger(__name__)


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
    for place in (*layout.run.glob("[am]*"), *(layout.data / "agents").glob(f"{STAGING}*")):
        shutil.rmtree(place, ignore_errors=True)


async def open_backends(layout: Layout, stack: contextlib.AsyncExitStack) -> Backends:
    """The backends, once nothing runs any more of what an earlier kernel started; `stack` closes them."""
    backends = Backends(layout)
    stack.push_async_callback(backends.close)
    # A kernel adopts nothing: what an earlier one left running is ended before anything else happens.
    ended = await backends.sweep()
    await asyncio.to_thread(sweep_directories, layout)
    if ended:
        log.info("ended what an earlier kernel left: %s", ", ".join(ended))
    return backends
