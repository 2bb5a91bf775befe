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
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_VERSION = 1
_RULE_PATH_BENEATH, _RULE_NET_PORT = 1, 2
_BITS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
_BITS_NOW = 16
_NET_SINCE, _SCOPE_SINCE = 4, 6
_BIND_AND_CONNECT, _CONNECT = 0b11, 0b10
_ABSTRACT_SOCKETS, _SIGNALS = 0b01, 0b10

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


def bound_signals() -> None:
    """Keep this process from signalling any but its descendants, for good; files are as before. Needs no_new_privs.

    Does nothing where Landlock knows no such bound.

    Raises:
        OSError: it does, and it could not be made.
    """
    if version() < _SCOPE_SINCE:
        return
    # Whoever says nothing about moves between directories refuses them.
    attributes = struct.pack("=3Q", _REFER, 0, _SIGNALS)
    ruleset = linux.syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        _add(ruleset, "/", _REFER, _REFER)
        linux.syscall("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, path: str, rights: int, handled: int) -> None:
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        possible = handled if stat.S_ISDIR(os.fstat(beneath).st_mode) else handled & _OF_FILES
        rule = struct.pack("=Qi", rights & possible, beneath)
        linux.syscall("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(beneath)


class Rules:
    """Rules in the making: what is common to all sandboxes can stand in them before there is a job.

    Args:
        signals: whether who keeps to them signals its descendants alone, where Landlock knows that bound.

    Attributes:
        abi: that is in force for them; 0: this kernel has no Landlock, and nothing here does anything.

    Raises:
        OSError: the kernel has Landlock, but refuses.
    """

    def __init__(self, *, signals: bool) -> None:
        self.abi = version()
        self._ruleset = -1
        self._handled = 0
        if self.abi < 1:
            return
        self._handled = (1 << _BITS_BY_ABI.get(self.abi, _BITS_NOW)) - 1
        words = [self._handled]
        if self.abi >= _NET_SINCE:
            words.append(_BIND_AND_CONNECT)
        if self.abi >= _SCOPE_SINCE:
            words.append(_ABSTRACT_SOCKETS | (_SIGNALS if signals else 0))
        attributes = struct.pack(f"={len(words)}Q", *words)
        self._ruleset = linux.syscall("landlock_create_ruleset", attributes, len(attributes), 0)

    @property
    def descriptors(self) -> frozenset[int]:
        """What has to stay open."""
        return frozenset() if self._ruleset < 0 else frozenset({self._ruleset})

    def add(self, rules: list[tuple[str, int]]) -> None:
        """Allow more: pairs of a path that exists and rights.

        Raises:
            OSError: a rule could not be made.
        """
        if self._ruleset < 0:
            return
        for path, rights in rules:
            _add(self._ruleset, path, rights, self._handled)

    def allow_port(self, port: int) -> None:
        """Allow TCP connections to one port, where Landlock knows such rules; without one it lets none through.

        Raises:
            OSError: the rule could not be made.
        """
        if self._ruleset >= 0 and self.abi >= _NET_SINCE:
            rule = struct.pack("=2Q", _CONNECT, port)
            linux.syscall("landlock_add_rule", self._ruleset, _RULE_NET_PORT, rule, 0)

    def restrict(self) -> None:
        """Confine this process to them, for good. Needs no_new_privs.

        Raises:
            OSError: the kernel refused.
        """
        if self._ruleset >= 0:
            linux.syscall("landlock_restrict_self", self._ruleset, 0)
        self.close()

    def close(self) -> None:
        """Let go of them."""
        if self._ruleset >= 0:
            os.close(self._ruleset)
            self._ruleset = -1
