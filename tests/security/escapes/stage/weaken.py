"""Takes walls of the native backend away, in a copy of its source: the control of an attempt is the same sandbox without them.

Only the copy is changed, by lines at the end of its modules, and only `apart.py` may start it: in namespaces that are
thrown away. A name that the backend no longer has is an error here, so that no control is ever a sandbox that was whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_NATIVE = "ringfence/sandbox/native"

# fmt: off
_LINUX = """
_taken = {taken!r}
_unshare_whole, _mount_whole, _restrict_whole = unshare, mount, restrict_mount
_prctl_whole, _umount_whole, _close_whole, _fork_whole = prctl, umount, close_from, fork_beside
_SPACES = {{"pid namespace": CLONE_NEWPID, "network namespace": CLONE_NEWNET, "ipc namespace": CLONE_NEWIPC, "uts namespace": CLONE_NEWUTS}}
_shared = sum(flag for name, flag in _SPACES.items() if name in _taken)
_cleared = (ATTR_RDONLY if "read-only mounts" in _taken else 0) | (ATTR_NOSUID if "nosuid" in _taken else 0)

def unshare(flags):
    if flags & ~_shared:
        _unshare_whole(flags & ~_shared)

def fork_beside(spaces):
    return _fork_whole(spaces & ~_shared)

def mount(source, target, kind, flags=0, options=""):
    flags &= ~(MS_NOSUID if "nosuid" in _taken else 0)
    if kind == "proc" and "pid namespace" in _taken:
        source, kind, flags = "/proc", None, MS_BIND | MS_REC
    if kind == "overlay" and "userxattr" not in options:
        # The other kind of attributes takes rights over the whole machine.
        options = options.replace(",redirect_dir=off,metacopy=off", ",userxattr")
    if "bounded /tmp" in _taken and target.endswith("/tmp"):
        options = "mode=1777"
    _mount_whole(source, target, kind, flags, options)

def restrict_mount(target, attributes, *, recursive=False):
    _restrict_whole(target, attributes & ~_cleared, recursive=recursive)

def umount(target):
    if target == "/.old" and "private root" in _taken:
        os.mkdir("/host")
        _mount_whole("/.old", "/host", None, MS_BIND | MS_REC)
    _umount_whole(target)

def prctl(option, *values):
    if option == PR_SET_DUMPABLE and "undumpable first process" in _taken:
        values = (1,)
    if option == PR_SET_NO_NEW_PRIVS and "no_new_privs" in _taken:
        return 0
    return _prctl_whole(option, *values)

if "uts namespace" in _taken:
    import socket
    socket.sethostname = lambda name: None

if "closed descriptors" in _taken:
    def close_from(lowest, keep=frozenset()):
        os.set_inheritable(os.dup(os.open("/", os.O_RDONLY | os.O_DIRECTORY)), True)

if "capabilities" in _taken:
    def drop_bounding_set():
        _prctl_whole(28, 1 << 2 | 1 << 4)  # keep them over a change of user

    def drop_capabilities():
        with open("/proc/self/status") as file:
            low = int(next(line for line in file if line.startswith("CapPrm")).split()[1], 16)
        words = (low & 0xFFFFFFFF, low >> 32)
        sets = b"".join(word.to_bytes(4, "little") * 3 for word in words)
        syscall("capset", CAPABILITY_VERSION_3.to_bytes(4, "little") + bytes(4), sets)
        for number in range(64):
            if low >> number & 1:
                _prctl_whole(PR_CAP_AMBIENT, 2, number)
"""
_APPENDED = {
    "seccomp filter": {"seccomp.py": "\ninstall\ndef install(filter_program):\n    pass\n"},
    "marked filter": {"seccomp.py": """
_program_whole = program
def program(**more):
    import errno, struct
    code = _program_whole(**more)
    out = []
    for line in struct.iter_unpack("=HBBI", code):
        if line[0] == _RETURN and line[3] in (_ERRNO | errno.EPERM, _ERRNO | errno.EAFNOSUPPORT):
            line = (*line[:3], _ERRNO | errno.ENOANO)
        out.append(struct.pack("=HBBI", *line))
    return b"".join(out)
"""},
    "landlock": {"landlock.py": "\nversion\ndef version():\n    return 0\n"},
    "masks": {"jail.py": "\n_masks\ndef _masks(masks):\n    pass\n"},
    "sealed /proc": {"procfs.py": """
_PROC_READ_ONLY, _PROC_HIDDEN_FILES, _PROC_HIDDEN_DIRECTORIES
_PROC_READ_ONLY = _PROC_HIDDEN_FILES = _PROC_HIDDEN_DIRECTORIES = ()
"""},
    "limits": {"confine.py": "\n_bound\ndef _bound(which, value):\n    pass\n"},
}
_IN_LINUX = frozenset({
    "pid namespace", "network namespace", "ipc namespace", "uts namespace", "read-only mounts", "nosuid", "private root",
    "undumpable first process", "no_new_privs", "closed descriptors", "capabilities", "bounded /tmp",
})
# fmt: on
WALLS = frozenset(_APPENDED) | _IN_LINUX


def weaken(tree: Path, taken: Iterable[str]) -> None:
    """Take walls away in a copy of the source.

    Args:
        tree: holds `ringfence/sandbox/native`.
        taken: names of walls.

    Raises:
        KeyError: there is no such wall.
    """
    names = sorted(set(taken))
    native = tree / _NATIVE
    _append(native / "linux.py", _LINUX.format(taken=names))
    # What the backend looks for in itself at the end would not be found.
    _append(native / "confine.py", "\n_STATUS_WANTED\n_STATUS_WANTED = {}\n")
    for name in names:
        if name in _IN_LINUX:
            continue
        for module, text in _APPENDED[name].items():
            _append(native / module, text)


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
