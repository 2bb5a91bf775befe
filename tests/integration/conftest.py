"""Embedded servers in processes of their own, as this user or another one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPOSITORY = Path(__file__).parents[2]
PORTIONS = ("kernel", "policy", "sandbox", "syscalls", "proto")
NOBODY = 65534


class Child:
    """One such process."""

    def __init__(self, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    def hear(self) -> dict[str, Any]:
        """The next thing it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate()
            pytest.fail(f"the child said nothing: {errors}")
        return json.loads(line)

    def stop(self) -> dict[str, Any]:
        """Asks it to stop its server, and waits."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        said = self.hear()
        self.process.communicate()
        return said

    def end(self) -> None:
        """Ends it by force if it is still there."""
        self.process.kill()
        self.process.communicate()


class Children:
    """Starts them, and ends them after the test."""

    def __init__(self) -> None:
        self._all: list[Child] = []
        self._made: list[Path] = []

    def start(self, data_dir: Path, *, wrap: Sequence[str] = (), env: dict[str, str] | None = None) -> Child:
        """Starts one as this user, with this interpreter."""
        program = Path(__file__).with_name("postgres_child.py")
        return self._add(Child([*wrap, sys.executable, str(program), str(data_dir)], env))

    def start_as(self, uid: int, data_dir: Path) -> Child:
        """Starts one as another user, who need not be able to reach this repository."""
        public = Path(tempfile.mkdtemp(prefix="rf-public-", dir="/tmp"))
        self._made.append(public)
        public.chmod(0o755)
        (public / "repository").mkdir()
        (public / "packages").mkdir()
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        paths = [public / "repository" / name for name in PORTIONS] + [public / "packages"]
        script = (
            'mount --bind "$1" "$5/repository" && mount --bind "$2" "$5/packages" && '
            'exec setpriv --reuid="$3" --regid="$3" --clear-groups '
            'env -i PATH=/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$4" '
            '"$6" "$5/repository/tests/integration/postgres_child.py" "$7"'
        )
        python_path = ":".join(map(str, paths))
        words = (REPOSITORY, packages, uid, python_path, public, interpreter_for_all(), data_dir)
        argv = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", *map(str, words)]
        return self._add(Child(argv))

    def _add(self, child: Child) -> Child:
        self._all.append(child)
        return child

    def end(self) -> None:
        """Ends what is left."""
        for child in self._all:
            child.end()
        for path in self._made:
            shutil.rmtree(path)


def interpreter_for_all() -> str:
    """A Python of this very version that any user can run."""
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
    # Through env: setpriv itself still has root's reach when it executes.
    nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env"]
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in (
        sys.executable,
        *(f"{place}/python{wanted}" for place in ("/usr/bin", "/usr/local/bin")),
    ):
        argv = [*nobody, candidate, "-S", "-c", code]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == wanted:
            return candidate
    missing = f"no Python {wanted} that another user can run: install one in /usr/bin"
    return pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)


@pytest.fixture
def children() -> Iterator[Children]:
    """Starts servers in processes of their own."""
    made = Children()
    yield made
    made.end()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path is short enough for a socket, and that any user may pass through."""
    path = Path(tempfile.mkdtemp(prefix="rf-t-", dir="/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def as_root() -> None:
    """Skips a test that only root can make: one that becomes other users, or mounts."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user or mount")
