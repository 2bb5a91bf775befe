"""Landlock: a second wall around the file system, and the only one around abstract sockets and signals."""

from __future__ import annotations

import os
import stat
import struct

from ringfence.sandbox.native import linux

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_MAKE_CHAR = 1 << 6
_MAKE_BLOCK = 1 << 11
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_VERSION = 1
_RULE_PATH_BENEATH = 1
_BITS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
_BITS_NOW = 16
_NET_SINCE, _SCOPE_SINCE = 4, 6
_BIND_AND_CONNECT = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

WRITE = _WRITE_FILE | _TRUNCATE
READ = _READ_FILE | _READ_DIR
READ_AND_RUN = READ | _EXECUTE
DEVICE = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
CHANGE = ((1 << _BITS_NOW) - 1) & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV)


def version() -> int:
    """The kernel's Landlock ABI; 0: it has none, or it is switched off."""
    try:
        return linux.syscall("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return 0


def restrict(rules: list[tuple[str, int]]) -> int:
    """Confine this process to `rules`: pairs of a path that exists and rights. Needs no_new_privs.

    Returns:
        The ABI that is in force; 0: the kernel has no Landlock.

    Raises:
        OSError: the kernel has Landlock, but a rule could not be made.
    """
    abi = version()
    if abi < 1:
        return 0
    handled = (1 << _BITS_BY_ABI.get(abi, _BITS_NOW)) - 1
    words = [handled]
    if abi >= _NET_SINCE:
        words.append(_BIND_AND_CONNECT)
    if abi >= _SCOPE_SINCE:
        words.append(_ABSTRACT_SOCKETS_AND_SIGNALS)
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = linux.syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    for path, rights in rules:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        possible = handled if stat.S_ISDIR(os.fstat(beneath).st_mode) else handled & _OF_FILES
        linux.syscall(
            "landlock_add_rule",
            ruleset,
            _RULE_PATH_BENEATH,
            struct.pack("=Qi", rights & possible, beneath),
            0,
        )
        os.close(beneath)
    linux.syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)
    return abi
