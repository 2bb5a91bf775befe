"""Looking at files with an agent's rights instead of root's, for the moment of one system call.

Linux keeps these rights by thread. While they are lent, the calling thread has no right over files that the agent's uid
does not have: permission bits of files and of every directory on the way decide as they do for the agent itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from typing import Any

_SETGROUPS = {"x86_64": 116, "aarch64": 159}
_ASK = 0xFFFFFFFF  # an id that can't be taken: the call only tells the one in force
_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_setgroups = _SETGROUPS.get(platform.machine()) if os.name == "posix" else None


def _setter(name: str) -> Callable[[int], int] | None:
    """The C library's `setfsuid` or `setfsgid`: unlike others of its kind it sets what is the calling thread's alone."""
    prototype = ctypes.PYFUNCTYPE(
        ctypes.c_int, ctypes.c_uint
    )  # never waits, so it needn't let other threads run
    try:
        return prototype((name, ctypes.PyDLL(None)))
    except AttributeError:
        return None


_SETTERS = (_setter("setfsuid"), _setter("setfsgid"))


class AgentRights:
    """A context in which files are opened and looked at as `uid` (and the gid of the same number) would.

    Args:
        uid: the agent's host uid; None: the kernel's own user, and nothing changes.

    Raises:
        OSError: on entry, EPERM: root's rights can't be laid down. Nothing was looked at.
    """

    __slots__ = ("_groups", "uid")

    def __init__(self, uid: int | None) -> None:
        self.uid = uid if uid is not None and os.geteuid() == 0 else None
        """As whom files are looked at; None: as the kernel itself."""
        self._groups = os.getgroups() if self.uid is not None else []

    def __enter__(self) -> None:
        if self.uid is None:
            return
        try:
            if self._groups:
                _set_groups([])
            _set(1, self.uid)
            _set(0, self.uid)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self.uid is None:
            return
        # INVARIANT: a thread never goes on with a part of its rights; if they can't be had back, the caller fails.
        _set(0, os.geteuid())
        _set(1, os.getegid())
        if self._groups:
            _set_groups(self._groups)


def _set(which: int, value: int) -> None:
    """Set the uid (0) or gid (1) that decides about files, and see that it is in force."""
    setter = _SETTERS[which]
    if setter is None:
        raise OSError(errno.EPERM, "this machine has no rights over files for a thread alone")
    setter(value)
    if setter(_ASK) != value:
        raise OSError(
            errno.EPERM, "the rights of an agent can't be taken; run the kernel with all of root's rights"
        )


def _set_groups(groups: list[int]) -> None:
    """Set this thread's supplementary groups; the C library would set those of all threads."""
    if _setgroups is None:
        raise OSError(errno.EPERM, "this machine's system call numbers are not known")
    words = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(ctypes.c_long(_setgroups), ctypes.c_long(len(groups)), words) != 0:
        raise OSError(ctypes.get_errno(), "the groups of an agent can't be taken")
