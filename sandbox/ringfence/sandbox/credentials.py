"""Looking at files with an agent's rights instead of root's, for the moment of one system call.

Linux keeps these rights by thread. While they are lent, the calling thread has no right over files that the agent's uid
does not have: permission bits of files and of every directory on the way decide as they do for the agent itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from typing import Any

_NUMBERS = {"x86_64": (122, 123, 116), "aarch64": (151, 152, 159)}
_ASK = -1  # an id that can't be taken: the call only tells the one in force
_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_ids = _NUMBERS.get(platform.machine()) if os.name == "posix" else None


class AgentRights:
    """A context in which files are opened and looked at as `uid` (and the gid of the same number) would.

    Args:
        uid: the agent's host uid; None: the kernel's own user, and nothing changes.

    Raises:
        OSError: on entry, EPERM: root's rights can't be laid down. Nothing was looked at.
    """

    __slots__ = ("_groups", "_uid")

    def __init__(self, uid: int | None) -> None:
        self._uid = uid if uid is not None and os.geteuid() == 0 else None
        self._groups = os.getgroups() if self._uid is not None else []

    def __enter__(self) -> None:
        if self._uid is None:
            return
        try:
            if self._groups:
                _set_groups([])
            _set(1, self._uid)
            _set(0, self._uid)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._uid is None:
            return
        # INVARIANT: a thread never goes on with a part of its rights; if they can't be had back, the caller fails.
        _set(0, os.geteuid())
        _set(1, os.getegid())
        if self._groups:
            _set_groups(self._groups)


def _set(which: int, value: int) -> None:
    """Set the uid (0) or gid (1) that decides about files, and see that it is in force."""
    if _ids is None:
        raise OSError(errno.EPERM, "this machine's system call numbers are not known")
    number = ctypes.c_long(_ids[which])
    _libc.syscall(number, ctypes.c_long(value))
    if _libc.syscall(number, ctypes.c_long(_ASK)) != value:
        raise OSError(
            errno.EPERM, "the rights of an agent can't be taken; run the kernel with all of root's rights"
        )


def _set_groups(groups: list[int]) -> None:
    """Set this thread's supplementary groups; the C library would set those of all threads."""
    if _ids is None:
        raise OSError(errno.EPERM, "this machine's system call numbers are not known")
    words = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(ctypes.c_long(_ids[2]), ctypes.c_long(len(groups)), words) != 0:
        raise OSError(ctypes.get_errno(), "the groups of an agent can't be taken")
