"""A way to PostgreSQL that breaks right around a commit of the kernel's journal.

A kernel that lost its connection there can't know from it whether the commit took place.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

from support.matrix import Result
from support.scenes import short_directory

if TYPE_CHECKING:
    from support.scenes import Held
    from support.target import Target

MOMENTS = ("before", "after", "with")
"""The commit never arrives; it takes place and its answer is lost; it is sent and nobody waits for what becomes of it."""
_COMMIT = re.compile(rb"B.{4}\x00(append|append_one|append_changes|commit)\x00", re.DOTALL)
"""How the journal's connection names the statements that commit, in the messages that run them."""


class Cutter:
    """Carries connections of one kernel to its database.

    Attributes:
        dsn: what the kernel is given.
        cuts: how often a commit was cut.
    """

    def __init__(self, directory: Path, dsn: str) -> None:
        parts = urlsplit(dsn)
        self._server = f"{parse_qs(parts.query)['host'][0]}/.s.PGSQL.5432"
        self.dsn = (
            f"postgresql://{parts.username}@{parts.path}?host={quote(str(directory), safe='')}&port=5432"
        )
        self.cuts = 0
        self._moment = ""
        self._skip = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._lost: set[socket.socket] = set()  # servers whose next answer nobody gets
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / ".s.PGSQL.5432"))
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def arm(self, moment: str, skip: int = 0) -> None:
        """Cut one commit: the first, or the one after `skip` others."""
        with self._lock:
            self._moment, self._skip = moment, skip

    def disarm(self) -> None:
        with self._lock:
            self._moment = ""

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self._server)
            except OSError:
                near.close()
                far.close()
                continue
            self._open |= {near, far}
            left = [2]
            for work, ends in ((self._up, (near, far)), (self._down, (far, near))):
                thread = threading.Thread(target=self._carry, args=(work, *ends, left), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(
        self,
        work: Callable[[socket.socket, socket.socket], None],
        one: socket.socket,
        other: socket.socket,
        left: list[int],
    ) -> None:
        with contextlib.suppress(OSError):
            work(one, other)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left[0] -= 1
            if left[0] == 0:
                for end in (one, other):
                    end.close()
                    self._open.discard(end)

    def _down(self, far: socket.socket, near: socket.socket) -> None:
        while data := far.recv(1 << 16):
            if far in self._lost:
                return
            near.sendall(data)

    def _up(self, near: socket.socket, far: socket.socket) -> None:
        while data := near.recv(1 << 16):
            moment = self._due(data)
            if moment == "before":
                return
            if moment == "after":
                self._lost.add(far)
            far.sendall(data)
            if moment == "with":
                return

    def _due(self, data: bytes) -> str:
        with self._lock:
            if not self._moment or not _COMMIT.search(data):
                return ""
            if self._skip:
                self._skip -= 1
                return ""
            moment, self._moment = self._moment, ""
            self.cuts += 1
            return moment


@contextlib.contextmanager
def cutter(dsn: str) -> Iterator[Cutter]:
    with short_directory() as directory:
        made = Cutter(directory, dsn)
        try:
            yield made
        finally:
            made.close()


# -- calls over it --------------------------------------------------------------------------------------------------------

CONFIG = (
    'apiVersion: ringfence/v1\nkind: Kernel\nspec: {{resources: {{plain: {{type: http, base: "{base}"}}}}}}\n'
)
FILES = {"count.txt": "", "ran.txt": ""}


def allowed(counter: Target) -> list[str]:
    """Rules for an agent that makes the calls of a round."""
    return ['fs.*: "/workspace/**"', 'state.*: "**"', f'http.*: "{counter.base}/**"', 'exec.run: "*"']


def one_round(held: Held, counter: Target, key: str, mark: str) -> None:
    """A call of each kind: in one commit with its outcome, on files, out of the house, a command."""
    with held.rf.state.transaction() as tx:
        tx.put(key, (tx.get(key) or 0) + 1)
    held.rf.fs.append_text("count.txt", "x")
    held.rf.http.post(f"{counter.base}/plain/{mark}", json={})
    held.rf.exec.run(["sh", "-c", "printf x >> ran.txt"])


def cut_rounds(held: Held, way: Cutter, counter: Target, moment: str, rounds: int) -> Result:
    """Cut one commit of each round, each time a later one, and count what the rounds did."""
    result = Result(runs=rounds)
    key = f"cut/{moment}"

    def look() -> dict[str, int]:
        files = {name: len((held.live / name).read_text()) for name in FILES}
        return {**files, "state": held.rf.state.get(key) or 0}

    before, cut = look(), way.cuts
    for number in range(rounds):
        way.arm(moment, number % 8)
        one_round(held, counter, key, f"{moment}-{number}")
        way.disarm()
        sent = len(counter.deliveries(f"/plain/{moment}-{number}"))
        if sent != 1:
            (result.repeated if sent else result.lost).append(f"{moment}, round {number}: sent {sent} times")
    for what, times in look().items():
        done = times - before[what]
        if done != rounds:
            (result.repeated if done > rounds else result.lost).append(f"{moment}: {what} {done} of {rounds}")
    if way.cuts - cut < rounds * 3 // 4:
        result.stuck.append(f"{moment}: only {way.cuts - cut} of {rounds} commits were cut")
    result.unknown += [f"step {step['step']}" for step in held.steps() if step["outcome"] == "unknown"]
    return result
