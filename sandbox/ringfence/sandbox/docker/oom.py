"""Whether the kernel killed a process of a container for want of memory, read from this host's control groups."""

from __future__ import annotations

from pathlib import Path


class OomCount:
    """The count of one container's group.

    Engines learn of such a kill by a notice that may come after the container's end; the group itself knows at once.

    Args:
        pid: of a process of the container on this host; 0: it isn't known.
    """

    def __init__(self, pid: int) -> None:
        self._file = _file_of(pid) if pid > 0 else None

    def kills(self) -> int:
        """How many; 0 where it can't be told. Only as long as the container runs."""
        if self._file is None:
            return 0
        try:
            lines = self._file.read_text(encoding="ascii").splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _file_of(pid: int) -> Path | None:
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    first = second = ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup" and "memory" in options.split(","):
            first = first or left.split(" ")[4]
        elif kind == "cgroup2":
            second = second or left.split(" ")[4]
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for top, file in ((first, "memory.oom_control"), (second, "memory.events")):
            wanted = "memory" in controllers.split(",") if top == first else controllers == ""
            place = Path(f"{top}{path}") / file
            if top and wanted and path != "/" and place.is_file():
                return place
    return None
