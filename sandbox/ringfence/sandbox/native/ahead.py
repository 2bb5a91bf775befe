"""The process of a sandbox that is to be the program: forked before there is a job, so that a start does not wait for that.

In the namespaces and the control groups of the sandbox it prepares the new root, then it waits, knows nothing and runs nothing.
When the first process has completed the sandbox around both it confines itself and turns into the program, while the first process confines itself too. It
runs when that is done and the warden agrees.
"""

# A sandbox works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH113

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
from typing import TYPE_CHECKING, NamedTuple, cast

from ringfence.sandbox.native import confine, jail, landlock, linux
from ringfence.sandbox.native.job import PACKET_BYTES, Become, Job, Refused, wall

if TYPE_CHECKING:
    from ringfence.sandbox.native.warm import Interpreter

LENT = 4
"""Descriptors of a job: itself and the program's standard streams."""
_PREPARED = b"\0"
"""Before what `jail.show` has said; no failure begins so."""
_ENTERED = b"entered"
_RUN = b"run"
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_PROGRAM_FIX = (
    "name a file of the program image, or install it below /usr or a read-only directory of the sandbox"
)
_COMMAND_FIX = "name a program on the sandbox's PATH, or a file by a path with a slash"


class Second:
    """That process, as the first one has it.

    Attributes:
        pid: within the sandbox.
    """

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self._link = link

    def prepared(self) -> jail.Shown:
        """Wait until the new root is prepared; returns what `jail.show` has said there.

        Raises:
            Refused: it can't be.
        """
        said = self._link.recv(PACKET_BYTES)
        if not said:
            os._exit(1)  # it was killed
        if not said.startswith(_PREPARED):
            raise Refused(said.decode())
        shown = cast("dict[str, list[int]]", json.loads(said.removeprefix(_PREPARED)))
        return {path: (device, number) for path, (device, number) in shown.items()}

    def give(self, groups: bytes, descriptors: list[int]) -> None:
        """Hand on what the warden has sent."""
        socket.send_fds(self._link, [groups], descriptors)

    def entered(self) -> None:
        """Say that it is in the new root."""
        self._link.send(_ENTERED)

    def run(self) -> None:
        """Let it be the program; returns when it is, or was killed.

        Raises:
            Refused: it can't be.
        """
        failure = b""
        with contextlib.suppress(BrokenPipeError):  # it has said why, and is gone
            self._link.send(_RUN)
        for _ in range(2):
            with contextlib.suppress(ConnectionResetError):  # the same; what it said comes next
                failure = self._link.recv(PACKET_BYTES)
                break
        self._link.close()
        if failure:
            raise Refused(failure.decode())


class Ahead(NamedTuple):
    """What it has to know, of which nothing belongs to a job.

    Attributes:
        paths: directories to show.
        memfd: whether there is a control group that counts memory.
        alone: whether the rules bound signals.
        sub: whether a sub-uid is mapped for the program.
        spare: whether there is time until there is a job.
        tcp: whether it may make TCP sockets.
    """

    paths: list[str]
    memfd: bool
    alone: bool
    sub: bool
    spare: bool
    tcp: bool


def fork(interpreter: Interpreter | None, rules: landlock.Rules, what: Ahead) -> Second:
    """Fork it. The caller is the first process of a sandbox, in its control groups and in the directory of the records.

    Args:
        interpreter: this one, where it can become a program.
        rules: of Landlock, which the caller adds to when the new root is prepared.
        what: it has to know.

    Raises:
        Become: in the process that is to become the program.
        Refused: a wall can't be raised, or there is no room for a process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with wall("first process", "raise the limits of processes around the kernel, or end other agents"):
        pid = os.fork()
    if pid:
        theirs.close()
        return Second(pid, ours)
    report = "the program could not be prepared"
    try:
        _wait(theirs, interpreter, rules, what)
    except Become:
        theirs.detach()  # it is closed, and its number may be another's soon
        raise
    except Refused as refusal:
        report = str(refusal)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the program does not run
        report = f"the program could not be prepared ({type(error).__name__}: {error})"
    # Only a failure comes here. An execution that works closes the link without a word.
    theirs.send(report.encode())
    os._exit(1)


def _wait(link: socket.socket, interpreter: Interpreter | None, rules: landlock.Rules, what: Ahead) -> None:
    """In that process. Never returns; the link is closed when it has become the program."""
    linux.close_from(3, frozenset({link.fileno(), *rules.descriptors}))
    confine.stand_apart()
    _prepare(link, rules, what.paths)
    if what.spare:
        _rehearse(interpreter)
    confine.filter_calls(memfd=what.memfd, tcp=what.tcp)
    groups, descriptors, _, _ = socket.recv_fds(link, PACKET_BYTES, LENT, socket.MSG_CMSG_CLOEXEC)
    if not groups:
        os._exit(1)
    job = read_job(descriptors[0])
    job["sub"] = what.sub
    held = frozenset(json.loads(groups))
    if link.recv(PACKET_BYTES) != _ENTERED:
        os._exit(1)
    if what.memfd and "memory" not in held:
        confine.filter_calls(memfd=False, tcp=what.tcp)
    confine.give_up_rights(job, rules)
    if not what.alone:
        confine.stand_alone()
    confine.verify()
    confine.become_program(job, pids_in_group="pids" in held, memory_in_group="memory" in held)
    raised = [os.dup(descriptor) for descriptor in descriptors[1:]]
    for standard, descriptor in enumerate(raised):
        os.dup2(descriptor, standard)
    linux.close_from(3, frozenset({link.fileno()}))
    _look_around(job)
    path = _find(job)
    try:
        program = None if interpreter is None else interpreter.become(job, path)
        if link.recv(PACKET_BYTES) != _RUN:
            os._exit(1)
        if program is not None:
            os.close(link.fileno())
            raise Become(program)
        os.execve(path, job["argv"], job["env"])  # noqa: S606 - there must be no shell
    except OSError as error:
        hint = " (a script needs a `#!` line)" if error.errno == errno.ENOEXEC else ""
        reason = f"{error.strerror}{hint}; {_fix(job)}"
        raise Refused(f"`{job['argv'][0]}` can't be executed: {reason}") from error


def _prepare(link: socket.socket, rules: landlock.Rules, paths: list[str]) -> None:
    """The part of the new root that needs no job."""
    jail.prepare()
    shown = jail.show(paths)
    confine.begin(rules)
    link.send(_PREPARED + json.dumps(shown).encode())
    # The first process takes it along into the new root from there.
    os.chdir("/")


def _look_around(job: Job) -> None:
    """Refuse early, with a reason that helps, what would make the program fail in a way no one understands."""
    who = "this sandbox's user" if job["uid"] is None else f"uid {job['uid']}"
    if job["sub"]:
        who = "the program's sub-uid"
    if job["image"] and not os.access("/program", os.R_OK | os.X_OK):
        raise Refused(f"the program image `{job['image']}` is not readable for {who}; run `chmod a+rx` on it")
    for path in (*job["readonly"], *job["mounts"]):
        inner: list[str] = []
        with contextlib.suppress(PermissionError):
            inner = [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
        for directory in (path, *inner):
            if not os.access(directory, os.R_OK | os.X_OK):
                raise Refused(f"`{directory}` is not readable for {who}; run `chmod -R a+rX {path}`")
    try:
        os.chdir(job["cwd"])
    except OSError as error:
        raise Refused(
            f"the working directory `{job['cwd']}` can't be entered: {error.strerror}; name another"
        ) from error


def _fix(job: Job) -> str:
    return _PROGRAM_FIX if job["socket_dir"] else _COMMAND_FIX


def _find(job: Job) -> str:
    name = job["argv"][0]
    if "/" in name or (job["socket_dir"] and os.path.isfile(name) and os.access(name, os.X_OK)):
        # `./` keeps a bare name of the image from being anything else; absolute names stay as they are.
        path = name if "/" in name else f"./{name}"
        if not os.path.isfile(path):
            raise Refused(f"`{name}` is not there; {_fix(job)}")
        return path
    search = job["env"].get("PATH", _DEFAULT_PATH)
    for directory in search.split(":"):
        path = f"{directory}/{name}"
        if directory.startswith("/") and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise Refused(f"`{name}` is not on the sandbox's PATH `{search}`; {_fix(job)}")


def _rehearse(interpreter: Interpreter | None) -> None:
    """Go through what is to come: each page that is written to by that need not be copied when there is a job."""
    with contextlib.suppress(Exception):  # it saves time, if it can
        rehearse()
        confine.rehearse()
        if interpreter is not None:
            interpreter.rehearse()


def rehearse() -> None:
    """Read a job that is none, in a process that has time until it has one."""
    descriptor = os.memfd_create("rehearsal", os.MFD_CLOEXEC)
    os.write(descriptor, json.dumps({"words": ["text", 1, 1.5, None, False]}).encode())
    read_job(descriptor)
    os.close(descriptor)


def readable(link: socket.socket) -> bool:
    """Whether somebody has said something there."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(0))


def read_job(descriptor: int) -> Job:
    """The job in an anonymous file, which stays open."""
    size = os.fstat(descriptor).st_size
    parts: list[bytes] = []
    done = 0
    while done < size:
        parts.append(os.pread(descriptor, size - done, done))
        done += len(parts[-1])
    return cast("Job", json.loads(b"".join(parts)))
