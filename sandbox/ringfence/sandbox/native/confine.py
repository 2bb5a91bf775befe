"""Gives up every right for good: user, capabilities, no_new_privs, Landlock, seccomp; then looks whether it is so."""

# The launcher works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH110, PTH123

from __future__ import annotations

import os
import resource
import signal

from ringfence.sandbox.native import jail, landlock, linux, seccomp
from ringfence.sandbox.native.job import INSIDE_UID, Job, Refused, wall

_NOFILE = 1024
_CORE_BYTES = 1
_DATA_SLACK_BYTES = 1 << 30
_OOM_SCORE = 500
_STATUS_WANTED = {
    "CapInh": 0,
    "CapPrm": 0,
    "CapEff": 0,
    "CapBnd": 0,
    "CapAmb": 0,
    "NoNewPrivs": 1,
    "Seccomp": 2,
}
_HEXADECIMAL = 16


def give_up_rights(job: Job, *, memory_in_group: bool) -> int:
    """Confine this process and all its descendants. There is no way back.

    Returns:
        The Landlock ABI in force, 0 for none.

    Raises:
        Refused: a wall can't be raised, or doesn't stand after all.
    """
    # With a sub-uid this is the kernel's user yet, as uid 0 inside.
    uid = INSIDE_UID if job["sub"] else job["uid"]
    with wall(
        "capabilities",
        "run the kernel as root or as an ordinary user, not with a part of root's capabilities",
    ):
        linux.drop_bounding_set()
        if uid is not None:
            become(uid)
        linux.drop_capabilities()
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    with wall("landlock", "report this with the output of `ringfence doctor`"):
        abi = landlock.restrict(_rules(job))
    # Zero stops core files, but not a core_pattern that pipes them to a program of the host; one byte stops both. The
    # filter then keeps it so.
    _bound(resource.RLIMIT_CORE, _CORE_BYTES)
    with wall("seccomp", "the Linux kernel must have CONFIG_SECCOMP_FILTER"):
        seccomp.install(seccomp.program(memfd=memory_in_group))
    _verify()
    return abi


def become(uid: int) -> None:
    """Be this user, in the group of the same number and in no other.

    Raises:
        OSError: without the right to it.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _rules(job: Job) -> list[tuple[str, int]]:
    runnable = [*jail.SYSTEM, *job["readonly"], *job["mounts"], *(["/program"] if job["image"] else [])]
    writable = ["/tmp", *(["/workspace"] if job["lower"] else [])]  # noqa: S108 - the sandbox's own
    rules = [("/", landlock.READ), ("/proc", landlock.WRITE)]
    rules += [(path, landlock.READ_AND_RUN) for path in runnable if os.path.exists(path)]
    rules += [(path, landlock.CHANGE) for path in writable]
    return rules + [(f"/dev/{name}", landlock.DEVICE) for name in jail.DEVICES]


def _verify() -> None:
    # INVARIANT: nothing here may import, not even a codec: the interpreter's own files may be out of reach by now.
    with open("/proc/self/status", "rb") as file:
        status = dict(line.decode("utf-8", "replace").split(":", 1) for line in file)
    for name, wanted in _STATUS_WANTED.items():
        found = int(status[name].strip(), _HEXADECIMAL)
        if found != wanted:
            raise Refused(
                f"the sandbox's wall `{name}` does not stand: it is {found:x}; report this as a bug"
            )


def become_program(job: Job, *, pids_in_group: bool, memory_in_group: bool) -> None:
    """Last steps of the process that becomes the program: signals, resource limits, and what the OOM killer prefers.

    Raises:
        OSError: a limit can't be set.
    """
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
        # A group short of memory must lose the program, not the reaper that reports its end.
        file.write(str(_OOM_SCORE).encode())
    # A uid's processes are counted over all its sandboxes: with a group of its own this is only a second bound.
    processes = 2 * job["pids"] + 8 if pids_in_group else job["pids"] + 1
    limits = {
        resource.RLIMIT_NOFILE: _NOFILE,
        resource.RLIMIT_FSIZE: job["disk_bytes"],
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_MEMLOCK: 1 << 20,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_SIGPENDING: 1024,
    }
    if not memory_in_group:
        limits[resource.RLIMIT_DATA] = job["memory_bytes"] + _DATA_SLACK_BYTES
    for which, value in limits.items():
        _bound(which, value)


def _bound(which: int, value: int) -> None:
    """Set a limit for good, or keep a lower one that is in force already."""
    hard = resource.getrlimit(which)[1]
    bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bounded, bounded))
