"""Linux' rules for control groups of version 2, over a real directory tree: who may write where, and what is busy."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from ringfence.sandbox.native.unified import Files

CONTROLLERS = ("cpu", "io", "memory", "pids")
OF_CONTROLLER = {
    "cpu": ("cpu.max", "cpu.weight"),
    "io": ("io.max",),
    "memory": ("memory.max", "memory.swap.max", "memory.oom.group", "memory.events"),
    "pids": ("pids.max",),
}


def _fail(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


class Model(Files):
    """A tree of groups. Whoever asks is an ordinary user, who may write in the groups that were delegated to it.

    Attributes:
        where: the group of each process.
        refused: controllers that can't be handed out although they are there, as `cpu` with realtime processes.
    """

    def __init__(self, top: Path, *, root: bool = False, real_top: bool = True) -> None:
        self.top = top
        self.root = root
        self.where: dict[int, Path] = {}
        self.refused: set[str] = set()
        self._delegated: set[Path] = set()
        self._populate(top, CONTROLLERS, real_top=real_top)

    def group(
        self, path: str, *, gives: str = "", delegated: bool = False, pids: tuple[int, ...] = ()
    ) -> Path:
        """Make a group as the host's manager would; with `gives` it hands these controllers on."""
        place = self.top / path
        self._populate(place, (place.parent / "cgroup.subtree_control").read_text().split())
        for pid in pids:
            self.where[pid] = place
        if delegated:
            self._delegated.add(place)
        if gives:
            (place / "cgroup.subtree_control").write_text(gives)
        return place

    def gives(self, gives: str) -> None:
        """Let the top hand these controllers on."""
        (self.top / "cgroup.subtree_control").write_text(gives)

    def inside(self, place: Path) -> list[int]:
        """Processes of a group."""
        return [pid for pid, where in self.where.items() if where == place]

    def _populate(self, place: Path, controllers: Sequence[str], *, real_top: bool = False) -> None:
        place.mkdir(exist_ok=True)
        (place / "cgroup.controllers").write_text(" ".join(controllers))
        (place / "cgroup.subtree_control").write_text("")
        (place / "cgroup.procs").write_text("")
        if not real_top:
            for name in ("cgroup.events", "cgroup.freeze", "cgroup.kill", "cgroup.type"):
                (place / name).write_text("")
            for controller in controllers:
                for name in OF_CONTROLLER[controller]:
                    (place / name).write_text("")

    def _mine(self, place: Path) -> bool:
        """Delegated, or made by the user in what was; what the manager made in there is the manager's."""
        return self.root or place in self._delegated

    # -- Files --------------------------------------------------------------------------------------------------------

    def read(self, path: str) -> str:
        place, name = Path(path).parent, Path(path).name
        if name == "cgroup.procs":
            return "".join(f"{pid}\n" for pid in self.inside(place))
        return Path(path).read_text()

    def writable(self, path: str) -> bool:
        place = Path(path)
        if not place.exists():
            return False
        return self._mine(place if place.is_dir() else place.parent)

    def mkdir(self, path: str) -> None:
        place = Path(path)
        if place.exists():
            return
        if not place.parent.exists():
            raise _fail(errno.ENOENT, path)
        if not self._mine(place.parent):
            raise _fail(errno.EACCES, path)
        self._populate(place, (place.parent / "cgroup.subtree_control").read_text().split())
        self._delegated.add(place)

    def rmdir(self, path: str) -> None:
        place = Path(path)
        if not place.exists():
            raise _fail(errno.ENOENT, path)
        if self.inside(place) or any(entry.is_dir() for entry in place.iterdir()):
            raise _fail(errno.EBUSY, path)
        for entry in place.iterdir():
            entry.unlink()
        place.rmdir()

    def write(self, path: str, value: object) -> None:
        place, name = Path(path).parent, Path(path).name
        if not Path(path).exists():
            raise _fail(errno.ENOENT, path)
        if not self.writable(path):
            raise _fail(errno.EACCES, path)
        if name == "cgroup.procs":
            self._move(place, int(str(value)), path)
        elif name == "cgroup.subtree_control":
            self._hand_out(place, str(value).removeprefix("+"), path)
        else:
            Path(path).write_text(str(value))

    def _move(self, place: Path, pid: int, path: str) -> None:
        if pid not in self.where:
            raise _fail(errno.ESRCH, path)
        common = Path(os.path.commonpath([place, self.where[pid]]))
        if not self._mine(common):
            raise _fail(errno.EACCES, path)
        if place != self.top and (place / "cgroup.subtree_control").read_text():
            raise _fail(errno.EBUSY, path)
        self.where[pid] = place

    def _hand_out(self, place: Path, controller: str, path: str) -> None:
        if controller not in (place / "cgroup.controllers").read_text().split():
            raise _fail(errno.ENOENT, path)
        if controller in self.refused:
            raise _fail(errno.EINVAL, path)
        if (place / "cgroup.events").exists() and self.inside(place):
            raise _fail(errno.EBUSY, path)
        given = (place / "cgroup.subtree_control").read_text().split()
        (place / "cgroup.subtree_control").write_text(" ".join(sorted({*given, controller})))
        for group in (entry for entry in place.iterdir() if entry.is_dir()):
            there = (group / "cgroup.controllers").read_text().split()
            (group / "cgroup.controllers").write_text(" ".join(sorted({*there, controller})))
            for name in OF_CONTROLLER[controller]:
                (group / name).touch()
