"""The first process of a sandbox's pid namespace: builds it, starts the program, reaps, and reports the end.

It talks with the warden outside over one packet socket. When the warden goes, so does this process, and with the
first process of a pid namespace the kernel ends all others of it.
"""

# A sandbox works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from typing import TYPE_CHECKING

from ringfence.sandbox.native import (
    ahead,
    cgroups,
    confine,
    jail,
    landlock,
    launcher,
    linux,
    loopback,
    pages,
    seccomp,
    users,
)
from ringfence.sandbox.native import job as job_module
from ringfence.sandbox.native.job import (
    GROUPS_FIX,
    PACKET_BYTES,
    ROOT_NAME,
    USERNS_FIX,
    Become,
    Job,
    Refused,
    wall,
)

if TYPE_CHECKING:
    from ringfence.sandbox.native.warm import Interpreter

_MOST_LENT = max(ahead.LENT + 1, len(cgroups.CONTROLLERS))
_SELF_SUFFICIENT = frozenset({"memory", "freezer"})
"""With these groups, and without an overlay, the warden has nothing to measure and nobody to stop one by one."""
STOP, CONTINUE = b"stop", b"continue"
_SOCK_DIAG = 4
"""Netlink's protocol that tells about sockets; a number that the standard library has no name for."""


def main(
    link: socket.socket,
    interpreter: Interpreter | None,
    *,
    user: str,
    own: tuple[int, int],
) -> None:
    """Prepare a sandbox, wait for its job and run it; never returns. Called in the directory of the records.

    Args:
        link: to the warden. Three packets come: directories to show, controllers, whether it is a spare one and whether its
            program may make TCP sockets, with the control groups to enter; then the controllers whose limits a control group
            holds, with the job, the program's standard streams and who gets the listener of the doors; then leave to run it.
        interpreter: this one, where it can become a program.
        user: the form of the wall `uid`.
        own: uid and gid of the kernel's user.

    Raises:
        Become: in the process that is to become the program.
    """
    try:
        os.setsid()
        _map_user(link, user, own)
        jail.name_host()
        if user != users.OWN:
            confine.renounce()  # a new user namespace gives back what the zygote has given up
        # INVARIANT: nothing of a job is read, and no other process made, before this one is in the sandbox's groups.
        with wall("control groups", GROUPS_FIX):
            told, descriptors = _packet(link)
            cgroups.enter(descriptors)
        jail.settle()
        paths, controllers, spare, tcp = json.loads(told)
        memfd, alone = "memory" in controllers, "freezer" in controllers
        # Early: each page that this process writes to before that would be copied once more afterwards. And most of the work
        # is left to the other one, which writes to many pages anyway before it is the program.
        rules = confine.rules(signals=alone)
        what = ahead.Ahead(paths=paths, memfd=memfd, alone=alone, sub=user == users.SUB, spare=spare, tcp=tcp)
        second = ahead.fork(interpreter, rules, what)
        shown = second.prepared()
        os.chdir(ROOT_NAME)
        if spare and not ahead.readable(link):
            _rehearse()
        go, descriptors = _packet(link)
        second.give(go, descriptors[: ahead.LENT])
        job = ahead.read_job(descriptors[0])
        job["sub"] = user == users.SUB
        jail.enter(job, shown)
        if job["loopback"]:
            loopback.open_doors(job["loopback"], descriptors[ahead.LENT])
        confine.allow_job(rules, job)
        second.entered()
        jail.leave()
        for descriptor in descriptors:
            os.close(descriptor)
        _run(job, link, second, rules, frozenset(json.loads(go)))
    except Become:
        link.detach()  # it is closed, and its number may be another's soon
        raise
    except Refused as refusal:
        with contextlib.suppress(OSError):
            link.send(json.dumps({"refused": str(refusal)}).encode())
    except BaseException:  # noqa: BLE001 - there is nobody to tell
        os._exit(1)
    os._exit(1)


def _rehearse() -> None:
    """Go through what is to come, as far as it has no effect, in a process that has time until it has a job."""
    jail.rehearse()
    ahead.rehearse()
    with contextlib.suppress(Exception):  # it saves time, if it can
        confine.rehearse()
    # Of what this process will run itself. The program's own is left: most of it no program ever takes in hand.
    pages.touch(jail, confine, landlock, seccomp, linux, ahead, job_module)


def _map_user(link: socket.socket, user: str, own: tuple[int, int]) -> None:
    """Be somebody in a new user namespace, where there is one."""
    if user == users.OWN:
        return
    with wall("user namespace", USERNS_FIX):
        if user == users.NAMESPACE:
            launcher.write_own_maps(*own)
        elif link.recv(PACKET_BYTES) != launcher.MAPPED:
            os._exit(1)


def _packet(link: socket.socket) -> tuple[bytes, list[int]]:
    """What the warden says next; ends this process where it says nothing any more."""
    packet, descriptors, _, _ = socket.recv_fds(link, PACKET_BYTES, _MOST_LENT, socket.MSG_CMSG_CLOEXEC)
    if not packet:
        os._exit(1)
    return packet, descriptors


def _run(
    job: Job, link: socket.socket, second: ahead.Second, rules: landlock.Rules, groups: frozenset[str]
) -> None:
    if job["lower"] or not groups >= _SELF_SUFFICIENT:
        _lend_views(job, link)
    confine.filter_calls(memfd="memory" in groups)
    confine.give_up_rights(job, rules)
    confine.verify()
    # A change of user clears the death signal, so it comes after it. Whoever died before shows as a closed socket.
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, _wake)
    # INVARIANT: the program runs when its record is on disk, and its first process is confined as it is.
    _packet(link)
    second.run()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for standard in range(3):
        os.dup2(null, standard)
    linux.close_from(3, frozenset({link.fileno(), wake_read, wake_write}))
    link.send(json.dumps({"started": rules.abi}).encode())
    _reap(second.pid, link, wake_read)


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
