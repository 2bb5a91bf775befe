"""Runs a program in namespaces of its own that end with it: `apart.py UID_MAP GID_MAP PROGRAM…`.

New user, mount, pid, network, ipc, uts and control group namespaces, all mounts private, a fresh /proc. What has all
rights in there has none over this machine: root inside is no root outside. A map is `inside:outside:count,…`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
_NEW = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
_PRIVATE, _REC = 1 << 18, 16384


def check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def map_users(pid: int, users: str, groups: str) -> None:
    def lines(text: str) -> str:
        return "\n".join(part.replace(":", " ") for part in text.split(","))

    if os.geteuid() != 0:
        write(f"/proc/{pid}/setgroups", "deny")
    write(f"/proc/{pid}/uid_map", lines(users))
    write(f"/proc/{pid}/gid_map", lines(groups))


def inside(uid: int, gid: int) -> None:
    """The first process in there."""
    os.setresgid(gid, gid, gid)
    # Its rights go when it executes a program, unless it is root in there.
    libc.prctl(8, 1, 0, 0, 0)
    os.setresuid(uid, uid, uid)
    check(libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE | _REC), None))
    check(libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        fcntl.ioctl(link, 0x8914, struct.pack("16sH14x", b"lo", 1))  # up


def main() -> None:
    users, groups, *argv = sys.argv[1:]
    ready_read, ready_write = os.pipe()
    mapped_read, mapped_write = os.pipe()
    outer = os.fork()
    if outer == 0:
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)
        check(libc.unshare(_NEW))
        os.write(ready_write, b"x")
        os.read(mapped_read, 1)
        first = os.fork()
        if first == 0:
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)
            inside(int(users.split(":")[0]), int(groups.split(":")[0]))
            # The first process must stay to the end and reap; the program is its child.
            program = os.fork()
            if program == 0:
                for descriptor in (ready_read, ready_write, mapped_read, mapped_write):
                    os.close(descriptor)
                os.execv(argv[0], argv)
            while True:
                ended, status = os.wait()
                if ended == program:
                    os._exit(min(abs(os.waitstatus_to_exitcode(status)), 255))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    os.close(ready_write)
    os.read(ready_read, 1)
    map_users(outer, users, groups)
    os.write(mapped_write, b"x")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(outer, 0)[1]))


if __name__ == "__main__":
    main()
