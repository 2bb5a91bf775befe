"""Becomes another program on a host that grants no new namespace: `python no_namespaces.py PROGRAM ARGUMENT…`."""

from __future__ import annotations

import errno
import os
import struct
import sys

from ringfence.sandbox.native import calls, linux, seccomp

NAMESPACES = 0x7E020000


def refuse_namespaces() -> None:
    """From now on `unshare` and `clone` make none, for this process and all that come of it."""
    numbers = calls.numbers(calls.X86_64 if linux.MACHINE == "x86_64" else calls.AARCH64)
    refused, allowed, absent = 0x50000 | errno.EPERM, 0x7FFF0000, 0x50000 | errno.ENOSYS
    code = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, numbers["unshare"]),
        (0x06, 0, 0, refused),
        (0x15, 0, 1, numbers["clone3"]),
        (0x06, 0, 0, absent),
        (0x15, 0, 3, numbers["clone"]),
        (0x20, 0, 0, 16),
        (0x45, 0, 1, NAMESPACES),
        (0x06, 0, 0, refused),
        (0x06, 0, 0, allowed),
    ]
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(b"".join(struct.pack("=HBBI", *line) for line in code))


if __name__ == "__main__":
    refuse_namespaces()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - what the test wants, and no shell
