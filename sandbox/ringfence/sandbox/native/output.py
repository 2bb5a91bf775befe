"""Takes in what a command writes, in bounded memory and bounded files."""

# The warden works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH101, PTH102, PTH116, PTH123

from __future__ import annotations

import contextlib
import os
import select

from ringfence.sandbox.native.job import (
    FORMAT_NAME,
    STDERR_NAME,
    STDOUT_NAME,
    UPPER_NAME,
    WORK_NAME,
    Order,
    wall,
)

_OUTPUT_SHARE = 4
"""Each output file of a command may take this part of its disk limit."""
_CHUNK_BYTES = 1 << 18
_LEAST_BYTES = 1 << 18
_TAIL_MOST_BYTES = 1 << 20


class Sink:
    """One stream of a command on its way into a file.

    The file never grows past `limit_bytes` (and a line): beyond it the beginning and the last part are kept, with a line
    between them that says how much is missing. The command is never held up or ended for what it prints.

    A full disk loses output, not the command.

    Attributes:
        total_bytes: everything that was written.
    """

    def __init__(self, path: str, limit_bytes: int) -> None:
        limit = max(limit_bytes, _LEAST_BYTES)
        self._tail_most = min(_TAIL_MOST_BYTES, limit // 4)
        self._head_left = limit - self._tail_most
        self._tail = bytearray()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.total_bytes = 0
        self.source, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.source, False)

    @property
    def kept_bytes(self) -> int:
        """How much of it is or will be in the file."""
        return self._written() + min(len(self._tail), self._tail_most)

    def take(self) -> bool:
        """Move what is there; returns whether more can come."""
        try:
            data = os.read(self.source, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.total_bytes += len(data)
        head = data[: self._head_left]
        if head:
            self._head_left -= len(head)
            _write_all(self._file, head)
        self._tail += data[len(head) :]
        if len(self._tail) > 2 * self._tail_most:
            del self._tail[: -self._tail_most]
        return True

    def take_writer(self) -> int:
        """The end to write to, which is the caller's from now on."""
        writer, self.writer = self.writer, -1
        return writer

    def close(self) -> None:
        """Close what `finish` has not closed."""
        for descriptor in (self.source, self.writer, self._file):
            if descriptor >= 0:
                os.close(descriptor)
        self.source = self.writer = self._file = -1

    def finish(self) -> None:
        """Take the rest, write the last part and close."""
        while self.take():
            if not _readable(self.source):
                break
        dropped = len(self._tail) and self.total_bytes - self._written() - self._tail_most
        if dropped > 0:
            _write_all(self._file, f"\n[ringfence: {dropped} bytes left out]\n".encode())
        _write_all(self._file, bytes(self._tail[-self._tail_most :]))
        os.fsync(self._file)
        self.close()

    def _written(self) -> int:
        return os.lseek(self._file, 0, os.SEEK_CUR)


def _readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(descriptor, view) :]


def lay_overlay(order: Order) -> None:
    """Make the layers of the overlay of a command, or of a program that has one.

    Raises:
        Refused: the scratch directory is of no use.
    """
    if not order["lower"]:
        return
    scratch, uid = order["scratch"], order["uid"]
    with wall("scratch directory", "it must be empty and writable for the kernel"):
        lower = os.stat(order["lower"])
        upper = f"{scratch}/{UPPER_NAME}"
        os.mkdir(f"{scratch}/{WORK_NAME}", 0o700)
        os.mkdir(upper, 0o700)
        # The root of an overlay shows the upper layer's own owner, mode and times.
        if uid is not None:
            os.chown(upper, lower.st_uid, lower.st_gid)
        os.chmod(upper, lower.st_mode & 0o7777)
        os.utime(upper, ns=(lower.st_atime_ns, lower.st_mtime_ns))
        with open(f"{scratch}/{FORMAT_NAME}", "x", encoding="ascii") as file:
            file.write("user" if uid is None else "trusted")


def command_sinks(order: Order) -> list[Sink]:
    """Where the output of a command goes.

    Raises:
        Refused: the scratch directory is of no use.
    """
    scratch = order["scratch"]
    with wall("scratch directory", "it must be empty and writable for the kernel"):
        limit = order["disk_bytes"] // _OUTPUT_SHARE
        return [Sink(f"{scratch}/{name}", limit) for name in (STDOUT_NAME, STDERR_NAME)]
