"""Control groups, version 1 and 2, each controller on its own: whatever this host permits is used.

Groups are made below the kernel's own, so that limits around the kernel hold for its agents too, or as near to it as this
host permits (`unified` for version 2). Their names begin with a mark of the data directory, so that a later kernel finds
those that no record names.
"""

# The warden works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH102, PTH103, PTH106, PTH110, PTH116, PTH208

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from ringfence.sandbox.native import unified
from ringfence.sandbox.native.identity import parent as parent_of
from ringfence.sandbox.native.unified import SHARED, Files

GONE = frozenset({errno.ENOENT, errno.ENODEV})
"""Of a group that its own warden may be removing: a file of one can't be found then, or not be used."""
CONTROLLERS = ("memory", "pids", "cpu", "freezer")
_SWITCHES = {
    "memory": "memory.limit_in_bytes",
    "pids": "pids.max",
    "cpu": "cpu.cfs_quota_us",
    "freezer": "freezer.state",
}
_CPU_PERIOD_US = 100_000
_FREEZE_TRIES = 2000
_REMOVE_TRIES = 500
_MAKE_TRIES = 5
_PAUSE_S = 0.001
_MARK_CHARS = 12
_ANCESTORS_MOST = 64
_FILES = Files()
_read, _write = _FILES.read, _FILES.write


def label(records: str, name: str) -> str:
    """What the groups of a sandbox are called.

    Args:
        records: directory of the kernel's records.
        name: of the sandbox.
    """
    return f"{_mark(records)}-{name}"


def _mark(records: str) -> str:
    path = os.path.realpath(records)
    # Two containers that share control groups may have the same path for directories of their own.
    which = "none yet"
    with contextlib.suppress(FileNotFoundError):
        facts = os.stat(path)
        which = f"{facts.st_dev}:{facts.st_ino}"
    return hashlib.sha256(os.fsencode(f"{path}:{which}")).hexdigest()[:_MARK_CHARS]


def _mounts() -> tuple[dict[str, str], str]:
    """Mount points of version 1 by controller, and of version 2 (empty: none)."""
    first: dict[str, str] = {}
    second = ""
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        point = left.split(" ")[4]
        if kind == "cgroup2":
            second = second or point
        elif kind == "cgroup":
            for option in options.split(","):
                if option in CONTROLLERS:
                    first.setdefault(option, point)
    return first, second


def _own() -> dict[str, str]:
    """Where this process is: by version 1 controller, and under "" for version 2."""
    places: dict[str, str] = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            places[controller] = path
    return places


class Groups:
    """The groups of one sandbox.

    Attributes:
        where: controller -> (directory, version), only those that this host permits.
    """

    def __init__(self, where: dict[str, tuple[str, int]]) -> None:
        self.where = where

    @classmethod
    def create(cls, name: str) -> Groups:
        """Make groups called `name` for as many controllers as possible; never fails."""
        try:
            first, second = _mounts()
            own = _own()
        except (OSError, ValueError):
            return cls({})
        where: dict[str, tuple[str, int]] = {}
        for controller, point in first.items():
            for parent in (f"{point}{own.get(controller, '/')}".rstrip("/"), point):
                if controller not in where and (directory := _make(controller, parent, name)):
                    where[controller] = (directory, 1)
        missing = [controller for controller in CONTROLLERS if controller not in where]
        if second and missing:
            # A process is in one version 2 group only, so one has to serve for all that is missing.
            directory, has = unified.make(_FILES, second, own.get("", "/"), name, missing, _is_ours)
            where |= dict.fromkeys(has, (directory, 2))
        return cls(where)

    def limit(self, memory_bytes: int, pids: int, cpu: float) -> None:
        """Set limits. A controller whose limit can't be set is dropped from `where`, as if it were not permitted."""
        quota = max(int(cpu * _CPU_PERIOD_US), 1000)
        wanted = {
            ("memory", 1): [("memory.limit_in_bytes", memory_bytes)],
            ("memory", 2): [("memory.max", memory_bytes)],
            ("pids", 1): [("pids.max", pids)],
            ("pids", 2): [("pids.max", pids)],
            ("cpu", 1): [("cpu.cfs_period_us", _CPU_PERIOD_US), ("cpu.cfs_quota_us", quota)],
            ("cpu", 2): [("cpu.max", f"{quota} {_CPU_PERIOD_US}")],
        }
        optional = {
            1: [("memory.memsw.limit_in_bytes", memory_bytes), ("memory.swappiness", 0)],
            2: [("memory.swap.max", 0), ("memory.oom.group", 1)],
        }
        for controller, (directory, version) in list(self.where.items()):
            try:
                for file, value in wanted.get((controller, version), []):
                    _write(f"{directory}/{file}", value)
            except OSError:
                del self.where[controller]
                if directory not in self.directories():
                    _rmdir(directory)
                continue
            for file, value in optional[version] if controller == "memory" else []:
                try:
                    _write(f"{directory}/{file}", value)
                except OSError:
                    continue

    def attach(self, pid: int) -> None:
        """Move a process in.

        Raises:
            OSError: the host refuses after all.
        """
        for directory in self.directories():
            _write(f"{directory}/cgroup.procs", pid)

    def admit(self, pid: int) -> list[int]:
        """Move a process into groups of version 2, and open those of version 1 for it to `enter` by itself.

        To move another process, Linux waits until nobody forks, some 3 ms for each controller, and all forks of the
        host wait meanwhile. A process with one thread that moves itself waits for nobody; version 2 knows no such way.

        Raises:
            OSError: the host refuses after all.
        """
        opened: list[int] = []
        try:
            for directory, version in dict.fromkeys(self.where.values()):
                if version > 1:
                    _write(f"{directory}/cgroup.procs", pid)
                else:
                    opened.append(os.open(f"{directory}/tasks", os.O_WRONLY | os.O_CLOEXEC))
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return opened

    def directories(self) -> list[str]:
        """Every directory once."""
        return list(dict.fromkeys(directory for directory, _ in self.where.values()))

    def oom_kills(self) -> int:
        """How many processes the kernel killed here for want of memory."""
        if "memory" not in self.where:
            return 0
        directory, version = self.where["memory"]
        try:
            text = _read(f"{directory}/{'memory.oom_control' if version == 1 else 'memory.events'}")
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    def freeze(self, frozen: bool) -> None:
        """Freeze or thaw every process here; returns when it is so.

        Raises:
            TimeoutError: a process can't be frozen, say because it waits for a disk.
        """
        directory, version = self.where["freezer"]
        for _ in range(_FREEZE_TRIES):
            if version == 1:
                # A v1 freezer may stop half way; writing again makes it go on.
                _write(f"{directory}/freezer.state", "FROZEN" if frozen else "THAWED")
                done = _read(f"{directory}/freezer.state").strip() == ("FROZEN" if frozen else "THAWED")
            else:
                _write(f"{directory}/cgroup.freeze", int(frozen))
                done = f"frozen {int(frozen)}" in _read(f"{directory}/cgroup.events")
            if done:
                return
            time.sleep(_PAUSE_S)
        raise TimeoutError(f"the control group `{directory}` does not {'freeze' if frozen else 'thaw'}")

    def kill(self) -> None:
        """Kill every process that is still here, frozen or not; the first process of the sandbox is dead already.

        Raises:
            OSError: the host refuses.
        """
        for directory, version in dict.fromkeys(self.where.values()):
            try:
                if version > 1 and os.path.exists(f"{directory}/cgroup.kill"):
                    _write(f"{directory}/cgroup.kill", 1)
                else:
                    _kill_in(f"{directory}/cgroup.procs")
            except OSError as error:
                if error.errno not in GONE:
                    raise

    def remove(self) -> None:
        """Remove the groups, which must be empty of processes; waits a moment for the kernel to notice that."""
        for directory in self.directories():
            for _ in range(_REMOVE_TRIES):
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(_PAUSE_S)
                else:
                    break


def enter(opened: Sequence[int]) -> None:
    """Move this process, which has one thread, into what `Groups.admit` opened.

    Raises:
        OSError: the host refuses after all.
    """
    for descriptor in opened:
        os.write(descriptor, b"0")
        os.close(descriptor)


def remove_shared() -> None:
    """Remove the groups that groups are made in, where nobody on this host uses them any more."""
    for parent, _ in _parents():
        _rmdir(f"{parent}/{SHARED}")


def sweep(records: str, keep: AbstractSet[str]) -> None:
    """Remove the groups that no record names: a kernel died between making them and writing the record.

    Args:
        records: directory of the kernel's records.
        keep: how names of groups begin, up to their first dot, that belong to somebody who lives: the pids of wardens. It may
            grow meanwhile: a pid is in it before there is a group.

    Raises:
        OSError: what is in one can't be ended.
    """
    mark = _mark(records) + "-"
    for parent, version in _parents():
        for name in _inside(f"{parent}/{SHARED}"):
            if name.startswith(mark) and name.removeprefix(mark).partition(".")[0] not in keep:
                left = Groups({"": (f"{parent}/{SHARED}/{name}", version)})
                left.kill()
                left.remove()


def _inside(shared: str) -> list[str]:
    """Names in a shared group. One that can't be looked into is another user's, and nothing of ours is in it."""
    try:
        return os.listdir(shared)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _parents() -> list[tuple[str, int]]:
    """Wherever the group that groups are made in may be, with its version."""
    try:
        first, second = _mounts()
        own = _own()
    except (OSError, ValueError):
        return []
    places = [(point, own.get(controller, "/")) for controller, point in first.items()]
    found = [(parent, 1) for point, place in places for parent in (f"{point}{place}".rstrip("/"), point)]
    if second:
        found += [(parent, 2) for parent in unified.parents(second, own.get("", "/"))]
    return list(dict.fromkeys(found))


def _is_ours(pid: int) -> bool:
    """Whether a process is the one that started this one, or has come of it."""
    kernel = os.getppid()
    if kernel <= 1:
        return False  # it is gone, and everything comes of who has taken its place
    for _ in range(_ANCESTORS_MOST):
        if pid == kernel or not pid:
            return pid == kernel
        pid = parent_of(pid) or 0
    return False


def _kill_in(file: str) -> None:
    """Kill who is in a group, by a handle that is taken before it is looked once more whether it is still in it."""
    for pid in _read(file).split():
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(int(pid))
            try:
                if pid in _read(file).split():
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _make(controller: str, parent: str, name: str) -> str:
    """Make one group of version 1 and return its directory, or an empty string where this host does not permit it."""
    shared = f"{parent}/{SHARED}"
    directory = f"{shared}/{name}"
    for _ in range(_MAKE_TRIES):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
        except FileNotFoundError:
            # The first of this host, or another kernel stopped and removed the shared one just now.
            with contextlib.suppress(OSError):
                os.makedirs(shared, exist_ok=True)
            continue
        except OSError:
            break
        if os.access(f"{directory}/{_SWITCHES[controller]}", os.W_OK):
            return directory
        break
    unified.discard(_FILES, parent, name)
    return ""


def _rmdir(directory: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(directory)
