"""Builds the file system of a sandbox. Runs as the first process of the new pid namespace, with all rights over it.

The new root is a small tmpfs with read-only binds; the old root is unmounted before anything else runs.
"""

# The launcher works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH102, PTH106, PTH108, PTH112, PTH115, PTH116, PTH120, PTH121, PTH211

from __future__ import annotations

import contextlib
import os
import socket
import stat

from ringfence.sandbox.native import linux, procfs
from ringfence.sandbox.native.job import (
    INSIDE_UID,
    ROOT_NAME,
    UPPER_NAME,
    USERNS_FIX,
    WORK_NAME,
    Job,
    Refused,
    wall,
)

SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin")
DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "shm": "/tmp",  # noqa: S108 - the sandbox's own
}
_ETC = (
    "ld.so.cache",
    "localtime",
    "alternatives",
    "ssl/certs",
    "ssl/openssl.cnf",
    "pki/tls/certs",
    "pki/ca-trust/extracted",
)
_SEALED = linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NODEV
_INERT = _SEALED | linux.ATTR_NOEXEC
_PLAIN = linux.MS_NOSUID | linux.MS_NODEV
_LAYERS = "./.layers"
_TMP_INODES = 65536
_TMP_LEAST_BYTES = 16 << 20
Shown = dict[str, tuple[int, int]]
"""Device and number of directories, by path."""
_KERNEL_FIX = "this needs Linux 5.12 or newer"
_PROC_FIX = "the kernel's own /proc must be whole: run it outside a container that masks parts of it"
_MOUNT_FIX = (
    "the directory must be readable for the kernel, hold no mounts where the kernel is an ordinary user's, and lie on a "
    "file system that an overlay can lie on (ext4, xfs, btrfs, tmpfs)"
)
_OVERLAY_FIX = "put the data directory on ext4, xfs, btrfs or tmpfs (an overlay can't lie on another), Linux 5.12 or newer"


def build(job: Job) -> None:
    """Build the new root and enter it; afterwards nothing of the host is reachable but what the job names.

    Raises:
        Refused: a wall can't be raised.
    """
    os.chdir(job["records"])
    with wall("namespaces", USERNS_FIX):
        linux.unshare(SPACES)
    name_host()
    settle()
    prepare()
    enter(job, {})
    leave()


SPACES = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWNET
"""The namespaces of a sandbox, but for those of users and pids, which it is forked into, and that of control groups, which comes after."""


def name_host() -> None:
    """Give this process's own host name, and the modes of what is made from here on. Called in `SPACES`.

    Raises:
        Refused: the host refuses.
    """
    with wall("namespaces", USERNS_FIX):
        socket.sethostname("sandbox")
    os.umask(0o022)


def prepare() -> None:
    """The part that is the same for every sandbox, in the directory of the records. Nothing that belongs to one may run yet.

    Afterwards this process stands in the new root, and finds all of it from there: by short paths that say nothing of where
    the kernel keeps its files.

    Raises:
        Refused: a wall can't be raised.
    """
    with wall("private root", USERNS_FIX):
        linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("tmpfs", ROOT_NAME, "tmpfs", _PLAIN, "size=8m,nr_inodes=4096,mode=755")
        os.chdir(ROOT_NAME)
        for name in ("proc", "dev", "etc", "tmp", "run", ".old"):
            os.mkdir(name)
    with wall("read-only system", _KERNEL_FIX):
        _system()
        _devices()
        _etc()
    with wall("bounded tmp", USERNS_FIX):
        # What is shown may lie below it, so it comes first; how large it may be is known later.
        options = f"size=4k,nr_inodes={_TMP_INODES},mode=1777"
        linux.mount("tmpfs", "./tmp", "tmpfs", _PLAIN, options)
    with wall("own /proc", _PROC_FIX):
        procfs.mount()


def settle() -> None:
    """Take the control groups that this process is in for the root of all; they are the sandbox's own by now.

    Raises:
        Refused: a wall can't be raised.
    """
    with wall("namespaces", USERNS_FIX):
        linux.unshare(linux.CLONE_NEWCGROUP)


def show(paths: list[str]) -> Shown:
    """Show directories of the host, at the same place, ahead of the job that names them.

    Returns:
        What each of them was; another one by then is shown anew when there is the job.

    Raises:
        Refused: one can't be shown.
    """
    shown: Shown = {}
    for path in sorted(paths):
        _readonly(path, path)
        found = os.stat(path)
        shown[path] = (found.st_dev, found.st_ino)
    return shown


def _same(path: str, known: tuple[int, int] | None) -> bool:
    if known is None:
        return False
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return (found.st_dev, found.st_ino) == known
    return False


def rehearse() -> None:
    """Go through what `enter` does, with nothing: for a process that has time until it has a job."""
    place = "./run/rehearsal"
    _make(place)
    linux.mount("tmpfs", place, "tmpfs", _PLAIN, "size=4k")
    linux.bind(place, place, _SEALED)
    _texts({"rehearsal": ""})
    for _ in range(2):
        linux.umount(place)
    os.rmdir(place)
    os.unlink("./etc/rehearsal")


def enter(job: Job, shown: Shown) -> None:
    """Complete what `prepare` began, and go into the new root, with every process that stands in the old one.

    Args:
        job: of the sandbox.
        shown: what `show` has said.

    Raises:
        Refused: a wall can't be raised.
    """
    # INVARIANT: nothing is seen inside but what the job names.
    if not shown.keys() <= set(job["readonly"]):
        raise Refused("the sandbox was made for another job; report this as a bug")
    with wall("read-only system", _KERNEL_FIX):
        _user(job)
    with wall("bounded tmp", USERNS_FIX):
        size = min(job["disk_bytes"], max(_TMP_LEAST_BYTES, job["memory_bytes"] // 2))
        linux.mount(None, "./tmp", None, linux.MS_REMOUNT | _PLAIN, f"size={size}")
    for path in sorted(job["readonly"]):
        if path not in job["sources"] and _same(path, shown.get(path)):
            continue
        _readonly(path, job["sources"].get(path, path))
    for target in sorted(job["mounts"]):
        _mounted(job["mounts"][target], target)
    if job["socket_dir"]:
        _program(job)
    if job["lower"]:
        _workspace(job)
    with wall("pivot_root", USERNS_FIX):
        linux.pivot_root(".", ".old")
        os.chdir("/")


def leave() -> None:
    """Let go of the old root. Nothing that belongs to the sandbox may run before.

    Raises:
        Refused: a wall can't be raised.
    """
    with wall("pivot_root", USERNS_FIX):
        linux.umount("/.old")
        os.rmdir("/.old")
        linux.restrict_mount("/", _SEALED)


def _system() -> None:
    with os.scandir("/") as entries:
        found = {entry.path: entry for entry in entries}
    for path in SYSTEM:
        entry = found.get(path)
        if entry is None:
            continue
        if entry.is_symlink():
            os.symlink(os.readlink(path), f".{path}")
        elif entry.is_dir():
            os.mkdir(f".{path}")
            linux.bind(path, f".{path}", _SEALED)


def _devices() -> None:
    for name in DEVICES:
        _touch(f"./dev/{name}")
        linux.mount(f"/dev/{name}", f"./dev/{name}", None, linux.MS_BIND)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"./dev/{name}")


def _user(job: Job) -> None:
    uid = INSIDE_UID if job["uid"] is None else job["uid"]
    _texts({"passwd": f"agent:x:{uid}:{uid}::/tmp:/bin/sh\n", "group": f"agent:x:{uid}:\n"})


def _texts(texts: dict[str, str]) -> None:
    for name, text in texts.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(f"./etc/{name}", flags, 0o644)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def _etc() -> None:
    _texts(
        {
            "hosts": "127.0.0.1 localhost sandbox\n",
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        },
    )
    for name in _ETC:
        try:
            source = os.open(f"/etc/{name}", os.O_PATH | os.O_CLOEXEC)  # wherever its links lead
        except OSError:
            continue  # it is not there for this user
        target = f"./etc/{name}"
        if "/" in name:
            _make(os.path.dirname(target))
        if stat.S_ISDIR(os.fstat(source).st_mode):
            os.mkdir(target)
        else:
            _touch(target)
        linux.bind(f"/proc/self/fd/{source}", target, _INERT)
        os.close(source)


def _readonly(path: str, source: str) -> None:
    if any(path == system or path.startswith(f"{system}/") for system in SYSTEM):
        return
    target = f".{path}"
    if os.path.isdir(target) and os.path.samefile(target, source):
        return  # already seen through a parent
    with wall(f"read-only {path}", "the directory must exist and be readable for the kernel"):
        _make(target)
        linux.bind(source, target, _SEALED)


def _make(path: str) -> None:
    """Make a directory, and what it lies in, unless they are there."""
    try:
        os.mkdir(path)
    except FileNotFoundError:
        _make(os.path.dirname(path))
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _mounted(source: str, target: str) -> None:
    """Show a directory of the host through an overlay of its own: in one, a socket or a pipe is only a name.

    A bind, read-only or not, would let the program connect to what listens there on the host. Nor do mounts below the
    directory come along.
    """
    if any(target.startswith(f"{system}/") for system in SYSTEM):
        return
    place = f".{target}"
    if os.path.isdir(place) and os.path.samefile(place, source):
        return  # already seen through a parent, as every agent sees it
    with wall(f"mount {target}", _MOUNT_FIX):
        _make(place)
        for name in ("source", "nothing"):
            _make(f"{_LAYERS}/{name}")
        linux.mount(source, f"{_LAYERS}/source", None, linux.MS_BIND)
        # A mount of its own, which the overlay keeps: a directory that is removed below can't be read, so nothing would be listed.
        linux.mount("tmpfs", f"{_LAYERS}/nothing", "tmpfs", _PLAIN, "size=4k,mode=555")
        # Short relative names: options know no quoting, and the host's paths would show in /proc/self/mountinfo. The source
        # comes first: the top takes its owner and mode from there, so what is closed on the host is closed inside.
        os.chdir(_LAYERS)
        linux.mount(
            "overlay", f"..{target}", "overlay", _PLAIN | linux.MS_RDONLY, "lowerdir=source:nothing,index=off"
        )
        os.chdir("..")
        linux.restrict_mount(place, _SEALED)
        for name in ("source", "nothing"):
            linux.umount(f"{_LAYERS}/{name}")
            os.rmdir(f"{_LAYERS}/{name}")
        os.rmdir(_LAYERS)


def _program(job: Job) -> None:
    if job["image"]:
        with wall("program image", "the image must be a directory the kernel can read"):
            os.mkdir("./program")
            linux.bind(job["image"], "./program", _SEALED)
    # The directory, not the socket: a bound file would keep the inode of a socket that the next kernel replaces.
    with wall("socket directory", "the directory must exist"):
        os.mkdir("./run/ringfence")
        linux.bind(job["socket_dir"], "./run/ringfence", _INERT)


def _workspace(job: Job) -> None:
    with wall("overlay", _OVERLAY_FIX):
        os.mkdir("./workspace")
        for name, source in (("lower", job["lower"]), ("scratch", job["scratch"])):
            _make(f"{_LAYERS}/{name}")
            linux.mount(source, f"{_LAYERS}/{name}", None, linux.MS_BIND)
        # Short relative names: options know no quoting, and the host's paths would show in /proc/self/mountinfo.
        os.chdir(_LAYERS)
        options = (
            f"lowerdir=lower,upperdir=scratch/{UPPER_NAME},workdir=scratch/{WORK_NAME},volatile,index=off"
        )
        # Without redirects a renamed directory is copied and removed, so the upper layer alone tells what happened.
        options += ",userxattr" if job["uid"] is None else ",redirect_dir=off,metacopy=off"
        linux.mount("overlay", "../workspace", "overlay", _PLAIN, options)
        os.chdir("..")
        for name in ("lower", "scratch"):
            linux.umount(f"{_LAYERS}/{name}")
            os.rmdir(f"{_LAYERS}/{name}")
        os.rmdir(_LAYERS)
    with wall("masks", "the paths to hide must not lead through links; report this"):
        _masks(job["masks"])


def _masks(masks: list[str]) -> None:
    if not masks:
        return
    os.mkdir("./.mask", 0o700)
    _touch("./.mask/file", 0)
    os.mkdir("./.mask/directory", 0)
    for name in ("file", "directory"):
        linux.bind(f"./.mask/{name}", f"./.mask/{name}", _INERT)
    for path in sorted(masks):
        # One that is absent, or lies below another mask, needs no hiding.
        with contextlib.suppress(FileNotFoundError):
            handle = _walk(path)
            try:
                kind = "directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
                # By its handle even a link itself can be covered. The copy of a mount keeps its restrictions.
                linux.mount(f"./.mask/{kind}", f"/proc/self/fd/{handle}", None, linux.MS_BIND)
            finally:
                os.close(handle)


def _walk(path: str) -> int:
    """A handle on what stands at a path inside; never follows a link, so what is covered is what was named."""
    handle = os.open(".", os.O_PATH | os.O_CLOEXEC)
    names = path.strip("/").split("/")
    for position, name in enumerate(names):
        kind = os.O_DIRECTORY if position < len(names) - 1 else 0
        try:
            step = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=handle)
        finally:
            os.close(handle)
        handle = step
    return handle


def _touch(path: str, mode: int = 0o444) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
