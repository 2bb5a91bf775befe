"""Attempts on what policy hides from a command."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from security.escapes.attempts.base import Stopped, add, call, read

MASKED = "/workspace/private/key"


def _mask(name: str, text: str, *walls: str) -> Callable[[Callable[[], bytes]], None]:
    def enter(function: Callable[[], bytes]) -> None:
        def run(facts: Any) -> str:
            seen = function()
            if facts["mask_canary"].encode() in seen:
                return repr(seen)
            raise Stopped(f"empty: {seen!r}"[:60])

        add(name, run, ("masks", *walls), kind="command", what=text)

    return enter


@_mask("mask_read", "Read a masked file, by every name it has")
def _mask_read() -> bytes:
    names = ("", "/./", "/../private/")
    last: Exception = Stopped("none")
    for middle in names:
        try:
            return read(f"/workspace/private{middle or '/'}key")
        except OSError as error:
            last = error
    for prefix in ("/proc/self/root", "/proc/self/cwd/../workspace/..", "/proc/1/root"):
        try:
            return read(prefix + MASKED)
        except OSError as error:
            last = error
    raise last


@_mask("mask_link", "Give a masked file a second name and read that")
def _mask_link() -> bytes:
    os.link(MASKED, "/workspace/mine", follow_symlinks=False)
    return read("/workspace/mine")


@_mask("mask_move", "Move a masked file away and read it there")
def _mask_move() -> bytes:
    os.rename(MASKED, "/workspace/moved")
    data = read("/workspace/moved")
    os.rename("/workspace/moved", MASKED)
    return data


@_mask("mask_exchange", "Exchange a masked file with another and read it there")
def _mask_exchange() -> bytes:
    with open("/workspace/decoy", "w") as file:
        file.write("decoy")
    call("renameat2", -100, MASKED.encode(), -100, b"/workspace/decoy", 2)
    data = read("/workspace/decoy")
    call("renameat2", -100, MASKED.encode(), -100, b"/workspace/decoy", 2)
    return data


@_mask("mask_through_link", "Reach a masked file through a link to its directory")
def _mask_through_link() -> bytes:
    os.symlink("private", "/workspace/alias")
    return read("/workspace/alias/key")


@_mask("mask_opened", "Open up a masked file by its mode, then read it")
def _mask_opened() -> bytes:
    os.chmod(MASKED, 0o644)
    return read(MASKED)


@_mask("mask_removed", "Remove a masked file, so that the mask goes with it")
def _mask_removed() -> bytes:
    before = read("/workspace/private/old") if os.access("/workspace/private/old", os.R_OK) else b""
    os.unlink("/workspace/private/old")
    return before


@_mask("mask_directory", "List a masked directory")
def _mask_directory() -> bytes:
    return "".join(
        name + read(f"/workspace/hidden/{name}").decode() for name in os.listdir("/workspace/hidden")
    ).encode()


@_mask("mask_handle", "Hold a masked file by a path handle and open that")
def _mask_handle() -> bytes:
    handle = os.open(MASKED, os.O_PATH)
    return read(f"/proc/self/fd/{handle}")
