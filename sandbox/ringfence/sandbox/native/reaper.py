"""The first process of a sandbox's pid namespace: builds it, starts the program, reaps, and reports the end.

It talks with the warden outside over one packet socket. When the warden goes, so does this process, and with the
first process of a pid namespace the kernel ends all others of it.
"""

# A sandbox works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH113

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
from typing import TYPE_CHECKING, cast

from ringfence.sandbox.native import cgroups, confine, jail, linux
from ringfence.sandbox.native.job import GROUPS_FIX, PACKET_BYTES, Become, Job, Refused, wall

if TYPE_CHECKING:
    from ringfence.sandbox.native.warm import Interpreter

_LENT = 4
"""Descriptors of a job: itself and the program's standard streams."""
_MOST_LENT = _LENT + len(cgroups.CONTROLLERS)
STOP, CONTINUE = b"stop", b"continue"
_SOCK_DIAG = 4
"""Netlink's protocol that tells about sockets; a number that the standard library has no name for."""
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_PROGRAM_FIX = (
    "name a file of the program image, or install it below /usr or a read-only directory of the sandbox"
)
_COMMAND_FIX = "name a program on the sandbox's PATH, or a file by a path with a slash"


def main(
    records: int, link: socket.socket, interpreter: Interpreter | None = None, *, sub: bool = False
) -> None:
    """Prepare a sandbox, wait for its job and run it; never returns.

    Args:
        records: the directory of the records. By its descriptor, so that no path of the kernel's stands in memory.
        link: to the warden. One packet comes: the controllers whose limits a control group holds, and as descriptors the
            job, the program's standard streams, and the control groups to enter.
        interpreter: this one, where it can become a program.
        sub: whether a sub-uid is mapped for the program.

    Raises:
        Become: in the process that is to become the program.
    """
    try:
        os.setsid()
        os.fchdir(records)
        root = jail.prepare()
        go, descriptors, _, _ = socket.recv_fds(link, PACKET_BYTES, _MOST_LENT, socket.MSG_CMSG_CLOEXEC)
        if not go:
            os._exit(1)
        # INVARIANT: nothing of the job is read before this process is in the sandbox's groups.
        with wall("control groups", GROUPS_FIX):
            cgroups.enter(descriptors[_LENT:])
        job = read_job(descriptors[0])
        job["root"], job["sub"] = root, sub
        jail.enter(job)
        stdio = (descriptors[1], descriptors[2], descriptors[3])
        _run(job, link, stdio, frozenset(json.loads(go)), interpreter)
    except Become:
        link.detach()  # it is closed, and its number may be another's soon
        raise
    except Refused as refusal:
        with contextlib.suppress(OSError):
            link.send(json.dumps({"refused": str(refusal)}).encode())
    except BaseException:  # noqa: BLE001 - there is nobody to tell
        os._exit(1)
    os._exit(1)


def read_job(descriptor: int) -> Job:
    """The job in an anonymous file, which is closed."""
    size = os.fstat(descriptor).st_size
    parts: list[bytes] = []
    done = 0
    while done < size:
        parts.append(os.pread(descriptor, size - done, done))
        done += len(parts[-1])
    os.close(descriptor)
    return cast("Job", json.loads(b"".join(parts)))


def _run(
    job: Job,
    link: socket.socket,
    stdio: tuple[int, int, int],
    groups: frozenset[str],
    interpreter: Interpreter | None,
) -> None:
    _lend_views(job, link)
    abi = confine.give_up_rights(job, memory_in_group="memory" in groups)
    # A change of user clears the death signal, so it comes after it. Whoever died before shows as a closed socket.
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    _look_around(job)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, _wake)
    if _hung_up(link):
        os._exit(1)
    program = _start(job, stdio, groups, interpreter)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for standard in range(3):
        os.dup2(null, standard)
    linux.close_from(3, frozenset({link.fileno(), wake_read, wake_write}))
    link.send(json.dumps({"started": abi}).encode())
    _reap(program, link, wake_read)


def _lend_views(job: Job, link: socket.socket) -> None:
    """Give the warden eyes inside, for measuring: /proc, /tmp, the workspace and the sockets of this sandbox."""
    names = ["/proc", "/tmp", *(["/workspace"] if job["lower"] else [])]  # noqa: S108 - the sandbox's own
    views = [os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for name in names]
    places = len(views)
    with contextlib.suppress(OSError):
        views.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG).detach())
    socket.send_fds(link, [json.dumps({"views": places}).encode()], views)
    for view in views:
        os.close(view)


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


def _hung_up(link: socket.socket) -> bool:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))


def _start(
    job: Job, stdio: tuple[int, int, int], groups: frozenset[str], interpreter: Interpreter | None
) -> int:
    """Fork and execute or become the program; returns its pid once that has worked."""
    path = _find(job)
    failure_read, failure_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(failure_read)
        report = ""
        try:
            _become(job, path, stdio, groups, interpreter, failure_write)
        except Become:
            raise
        except OSError as error:
            report = json.dumps([error.errno or 0, str(error.strerror)])
        except BaseException as error:  # noqa: BLE001 - whatever it is, the program does not run
            report = json.dumps([0, f"it could not be prepared ({type(error).__name__}: {error})"])
        # Only a failure comes here. An execution that works closes the pipe without a word.
        os.write(failure_write, report.encode())
        os._exit(1)
    os.close(failure_write)
    failure = os.read(failure_read, PACKET_BYTES)
    os.close(failure_read)
    if failure:
        code, reason = json.loads(failure)
        hint = " (a script needs a `#!` line)" if code == errno.ENOEXEC else ""
        raise Refused(f"`{job['argv'][0]}` can't be executed: {reason}{hint}; {_fix(job)}")
    return pid


def _become(
    job: Job,
    path: str,
    stdio: tuple[int, int, int],
    groups: frozenset[str],
    interpreter: Interpreter | None,
    failure: int,
) -> None:
    """In the process that is to be the program: the last steps. Never returns; `failure` is closed when it has worked."""
    signal.set_wakeup_fd(-1)
    confine.become_program(job, pids_in_group="pids" in groups, memory_in_group="memory" in groups)
    raised = [os.dup(descriptor) for descriptor in stdio]
    for standard, descriptor in enumerate(raised):
        os.dup2(descriptor, standard)
    linux.close_from(3, frozenset({failure}))
    program = None if interpreter is None else interpreter.become(job, path)
    if program is not None:
        os.close(failure)
        raise Become(program)
    os.execve(path, job["argv"], job["env"])  # noqa: S606 - there must be no shell


def _fix(job: Job) -> str:
    return _PROGRAM_FIX if job["image"] else _COMMAND_FIX


def _find(job: Job) -> str:
    name = job["argv"][0]
    if "/" in name or (job["image"] and os.path.isfile(name) and os.access(name, os.X_OK)):
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


def _reap(program: int, link: socket.socket, wake: int) -> None:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        while (ended := _next_dead()) is not None:
            if ended[0] == program:
                # What it left behind ends with this process: wait() outside means the end of the whole tree.
                link.send(json.dumps({"exit": ended[1]}).encode())
                os._exit(0)
        for descriptor, _ in poll.poll():
            if descriptor == wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, PACKET_BYTES)
                continue
            order = link.recv(PACKET_BYTES)
            if not order:
                os._exit(1)
            with contextlib.suppress(ProcessLookupError):
                # One kill(-1) reaches every process of this pid namespace but this one, and none can fork past it.
                os.kill(-1, signal.SIGSTOP if order == STOP else signal.SIGCONT)
            link.send(b'{"sent":1}')


def _wake(_number: int, _frame: object) -> None:
    """Nothing to do: the wakeup descriptor has been written to."""


def _next_dead() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None
