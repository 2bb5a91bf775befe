"""How the processes outside sandboxes are started, and the namespaces that a sandbox begins with.

Standard library only: `warden` and `zygote` have to start fast.
"""

# These processes work on strings and descriptors; pathlib would cost them as much as all their own code.
# ruff: noqa: PTH100, PTH120, PTH123

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from ringfence.sandbox.native import linux, seccomp
from ringfence.sandbox.native.job import INSIDE_UID, PACKET_BYTES, USERNS_FIX, Refused, wall

SOURCE = os.path.abspath(f"{os.path.dirname(__file__)}/../../..")
"""Where this package is imported from."""
MAPPED = b"mapped"
"""The answer when the maps of a user namespace are written."""
_ENTRY = "import sys; sys.path.insert(0, sys.argv[1]); from ringfence.sandbox.native import {0}; {0}.{1}(*sys.argv[2:])"
_WARM_ENTRY = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
_before = frozenset(sys.modules)
sys.path.insert(0, sys.argv[1])
from ringfence.sandbox.native import zygote as _zygote
try:
    _zygote.main(sys.argv[2], _before)
except _zygote.Become as _become:
    _program = _become.program
_code = None
try:
    exec(_program.code, _program.namespace)
except SystemExit as _error:
    if not _program.plain(_error.code):
        raise
    _code = _error.code
except BaseException as _error:
    _program.show(_error)
    raise
_program.end(_code or 0)
"""
_NO_HOME = "/nonexistent"


def warm_command(descriptor: int) -> list[str]:
    """Command line of a warm zygote: the kernel's own interpreter as agents see it, with its site packages.

    Nothing is imported from the working directory.
    """
    return [sys.executable, "-c", _WARM_ENTRY, SOURCE, str(descriptor)]


def warm_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Environment of a warm zygote; packages in a user's home are never loaded."""
    return {**more, "HOME": _NO_HOME}


def command(module: str, entry: str, *arguments: str) -> list[str]:
    """Command line that calls a function of this package in the kernel's own interpreter, without site packages and
    without its environment.
    """  # noqa: D205
    code = _ENTRY.format(module, entry)
    return [sys.executable, "-I", "-S", "-X", "utf8", "-c", code, SOURCE, *arguments]


def require_tables() -> None:
    """Refuse where the system calls of this machine are not known.

    Raises:
        Refused: they are not.
    """
    if not (linux.supported() and seccomp.supported()):
        raise Refused(
            f"there is no system call filter for `{linux.MACHINE}`; run agents on x86_64 or aarch64"
        )


def spaces(user: str) -> int:
    """The namespaces that a first process is forked into, as `CLONE_NEW*`.

    Args:
        user: a form of the wall `uid`; all but `own` mean a user namespace.
    """
    return linux.CLONE_NEWPID if user == "own" else linux.CLONE_NEWUSER | linux.CLONE_NEWPID


def outer_wall(user: str) -> contextlib.AbstractContextManager[None]:
    """What it means where these are refused."""
    if user == "own":
        return wall("pid namespace", "run the kernel with all of root's capabilities, or as an ordinary user")
    return wall("user namespace", USERNS_FIX)


def leave_namespaces(*, user: str, mapped: Callable[[], None] | None = None) -> None:
    """New namespaces for the child to come; this process itself stays among the host's processes and files.

    Args:
        user: a form of the wall `uid`; all but `own` mean a user namespace.
        mapped: with sub-uids: waits until somebody outside has written the maps.

    Raises:
        Refused: the host refuses.
    """
    own = os.getuid(), os.getgid()
    with outer_wall(user):
        linux.unshare(spaces(user))
        if user != "own":
            if mapped is not None:
                mapped()
            else:
                write_own_maps(*own)


def write_own_maps(uid: int, gid: int) -> None:
    """Map one user and group, those of the host that this process has, in the user namespace it has just come into.

    Raises:
        OSError: the host refuses.
    """
    texts = {"setgroups": "deny", "uid_map": f"{INSIDE_UID} {uid} 1", "gid_map": f"{INSIDE_UID} {gid} 1"}
    for name, text in texts.items():
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def ask_for_maps(link: socket.socket) -> None:
    """Have the maps of this process's new user namespace written by who is at the other end, or go."""
    link.send(json.dumps({"map": os.getpid()}).encode())
    if link.recv(PACKET_BYTES) != MAPPED:
        os._exit(1)


def run_probe() -> None:
    """Try every wall on its own and print what was found as one JSON document."""
    probe = importlib.import_module("ringfence.sandbox.native.probe")
    arguments = cast("dict[str, Any]", json.loads(sys.stdin.read()))
    sys.stdout.write(json.dumps(probe.run(arguments["data"], sub_uids=arguments["sub_uids"])))
