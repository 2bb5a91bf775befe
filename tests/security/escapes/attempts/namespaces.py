"""Attempts to get a new namespace, a new mount or a new root, by every call that makes one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from security.escapes.attempts.base import MARKED, REACHES, Stopped, add, attempt, call, child, pack

FILTER = ("seccomp filter",)
RIGHTS = (*FILTER, "capabilities")
MOUNTS = (*RIGHTS, "landlock")
_SPACES = {
    "user": 0x10000000,
    "mount": 0x20000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
    "time": 0x80,
}
_HERE = -100
_SIGCHLD = 17


def _in_child(work: Callable[[], object]) -> str:
    """Namespaces are entered by a process that ends with the attempt."""
    read_end, write_end = os.pipe()

    def act() -> None:
        try:
            work()
            os.write(write_end, b"0")
        except OSError as error:
            os.write(write_end, str(error.errno).encode())

    pid = child(act)
    code = int(os.read(read_end, 10))
    os.waitpid(pid, 0)
    if code:
        raise OSError(code, os.strerror(code))
    return "done"


def _unshare(flag: int) -> Callable[[Any], str]:
    return lambda _facts: _in_child(lambda: call("unshare", flag))


def _clone(flag: int) -> Callable[[Any], str]:
    def run(_facts: Any) -> str:
        pid = call("clone", flag | _SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return str(pid)

    return run


for _name, _flag in _SPACES.items():
    _walls = FILTER if _name == "user" else RIGHTS
    add(f"unshare_{_name}", _unshare(_flag), _walls, what=f"Leave for a new {_name} namespace by unshare")
    if _name != "time":
        add(
            f"clone_{_name}",
            _clone(_flag),
            _walls,
            what=f"Start a process in a new {_name} namespace by clone",
        )


@attempt(*FILTER)
def clone3_user(facts: Any) -> str:
    """Start a process in a new user namespace by clone3, whose flags a filter can't read"""
    words = pack("=11Q", _SPACES["user"], 0, 0, 0, _SIGCHLD, 0, 0, 0, 0, 0, 0)
    pid = call("clone3", words, len(words))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return str(pid)


@attempt(*FILTER, "landlock")
def unshare_many(facts: Any) -> str:
    """Become root of a new user namespace and mount there"""

    def work() -> None:
        uid = os.getuid()
        call("unshare", _SPACES["user"] | _SPACES["mount"])
        with open("/proc/self/uid_map", "w") as file:
            file.write(f"0 {uid} 1")
        call("mount", b"none", b"/tmp", b"tmpfs", 0, None)

    return _in_child(work)


@attempt(*RIGHTS)
def enter_namespace(facts: Any) -> str:
    """Enter a namespace by setns"""
    handle = os.open("/proc/self/ns/uts", os.O_RDONLY)
    return _in_child(lambda: call("setns", handle, 0))


@attempt(*RIGHTS, "pid namespace", "landlock", user_control=REACHES)
def enter_host_namespace(facts: Any) -> str:
    """Enter a namespace of a process of the host by setns"""
    from security.escapes.attempts.proc import victim

    handle = os.pidfd_open(int(victim(facts)))
    return _in_child(lambda: call("setns", handle, _SPACES["uts"]))


# No wall of ours stands here: Linux takes one map for a namespace. The first write works, in `unshare_many`.
@attempt("user namespace", control="none")
def map_users(facts: Any) -> str:
    """Write the uid map of its own user namespace again"""
    with open("/proc/self/uid_map", "w") as file:
        file.write("0 0 1")
    return "written"


# -- mounts, the old way ------------------------------------------------------------------------------------------------


def _apart(work: Callable[[], object]) -> str:
    """In a mount namespace of its own where one can be had, so that a control leaves the sandbox as it was."""

    def act() -> None:
        try:
            call("unshare", _SPACES["mount"])
        finally:
            work()

    return _in_child(act)


def _mounted(name: str, text: str, work: Callable[[], object], *walls: str, **more: Any) -> None:
    add(name, lambda _facts: _apart(work), (*MOUNTS, *walls), what=text, **more)


def _place(name: str) -> bytes:
    os.makedirs(f"/tmp/{name}", exist_ok=True)
    return f"/tmp/{name}".encode()


_mounted(
    "mount_tmpfs", "Mount a new file system", lambda: call("mount", b"none", _place("t"), b"tmpfs", 0, None)
)
_mounted("mount_proc", "Mount a fresh /proc", lambda: call("mount", b"none", _place("p"), b"proc", 0, None))
_mounted(
    "mount_bind", "Bind a directory elsewhere", lambda: call("mount", b"/usr", _place("b"), None, 4096, None)
)
_mounted(
    "mount_sysfs",
    "Mount the machine's devices",
    lambda: call("mount", b"none", _place("s"), b"sysfs", 0, None),
    control=MARKED,
)


@attempt(*MOUNTS)
def remount_writable(facts: Any) -> str:
    """Make a read-only mount writable"""
    return _apart(lambda: call("mount", None, b"/", None, 32 | 4096, None))


@attempt(*MOUNTS)
def unmount(facts: Any) -> str:
    """Take a mount away, such as a mask or a cover of /proc"""
    return _apart(lambda: call("umount2", b"/proc/sys", 2))


@attempt(*MOUNTS)
def pivot(facts: Any) -> str:
    """Choose another root by pivot_root"""

    def work() -> None:
        place = _place("new")
        call("mount", place, place, None, 4096, None)
        os.chdir(place)
        call("pivot_root", b".", b".")

    return _apart(work)


@attempt(*RIGHTS)
def change_root(facts: Any) -> str:
    """Choose another root by chroot, and climb out of it"""

    def work() -> None:
        call("chroot", _place("jail"))

    return _in_child(work)


# -- mounts, the new way --------------------------------------------------------------------------------------------------


@attempt(*RIGHTS)
def open_file_system(facts: Any) -> str:
    """Make a file system by fsopen and fsmount"""
    handle = call("fsopen", b"tmpfs", 0)
    call("fsconfig", handle, 6, None, None, 0)
    return str(call("fsmount", handle, 0, 0))


@attempt(*FILTER, control=MARKED)
def configure_file_system(facts: Any) -> str:
    """Configure a file system by fsconfig"""
    return str(call("fsconfig", 0, 6, None, None, 0))


@attempt(*RIGHTS)
def pick_file_system(facts: Any) -> str:
    """Open a mounted file system for another configuration by fspick"""
    return str(call("fspick", _HERE, b"/tmp", 0))


@attempt(*RIGHTS)
def copy_mount(facts: Any) -> str:
    """Take a copy of a mount by open_tree"""
    return str(call("open_tree", _HERE, b"/usr", 1))


@attempt(*FILTER)
def hold_mount(facts: Any) -> str:
    """Take a handle on a mount by open_tree"""
    return str(call("open_tree", _HERE, b"/tmp", 0))


@attempt(*MOUNTS)
def move_mount(facts: Any) -> str:
    """Put a copied mount in another place by move_mount"""

    def work() -> None:
        tree = call("open_tree", _HERE, b"/usr", 1)
        call("move_mount", tree, b"", _HERE, _place("moved"), 4)

    return _in_child(work)


@attempt(*FILTER, control=MARKED)
def move_nothing(facts: Any) -> str:
    """Call move_mount with handles at hand"""
    return str(call("move_mount", 0, b"", _HERE, b"/tmp", 4))


@attempt(*RIGHTS)
def change_mount(facts: Any) -> str:
    """Clear the read-only flag of a mount by mount_setattr"""
    words = pack("=4Q", 0, 1, 0, 0)
    return _apart(lambda: call("mount_setattr", _HERE, b"/", 0, words, len(words)))


# -- names of the machine -------------------------------------------------------------------------------------------------


@attempt(*RIGHTS)
def set_host_name(facts: Any) -> str:
    """Rename the machine"""
    call("sethostname", b"sandbox", 7)
    return "renamed"


@attempt(*RIGHTS)
def set_domain_name(facts: Any) -> str:
    """Rename the machine's domain"""
    call("setdomainname", b"sandbox", 7)
    return "renamed"


@attempt("uts namespace")
def name_of_host(facts: Any) -> str:
    """Learn the host's name"""
    if os.uname().nodename == facts["host_name"]:
        return facts["host_name"]
    raise Stopped("a name of its own")
