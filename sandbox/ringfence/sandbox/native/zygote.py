"""The process that first processes of sandboxes are forked from: one thread, and nothing secret.

A cold one has the standard library only and executes every program. A warm one has imported what agents need, and its
children become Python programs themselves where that makes no difference.

For each sandbox it gets five descriptors and a packet without content. It forks; the child alone reads the job, makes the
namespaces, forks the first process of the sandbox, says its pid and goes, so that the warden becomes the parent.

INVARIANT: the zygote itself never reads a job, so that no sandbox can find what belongs to another in its memory.
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

from ringfence.sandbox.native import launcher, linux, reaper
from ringfence.sandbox.native.job import PACKET_BYTES, Become, Job, Refused

if TYPE_CHECKING:
    from ringfence.sandbox.native.warm import Interpreter

READY = b"ready"
LENT = 5
"""Descriptors of each order: the job, the program's standard streams, the link to the warden."""
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
        packet, descriptors, _, _ = socket.recv_fds(warden, PACKET_BYTES, LENT, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            os._exit(0)
        if len(descriptors) == LENT:
            _fork(descriptors, interpreter)
        for lent in descriptors:
            os.close(lent)


def _fork(descriptors: list[int], interpreter: Interpreter | None) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        with socket.socket(fileno=os.dup(descriptors[-1])) as link:
            _refuse(link, f"no process can be forked for a sandbox: {error.strerror}; {_FORK_FIX}")
        return
    if pid == 0:
        try:
            _leave(descriptors, interpreter)
        except Become:
            raise
        except BaseException:  # noqa: BLE001 - the warden sees the link end
            os._exit(1)
        os._exit(1)


def _refuse(link: socket.socket, message: str) -> None:
    with contextlib.suppress(OSError):
        link.send(json.dumps({"refused": message}).encode())


def _leave(descriptors: list[int], interpreter: Interpreter | None) -> None:
    """In a child of the zygote: fork the first process of a sandbox and go."""
    linux.close_from(3, frozenset(descriptors))
    # Ignored, the end of the first process would leave no status for the warden.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    content, stdin, stdout, stderr, link = descriptors
    warden = socket.socket(fileno=link)
    try:
        job = _read(content)
        launcher.require_tables()
        launcher.leave_namespaces(job["uid"])
        pid = os.fork()
    except Refused as refusal:
        _refuse(warden, str(refusal))
        return
    except OSError as error:
        _refuse(warden, f"the sandbox's first process can't be forked: {error.strerror}; {_FORK_FIX}")
        return
    if pid == 0:
        reaper.main(job, warden, (stdin, stdout, stderr), interpreter)
    warden.send(json.dumps({"pid": pid}).encode())


def _read(descriptor: int) -> Job:
    size = os.fstat(descriptor).st_size
    parts: list[bytes] = []
    done = 0
    while done < size:
        parts.append(os.pread(descriptor, size - done, done))
        done += len(parts[-1])
    os.close(descriptor)
    return cast("Job", json.loads(b"".join(parts)))
