"""Attempts on other processes by system calls, on one's own rights, and on what outlives a process."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
from contextlib import suppress
from typing import Any

from security.escapes.attempts.base import (
    MARKED,
    REACHES,
    Sibling,
    Stopped,
    attempt,
    call,
    child,
    fail,
    held_open,
    pack,
    read_all,
    status,
)
from security.escapes.attempts.proc import victim

FILTER = ("seccomp filter",)
_ATTACH, _DETACH, _SEIZE = 16, 17, 0x4206


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _traced(pid: int) -> str:
    call("ptrace", _ATTACH, pid, 0, 0)
    with suppress(OSError):
        os.waitpid(pid, os.WUNTRACED)
        call("ptrace", _DETACH, pid, 0, 0)
    return str(pid)


@attempt(*FILTER)
def trace_sibling(facts: Any) -> str:
    """Trace another process of the sandbox"""
    with Sibling() as sibling:
        return _traced(sibling.pid)


@attempt(*FILTER)
def seize_sibling(facts: Any) -> str:
    """Trace another process without stopping it"""
    with Sibling() as sibling:
        call("ptrace", _SEIZE, sibling.pid, 0, 0)
        return str(sibling.pid)


@attempt(*FILTER, "undumpable first process", "landlock")
def trace_first_process(facts: Any) -> str:
    """Trace the sandbox's first process"""
    call("ptrace", _SEIZE, facts["first"], 0, 0)
    return "1"


@attempt(*FILTER, "pid namespace", "landlock", user_control=REACHES)
def trace_host_process(facts: Any) -> str:
    """Trace a process of the host"""
    return _traced(int(victim(facts)))


@attempt(*FILTER)
def read_memory_of_sibling(facts: Any) -> str:
    """Read the memory of another process by process_vm_readv"""
    with Sibling() as sibling:
        buffer = ctypes.create_string_buffer(32)
        local, remote = _Vector(ctypes.addressof(buffer), 32), _Vector(sibling.address, 32)
        call("process_vm_readv", sibling.pid, bytes(local), 1, bytes(remote), 1, 0)
        return buffer.value.decode()


@attempt(*FILTER)
def write_memory_of_sibling(facts: Any) -> str:
    """Write the memory of another process by process_vm_writev"""
    with Sibling() as sibling:
        buffer = ctypes.create_string_buffer(b"changed", 32)
        local, remote = _Vector(ctypes.addressof(buffer), 8), _Vector(sibling.address, 8)
        return str(call("process_vm_writev", sibling.pid, bytes(local), 1, bytes(remote), 1, 0))


@attempt(*FILTER)
def take_descriptor_of_sibling(facts: Any) -> str:
    """Take a descriptor out of another process by pidfd_getfd"""
    with Sibling() as sibling:
        return str(call("pidfd_getfd", os.pidfd_open(sibling.pid), sibling.read_end, 0))


@attempt(*FILTER, "undumpable first process", "landlock")
def take_descriptor_of_first_process(facts: Any) -> str:
    """Take the link to the outside out of the sandbox's first process"""
    handle = os.pidfd_open(facts["first"])
    last: Exception = Stopped("none")
    for number in range(3, 40):
        try:
            taken = call("pidfd_getfd", handle, number, 0)
            return os.readlink(f"/proc/self/fd/{taken}")
        except OSError as error:
            last = error
            if error.errno != errno.EBADF:
                raise
    raise last


@attempt(*FILTER)
def compare_processes(facts: Any) -> str:
    """Learn about kernel objects of another process by kcmp"""
    with Sibling() as sibling:
        return str(call("kcmp", os.getpid(), sibling.pid, 1, 0, 0))


@attempt(*FILTER, control=MARKED)
def advise_sibling(facts: Any) -> str:
    """Push another process out of memory by process_madvise"""
    with Sibling() as sibling:
        vector = _Vector(sibling.address & ~4095, 4096)
        return str(call("process_madvise", os.pidfd_open(sibling.pid), bytes(vector), 1, 20, 0))


@attempt("pid namespace", "landlock")
def signal_host_process(facts: Any) -> str:
    """Send a signal to a process of the host"""
    for number in range(1, facts["victim_pid"] + 1000):
        with suppress(OSError):
            if facts["marker"] in read_all(f"/proc/{number}/cmdline"):
                os.kill(number, 0)
                return str(number)
    raise Stopped("no such process")


@attempt("pid namespace", "landlock")
def signal_by_handle(facts: Any) -> str:
    """Send a signal to a process of the host by a process handle"""
    handle = os.pidfd_open(int(victim(facts)))
    signal.pidfd_send_signal(handle, 0)
    return str(handle)


@attempt("pid namespace")
def handle_on_host_process(facts: Any) -> str:
    """Open a process handle on a process of the host, by its pid there"""
    os.pidfd_open(facts["victim_pid_here"])
    if facts["marker"] in read_all(f"/proc/{facts['victim_pid_here']}/cmdline"):
        return str(facts["victim_pid_here"])
    raise Stopped("another process")


@attempt("pid namespace", "landlock", alone=True)
def end_first_process(facts: Any) -> str:
    """End the sandbox's first process, which bounds it"""
    first = facts["first"]
    handle = os.pidfd_open(first)
    for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGINT, signal.SIGSEGV, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(first, number)
    import select

    poll = select.poll()
    poll.register(handle, select.POLLIN)
    if poll.poll(300):
        return str(first)
    raise Stopped("it lives")


# -- rights ---------------------------------------------------------------------------------------------------------------

RIGHTS = ("capabilities",)


@attempt(*RIGHTS, user_control="none")
def become_root(facts: Any) -> str:
    """Become uid 0"""
    os.setresuid(0, 0, 0)
    return str(os.getuid())


@attempt(*RIGHTS, user_control="none")
def become_root_group(facts: Any) -> str:
    """Become gid 0"""
    os.setresgid(0, 0, 0)
    return str(os.getgid())


@attempt(*RIGHTS, user_control="none")
def take_groups(facts: Any) -> str:
    """Take supplementary groups"""
    os.setgroups([0])
    return str(os.getgroups())


@attempt(*RIGHTS)
def raise_capabilities(facts: Any) -> str:
    """Give itself all capabilities"""
    full = 0x1FF
    call("capset", pack("=Ii", 0x20080522, 0), pack("=6I", full, full, 0, 0, 0, 0))
    if int(status()["CapEff"], 16):
        return status()["CapEff"]
    raise Stopped("none")


@attempt(*RIGHTS, user_control="none")
def give_file_away(facts: Any) -> str:
    """Give a file to root"""
    os.close(os.open("/tmp/given", os.O_CREAT | os.O_WRONLY))
    os.chown("/tmp/given", 0, 0)
    return "/tmp/given"


@attempt(*RIGHTS)
def file_capability(facts: Any) -> str:
    """Leave a program with capabilities of its file behind"""
    os.close(os.open("/tmp/capable", os.O_CREAT | os.O_WRONLY, 0o755))
    os.setxattr("/tmp/capable", "security.capability", pack("<5I", 0x02000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0))
    return "/tmp/capable"


@attempt(*RIGHTS, user_control="none")
def forge_credentials(facts: Any) -> str:
    """Claim to be root over a unix socket"""
    one, other = socket.socketpair()
    other.setsockopt(socket.SOL_SOCKET, 16, 1)
    claim = pack("=3i", os.getpid(), 0, 0)
    one.sendmsg([b"x"], [(socket.SOL_SOCKET, 2, claim)])
    return "sent"


@attempt("nosuid", "no_new_privs", "seccomp filter", "landlock", kind="program", user_control="none")
def run_setuid_program(facts: Any) -> str:
    """Run a program of the image that is setuid root"""
    pid, write_end = held_open("/program/setuid-cat")
    try:
        uids = status(str(pid))["Uid"].split()
    finally:
        os.close(write_end)
        os.waitpid(pid, 0)
    if uids[1] != uids[0]:
        return str(uids)
    raise Stopped("its own uid")


def _limit(which: int, value: int) -> None:
    try:
        resource.setrlimit(which, (value, value))
    except ValueError:  # how the module says EPERM
        raise fail(errno.EPERM) from None


@attempt("seccomp filter")
def silence_core_limit(facts: Any) -> str:
    """Set the limit of core files to zero, which lets a core_pattern that is a pipe run on the host"""
    _limit(resource.RLIMIT_CORE, 0)
    return str(resource.getrlimit(resource.RLIMIT_CORE))


@attempt("limits", "seccomp filter")
def raise_core_limit(facts: Any) -> str:
    """Leave a core file of more than a byte"""
    _limit(resource.RLIMIT_CORE, 2)
    return "raised"


@attempt("limits", "seccomp filter", "landlock")
def message_queue(facts: Any) -> str:
    """Make a POSIX message queue, whose memory no process owns"""
    queue = call("mq_open", b"planted", os.O_CREAT | os.O_RDWR, 0o600, None)
    call("mq_unlink", b"planted")
    return str(queue)


@attempt("limits")
def many_processes(facts: Any) -> str:
    """Have more processes at once than the sandbox may"""
    wanted = facts["pids"] + 64
    read_end, write_end = os.pipe()
    made: list[int] = []

    def wait() -> None:
        os.close(write_end)
        os.read(read_end, 1)

    try:
        while len(made) < wanted:
            pid = child(wait)
            made.append(pid)
    finally:
        for pid in made:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return str(len(made))


@attempt("limits")
def many_descriptors(facts: Any) -> str:
    """Open more files than a process may"""
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(2000)]
    return str(len(held))


@attempt("limits")
def large_file(facts: Any) -> str:
    """Make a file larger than the sandbox's disk"""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    descriptor = os.open("/tmp/large", os.O_CREAT | os.O_RDWR)
    try:
        os.ftruncate(descriptor, facts["disk"] + 4096)
    finally:
        os.unlink("/tmp/large")
    return "made"


@attempt("bounded /tmp")
def many_inodes(facts: Any) -> str:
    """Make more names in /tmp than it may hold: each takes memory of the host"""
    os.mkdir("/tmp/names")
    made = 0
    try:
        for number in range(66_000):
            os.mknod(f"/tmp/names/{number}")
            made += 1
    finally:
        for number in range(made):
            os.unlink(f"/tmp/names/{number}")
        os.rmdir("/tmp/names")
    return str(made)
