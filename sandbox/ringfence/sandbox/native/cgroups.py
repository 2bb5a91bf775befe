"""Control groups, version 1 and 2, each controller on its own: whatever this host permits is used.

Groups are made below the kernel's own, so that limits around the kernel hold for its agents too; where version 2
forbids that (a group with processes can't hand out controllers), below the top.
"""

# The launcher works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH102, PTH103, PTH106, PTH123

from __future__ import annotations

import contextlib
import os
import time

CONTROLLERS = ("memory", "pids", "cpu", "freezer")
_PARENT = "ringfence"
_SWITCHES = {
    "memory": ("memory.limit_in_bytes", "memory.max"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.cfs_quota_us", "cpu.max"),
    "freezer": ("freezer.state", "cgroup.freeze"),
}
_CPU_PERIOD_US = 100_000
_FREEZE_TRIES = 2000
_REMOVE_TRIES = 500
_MAKE_TRIES = 5
_PAUSE_S = 0.001


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, value: object) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


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
                if controller not in where and (directory := _make(controller, parent, name, 1)):
                    where[controller] = (directory, 1)
        missing = [controller for controller in CONTROLLERS if controller not in where]
        for parent in (f"{second}{own.get('', '/')}".rstrip("/"), second) if second else ():
            # A process is in one version 2 group only, so one parent has to serve for all that is missing.
            made = {controller: _make(controller, parent, name, 2) for controller in missing}
            found = {controller: (directory, 2) for controller, directory in made.items() if directory}
            if "memory" in found or "memory" not in missing or parent == second:
                where.update(found)
                if not found:
                    _discard(parent, name)
                break
            _discard(parent, name)
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


def remove_shared() -> None:
    """Remove the groups that groups are made in, where nobody on this host uses them any more."""
    try:
        first, second = _mounts()
        own = _own()
    except (OSError, ValueError):
        return
    tops = [(point, own.get(controller, "/")) for controller, point in first.items()]
    for point, place in [*tops, *([(second, own.get("", "/"))] if second else [])]:
        for parent in dict.fromkeys((f"{point}{place}".rstrip("/"), point)):
            _rmdir(f"{parent}/{_PARENT}")


def _make(controller: str, parent: str, name: str, version: int) -> str:
    """Make one group and return its directory, or an empty string where this host does not permit it."""
    shared = f"{parent}/{_PARENT}"
    directory = f"{shared}/{name}"
    for _ in range(_MAKE_TRIES):
        try:
            os.makedirs(shared, exist_ok=True)
            if version > 1 and controller != "freezer":
                for place in (parent, shared):
                    _write(f"{place}/cgroup.subtree_control", f"+{controller}")
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
        except FileNotFoundError:
            continue  # another kernel stopped and removed the shared one just now
        except OSError:
            break
        if os.access(f"{directory}/{_SWITCHES[controller][version - 1]}", os.W_OK):
            return directory
        break
    if version == 1:
        _discard(parent, name)
    return ""


def _discard(parent: str, name: str) -> None:
    """Remove a group that is of no use, and the shared one where nobody else is in it."""
    _rmdir(f"{parent}/{_PARENT}/{name}")
    _rmdir(f"{parent}/{_PARENT}")


def _rmdir(directory: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(directory)
