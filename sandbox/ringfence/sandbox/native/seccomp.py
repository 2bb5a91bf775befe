"""The system call filter, as classic BPF made by hand: no library, no compiler.

It lets through all but what gives new ground: namespaces, mounts, tracing, keys, kernel modules, io_uring, SysV
objects, devices, and every socket that is not AF_UNIX. Foreign architectures are killed.
"""

from __future__ import annotations

import ctypes
import errno
import resource
import socket
import struct

from ringfence.sandbox.native import linux

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
_ARGUMENT_BYTES = 8
_X32_BIT = 0x40000000
_NAMESPACE_FLAGS = 0x7E020000
"""All CLONE_NEW* that plain clone knows."""
_DEVICE_BIT = 0o020000
"""Set in the type of character and block devices, in no other."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SECCOMP_SET_MODE_FILTER = 1

_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "set_mempolicy_home_node": 450,
    "open_tree_attr": 467,
}

# fmt: off
_X86_64 = {
    "ptrace": 101, "syslog": 103, "setns": 308, "unshare": 272, "mount": 165, "umount2": 166, "pivot_root": 155,
    "chroot": 161, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172,
    "ioperm": 173, "modify_ldt": 154, "init_module": 175, "delete_module": 176, "finit_module": 313, "kexec_load": 246,
    "kexec_file_load": 320, "acct": 163, "quotactl": 179, "settimeofday": 164, "adjtimex": 159, "clock_settime": 227,
    "clock_adjtime": 305, "add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298, "bpf": 321,
    "userfaultfd": 323, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "open_by_handle_at": 304,
    "name_to_handle_at": 303, "fanotify_init": 300, "lookup_dcookie": 212, "nfsservctl": 180, "vhangup": 153,
    "uselib": 134, "ustat": 136, "sysfs": 139, "_sysctl": 156, "personality": 135, "mbind": 237, "set_mempolicy": 238,
    "get_mempolicy": 239, "migrate_pages": 256, "move_pages": 279, "shmget": 29, "shmat": 30, "shmctl": 31,
    "shmdt": 67, "semget": 64, "semop": 65, "semctl": 66, "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70,
    "msgctl": 71,
}
_AARCH64 = {
    "ptrace": 117, "syslog": 116, "setns": 268, "unshare": 97, "mount": 40, "umount2": 39, "pivot_root": 41,
    "chroot": 51, "swapon": 224, "swapoff": 225, "reboot": 142, "sethostname": 161, "setdomainname": 162,
    "init_module": 105, "delete_module": 106, "finit_module": 273, "kexec_load": 104, "kexec_file_load": 294,
    "acct": 89, "quotactl": 60, "settimeofday": 170, "adjtimex": 171, "clock_settime": 112, "clock_adjtime": 266,
    "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "bpf": 280, "userfaultfd": 282,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "open_by_handle_at": 265, "name_to_handle_at": 264,
    "fanotify_init": 262, "lookup_dcookie": 18, "nfsservctl": 42, "vhangup": 58, "personality": 92, "mbind": 235,
    "set_mempolicy": 237, "get_mempolicy": 236, "migrate_pages": 238, "move_pages": 239, "shmget": 194, "shmat": 196,
    "shmctl": 195, "shmdt": 197, "semget": 190, "semop": 193, "semctl": 191, "semtimedop": 192, "msgget": 186,
    "msgsnd": 189, "msgrcv": 188, "msgctl": 187,
}
# fmt: on


class _Machine:
    """What of the filter differs between architectures."""

    def __init__(self, audit: int, denied: dict[str, int], **numbers: int) -> None:
        self.audit = audit
        self.denied = {**denied, **_EVERYWHERE}
        self.numbers = numbers


# fmt: off
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E, _X86_64, clone=56, clone3=435, socket=41, socketpair=53, ioctl=16, mknod=133, mknodat=259,
        memfd=319, setrlimit=160, prlimit64=302,
    ),
    "aarch64": _Machine(
        0xC00000B7, _AARCH64, clone=220, clone3=435, socket=198, socketpair=199, ioctl=29, mknodat=33, memfd=279,
        setrlimit=164, prlimit64=261,
    ),
}
# fmt: on


class _Program:
    """Assembles the filter. Every test loads the number anew, so that no test depends on another."""

    def __init__(self) -> None:
        self._code: list[tuple[int, int, int, int]] = []

    def emit(self, code: int, value: int, yes: int = 0, no: int = 0) -> None:
        self._code.append((code, yes, no, value))

    def refuse(self, number: int, error: int) -> None:
        """This call fails with `error`."""
        self.emit(_EQUAL, number, 0, 1)
        self.emit(_RETURN, _ERRNO | error)

    def refuse_when(self, number: int, argument: int, tests: list[tuple[int, int]], error: int) -> None:
        """This call fails with `error` when the low half of an argument meets one of `tests` (opcode, value)."""
        self.emit(_EQUAL, number, 0, 2 * len(tests) + 2)
        self.emit(_LOAD, _ARGUMENT + argument * _ARGUMENT_BYTES)
        for code, value in tests:
            self.emit(code, value, 0, 1)
            self.emit(_RETURN, _ERRNO | error)
        self.emit(_LOAD, _NUMBER)

    def refuse_unless(self, number: int, argument: int, value: int, error: int) -> None:
        """This call fails with `error` unless the low half of an argument is `value`."""
        self.emit(_EQUAL, number, 0, 4)
        self.emit(_LOAD, _ARGUMENT + argument * _ARGUMENT_BYTES)
        self.emit(_EQUAL, value, 1, 0)
        self.emit(_RETURN, _ERRNO | error)
        self.emit(_LOAD, _NUMBER)

    def refuse_new_limit(self, number: int, which: int, error: int) -> None:
        """Prlimit64 fails with `error` when it would set the limit `which`; reading it stays possible."""
        self.emit(_EQUAL, number, 0, 8)
        self.emit(_LOAD, _ARGUMENT + _ARGUMENT_BYTES)
        self.emit(_EQUAL, which, 0, 5)
        self.emit(_LOAD, _ARGUMENT + 2 * _ARGUMENT_BYTES)
        self.emit(_EQUAL, 0, 0, 2)
        self.emit(_LOAD, _ARGUMENT + 2 * _ARGUMENT_BYTES + 4)
        self.emit(_EQUAL, 0, 1, 0)
        self.emit(_RETURN, _ERRNO | error)
        self.emit(_LOAD, _NUMBER)

    def bytes(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *line) for line in self._code)


def supported() -> bool:
    """Whether there is a table for this machine."""
    return linux.MACHINE in _MACHINES


def program(*, memfd: bool = True, machine: str = linux.MACHINE) -> bytes:
    """The filter for `machine`.

    Args:
        memfd: whether memfd_create may be called. It may where a cgroup counts its memory; otherwise such memory
            belongs to no process that could be measured.
        machine: name as `uname -m` prints it.

    Raises:
        KeyError: no table for this machine.
    """
    table = _MACHINES[machine]
    numbers = table.numbers
    code = _Program()
    code.emit(_LOAD, _ARCH)
    code.emit(_EQUAL, table.audit, 1, 0)
    code.emit(_RETURN, _KILL)
    code.emit(_LOAD, _NUMBER)
    if machine == "x86_64":
        code.emit(_AT_LEAST, _X32_BIT, 0, 1)
        code.emit(_RETURN, _KILL)
    # The flags of clone3 lie in memory that a filter can't read; with ENOSYS libc falls back to clone.
    code.refuse(numbers["clone3"], errno.ENOSYS)
    code.refuse_when(numbers["clone"], 0, [(_ANY_BIT, _NAMESPACE_FLAGS)], errno.EPERM)
    code.refuse_unless(numbers["socket"], 0, socket.AF_UNIX, errno.EAFNOSUPPORT)
    code.refuse_unless(numbers["socketpair"], 0, socket.AF_UNIX, errno.EAFNOSUPPORT)
    code.refuse_when(numbers["ioctl"], 1, [(_EQUAL, _TIOCSTI), (_EQUAL, _TIOCLINUX)], errno.EPERM)
    code.refuse_when(numbers["mknodat"], 2, [(_ANY_BIT, _DEVICE_BIT)], errno.EPERM)
    if "mknod" in numbers:
        code.refuse_when(numbers["mknod"], 1, [(_ANY_BIT, _DEVICE_BIT)], errno.EPERM)
    # Whoever may lower the limit of core files to zero has the host's core_pattern run on its memory.
    code.refuse_when(numbers["setrlimit"], 0, [(_EQUAL, resource.RLIMIT_CORE)], errno.EPERM)
    code.refuse_new_limit(numbers["prlimit64"], resource.RLIMIT_CORE, errno.EPERM)
    if not memfd:
        code.refuse(numbers["memfd"], errno.ENOSYS)
    for number in sorted(set(table.denied.values())):
        code.refuse(number, errno.EPERM)
    code.emit(_RETURN, _ALLOW)
    return code.bytes()


def install(filter_program: bytes) -> None:
    """Put the filter on this process for good. Needs no_new_privs.

    Raises:
        OSError: the kernel has no seccomp filters.
    """
    buffer = ctypes.create_string_buffer(filter_program, len(filter_program))
    header = struct.pack("=HxxxxxxQ", len(filter_program) // 8, ctypes.addressof(buffer))
    linux.syscall("seccomp", _SECCOMP_SET_MODE_FILTER, 0, header)
