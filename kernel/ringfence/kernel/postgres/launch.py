"""Becomes a PostgreSQL program: gives up root, ties its life to the kernel's, then executes it.

Run as a script by the supervisor, never imported. A separate small process, so that a kernel with threads
is never forked and no code of the kernel runs between fork and exec.

    launch.py UID GID FD SIGNAL PARENT PROGRAM [ARGUMENT ...]

UID -1 keeps the user. FD is an inherited descriptor of the server's directory and becomes descriptor 3.
SIGNAL (0: none) is what the program gets when the kernel dies.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_ROOT_FD = 3
_CANNOT_START = 127


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _become(argv: list[str]) -> None:
    uid, gid, directory, signal, parent = (int(word) for word in argv[:5])
    if directory != _ROOT_FD:
        os.dup2(directory, _ROOT_FD)
    os.set_inheritable(_ROOT_FD, True)
    if uid != -1:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    os.umask(0o077)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # After setuid, which clears it. It fires at once for a parent that died before: hence the second look.
    _prctl(_PR_SET_PDEATHSIG, signal)
    if os.getppid() != parent:
        sys.exit(0)
    os.execve(argv[5], argv[5:], dict(os.environ))  # noqa: S606 - becoming a program is what this is for


if __name__ == "__main__":
    try:
        _become(sys.argv[1:])
    except OSError as error:
        sys.stderr.write(f"launch: {error}\n")
        sys.exit(_CANNOT_START)
