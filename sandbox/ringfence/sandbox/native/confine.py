"""Gives up every right for good: user, capabilities, no_new_privs, Landlock, seccomp; then looks whether it is so."""

# The launcher works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH110, PTH112, PTH114

from __future__ import annotations

import contextlib
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
_STATUS_BYTES = 16384


def _capabilities() -> contextlib.AbstractContextManager[None]:
    fix = "run the kernel as root or as an ordinary user, not with a part of root's capabilities"
    return wall("capabilities", fix)


def _landlock() -> contextlib.AbstractContextManager[None]:
    return wall("landlock", "report this with the output of `ringfence doctor`")


def renounce() -> None:
    """Let nothing that is executed here, or in what comes of this process, ever gain a right. What it has, it keeps.

    Raises:
        Refused: a wall can't be raised.
    """
    with _capabilities():
        linux.drop_bounding_set()
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)


def rules(*, signals: bool) -> landlock.Rules:
    """Rules for files that allow nothing yet.

    Args:
        signals: whether who keeps to them signals its descendants alone. See `stand_alone`.

    Raises:
        Refused: the host refuses.
    """
    with _landlock():
        return landlock.Rules(signals=signals)


def begin(common: landlock.Rules) -> None:
    """Add to these what is the same for all sandboxes. Called in the new root, entered or not.

    Raises:
        Refused: a rule can't be made.
    """
    with _landlock():
        common.add([(".", landlock.READ), ("./proc", landlock.WRITE)])
        common.add([(path, landlock.READ_AND_RUN) for path in _directories()])
        common.add([(f"./dev/{name}", landlock.DEVICE) for name in jail.DEVICES])


def _directories() -> list[str]:
    """Those of the system that are none by a link to another: a link has no rights of its own."""
    found = [f".{path}" for path in jail.SYSTEM]
    return [path for path in found if os.path.isdir(path) and not os.path.islink(path)]


def allow_job(common: landlock.Rules, job: Job) -> None:
    """Add to these what a job names. Called in the new root.

    Raises:
        Refused: a rule can't be made.
    """
    runnable = [*job["readonly"], *job["mounts"], *(["/program"] if job["image"] else [])]
    writable = ["/tmp", *(["/workspace"] if job["lower"] else [])]  # noqa: S108 - the sandbox's own
    with _landlock():
        common.add([(path, landlock.READ_AND_RUN) for path in runnable if os.path.exists(path)])
        common.add([(path, landlock.CHANGE) for path in writable])
        if job["loopback"]:
            common.allow_port(job["loopback"])


def filter_calls(*, memfd: bool, tcp: bool = False) -> None:
    """Put the filter of system calls on this process and all its descendants. It leaves what the other walls need.

    Args:
        memfd: whether a control group counts memory, see `seccomp.program`. A second filter only adds to the first.
        tcp: whether there are doors on the loopback, see there.

    Raises:
        Refused: a wall can't be raised.
    """
    # Zero stops core files, but not a core_pattern that pipes them to a program of the host; one byte stops both. The
    # filter then keeps it so.
    with wall("seccomp", "the Linux kernel must have CONFIG_SECCOMP_FILTER"):
        _bound(resource.RLIMIT_CORE, _CORE_BYTES)
        seccomp.install(seccomp.program(memfd=memfd, tcp=tcp))


def give_up_rights(job: Job, files: landlock.Rules) -> None:
    """Give up user, capabilities and files, in a process that comes of one that has called `renounce`. There is no way back.

    Args:
        job: of the sandbox.
        files: rules, with what `allow_job` has added.

    Raises:
        Refused: a wall can't be raised.
    """
    # With a sub-uid this is the kernel's user yet, as uid 0 inside.
    uid = INSIDE_UID if job["sub"] else job["uid"]
    with _capabilities():
        if uid is not None:
            become(uid)
        linux.drop_capabilities()
    with _landlock():
        files.restrict()


def stand_alone() -> None:
    """Keep this process from signalling any but its descendants, where the rules for files don't do that too.

    Raises:
        Refused: a wall can't be raised.
    """
    with _landlock():
        landlock.bound_signals()


def become(uid: int) -> None:
    """Be this user, in the group of the same number and in no other.

    Raises:
        OSError: without the right to it.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def verify() -> None:
    """Look whether all walls stand that can be seen from here.

    Raises:
        Refused: one doesn't.
    """
    # INVARIANT: nothing here may import, not even a codec: the interpreter's own files may be out of reach by now.
    status = _status()
    for name, wanted in _STATUS_WANTED.items():
        found = status[name]
        if found != wanted:
            raise Refused(
                f"the sandbox's wall `{name}` does not stand: it is {found:x}; report this as a bug"
            )


def _status() -> dict[str, int]:
    descriptor = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, _STATUS_BYTES)
    finally:
        os.close(descriptor)
    return {
        name: int(text.partition(b"\n%s:" % name.encode())[2].partition(b"\n")[0], _HEXADECIMAL)
        for name in _STATUS_WANTED
    }


def rehearse() -> None:
    """Go through what can be done without doing anything, in a process that has time until it has a job."""
    _status()
    landlock.Rules(signals=True).close()


def stand_apart() -> None:
    """First steps of the process that will be the program: a session and signals of its own, and what the OOM killer prefers.

    Raises:
        OSError: the host refuses.
    """
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # A group short of memory must lose the program, not the reaper that reports its end.
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(descriptor, b"%d" % _OOM_SCORE)
    os.close(descriptor)


def become_program(job: Job, *, pids_in_group: bool, memory_in_group: bool) -> None:
    """Its last steps: it may be looked at by others of its user again, and resource limits.

    Raises:
        OSError: a limit can't be set.
    """
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
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
