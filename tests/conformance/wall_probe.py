"""Runs inside a sandbox and tries what must not work there. Prints what happened as JSON; standard library only."""

# Runs where only the bare interpreter is.
# ruff: noqa: PTH109, PTH123, PTH208

import ctypes
import errno
import json
import os
import platform
import resource
import socket
import sys

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
NUMBERS = {
    "x86_64": {
        "unshare": 272,
        "setns": 308,
        "mount": 165,
        "umount2": 166,
        "pivot_root": 155,
        "chroot": 161,
        "ptrace": 101,
        "keyctl": 250,
        "add_key": 248,
        "bpf": 321,
        "perf_event_open": 298,
        "userfaultfd": 323,
        "kexec_load": 246,
        "io_uring_setup": 425,
        "open_by_handle_at": 304,
        "process_vm_readv": 310,
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "init_module": 175,
        "reboot": 169,
        "swapon": 167,
        "sethostname": 170,
        "settimeofday": 164,
        "fsopen": 430,
        "open_tree": 428,
        "move_mount": 429,
        "mount_setattr": 442,
        "personality": 135,
        "acct": 163,
        "clone": 56,
        "clone3": 435,
        "ioctl": 16,
        "mknodat": 259,
        "syslog": 103,
        "quotactl": 179,
        "pidfd_getfd": 438,
    },
    "aarch64": {
        "unshare": 97,
        "setns": 268,
        "mount": 40,
        "umount2": 39,
        "pivot_root": 41,
        "chroot": 51,
        "ptrace": 117,
        "keyctl": 219,
        "add_key": 217,
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
        "kexec_load": 104,
        "io_uring_setup": 425,
        "open_by_handle_at": 265,
        "process_vm_readv": 270,
        "shmget": 194,
        "semget": 190,
        "msgget": 186,
        "init_module": 105,
        "reboot": 142,
        "swapon": 224,
        "sethostname": 161,
        "settimeofday": 170,
        "fsopen": 430,
        "open_tree": 428,
        "move_mount": 429,
        "mount_setattr": 442,
        "personality": 92,
        "acct": 89,
        "clone": 220,
        "clone3": 435,
        "ioctl": 29,
        "mknodat": 33,
        "syslog": 116,
        "quotactl": 60,
        "pidfd_getfd": 438,
    },
}[platform.machine()]


def call(name, *arguments):
    result = libc.syscall(
        ctypes.c_long(NUMBERS[name]), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    )
    return errno.errorcode[ctypes.get_errno()] if result < 0 else "done"


def attempt(action):
    try:
        return action() or "done"
    except OSError as error:
        return errno.errorcode[error.errno]
    except ValueError:  # how the resource module says EPERM
        return "EPERM"


def read(path):
    def action():
        with open(path, "rb") as file:
            return "read:" + file.read(4096).decode("latin1")

    return attempt(action)


def write(path):
    def action():
        with open(path, "wb") as file:
            file.write(b"x")

    return attempt(action)


def family(number, kind=socket.SOCK_STREAM):
    return attempt(lambda: socket.socket(number, kind).close())


def abstract(name):
    def action():
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("\0" + name)

    return attempt(action)


def environments():
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            found[name] = read(f"/proc/{name}/environ")
    return found


def status():
    with open("/proc/self/status") as file:
        return {key: value.strip() for key, value in (line.split(":", 1) for line in file)}


NAMESPACES = {"NEWUSER": 0x10000000, "NEWNS": 0x20000, "NEWPID": 0x20000000, "NEWNET": 0x40000000}
host_abstract, host_file = sys.argv[2], sys.argv[3]
report = {
    "environ": dict(os.environ),
    "environments": environments(),
    "pids": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "fds": sorted(os.listdir("/proc/self/fd")),
    "status": status(),
    "root": sorted(os.listdir("/")),
    "etc": sorted(os.listdir("/etc")),
    "dev": sorted(os.listdir("/dev")),
    "passwd": read("/etc/passwd"),
    "hostname": socket.gethostname(),
    "interfaces": read("/proc/net/dev"),
    "cgroup": read("/proc/self/cgroup"),
    "mounts": read("/proc/self/mounts"),
    "umask": os.umask(0),
    "cwd": os.getcwd(),
    "read": {
        path: read(path)
        for path in [
            *(
                "/proc/1/environ",
                "/proc/1/maps",
                "/proc/1/mem",
                "/proc/kcore",
                "/proc/kallsyms",
                "/proc/keys",
                "/proc/kmsg",
            ),
            *(
                "/proc/cmdline",
                "/etc/shadow",
                "/proc/self/root/etc/shadow",
                "/proc/1/root/etc/shadow",
                host_file,
            ),
            *(
                "/proc/self/root" + host_file,
                "/proc/1/root" + host_file,
                "/proc/self/cwd/../../.." + host_file,
            ),
            *(
                "/proc/1/cwd" + host_file,
                "/sys/kernel/uevent_helper",
                "/dev/mem",
                "/dev/vda",
                "/dev/sda",
                "/dev/kmsg",
            ),
        ]
    },
    "write": {
        path: write(path)
        for path in [
            *(
                "/program/new",
                "/program/wall_probe.py",
                "/usr/new",
                "/etc/passwd",
                "/new",
                "/run/ringfence/new",
                "/dev/new",
            ),
            *(
                "/proc/sys/kernel/core_pattern",
                "/proc/sysrq-trigger",
                "/proc/sys/vm/drop_caches",
                "/bin/sh",
                "/proc/1/mem",
            ),
            *("/proc/1/oom_score_adj", "/run/new"),
        ]
    },
    "tmp": write("/tmp/file"),
    "syscalls": {
        name: call(name, *[0] * 6) for name in NUMBERS if name not in ("clone", "clone3", "ioctl", "mknodat")
    },
    "clone": {name: call("clone", flag | 17, 0, 0, 0, 0) for name, flag in NAMESPACES.items()},
    "unshare": {name: call("unshare", flag) for name, flag in NAMESPACES.items()},
    "clone3": call("clone3", 0, 0),
    "tiocsti": call("ioctl", 0, 0x5412, b"x"),
    "block_device": call("mknodat", -100, b"/tmp/block", 0o060600, 0x0800),
    "char_device": call("mknodat", -100, b"/tmp/char", 0o020600, 0x0103),
    "fifo": attempt(lambda: os.mkfifo("/tmp/fifo")),
    "families": {
        name: family(number, kind)
        for name, number, kind in [
            ("inet", socket.AF_INET, socket.SOCK_STREAM),
            ("inet6", socket.AF_INET6, socket.SOCK_DGRAM),
            ("netlink", socket.AF_NETLINK, socket.SOCK_RAW),
            ("packet", socket.AF_PACKET, socket.SOCK_RAW),
            ("vsock", 40, socket.SOCK_STREAM),
            ("alg", 38, socket.SOCK_SEQPACKET),
            ("unix", socket.AF_UNIX, socket.SOCK_STREAM),
        ]
    },
    "abstract": abstract(host_abstract),
    "kill_init": attempt(lambda: os.kill(1, 9)),
    "setuid": attempt(lambda: os.setuid(0)),
    "setgid": attempt(lambda: os.setgid(0)),
    "chown": attempt(lambda: os.chown("/tmp/file", 0, 0)),
    "nice": attempt(lambda: os.nice(-5)),
    "core_limit": resource.getrlimit(resource.RLIMIT_CORE)[1],
    "lower_core_limit": attempt(lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))),
    "lower_other_limit": attempt(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))),
    "still_here": os.listdir("/proc/1") != [],
}
print(json.dumps(report))
