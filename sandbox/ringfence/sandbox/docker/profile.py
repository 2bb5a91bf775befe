"""The native backend's system call filter in the form that container engines read.

Both are made from the same lists, so that neither lets through what the other refuses.
"""

from __future__ import annotations

import errno
import json
import resource
import socket
from functools import lru_cache
from typing import Any

from ringfence.sandbox.native import calls

_ALLOW, _ERRNO = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"
_EQUAL, _NOT_EQUAL, _MASKED = "SCMP_CMP_EQ", "SCMP_CMP_NE", "SCMP_CMP_MASKED_EQ"
_LOW_HALF = 0xFFFFFFFF
_SOCKET_TYPE = 0xF
_BUT_STREAM = ((1, 0), (2, 2), (4, 4), (8, 8))
"""Masks and what they leave: every type of socket but a stream, whose number is 1, meets one."""
_NAMESPACE_FLAGS = 0x7E020000
_DEVICE_BIT = 0o020000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_ARCHITECTURES = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")

Rule = dict[str, Any]


@lru_cache(maxsize=2)
def profile(*, tcp: bool = False) -> str:
    """The profile as one JSON document, for machines of both architectures that have a table.

    Args:
        tcp: whether TCP sockets may be made, as in `native.seccomp.program`.
    """
    core = resource.RLIMIT_CORE
    rules = [
        _rule(calls.ALLOWED, _ALLOW),
        _rule(["memfd_create"], _ALLOW),
        _rule(calls.REFUSED, _ERRNO, error=errno.EPERM),
        _rule(calls.ABSENT, _ERRNO, error=errno.ENOSYS),
        # The flags of clone3 lie in memory that a filter can't read; with ENOSYS libc falls back to clone.
        _rule(["clone3"], _ERRNO, error=errno.ENOSYS),
        _rule(["clone"], _ALLOW, [_masked(0, _NAMESPACE_FLAGS, 0)]),
        *(
            _rule(["clone"], _ERRNO, [_masked(0, bit, bit)], error=errno.EPERM)
            for bit in _bits(_NAMESPACE_FLAGS)
        ),
        _rule(["socket", "socketpair"], _ALLOW, [_masked(0, _LOW_HALF, socket.AF_UNIX)]),
        *_refused("socketpair", socket.AF_UNIX),
        *(_tcp() if tcp else _refused("socket", socket.AF_UNIX)),
        *(_rule(["ioctl"], _ALLOW, [_masked(1, *cube)]) for cube in all_but(_TIOCSTI, _TIOCLINUX)),
        *(
            _rule(["ioctl"], _ERRNO, [_masked(1, _LOW_HALF, request)], error=errno.EPERM)
            for request in (_TIOCSTI, _TIOCLINUX)
        ),
        *_devices("mknodat", 2),
        *_devices("mknod", 1),
        # Whoever may lower the limit of core files to zero has the host's core_pattern run on its memory.
        *(_rule(["setrlimit"], _ALLOW, [_masked(0, *cube)]) for cube in all_but(core)),
        _rule(["setrlimit"], _ERRNO, [_masked(0, _LOW_HALF, core)], error=errno.EPERM),
        *(_rule(["prlimit64"], _ALLOW, [_masked(1, *cube)]) for cube in all_but(core)),
        _rule(["prlimit64"], _ALLOW, [_masked(1, _LOW_HALF, core), {"index": 2, "value": 0, "op": _EQUAL}]),
        _rule(
            ["prlimit64"],
            _ERRNO,
            [_masked(1, _LOW_HALF, core), {"index": 2, "value": 0, "op": _NOT_EQUAL}],
            error=errno.EPERM,
        ),
    ]
    return json.dumps(
        {
            "defaultAction": _ERRNO,
            "defaultErrnoRet": errno.ENOSYS,
            "architectures": list(_ARCHITECTURES),
            "syscalls": rules,
        }
    )


def all_but(*values: int) -> list[tuple[int, int]]:
    """Masks and what they must leave, one of which every 32-bit number meets that is not among `values`.

    Engines know no "neither this nor that" for one argument, only "the bits of this mask are these"; and "not equal" looks at
    all 64 bits, of which the kernel ignores the upper half.
    """
    found: list[tuple[int, int]] = []
    branches = [(0, 0, tuple(values))]
    for bit in (1 << place for place in range(31, -1, -1)):
        following: list[tuple[int, int, tuple[int, ...]]] = []
        for mask, wanted, inside in branches:
            for side in (0, bit):
                held = tuple(value for value in inside if value & bit == side)
                if held:
                    following.append((mask | bit, wanted | side, held))
                else:
                    found.append((mask | bit, wanted | side))
        branches = following
    return found


def _refused(name: str, *families: int) -> list[Rule]:
    """No sockets but of these families."""
    return [
        _rule([name], _ERRNO, [_masked(0, *cube)], error=errno.EAFNOSUPPORT) for cube in all_but(*families)
    ]


def _tcp() -> list[Rule]:
    """TCP over IPv4 besides unix sockets, and no other protocol."""
    inet = _masked(0, _LOW_HALF, socket.AF_INET)
    stream = _masked(1, _SOCKET_TYPE, socket.SOCK_STREAM)
    protocols = (0, socket.IPPROTO_TCP)
    return [
        *_refused("socket", socket.AF_UNIX, socket.AF_INET),
        *(_rule(["socket"], _ALLOW, [inet, stream, _masked(2, _LOW_HALF, one)]) for one in protocols),
        *(
            _rule(["socket"], _ERRNO, [inet, _masked(1, *cube)], error=errno.EPROTONOSUPPORT)
            for cube in _BUT_STREAM
        ),
        *(
            _rule(["socket"], _ERRNO, [inet, stream, _masked(2, *cube)], error=errno.EPROTONOSUPPORT)
            for cube in all_but(*protocols)
        ),
    ]


def _bits(mask: int) -> list[int]:
    return [1 << place for place in range(32) if mask >> place & 1]


def _devices(name: str, index: int) -> list[Rule]:
    return [
        _rule([name], _ALLOW, [_masked(index, _DEVICE_BIT, 0)]),
        _rule([name], _ERRNO, [_masked(index, _DEVICE_BIT, _DEVICE_BIT)], error=errno.EPERM),
    ]


def _rule(names: Any, action: str, arguments: list[Rule] | None = None, *, error: int | None = None) -> Rule:
    rule: Rule = {"names": sorted(names), "action": action, "args": arguments or []}
    return rule if error is None else {**rule, "errnoRet": error}


def _masked(index: int, mask: int, wanted: int) -> Rule:
    return {"index": index, "value": mask, "valueTwo": wanted, "op": _MASKED}
