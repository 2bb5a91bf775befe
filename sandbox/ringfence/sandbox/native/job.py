"""What the backend hands on to make a sandbox, and how that is refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import TypedDict

INSIDE_UID = 1000
"""Uid seen inside where the sandbox has a user namespace of its own."""

PACKET_BYTES = 65536
"""The largest packet between kernel, warden, zygote and sandbox."""

STDOUT_NAME, STDERR_NAME, UPPER_NAME, WORK_NAME, FORMAT_NAME = "stdout", "stderr", "upper", "work", "format"
"""Names within a command's scratch directory. `format` says which xattrs the upper layer uses: `trusted` or `user`."""


class Order(TypedDict):
    """What the warden has to know of a sandbox, and no more. Fields as in `Job`, and `warm`: a warm interpreter may do.

    Of `readonly` it has what lies at the same path on the host, so that no path of the host is in here that is not inside too.

    INVARIANT: nothing secret is in here. Only the process that becomes the sandbox reads the job itself.
    """

    name: str
    agent: str
    records: str
    lower: str
    scratch: str
    uid: int | None
    readonly: list[str]
    require: list[str]
    memory_bytes: int
    pids: int
    cpu: float
    disk_bytes: int
    timeout_s: float
    warm: bool
    loopback: int


class Job(TypedDict):
    """One sandbox. Paths are those of the host unless said otherwise.

    Attributes:
        name: unique in the data directory.
        records: directory of the identity records.
        root: empty directory to mount the new root on.
        argv: program and arguments.
        env: whole environment.
        uid: host uid; None: this process's own, in a user namespace.
        sub: there, whether the program runs as a sub-uid.
        readonly: paths inside of directories that are bound read-only.
        sources: by path inside, where such a directory lies on the host; without one it is the same path.
        mounts: by path inside, directories of the host that a manifest names.
        require: walls, and their forms, that have to stand; see `forms.demand`.
        cwd: working directory inside.
        image: program image, seen as `/program`; empty for commands and for programs on an overlay.
        socket_dir: seen as `/run/ringfence`; empty for commands.
        lower: what lies below the overlay; empty for programs without one.
        scratch: directory of the overlay's layers; empty where there is none.
        masks: paths inside, below `/workspace`.
        loopback: port of the doors on the sandbox's loopback; 0: there are none, and no network at all. With a port, a fifth
            descriptor comes with the job, see `loopback.open_doors`.
    """

    name: str
    agent: str
    records: str
    root: str
    argv: list[str]
    env: dict[str, str]
    uid: int | None
    sub: bool
    readonly: list[str]
    sources: dict[str, str]
    mounts: dict[str, str]
    require: list[str]
    cwd: str
    image: str
    socket_dir: str
    lower: str
    scratch: str
    masks: list[str]
    memory_bytes: int
    pids: int
    cpu: float
    disk_bytes: int
    timeout_s: float
    loopback: int


ROOT_NAME = "root"
"""An empty directory within that of the records; every sandbox's new root is mounted on it, in its own namespace."""

KERNELS_OWN = ("records", "root", "sub")
"""What of a job is not handed over: a sandbox does without, and so can't find the kernel's directories in its memory."""


class First(TypedDict):
    """What a zygote has to know of a sandbox: nothing that belongs to one alone. The directory of the records comes open.

    Attributes:
        user: the form of its wall `uid`. With `sub` it waits until the maps of its user namespace are written.
    """

    user: str


class Refused(Exception):
    """The sandbox can't be made as asked; the text is the user's line. Nothing has run."""


class Become(BaseException):
    """Leaves all code of the sandbox's own in the process that is the program from now on.

    Attributes:
        program: what the entry of the interpreter executes.
    """

    def __init__(self, program: object) -> None:
        super().__init__()
        self.program = program


GROUPS_FIX = "let the kernel write to its own control groups, or to none"

USERNS_FIX = (
    "allow user namespaces (sysctl user.max_user_namespaces=15000, and where they exist "
    "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0) or run the kernel as root"
)


@contextlib.contextmanager
def wall(name: str, fix: str) -> Generator[None]:
    """Turn an OSError within into a refusal that names the wall and the fix."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or "it failed"
        if error.filename is not None:
            reason = f"`{os.fsdecode(error.filename)}`: {reason}"
        raise Refused(f"the sandbox's wall `{name}` can't be raised: {reason}; {fix}") from error
