"""Tries every wall for `ringfence doctor`: with the code that builds real sandboxes, each in a process of its own."""

# The launcher works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH101, PTH102, PTH103

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from typing import TypedDict

from ringfence.sandbox.native import confine, forms, jail, landlock, launcher, linux, seccomp, users
from ringfence.sandbox.native.cgroups import Groups, remove_shared
from ringfence.sandbox.native.job import UPPER_NAME, USERNS_FIX, WORK_NAME, Job, Refused

_NOBODY = 65534
_REPORT_BYTES = 65536
_USES = {
    "memory": (
        "the memory limit",
        "memory is measured from outside, and the sandbox is killed over the limit",
    ),
    "pids": ("the limit of processes", "RLIMIT_NPROC bounds them"),
    "cpu": ("the share of processors", "processor time is not bounded, only shared fairly"),
    "pause": ("pause", "processes are stopped by signal, and stopped again where they wake themselves"),
}
"""What a control group does for a wall, and what stands in for it."""


class Found(TypedDict):
    """One wall, with the fields of `Wall`."""

    name: str
    ok: bool
    detail: str
    fix: str
    required: bool
    form: str


def run(data: str, *, sub_uids: bool) -> list[Found]:
    """Try everything.

    Args:
        data: a directory on the file system of the sandboxes' data.
        sub_uids: whether programs may run as sub-uids.
    """
    found = [_architecture()]
    if os.geteuid() != 0:
        found.append(
            _attempt(
                forms.USER_NAMESPACES, lambda: _enter(None), "an ordinary user can make them", USERNS_FIX
            )
        )
    if all(wall["ok"] for wall in found):
        with tempfile.TemporaryDirectory(dir=data, prefix="probe-") as place:
            found += _builds(place)
    else:
        missing = ", ".join(f"`{wall['name']}`" for wall in found if not wall["ok"])
        tried = {wall["name"] for wall in found}
        found += [_untried(name, missing) for name in forms.ALWAYS if name not in tried]
    return found + _formed(sub_uids=sub_uids)


def _architecture() -> Found:
    ok = linux.supported() and seccomp.supported()
    detail = f"{linux.MACHINE}, Linux {os.uname().release}"
    fix = "" if ok else "run agents on x86_64 or aarch64: there is no system call filter for others"
    return {"name": "architecture", "ok": ok, "detail": detail, "fix": fix, "required": True, "form": ""}


def _untried(name: str, missing: str) -> Found:
    return {
        "name": name,
        "ok": False,
        "detail": f"can't be tried without {missing}",
        "fix": f"mend {missing} first",
        "required": True,
        "form": "",
    }


def _builds(place: str) -> list[Found]:
    plain = _job(place)
    image = f"{place}/image"
    os.mkdir(image)
    for directory in (place, image):
        os.chmod(directory, 0o755)  # noqa: S103 - another uid has to enter these empty directories
    program: Job = {**plain, "image": image, "socket_dir": image}
    layers = f"{place}/layers"
    for name in (UPPER_NAME, WORK_NAME):
        os.makedirs(f"{layers}/{name}")
    command: Job = {**plain, "lower": image, "scratch": layers}
    walls = [
        _attempt(
            "namespaces",
            lambda: _build(plain),
            "mount, pid, net, ipc, uts, cgroup; own root and /proc",
            USERNS_FIX,
        ),
        _attempt("read-only image", lambda: _build(program), "program images can be bound", USERNS_FIX),
        _attempt("overlay", lambda: _build(command), "commands see a copy-on-write workspace", USERNS_FIX),
        _attempt(
            "no_new_privs",
            lambda: _confine(plain),
            "capabilities, bounding set and setuid are gone",
            USERNS_FIX,
        ),
        _attempt("seccomp", lambda: _filter(plain), "new namespaces and the network are refused", USERNS_FIX),
    ]
    # The kernel of an overlay leaves a directory that not even its owner may list.
    for directory in (f"{layers}/{WORK_NAME}/work", f"{layers}/{WORK_NAME}/index"):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(directory, 0o700)
    shutil.rmtree(layers, ignore_errors=True)
    return walls


def _job(place: str) -> Job:
    root = f"{place}/root"
    os.mkdir(root)
    return {
        "name": "probe",
        "agent": "",
        "records": place,
        "root": root,
        "argv": ["true"],
        "env": {},
        "uid": _uid(),
        "sub": False,
        "readonly": [],
        "sources": {},
        "mounts": {},
        "require": [],
        "cwd": "/",
        "image": "",
        "socket_dir": "",
        "lower": "",
        "scratch": "",
        "masks": [],
        "memory_bytes": 64 << 20,
        "pids": 8,
        "cpu": 1.0,
        "disk_bytes": 16 << 20,
        "timeout_s": 10.0,
        "loopback": 0,
    }


def _uid() -> int | None:
    return _NOBODY if os.geteuid() == 0 else None


def _attempt(name: str, action: Callable[[], None], detail: str, fix: str) -> Found:
    """Run `action` in a child and report how it went."""
    read, write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        problem = "it failed"
        try:
            action()
            problem = ""
        except Refused as refusal:
            problem = str(refusal)
        except Exception as error:  # noqa: BLE001 - whatever it is, the wall does not stand
            problem = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, problem.encode())
            os._exit(0)
    os.close(write)
    problem = os.read(read, _REPORT_BYTES).decode(errors="replace")
    os.close(read)
    os.waitpid(pid, 0)
    return {
        "name": name,
        "ok": not problem,
        "detail": problem or detail,
        "fix": fix if problem else "",
        "required": True,
        "form": "",
    }


def _enter(uid: int | None) -> None:
    """Make the outer namespaces and go on as first process of the new pid namespace."""
    launcher.leave_namespaces(user=users.form(uid, sub=False))
    read, write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        return
    os.close(write)
    os.read(read, 1)
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status))


def _build(job: Job) -> None:
    _enter(job["uid"])
    jail.build(job)


def _confine(job: Job) -> None:
    _build(job)
    confine.renounce()
    rules = confine.rules(signals=False)
    confine.begin(rules)
    confine.allow_job(rules, job)
    confine.filter_calls(memfd=False)
    confine.give_up_rights(job, rules)
    confine.stand_alone()
    confine.verify()


def _filter(job: Job) -> None:
    _confine(job)
    try:
        linux.unshare(linux.CLONE_NEWNS)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
    try:
        socket.socket(socket.AF_INET).close()
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            return
    raise Refused("the system call filter lets through what it should refuse")


def _formed(*, sub_uids: bool) -> list[Found]:
    """The walls that stand in one form or another on every host."""
    groups = Groups.create(f"probe-{os.getpid()}")
    groups.limit(64 << 20, 8, 1.0)
    abi = landlock.version()
    ids, why = (None, "not here: what programs read is a copy of another host's")
    if sub_uids and os.geteuid() != 0:
        ids, why = users.find()
    held = forms.held(groups.where, landlock=abi, uid=users.form(_uid(), sub=ids is not None))
    groups.remove()
    remove_shared()
    details = {
        "files": f"Landlock ABI {abi} besides the mounts"
        if abi
        else "this kernel has no Landlock, or it is switched off; mounts and namespaces stand alone",
        "uid": {
            "own": "each agent runs as a uid of its own",
            "sub": "each agent's program runs as a sub-uid of its own; commands run as this user, each in a user namespace "
            "of its own, since their files are this user's",
            "namespace": f"all agents run as this user, each in a user namespace of its own (no sub-uids: {why})",
        }[held["uid"]],
    }
    for wall, (use, instead) in _USES.items():
        version = held[wall].removeprefix("cgroup-v")
        strong = held[wall] != forms.FORMS[wall][-1]
        details[wall] = f"a control group of version {version} holds {use}" if strong else instead
    found: list[Found] = []
    for wall, form in held.items():
        weaker = form == forms.FORMS[wall][-1]
        fix = forms.FIXES[wall] if weaker else ""
        found.append(
            {"name": wall, "ok": True, "detail": details[wall], "fix": fix, "required": False, "form": form}
        )
    return found
