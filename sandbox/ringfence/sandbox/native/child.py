"""A child process with three pipes, for a kernel that serves gRPC.

An event loop's own way to start a process may fork, and then gRPC's fork handlers run in the child and can kill it. The
standard library's `Popen` uses vfork, which runs no handlers.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from typing import IO, cast

_LINE_BYTES_MAX = 1 << 20


class Child:
    """A running child.

    Attributes:
        stdin: its standard input; closing it tells the child that nobody is there any more.
        stdout: its standard output.
        stderr: its standard error.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdin: asyncio.WriteTransport,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self._process = process

    @classmethod
    async def start(cls, argv: Sequence[str], descriptors: tuple[int, ...]) -> Child:
        """Start a program in a session of its own, with an empty environment.

        Args:
            argv: program and arguments.
            descriptors: open in the child under the same numbers.

        Raises:
            OSError: it can't be started.
        """
        process = subprocess.Popen(  # noqa: ASYNC220 - vfork returns as soon as the program is loaded
            argv,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=descriptors,
            env={},
            start_new_session=True,
        )
        loop = asyncio.get_running_loop()
        stdin, _ = await loop.connect_write_pipe(asyncio.Protocol, process.stdin)
        return cls(process, stdin, await _reader(process.stdout), await _reader(process.stderr))

    def kill(self) -> None:
        """SIGKILL, unless it is gone already."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait for its end and reap it; answers its exit status, or minus the signal."""
        if self._process.poll() is None:
            loop = asyncio.get_running_loop()
            gone = loop.create_future()
            pidfd = os.pidfd_open(self._process.pid)
            loop.add_reader(pidfd, lambda: gone.done() or gone.set_result(None))
            try:
                await gone
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        return self._process.wait()


async def _reader(pipe: IO[bytes] | None) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), cast("IO[bytes]", pipe))
    return reader
