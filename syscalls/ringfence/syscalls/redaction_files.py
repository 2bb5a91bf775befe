"""Takes the operator's credentials out of a file of any length, in bounded memory.

INVARIANT: no end of a window hides a part of a credential: each is searched with what stands around it. Nor does the place where
the middle of a stream was dropped: what is left there of a credential goes too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final

from ringfence.syscalls.redaction import REDACTED, Redactor

WINDOW_BYTES: Final = 1 << 20
"""How much of a file is searched at a time. A shorter one is searched as a whole, and as JSON where it is that."""

AROUND_BYTES: Final = 64 << 10
"""What is looked at on both sides of a window, or more: a spelling may be cut into many lines."""

_GAP: Final = re.compile(rb"\n\[ringfence: [0-9]+ bytes left out\]\n")
_LINES: Final = 4
"""How many times its own length a spelling may take, with ends of lines in it."""


def without_credentials(hide: Redactor, source: Path, *, window: int = WINDOW_BYTES) -> Path:
    """A file with the same without any credential: the source itself where it holds none, else one beside it.

    Raises:
        OSError: the source can't be read, or the other one not be written.
    """
    if not hide.longest:
        return source
    target = source.with_name(f"{source.name}.clean")
    with source.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        spans = _spans(hide, file, size, window)
        first = next(spans, None)
        if first is not None:
            with target.open("wb") as out:
                _copy(file, out, size, chain([first], spans))
    found = source if first is None else target
    if size <= window:
        data = found.read_bytes()
        clean = hide.body(data)
        if clean != data:
            target.write_bytes(clean)
            return target
    return found


def _spans(hide: Redactor, file: BinaryIO, size: int, window: int) -> Iterator[tuple[int, int]]:
    """Where credentials lie, in order; they may overlap."""
    around = max(AROUND_BYTES, _LINES * hide.longest)
    for at in range(0, size, window):
        begin = max(0, at - around)
        data = os.pread(file.fileno(), at + window + around - begin, begin)
        for one in sorted(chain(hide.spans(data), _halves(hide, data))):
            # Each belongs to the window in which it begins: that one sees all of it.
            if at <= begin + one[0] < at + window:
                yield begin + one[0], begin + one[1]


def _halves(hide: Redactor, data: bytes) -> Iterator[tuple[int, int]]:
    """What is left of credentials beside a place where something was dropped."""
    for gap in _GAP.finditer(data):
        head = data[max(0, gap.start() - hide.longest) : gap.start()]
        tail = data[gap.end() : gap.end() + hide.longest]
        before, after = hide.halves(head, tail)
        if before:
            yield gap.start() - before, gap.start()
        if after:
            yield gap.end(), gap.end() + after


def _copy(file: BinaryIO, out: BinaryIO, size: int, spans: Iterable[tuple[int, int]]) -> None:
    """Copy a file with a word in place of each span."""
    at = 0
    for begin, end in chain(spans, [(size, size)]):
        if begin < at:
            at = max(at, end)
            continue
        file.seek(at)
        left = begin - at
        while left:
            part = file.read(min(left, WINDOW_BYTES))
            if not part:
                raise OSError("the output became shorter while it was read")
            out.write(part)
            left -= len(part)
        if begin < size:
            out.write(REDACTED.encode())
        at = end
