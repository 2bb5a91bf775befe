"""What an order carries, as the backend at the host takes it, and what its answer says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from ringfence.sandbox.remote import pumps, wire
from ringfence.sandbox.remote.channels import Channel
from ringfence.sandbox.remote.mirror import Mirror
from ringfence.sandbox.types import Exit, Limits, SandboxError

STDIN_BYTES_MAX = 64 << 20


def at(places: Iterable[bytes], found: Sequence[Mirror]) -> dict[Path, Path]:
    """Where trees are seen; `found` may hold more behind them."""
    return {Path(os.fsdecode(place)): tree.path for place, tree in zip(places, found, strict=False)}


async def stdin(channel: Channel, size: int) -> bytes:
    """What a program reads first.

    Raises:
        SandboxError: it is too large.
        ChannelLostError: the kernel sent less.
    """
    if size > STDIN_BYTES_MAX:
        raise SandboxError(f"a standard input of {size} bytes is too large for a sandbox host; send less")
    return await pumps.read_bytes(channel, size)


def limits(told: wire.Limited) -> Limits:
    """Limits as the backend takes them."""
    return Limits(
        memory_bytes=told.memory_bytes,
        pids=told.pids,
        cpu=told.cpu,
        disk_bytes=told.disk_bytes,
        timeout_s=told.timeout_s,
    )


def exit_words(ended: Exit) -> list[str]:
    """How a program ended, as an answer says it."""
    return [ended.reason.value, str(ended.code)]


def sizes(stdout: int | None, stderr: int | None) -> dict[str, int]:
    """Sizes of a command's output in bytes, as an answer says them; what is not known is left out."""
    known = {"stdout_bytes": stdout, "stderr_bytes": stderr}
    return {name: size for name, size in known.items() if size is not None}


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await clean-up to its end; what cancels meanwhile is heard after it.

    INVARIANT: an order is answered only when nothing of it is left, however often and whenever it is given up.
    """
    task = asyncio.create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()
