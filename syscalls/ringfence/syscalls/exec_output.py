"""Output of commands, without credentials: its ends go into the result, all of a long one into an artifact."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ringfence.syscalls import fs_common
from ringfence.syscalls.base import Call
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.redaction import redactor_for
from ringfence.syscalls.redaction_files import without_credentials

PART_BYTES: Final = 32 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One stream of a command.

    Attributes:
        shown: all of it, or its first and its last part.
        total_bytes: how much it was in all, as it was written.
        ref: artifact with all of it where `shown` is not; of more than the sandbox's disk holds, again the ends.
    """

    shown: bytes
    total_bytes: int
    ref: str = ""


async def taken_in(call: Call, stream: str, path: Path, written: int | None) -> Output:
    """Take in what a command wrote.

    Args:
        call: the call that ran it.
        stream: `stdout` or `stderr`; with the step it names the artifact.
        path: the file with the stream.
        written: how much it was in all; None: the file's size.

    Raises:
        CallFailed: it can't be searched for credentials, or a long one not be kept.
    """
    hide = redactor_for(call.env, ())

    def look() -> tuple[Path, int, bytes, int]:
        clean = without_credentials(hide, path)
        return clean, path.stat().st_size, *_ends(clean, written)

    try:
        clean, came, shown, size = await fs_common.in_thread(look)
    except OSError as error:
        raise CallFailed(f"what the command wrote can't be searched for credentials: {error}") from error
    total = came if written is None else written
    if size <= 2 * PART_BYTES:
        return Output(shown=shown, total_bytes=total)
    ref = await call.env.artifacts.keep_output(clean, f"exec-{call.step}-{stream}", size, call.step)
    return Output(shown=shown, total_bytes=total, ref=ref)


def _ends(path: Path, written: int | None) -> tuple[bytes, int]:
    """The first and the last part of a file, or all of it, and its size."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= 2 * PART_BYTES:
            return file.read(), size
        head = file.read(PART_BYTES)
        file.seek(size - PART_BYTES)
        total = size if written is None else written
        left_out = f"\n[ringfence: {total - 2 * PART_BYTES} bytes left out]\n".encode()
        return head + left_out + file.read(PART_BYTES), size
