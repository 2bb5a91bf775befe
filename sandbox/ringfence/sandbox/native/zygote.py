"""The process that first processes of sandboxes are forked from. Standard library only, one thread, nothing secret.

For each sandbox it gets five descriptors and a packet without content. It forks; the child alone reads the job, makes the
namespaces, forks the first process of the sandbox, says its pid and goes, so that the warden becomes the parent.

INVARIANT: the zygote itself never reads a job, so that no sandbox can find what belongs to another in its memory.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
from typing import cast

from ringfence.sandbox.native import launcher, linux, reaper
from ringfence.sandbox.native.job import PACKET_BYTES, Job, Refused

READY = b"ready"
LENT = 5
"""Descriptors of each order: the job, the program's standard streams, the link to the warden."""
_FORK_FIX = "raise the limit of processes or memory around the kernel, or end other agents"


def main(descriptor: str) -> None:
    """Fork for the warden at the other end of a packet socket until it goes."""
    warden = socket.socket(fileno=int(descriptor))
    linux.close_from(3, frozenset({warden.fileno()}))
    # Children of this process are the warden's to wait for, or of no interest.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    # Pages of objects that are never looked at by the collector stay shared with the children.
    gc.freeze()
    warden.send(READY)
    while True:
        packet, descriptors, _, _ = socket.recv_fds(warden, PACKET_BYTES, LENT, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            os._exit(0)
        if len(descriptors) == LENT:
            _fork(descriptors)
        for lent in descriptors:
            os.close(lent)


def _fork(descriptors: list[int]) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        with socket.socket(fileno=os.dup(descriptors[-1])) as link:
            _refuse(link, f"no process can be forked for a sandbox: {error.strerror}; {_FORK_FIX}")
        return
    if pid == 0:
        try:
            _leave(descriptors)
        finally:
            os._exit(1)


def _refuse(link: socket.socket, message: str) -> None:
    with contextlib.suppress(OSError):
        link.send(json.dumps({"refused": message}).encode())


def _leave(descriptors: list[int]) -> None:
    """In a child of the zygote: fork the first process of a sandbox and go."""
    linux.close_from(3, frozenset(descriptors))
    # Ignored, the end of the first process would leave no status for the warden.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    content, stdin, stdout, stderr, link = descriptors
    with socket.socket(fileno=link) as warden:
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
            reaper.main(job, warden, (stdin, stdout, stderr))
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
