"""The first process of a container: takes its orders from the kernel, looks whether the walls stand, starts the program, reaps.

Runs by itself, as module `start`, under the image's Python (3.9 or newer) with the standard library alone. Its link with the kernel is a unix socket
whose name is gone before the program runs. When the link closes it ends, and with the first process of a pid namespace the
kernel ends all others of it: no sandbox outlives the kernel that started it.
"""

# It has to start fast, and what it imports would cost it several times its own code: pathlib, json, contextlib, and what
# `socket`, `signal` and `ctypes` put around the modules in C that they are made of, which are used here instead.
# ruff: noqa: PTH113, PTH123, SIM105

from __future__ import annotations

import _ctypes
import _socket
import errno
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal

HEADER_BYTES = 8
_MAX_FDS = 4
_INT_BYTES = 4
_PACKET_BYTES = 65536
_PR_SET_DUMPABLE = 4
_ITSELF: Any = None
"""What names all that is loaded already, the C library among it."""
_OOM_PLACE, _OOM_SCORE, _OOM_BYTES = "/proc/self/oom_score_adj", b"500", 32
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_PROGRAM_FIX = "name a file of the program image, or put it into the container image"
_COMMAND_FIX = "name a program on the sandbox's PATH, or a file by a path with a slash"
_LINGER_S = 30.0
_DOOR_BYTES, _DOOR_BACKLOG = 64 << 10, 16
_DEVICES = {"lo", "sit0", "tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6tnl0", "ip6gre0"}
"""Network devices of an empty network namespace: modules of the host put theirs, which lead nowhere, into each."""


class Refused(Exception):
    """The program can't be started as asked; the text is the user's line."""


def main(path: str) -> None:
    """Connect to the kernel at `path` and run what it wants; never returns."""
    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    link.connect(path)
    try:
        job, descriptors = _orders(link)
        _run(job, link, descriptors)
    except Exception as error:  # noqa: BLE001 - whatever it is, the kernel has to hear of it
        text = f"the sandbox's first process failed: {type(error).__name__}: {error}; report this"
        try:
            _refuse(link, str(error) if isinstance(error, Refused) else text)
            _wait_for_end(link)
        except OSError:
            pass  # it has gone
    finally:
        os._exit(1)


def _orders(link: _socket.socket) -> tuple[dict[str, Any], list[int]]:
    space = _socket.CMSG_SPACE(_MAX_FDS * _INT_BYTES)
    header, attached, _, _ = link.recvmsg(HEADER_BYTES, space, _socket.MSG_CMSG_CLOEXEC | _socket.MSG_WAITALL)
    numbers: list[int] = []
    for level, kind, data in attached:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            ends = range(_INT_BYTES, len(data) + 1, _INT_BYTES)
            numbers += [int.from_bytes(data[end - _INT_BYTES : end], sys.byteorder) for end in ends]
    size, body = int.from_bytes(header, "big"), bytearray()
    while len(body) < size or len(header) < HEADER_BYTES:
        part = link.recv(min(size - len(body), 1 << 20))
        if not part:
            os._exit(1)  # the kernel went away
        body += part
    # From the kernel alone, which is trusted; what it is told is JSON.
    return marshal.loads(bytes(body)), numbers  # noqa: S302


def _say(link: _socket.socket, what: str, number: int, descriptors: tuple[int, ...] = ()) -> None:
    data = f'{{"{what}": {number}}}\n'.encode()
    if descriptors:
        numbers = b"".join(one.to_bytes(_INT_BYTES, sys.byteorder) for one in descriptors)
        link.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
    else:
        link.sendall(data)


def _refuse(link: _socket.socket, text: str) -> None:
    import json  # noqa: PLC0415 - where nothing starts there is time for it

    link.sendall(json.dumps({"refused": text}).encode() + b"\n")


def _run(job: dict[str, Any], link: _socket.socket, stdio: list[int]) -> None:
    os.umask(0o022)
    oom = _oom()
    # What this process has in memory, and its environment, are nothing for the program to look at.
    if _dumpable(0) != 0:
        raise Refused("the sandbox's first process can't be closed to the program; report this")
    _verify(job)
    if job["views"]:
        views = tuple(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for place in job["views"])
        _say(link, "views", len(views), views)
        for view in views:
            os.close(view)
    if job["loopback"]:
        _open_doors(job["loopback"], link)
    _look_around(job)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    # The interpreter's own handler makes an exception of it: the program could end its container, and it would look as if
    # somebody outside had. Without a handler Linux keeps signals from inside away from the first process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    program = _start(job, stdio, oom)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for standard in range(3):
        os.dup2(null, standard)
    for descriptor in {null, oom, *stdio} - {-1, 0, 1, 2}:
        os.close(descriptor)
    _say(link, "started", program)
    _reap(program, link, wake_read)


def _dumpable(value: int) -> int:
    place = _ctypes.dlsym(_ctypes.dlopen(_ITSELF, os.RTLD_NOW), "prctl")
    return _ctypes.call_function(place, (_PR_SET_DUMPABLE, value, 0, 0, 0))


def _open_doors(port: int, link: _socket.socket) -> None:
    """Listen on the loopback, which the engine has brought up, and give the socket away: as in `native.loopback`."""
    try:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_RCVBUF, _DOOR_BYTES)
        listener.bind(("127.0.0.1", port))
        listener.listen(_DOOR_BACKLOG)
    except OSError as error:
        raise Refused(
            f"the container's loopback can't have doors: {error.strerror}; see the engine's own settings"
        ) from error
    _say(link, "doors", 1, (listener.fileno(),))
    listener.close()


def _verify(job: dict[str, Any]) -> None:
    """The engine was told which walls to raise; this is what of them shows from within."""
    with open("/proc/self/status", "rb") as file:
        status = dict(line.decode("utf-8", "replace").split(":", 1) for line in file)
    for name, wanted in job["status"].items():
        found = status.get(name, "absent").strip()
        if not found.isalnum() or found == "absent" or int(found, 16) != wanted:
            raise Refused(
                f"the sandbox's wall `{name}` does not stand: it is {found}; see the engine's own settings"
            )
    if os.getuid() != job["uid"] or os.getgid() != job["uid"] or set(os.getgroups()) - {job["uid"]}:
        raise Refused(
            f"the engine runs the sandbox as uid {os.getuid()}, not {job['uid']}; switch its userns-remap off"
        )
    # The kernel of another runtime does not say how things are mounted.
    if job["linux"] and not os.statvfs("/").f_flag & os.ST_RDONLY:
        raise Refused("the sandbox's wall `read-only root` does not stand; see the engine's own settings")
    with open("/proc/net/dev", encoding="ascii", errors="replace") as file:
        devices = {line.split(":")[0].strip() for line in file if ":" in line}
    if devices - _DEVICES:
        raise Refused("the sandbox's wall `no network` does not stand; see the engine's own settings")


def _look_around(job: dict[str, Any]) -> None:
    """Refuse early, with a reason that helps, what would make the program fail in a way no one understands."""
    who = f"uid {job['uid']}"
    if job["image"] and not os.access("/program", os.R_OK | os.X_OK):
        raise Refused(f"the program image `{job['image']}` is not readable for {who}; run `chmod a+rx` on it")
    for path, source in job["shown"]:
        inner: list[str] = []
        try:
            inner = [entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
        except PermissionError:
            pass  # said below
        for name in ("", *(f"/{name}" for name in inner)):
            if not os.access(path + name, os.R_OK | os.X_OK):
                raise Refused(f"`{source}{name}` is not readable for {who}; run `chmod -R a+rX {source}`")
    try:
        os.chdir(job["cwd"])
    except OSError as error:
        raise Refused(
            f"the working directory `{job['cwd']}` can't be entered: {error.strerror}; name another"
        ) from error


def _start(job: dict[str, Any], stdio: list[int], oom: int) -> int:
    """Execute the program in a process of its own; returns its pid once the execution has worked."""
    path = _find(job)
    actions = [(os.POSIX_SPAWN_DUP2, descriptor, standard) for standard, descriptor in enumerate(stdio)]
    defaults = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD)
    own = os.pread(oom, _OOM_BYTES, 0) if oom >= 0 else b""
    _adjust(oom, _OOM_SCORE)
    try:
        # A fork would copy the interpreter's tables of pages, and then pages, for nothing.
        return os.posix_spawn(
            path, job["argv"], job["env"], file_actions=actions, setsid=True, setsigdef=defaults
        )
    except OSError as error:
        hint = " (a script needs a `#!` line)" if error.errno == errno.ENOEXEC else ""
        raise Refused(f"`{job['argv'][0]}` can't be executed: {error.strerror}{hint}; {_fix(job)}") from error
    finally:
        _adjust(oom, own)


def _oom() -> int:
    """Opened before this process is closed to itself; -1: a runtime with a kernel of its own may have none."""
    try:
        return os.open(_OOM_PLACE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1


def _adjust(oom: int, score: bytes) -> None:
    """A group short of memory must lose the program, not the process that reports its end; what is started inherits the place."""
    try:
        if oom >= 0:
            os.pwrite(oom, score, 0)
    except OSError:
        pass  # it need not take it


def _fix(job: dict[str, Any]) -> str:
    return _PROGRAM_FIX if job["image"] else _COMMAND_FIX


def _find(job: dict[str, Any]) -> str:
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


def _reap(program: int, link: _socket.socket, wake: int) -> None:
    import select  # noqa: PLC0415 - the program runs by now

    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        while (ended := _next_dead()) is not None:
            if ended[0] == program:
                try:
                    # What it left behind ends now; one call reaches them all, and none can fork past it.
                    os.kill(-1, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # nothing
                _say(link, "exit", ended[1])
                _wait_for_end(link)
                os._exit(0)
        for descriptor, _ in poll.poll():
            if descriptor == wake:
                try:
                    os.read(wake, _PACKET_BYTES)
                except BlockingIOError:
                    pass  # read before
            elif not link.recv(_PACKET_BYTES):
                os._exit(1)


def _wait_for_end(link: _socket.socket) -> None:
    """The kernel looks at the control group of this container first, and then closes the link."""
    link.settimeout(_LINGER_S)
    try:
        link.recv(1)
    except OSError:
        pass  # it took too long


def _next_dead() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None
