"""Gives a forked process the name, arguments and environment that tools such as `ps` show, as execution would."""

# ruff: noqa: PTH123

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ringfence.sandbox.native import linux

_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_NAME_BYTES = 16
_NO_FILE = 0xFFFFFFFF
# Indices among the fields that follow the name in /proc/PID/stat.
_START_CODE, _END_CODE, _START_STACK = 23, 24, 25
_START_DATA, _END_DATA, _START_BREAK = 42, 43, 44
_kept: list[Any] = []
"""What the process's arguments and environment are read from by others: lives as long as the process."""


def rename(name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Set what is shown of this process; where the host refuses, it stays as it was."""
    with contextlib.suppress(OSError):
        text = ctypes.create_string_buffer(os.fsencode(name)[: _NAME_BYTES - 1])
        linux.prctl(_PR_SET_NAME, ctypes.addressof(text))
        arguments = b"".join(os.fsencode(word) + b"\0" for word in argv)
        environment = b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in env.items())
        area = ctypes.create_string_buffer(arguments + environment)
        start = ctypes.addressof(area)
        middle = start + len(arguments)
        *places, stack = _places()
        words = [*places, linux.program_break(), stack, start, middle, middle, middle + len(environment), 0]
        layout = ctypes.create_string_buffer(struct.pack("=12QII", *words, 0, _NO_FILE))
        linux.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.addressof(layout), len(layout) - 1)
        _kept.append(area)


def rehearse() -> None:
    """Look up what is kept as it is."""
    _places()
    linux.program_break()


@functools.cache
def _places() -> list[int]:
    """Where code, data, the break and the stack begin or end, here and in every process that is forked from this one."""
    with open("/proc/self/stat", "rb", buffering=0) as file:
        facts = file.read().rpartition(b")")[2].split()
    wanted = (_START_CODE, _END_CODE, _START_DATA, _END_DATA, _START_BREAK, _START_STACK)
    return [int(facts[index]) for index in wanted]
