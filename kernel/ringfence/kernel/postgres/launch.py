"""Becomes a PostgreSQL program: gives up root, ties its life to the kernel's, then executes it.

Run as a script by the supervisor, never imported. A separate small process, so that a kernel with threads
is never forked and no code of the kernel runs between fork and exec.

    launch.py UID GID DIRECTORY LOCK SIGNAL PARENT PROGRAM [ARGUMENT ...]

UID -1 keeps the user. DIRECTORY and LOCK (-1: none) are inherited descriptors and become 3 and 4. SIGNAL
(0: none) is what the program gets when the kernel dies.
"""

import ctypes
import fcntl
import os
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_FIRST = 3
_CANNOT_START = 127


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _place(handles: list[int]) -> None:
    """Moves descriptors to 3 and on, whatever their numbers are, and leaves no other copy."""
    free = _FIRST + len(handles)
    above = [fcntl.fcntl(handle, fcntl.F_DUPFD, free) for handle in handles]
    for handle in handles:
        os.close(handle)
    for number, handle in enumerate(above, _FIRST):
        os.dup2(handle, number)
        os.close(handle)


def _become(argv: list[str]) -> None:
    uid, gid, directory, lock, signal, parent = (int(word) for word in argv[:6])
    _place([handle for handle in (directory, lock) if handle != -1])
    if uid != -1:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    os.umask(0o077)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # After setuid, which clears it. A parent that died before sends nothing: hence the look at it.
    _prctl(_PR_SET_PDEATHSIG, signal)
    if os.getppid() != parent:
        sys.exit(0)
    os.execve(argv[6], argv[6:], dict(os.environ))  # noqa: S606 - becoming a program is what this is for


if __name__ == "__main__":
    try:
        _become(sys.argv[1:])
    except OSError as error:
        sys.stderr.write(f"launch: {error}\n")
        sys.exit(_CANNOT_START)
