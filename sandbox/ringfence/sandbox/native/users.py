"""Which user of the host a sandbox's processes are, and the sub-uids that programs of an ordinary user's kernel get.

A sub-uid comes from the range that /etc/subuid gives the kernel's user. In a sandbox's user namespace two users are known
then: the kernel's own, as uid 0, which builds the sandbox, and the sub-uid, as which the program runs.

Standard library only.
"""

# The warden works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH123

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import threading
from typing import NamedTuple

from ringfence.sandbox.native import confine, launcher
from ringfence.sandbox.native.job import INSIDE_UID, Refused

OWN, SUB, NAMESPACE = "own", "sub", "namespace"
"""Forms of the wall `uid`: of the kernel of root; of an ordinary user's with sub-uids; of one without."""

LEAST = 256
"""A smaller range is not used: each agent that runs, and each spare sandbox, takes one."""
_TOOLS = (("newuidmap", "/etc/subuid"), ("newgidmap", "/etc/subgid"))
_PLACES = ("/usr/bin", "/bin", "/usr/local/bin")
_TEXT_BYTES = 4096
_FIX = "see that newuidmap and newgidmap work for the kernel's user, or restart the kernel, which then does without sub-uids and says so"
_USED_UP_FIX = "end other agents, or add to the kernel's user's ranges in /etc/subuid and /etc/subgid"


class Ids(NamedTuple):
    """What sub-uids there are for this process's user.

    Attributes:
        tools: paths of newuidmap and newgidmap.
        own: this process's uid and gid.
        ranges: of sub-uids, and of sub-gids.
    """

    tools: tuple[str, str]
    own: tuple[int, int]
    ranges: tuple[list[range], list[range]]

    @property
    def most(self) -> int:
        """How many there are."""
        return min(sum(map(len, ranges)) for ranges in self.ranges)

    def pair(self, index: int) -> tuple[int, int]:
        """Sub-uid and sub-gid number `index`."""
        return _at(self.ranges[0], index), _at(self.ranges[1], index)

    def write(self, pid: int, index: int) -> None:
        """Write both maps of a child that has made a user namespace and waits.

        Raises:
            Refused: a tool refuses, or can't be started.
        """
        ends: list[tuple[str, int, int]] = []
        try:
            for tool, own, sub in zip(self.tools, self.own, self.pair(index), strict=True):
                words = [tool, *map(str, (pid, 0, own, 1, INSIDE_UID, sub, 1))]
                ends.append((tool, *_spawn(words)))
        except OSError as error:
            raise Refused(_refusal(f"{error.strerror}")) from error
        finally:
            # Both at once: they take a few milliseconds each. INVARIANT: every child is waited for.
            problems = [_finish(*end) for end in ends]
        if problem := next(filter(None, problems), ""):
            raise Refused(_refusal(problem))


class Lease:
    """A sub-uid that nobody else has as long as this is not closed.

    It is held by the name of an abstract socket, which Linux gives to one process of the host's and takes back when it
    dies. Nobody can connect: it never listens.
    """

    def __init__(self, ids: Ids, index: int, hold: socket.socket) -> None:
        self._ids = ids
        self._index = index
        self._hold = hold

    @property
    def uid(self) -> int:
        """The sub-uid."""
        return self._ids.pair(self._index)[0]

    def write(self, pid: int) -> None:
        """As `Ids.write`."""
        self._ids.write(pid, self._index)

    def close(self) -> None:
        """Give it back; the processes that had it must be dead."""
        self._hold.close()


class Leases:
    """Gives sub-uids out, each to one sandbox at a time over all kernels of this user.

    Args:
        ids: what there is.
    """

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._lock = threading.Lock()
        self._next = int.from_bytes(os.urandom(8)) % ids.most

    def take(self) -> Lease:
        """A free one; one that was given back is taken again as late as can be.

        Raises:
            Refused: all are in use.
        """
        hold = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        for _ in range(self._ids.most):
            with self._lock:
                index = self._next
                self._next = (index + 1) % self._ids.most
            with contextlib.suppress(OSError):
                hold.bind(f"\0ringfence-sub-uid-{self._ids.pair(index)[0]}")
                return Lease(self._ids, index, hold)
        hold.close()
        raise Refused(f"all {self._ids.most} sub-uids of the kernel's user are in use; {_USED_UP_FIX}")


def form(uid: int | None, *, sub: bool) -> str:
    """The form of the wall `uid`, of a program and of commands alike.

    Args:
        uid: as in `Job`.
        sub: whether there are sub-uids.
    """
    if uid is not None:
        return OWN
    return SUB if sub else NAMESPACE


def find() -> tuple[Ids | None, str]:
    """What sub-uids there are, tried with one of them; or None and why not. May fork: call it while there is one thread."""
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        return None, f"uid {os.getuid()} has no entry in /etc/passwd"
    tools: list[str] = []
    ranges: list[list[range]] = []
    for name, table in _TOOLS:
        found = [f"{place}/{name}" for place in _PLACES if os.access(f"{place}/{name}", os.X_OK)]
        if not found:
            return None, f"`{name}` is not installed"
        tools.append(found[0])
        ranges.append(_ranges(table, user))
        if (count := sum(map(len, ranges[-1]))) < LEAST:
            return None, f"`{table}` gives `{user.pw_name}` {count} ids, and {LEAST} are needed"
    ids = Ids((tools[0], tools[1]), (os.getuid(), os.getgid()), (ranges[0], ranges[1]))
    problem = _try(ids)
    return (None, problem) if problem else (ids, "")


def _ranges(table: str, user: pwd.struct_passwd) -> list[range]:
    """The ranges of a table like /etc/subuid for a user, by name or uid, without what is no sub-uid."""
    found: list[range] = []
    with contextlib.suppress(OSError), open(table, encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, numbers = line.strip().partition(":")
            first, _, count = numbers.partition(":")
            if name in (user.pw_name, str(user.pw_uid)) and first.isdecimal() and count.isdecimal():
                ids = range(int(first), int(first) + int(count))
                if ids.start > 0 and user.pw_uid not in ids and user.pw_gid not in ids:
                    found.append(ids)
    return found


def _at(ranges: list[range], index: int) -> int:
    for ids in ranges:
        if index < len(ids):
            return ids[index]
        index -= len(ids)
    raise IndexError(index)


def _try(ids: Ids) -> str:
    """Why no process can become the first of these; empty: one did."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            launcher.leave_namespaces(user=SUB, mapped=lambda: launcher.ask_for_maps(theirs))
            confine.become(INSIDE_UID)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the parent says what is wrong
            os._exit(1)
    theirs.close()
    problem = "user namespaces can't be made"
    try:
        if ours.recv(_TEXT_BYTES):
            ids.write(pid, 0)
            ours.send(launcher.MAPPED)
            problem = "a process can't become a sub-uid"
    except Refused as refusal:
        problem = str(refusal).partition(": ")[2].partition("; ")[0]
    except OSError:
        pass
    finally:
        ours.close()
        status = os.waitpid(pid, 0)[1]
    return problem if status else ""


def _refusal(problem: str) -> str:
    return f"the sandbox's wall `uid` can't be raised: {problem}; {_FIX}"


def _spawn(words: list[str]) -> tuple[int, int]:
    """Start a tool; its pid and what it says."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, writing, 2)]
        return os.posix_spawn(words[0], words, {}, file_actions=actions), reading
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)


def _finish(tool: str, pid: int, reading: int) -> str:
    """Why a tool failed; empty: it worked."""
    text = " ".join(os.read(reading, _TEXT_BYTES).decode(errors="replace").split())
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    name = os.path.basename(tool)  # noqa: PTH119 - as above
    return (text or f"{name}: it failed") if status else ""
