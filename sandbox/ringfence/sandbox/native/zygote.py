"""The process that first processes of sandboxes are forked from: one thread, and nothing secret.

A cold one has the standard library only and executes every program. A warm one has imported what agents need, and its
children become Python programs themselves where that makes no difference.

For each sandbox it gets two descriptors, a link to the warden and the directory of the records. It forks; the child makes the namespaces, forks the first process
of the sandbox, says its pid and goes, so that the warden becomes the parent. The first process prepares what all sandboxes
have in common and waits for its job, which comes over the link. It may wait long: the warden keeps spare ones.

INVARIANT: no job ever comes to the zygote, so that no sandbox can find what belongs to another in its memory.
"""

# A zygote works on strings and descriptors; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH208

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, cast

from ringfence.sandbox.native import launcher, linux, reaper, seccomp
from ringfence.sandbox.native.job import PACKET_BYTES, Become, First, Refused

if TYPE_CHECKING:
    from ringfence.sandbox.native.warm import Interpreter

READY = b"ready"
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
        interpreter = importlib.import_module("ringfence.sandbox.native.warm").Interpreter(before)
        # INVARIANT: one thread. Whatever lock another one held would stay locked in every child.
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            warden.send(f"its modules started {threads - 1} threads".encode())
            os._exit(1)
        warden.send(READY)
    # Children of this process are the warden's to wait for, or of no interest.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if seccomp.supported():
        for memfd in (False, True):
            seccomp.program(memfd=memfd)  # once for all
    gc.collect()
    # Pages of objects that are never looked at by the collector stay shared with the children.
    gc.freeze()
    try:
        _serve(warden, interpreter)
    except Become:
        warden.detach()  # it was closed long ago
        raise


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


def _fork(first: First, link: socket.socket, records: int, interpreter: Interpreter | None) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        _refuse(link, f"no process can be forked for a sandbox: {error.strerror}; {_FORK_FIX}")
        return
    if pid == 0:
        try:
            _leave(first, link, records, interpreter)
        except Become:
            raise
        except BaseException:  # noqa: BLE001 - the warden sees the link end
            os._exit(1)
        os._exit(1)


def _refuse(link: socket.socket, message: str) -> None:
    with contextlib.suppress(OSError):
        link.send(json.dumps({"refused": message}).encode())


def _leave(first: First, link: socket.socket, records: int, interpreter: Interpreter | None) -> None:
    """In a child of the zygote: fork the first process of a sandbox and go."""
    linux.close_from(3, frozenset({link.fileno(), records}))
    # Ignored, the end of the first process would leave no status for the warden.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        launcher.require_tables()
        asks = (lambda: launcher.ask_for_maps(link)) if first["user"] == "sub" else None
        launcher.leave_namespaces(user=first["user"], mapped=asks)
        pid = os.fork()
    except Refused as refusal:
        _refuse(link, str(refusal))
        return
    except OSError as error:
        _refuse(link, f"the sandbox's first process can't be forked: {error.strerror}; {_FORK_FIX}")
        return
    if pid == 0:
        reaper.main(records, link, interpreter, sub=first["user"] == "sub")
    link.send(json.dumps({"pid": pid}).encode())
