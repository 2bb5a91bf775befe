"""The one table of what the suite runs over: how each backend is made, why it may be missing here, what to expect of it.

A new backend is one entry in `KINDS`. This file is also read by `backend_host.py`, maybe with an ordinary user's Python:
nothing but the standard library and, inside functions, `ringfence.sandbox`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Processes of pytest beside each other have users of their own: some limits count what a user has on the whole host.
UIDS_ON = 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
ORDINARY_UID = 47110 + UIDS_ON
AGENT_UID = 247110 + UIDS_ON
RANGED_USER = "ringfence-ci"
"""An ordinary user with ranges of sub-uids, as .ci/run makes it."""
PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""
"""An interpreter that every user can run, here and inside."""

_ROOT = os.geteuid() == 0


OF_ONE_MODE = {"test_sandbox_subuid": "subuid"}
"""Test modules that say something about one mode only."""


def _yes() -> str:
    return ""


def _alone(_: Path) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _nothing(_: Path) -> list[str]:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One backend in one mode.

    Attributes:
        backend: as `Sandbox.name` has it.
        make: from a kernel's data directory to the backend. Runs in `backend_host.py`.
        missing: why a component that it needs is not here: the tests are skipped, and fail where CI=true. Empty: it is here.
        unsuited: why the user that runs the tests can't have it: skipped everywhere. Empty: suited.
        kernel_uid: the user of the process that owns the backend; None: the one who runs the tests.
        agent_uid: the uid that specs ask for; it owns workspaces and images.
        inside_uid: the uid that a program sees of itself.
        frozen: a paused program can't run for a moment, whatever it did before.
        walls: names that `walls()` has at least.
        fences: of the kernels of a data directory only the latest is served.
        stride: of the points of a crash every so many is tried; more where a life takes long.
        left: what is left on this host of the sandboxes of a data directory, besides processes that carry a test's token:
            records, control groups, containers. Empty as long as nothing runs.
        pace: how many starts of the native backend one of this takes: tests of very many do with so much less of them.
        pool: how many connections to an engine it may keep open for the next calls.
        warm: Python programs of tests are such that the backend has an interpreter warm for them.
        only: test modules that this mode tells something about; empty: all.
        without: programs of this host that its sandboxes have not.
        uid_forms: in which the wall `uid` may stand.
        of_its_own: what stands in /, /etc and /dev besides what the protocol names.
        around: what runs beside the kernels of a data directory, from before the first to after the last.
    """

    backend: str
    make: Callable[[Path], Any]
    missing: Callable[[], str] = _yes
    unsuited: Callable[[], str] = _yes
    kernel_uid: int | None = None
    agent_uid: int | None = None
    inside_uid: int
    frozen: bool
    walls: frozenset[str]
    fences: bool = False
    stride: int = 1
    left: Callable[[Path], list[str]] = _nothing
    pace: int = 1
    pool: int = 0
    warm: bool = False
    only: frozenset[str] = frozenset()
    uid_forms: frozenset[str] = frozenset({"own"} if _ROOT else {"sub", "namespace"})
    without: frozenset[str] = frozenset()
    of_its_own: frozenset[str] = frozenset()
    around: Callable[[Path], contextlib.AbstractContextManager[None]] = _alone

    @property
    def owner_uid(self) -> int | None:
        """Who owns what a sandbox may read and change; None: whoever runs the tests."""
        return self.kernel_uid if self.agent_uid is None else self.agent_uid


def _native(data: Path) -> Any:
    from ringfence.sandbox.native import NativeSandbox

    return NativeSandbox(data)


def _remote(data: Path) -> Any:
    from ringfence.sandbox.remote.backend import RemoteSandbox
    from ringfence.sandbox.remote.link import RemoteSettings

    told = json.loads((data / "elsewhere.json").read_text())
    return RemoteSandbox(data, RemoteSettings(address=told["address"], certs=Path(told["certs"])))


@contextlib.contextmanager
def _elsewhere(data: Path) -> Iterator[None]:
    """A sandbox host in other namespaces, where no path of this host's is valid."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support import elsewhere

    with elsewhere.running(data.with_name("elsewhere")) as machine:
        told = {"address": machine.address, "certs": str(machine.certs), "pid": machine.pid}
        (data / "elsewhere.json").write_text(json.dumps(told))
        yield


def _records_elsewhere(data: Path) -> list[str]:
    """Records and directories of sandboxes in the file system of the sandbox host."""
    told = json.loads((data / "elsewhere.json").read_text())
    there = Path("/proc", str(told["pid"]), "root", "tmp/server/data")
    found = [*_records(there), *there.glob("kernels/*/*/run/*"), *there.glob("kernels/*/*/scratch/*")]
    return sorted(map(str, found))


def _records(data: Path) -> list[str]:
    return sorted(path.name for path in (data / "sandboxes").glob("*.json*"))


def _for_root() -> str:
    return "" if _ROOT else "only root can give each agent a uid of its own"


def _needs_python() -> str:
    return "" if PYTHON or not _ROOT else "an ordinary user needs a Python below /usr; install python3"


def _only_as_root() -> str:
    return "" if _ROOT else "the mode `user` is this one already where who runs the tests has sub-uids"


def _ranged() -> int | None:
    try:
        return pwd.getpwnam(RANGED_USER).pw_uid
    except KeyError:
        return None


def _subuid_missing() -> str:
    if missing := _needs_python():
        return missing
    if not (shutil.which("newuidmap") and shutil.which("newgidmap")):
        return "newuidmap and newgidmap are not installed: Debian's package `uidmap` has them"
    for table in ("/etc/subuid", "/etc/subgid"):
        lines = Path(table).read_text().splitlines() if Path(table).exists() else []
        if not any(line.startswith(f"{RANGED_USER}:") for line in lines):
            return f"{table} has no range for a user `{RANGED_USER}`"
    return "" if _ranged() is not None else f"there is no user `{RANGED_USER}`"


def _docker(data: Path) -> Any:
    from ringfence.sandbox.docker import DockerSandbox, DockerSettings

    return DockerSandbox(data, DockerSettings(image=_docker_image()))


def _docker_image() -> str:
    from ringfence.sandbox.docker import image
    from ringfence.sandbox.docker.engine import Engine, usual_host

    return image.find(Engine(usual_host()), image.TAG)


def _docker_missing() -> str:
    from ringfence.sandbox.types import SandboxError

    try:
        return "" if _docker_image() else "there is no base image on the engine: ringfence image build"
    except SandboxError as error:
        return str(error)


def _docker_left(data: Path) -> list[str]:
    """Containers and volumes of a data directory, and the links with containers."""
    from ringfence.sandbox.docker.engine import Engine, usual_host
    from ringfence.sandbox.docker.places import LABEL_DATA, Places

    places = Places(data)
    if not places.used():
        return []
    wanted = {"label": f"{LABEL_DATA}={places.data()}"}
    engine = Engine(usual_host())
    containers = engine.ask(lambda api: api.containers(all=True, filters=wanted))
    volumes = engine.ask(lambda api: api.volumes(filters=wanted))["Volumes"] or []
    links = (data / "sandboxes" / "docker" / "links").iterdir()
    return [
        *(one["Id"] for one in containers),
        *(one["Name"] for one in volumes),
        *(path.name for path in links),
    ]


_NATIVE_WALLS = frozenset(
    {
        "seccomp",
        "files",
        "overlay",
        "no_new_privs",
        "memory",
        "pids",
        "cpu",
        "pause",
        "uid",
    }
)

KINDS = {
    "root": Kind(
        backend="native",
        make=_native,
        unsuited=_for_root,
        agent_uid=AGENT_UID,
        inside_uid=AGENT_UID,
        frozen=True,
        walls=_NATIVE_WALLS,
        left=_records,
    ),
    "user": Kind(
        backend="native",
        make=_native,
        missing=_needs_python,
        kernel_uid=ORDINARY_UID if _ROOT else None,
        inside_uid=1000,
        frozen=False,
        walls=_NATIVE_WALLS | {"user namespaces"},
        left=_records,
        uid_forms=frozenset({"namespace"} if _ROOT else {"sub", "namespace"}),
    ),
    "subuid": Kind(
        backend="native",
        make=_native,
        unsuited=_only_as_root,
        missing=_subuid_missing,
        kernel_uid=_ranged(),
        inside_uid=1000,
        frozen=False,
        walls=_NATIVE_WALLS | {"user namespaces"},
        left=_records,
        pace=8,
        only=frozenset(
            f"test_sandbox_{name}"
            for name in ("cycles", "demands", "lifecycle", "limits", "signals", "subuid", "sweep", "walls")
        ),
        uid_forms=frozenset({"sub"}),
    ),
    "warm": Kind(
        backend="native",
        make=_native,
        agent_uid=AGENT_UID if _ROOT else None,
        inside_uid=AGENT_UID if _ROOT else 1000,
        frozen=_ROOT,
        walls=_NATIVE_WALLS,
        left=_records,
        stride=8,
        warm=True,
        only=frozenset(
            f"test_sandbox_{name}"
            for name in ("cancel", "crash", "cycles", "lifecycle", "limits", "machine", "signals", "streams")
        ),
    ),
    "docker": Kind(
        backend="docker",
        make=_docker,
        missing=_docker_missing,
        agent_uid=AGENT_UID if _ROOT else None,
        inside_uid=AGENT_UID if _ROOT else os.geteuid(),
        frozen=True,
        pace=8,
        pool=32,
        stride=8,
        walls=frozenset(
            {
                "docker engine",
                "docker image",
                "memory",
                "namespaces",
                "no_new_privs",
                "overlay",
                "pids",
                "seccomp",
            }
        ),
        left=_docker_left,
        without=frozenset({"gcc", "node", "perl"}),
        # An engine mounts /sys, of which nothing shows, an empty list of name servers, terminals, message queues that the
        # filter refuses, a link to a masked file, and leaves a file that says that this is a container.
        of_its_own=frozenset(
            {".dockerenv", "core", "hostname", "mqueue", "ptmx", "pts", "resolv.conf", "sys", "tty"}
        ),
    ),
    "remote": Kind(
        backend="remote",
        make=_remote,
        agent_uid=AGENT_UID if _ROOT else None,
        inside_uid=400_000 if _ROOT else 1000,
        frozen=_ROOT,
        walls=_NATIVE_WALLS | {"mutual tls"},
        fences=True,
        stride=12,
        left=_records_elsewhere,
        around=_elsewhere,
    ),
}
