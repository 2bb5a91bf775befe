"""The process that first processes of sandboxes are forked from: one thread, and nothing secret.

A cold one has the standard library only and executes every program. A warm one has imported what agents need, and its
children become Python programs themselves where that makes no difference.

For each sandbox it gets two descriptors, a link to the warden and the directory of the records. It forks the first process, into
its namespaces and as a child of the warden's. The first process prepares what all sandboxes have in common,
forks who will be the program, and waits for its job, which comes over the link. It may wait long: the warden keeps spare ones.

INVARIANT: no job ever comes to the zygote, so that no sandbox can find what belongs to another in its memory.
"""

# A zygote works on strings and descriptors; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH208

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, cast

from ringfence.sandbox.native import ahead, confine, jail, launcher, linux, reaper, seccomp
from ringfence.sandbox.native.job import PACKET_BYTES, Become, First, Refused

if TYPE_CHECKING:
    from ringfence.sandbox.native.warm import Interpreter

READY = b"ready"
HERE = b"here"
"""The first word of a first process. The warden is told by Linux whose word it is."""
_REHEARSALS = 20
"""Enough for the interpreter to specialise what is run, which each child would have to write for itself."""
_NO_ROOM = frozenset({errno.EAGAIN, errno.ENOMEM})
_FORK_FIX = "raise the limit of processes or memory around the kernel, or end other agents"


def main(descriptor: str, before: frozenset[str] | None = None) -> None:
    """Fork for the warden at the other end of a packet socket until it goes.

    Args:
        descriptor: number of the socket.
        before: modules that every start of this interpreter has, for a warm one; None: it only executes programs.

    Raises:
        Become: in a process that is to become a program.
    """
    warden = socket.socket(fileno=int(descriptor))
    linux.close_from(3, frozenset({warden.fileno()}))
    interpreter: Interpreter | None = None
    if before is not None:
        sys.path.remove(launcher.SOURCE)
        warm = importlib.import_module("ringfence.sandbox.native.warm")
        interpreter = cast("Interpreter", warm.Interpreter(before))
    # Children of this process are the warden's to wait for, or of no interest.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.geteuid() == 0:
        confine.renounce()  # once for all that stay in this user namespace
    seccomp.prepare()
    gc.collect()
    _rehearse(interpreter)  # after that, which empties what the interpreter keeps for reuse
    if interpreter is not None:
        # INVARIANT: one thread. Whatever lock another one held would stay locked in every child.
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            warden.send(f"its modules started {threads - 1} threads".encode())
            os._exit(1)
        warden.send(READY)
    # Pages of objects that are never looked at by the collector stay shared with the children.
    gc.freeze()
    try:
        _serve(warden, interpreter)
    except Become:
        warden.detach()  # it was closed long ago
        raise


def _rehearse(interpreter: Interpreter | None) -> None:
    """Run what each child will, as far as it has no effect: what is written to memory by that, no child has to write."""
    for _ in range(_REHEARSALS):
        for part in (ahead.rehearse, confine.rehearse, linux.rehearse):
            with contextlib.suppress(
                OSError
            ):  # what the host refuses, it refuses with a reason when it is for real
                part()
        if interpreter is not None:
            interpreter.rehearse()


def _serve(warden: socket.socket, interpreter: Interpreter | None) -> None:
    while True:
        packet, descriptors, _, _ = socket.recv_fds(warden, PACKET_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            os._exit(0)
        if len(descriptors) == 2:  # noqa: PLR2004 - as above
            link = socket.socket(fileno=descriptors[0])
            try:
                _fork(cast("First", json.loads(packet)), link, descriptors[1], interpreter)
            except Become:
                link.detach()
                raise
            link.close()
            os.close(descriptors[1])
            os.chdir("/")


def _fork(first: First, link: socket.socket, records: int, interpreter: Interpreter | None) -> None:
    """Fork the first process of a sandbox, as a child of the warden's."""
    user = first["user"]
    own = os.getuid(), os.getgid()
    # By its descriptor, so that no path of the kernel's stands in memory; and before the fork, since a handle from before
    # would be one on the host's mounts, where the directory of a process comes along into mounts of its own.
    os.fchdir(records)
    try:
        pid = _divide(user)
    except Refused as refusal:
        with contextlib.suppress(OSError):
            link.send(json.dumps({"refused": str(refusal)}).encode())
        return
    if pid:
        return
    try:
        linux.close_from(3, frozenset({link.fileno()}))
        link.send(HERE)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        reaper.main(link, interpreter, user=user, own=own)
    except Become:
        raise
    except BaseException:  # noqa: BLE001 - the warden sees the link end
        os._exit(1)
    os._exit(1)


def _divide(user: str) -> int:
    """Fork into the namespaces of a sandbox; 0 in the child.

    Raises:
        Refused: the host has no room for a process, or no such namespaces.
    """
    launcher.require_tables()
    try:
        with launcher.outer_wall(user):
            return linux.fork_beside(launcher.spaces(user) | jail.SPACES)
    except Refused as refusal:
        cause = refusal.__cause__
        if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
            reason = os.strerror(cause.errno or 0)
            raise Refused(f"no process can be forked for a sandbox: {reason}; {_FORK_FIX}") from cause
        raise
