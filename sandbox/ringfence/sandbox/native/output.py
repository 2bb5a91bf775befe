"""Takes in what a command writes, in bounded memory and bounded files."""

from __future__ import annotations

import contextlib
import os
import select

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
        os.close(self._file)
        os.close(self.source)

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
