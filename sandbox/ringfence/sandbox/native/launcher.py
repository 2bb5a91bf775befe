"""The small process outside a sandbox: makes it, watches it, and reports how it ended. Imports the standard library only.

Standard input brings the job, then one byte per order; its end means that the kernel is gone, and the sandbox goes with
it. Standard output carries events as lines of JSON: `refused`, or `started`, then `paused` and `resumed`, then `exit`.
"""

# The launcher works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH101, PTH102, PTH116, PTH123

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import select
import socket
import sys
from typing import Any, cast

from ringfence.sandbox.native import identity, linux, reaper, seccomp
from ringfence.sandbox.native.cgroups import Groups
from ringfence.sandbox.native.job import (
    FORMAT_NAME,
    HEADER_BYTES,
    INSIDE_UID,
    STDERR_NAME,
    STDOUT_NAME,
    UPPER_NAME,
    USERNS_FIX,
    WORK_NAME,
    Job,
    Refused,
    wall,
)
from ringfence.sandbox.native.output import Sink
from ringfence.sandbox.native.supervisor import Supervisor, emit

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_OUTPUT_SHARE = 4
"""Each output file of a command may take this part of its disk limit."""


def main() -> None:
    """Run one sandbox to its end."""
    header = _read_exactly(HEADER_BYTES)
    job = cast("Job", json.loads(_read_exactly(int.from_bytes(header, "big"))))
    keep = frozenset({job["stdout_fd"], job["stderr_fd"]} - {-1})
    linux.close_from(3, keep)
    for descriptor in keep:
        os.set_inheritable(descriptor, False)
    groups = Groups({})
    try:
        _require_tables()
        stdin = _stdin(job)
        sinks = _sinks(job)
        groups = Groups.create(job["name"])
        groups.limit(job["memory_bytes"], job["pids"] + 1, job["cpu"])
        leave_namespaces(job["uid"])
        supervisor = _spawn(job, groups, stdin, sinks)
        emit(supervisor.run())
    except Refused as refusal:
        emit({"event": "refused", "message": str(refusal)})
    finally:
        groups.remove()
        identity.remove_record(job["records"], job["name"])


def _require_tables() -> None:
    if not (linux.supported() and seccomp.supported()):
        raise Refused(
            f"there is no system call filter for `{linux.MACHINE}`; run agents on x86_64 or aarch64"
        )


def _read_exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            sys.exit(1)  # the kernel went away before it had said anything
        data += part
    return bytes(data)


def _stdin(job: Job) -> int:
    """The program's standard input as a sealed anonymous file."""
    data = _read_exactly(job["stdin_bytes"])
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _sinks(job: Job) -> list[Sink]:
    """For a command: the layers of its overlay, and where its output goes."""
    if not job["lower"]:
        return []
    scratch, uid = job["scratch"], job["uid"]
    with wall("scratch directory", "it must be empty and writable for the kernel"):
        lower = os.stat(job["lower"])
        upper = f"{scratch}/{UPPER_NAME}"
        os.mkdir(f"{scratch}/{WORK_NAME}", 0o700)
        os.mkdir(upper, 0o700)
        # The root of an overlay shows the upper layer's own owner, mode and times.
        if uid is not None:
            os.chown(upper, lower.st_uid, lower.st_gid)
        os.chmod(upper, lower.st_mode & 0o7777)
        os.utime(upper, ns=(lower.st_atime_ns, lower.st_mtime_ns))
        with open(f"{scratch}/{FORMAT_NAME}", "x", encoding="ascii") as file:
            file.write("user" if uid is None else "trusted")
        limit = job["disk_bytes"] // _OUTPUT_SHARE
        return [Sink(f"{scratch}/{name}", limit) for name in (STDOUT_NAME, STDERR_NAME)]


def leave_namespaces(uid: int | None) -> None:
    """New namespaces for the child to come; this process itself stays among the host's processes and files.

    Args:
        uid: as in `Job`; None asks for a user namespace.

    Raises:
        Refused: the host refuses.
    """
    if uid is not None:
        with wall("pid namespace", "run the kernel with all of root's capabilities, or as an ordinary user"):
            linux.unshare(linux.CLONE_NEWPID)
        return
    own_uid, own_gid = os.getuid(), os.getgid()
    with wall("user namespace", USERNS_FIX):
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWPID)
        texts = {
            "setgroups": "deny",
            "uid_map": f"{INSIDE_UID} {own_uid} 1",
            "gid_map": f"{INSIDE_UID} {own_gid} 1",
        }
        for name, text in texts.items():
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


def _spawn(job: Job, groups: Groups, stdin: int, sinks: list[Sink]) -> Supervisor:
    """Fork the first process of the sandbox and let it go once a later kernel could find it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stdout, stderr = [sink.writer for sink in sinks] or [job["stdout_fd"], job["stderr_fd"]]
    record: identity.Record = {
        "name": job["name"],
        "agent": job["agent"],
        "boot": identity.boot_id(),
        "launcher": identity.process(os.getpid()),
        "init": None,
        "groups": groups.directories(),
        "freezer": groups.where.get("freezer"),
    }
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            ours.close()
            reaper.main(job, theirs, (stdin, stdout, stderr), frozenset(groups.where))
        os._exit(1)
    theirs.close()
    for descriptor in {stdin, stdout, stderr}:
        os.close(descriptor)
    try:
        with wall("control groups", "let the kernel write to its own control groups, or to none"):
            groups.attach(pid)
        record["init"] = identity.process(pid)
        with wall("identity record", "the data directory must be writable and have room"):
            # INVARIANT: no program runs before its record is on disk, so a later kernel finds everything.
            identity.write_record(job["records"], record)
        _require_kernel()
        ours.send(reaper.GO)
    except BaseException:
        ours.close()
        os.waitpid(pid, 0)
        raise
    return Supervisor(job, groups, record, ours, sinks)


def _require_kernel() -> None:
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):
        raise Refused("the kernel went away")


def run_probe() -> None:
    """Try every wall on its own and print what was found as one JSON document."""
    probe = importlib.import_module("ringfence.sandbox.native.probe")
    arguments = cast("dict[str, Any]", json.loads(sys.stdin.read()))
    sys.stdout.write(json.dumps(probe.run(arguments["data"])))
