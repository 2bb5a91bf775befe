"""A pipe's end on the event loop is closed once, whichever loop it is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest
import uvloop
from ringfence.kernel import pipes


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_end_is_closed_and_what_takes_its_number_stays(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(pipes._End):
        """Somebody opens a file as soon as the number is free, which is before the loop closes what it was given."""

        def close(self) -> None:
            with pytest.MonkeyPatch.context() as held:
                held.setattr(os, "close", closed.append)
                super().close()
            try:
                os.fstat(self.fileno())
            except OSError:
                freed.append(self.fileno())

    closed: list[int] = []
    freed: list[int] = []
    monkeypatch.setattr(pipes, "_End", Late)

    async def read() -> None:
        read_fd, write_fd = os.pipe()
        os.write(write_fd, b"words")
        os.close(write_fd)
        reader, transport = await pipes.reader_of(read_fd)
        assert await reader.read() == b"words"
        transport.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # Closed by the loop before it asked the object, or by the object: never by both.
        assert sorted(closed + freed) == [read_fd]
        if closed:
            os.close(read_fd)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(read())
