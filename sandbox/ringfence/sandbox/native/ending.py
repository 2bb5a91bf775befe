"""Ends a warm program as its interpreter would, but for what was there before the fork.

An interpreter takes everything apart at its end, and what is taken apart is written to: in a process that was forked from a warm
one each page of it is copied for that alone, which costs as much as the start. What the program has made itself is let go of in
the interpreter's own order; the rest goes with the process.
"""

# ruff: noqa: PTH208 - as elsewhere here, pathlib is not loaded

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from ringfence.sandbox.native import linux

_CODE_MOST = 255
_STANDARD = ("stdin", "stdout", "stderr")
# The interpreter's own first steps; again they do nothing.
_await_threads: Callable[[], None] = getattr(threading, "_shutdown")  # noqa: B009 - it has no public name
_run_exit_functions: Callable[[], None] = getattr(atexit, "_run_exitfuncs")  # noqa: B009 - the same


def plain(code: object) -> bool:
    """Whether an argument of `sys.exit` is an exit status and nothing else."""
    return code is None or (type(code) is int and 0 <= code <= _CODE_MOST)


def end(code: int, last: str, most: int) -> None:
    """End this process. Returns where its interpreter had better do that.

    Args:
        code: exit status.
        last: the newest module that was there before the program.
        most: how many were.
    """
    try:
        _await_threads()
        if len(os.listdir("/proc/self/task")) != 1:
            return  # threads that it stops where they stand
        _run_exit_functions()
        _flush_standard()
        newer = _newer(last, most)
    except BaseException:  # noqa: BLE001 - it knows what to say
        return
    if newer is None:
        return
    # From here on nothing of the program's is shown but by itself.
    with contextlib.suppress(BaseException):
        _let_go(newer)
    with contextlib.suppress(BaseException):
        _flush(_files())
        _flush_standard()
    linux.exit_process(code)


def _flush_standard() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _newer(last: str, most: int) -> list[str] | None:
    """Modules that came after one, the newest first; None: it was taken away or put elsewhere, and nobody knows."""
    names: list[str] = []
    for name in reversed(sys.modules):
        if name == last:
            return names if len(sys.modules) - len(names) <= most else None
        names.append(name)
    return None


def _let_go(names: list[str]) -> None:
    """Forget the program's modules; those that something still holds are emptied, the newest first."""
    for name in _STANDARD:
        setattr(sys, name, getattr(sys, f"__{name}__"))
    held: list[weakref.ref[types.ModuleType]] = []
    for name in (*names, "__main__"):
        module = sys.modules.pop(name, None)
        if isinstance(module, types.ModuleType):
            held.append(weakref.ref(module))
        module = None
    # Files are held meanwhile: in a cycle the collector may close what one writes to before it has written.
    files: list[io.IOBase | None] = [*_files()]
    gc.collect()
    _release(files)
    for reference in held:
        found = reference()
        if found is not None:
            _empty(vars(found))
        found = None
    gc.collect()


def _release(files: list[io.IOBase | None]) -> None:
    """Who writes to another one goes first."""
    for kind in (io.TextIOBase, io.BufferedIOBase, io.IOBase):
        for place in range(len(files)):
            if isinstance(files[place], kind):
                files[place] = None


def _empty(names: dict[str, Any]) -> None:
    """As the interpreter does: what begins with one underscore first, then all but the builtins."""
    for first in (True, False):
        for name in list(names):
            if name != "__builtins__" and (not first or (name[:1] == "_" and name[1:2] != "_")):
                names[name] = None


def _files() -> list[io.IOBase]:
    """Those that were made since the fork, whoever holds them."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), io.IOBase)]


def _flush(files: list[io.IOBase]) -> None:
    for file in files:
        with contextlib.suppress(Exception):
            file.flush()
