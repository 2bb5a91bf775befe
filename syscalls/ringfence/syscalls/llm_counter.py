"""A process that counts tokens for the kernel: `python -m ringfence.syscalls.llm_counter`, with a socket as its input.

The vocabularies hold the interpreter for up to a second while they are read, take 50 to 120 MB, and run native code over
whatever agents send. None of that belongs into the kernel's process: this one can be ended at any time, and ends by
itself when the kernel is gone or has asked for nothing for a while.

A frame is a length of four bytes and JSON: a `Request` in, a `Counted` or an error's text out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec
from ringfence.syscalls.llm_paging import Counted, Request, measure
from ringfence.syscalls.llm_profiles import PROFILES
from ringfence.syscalls.llm_shape import Count
from ringfence.syscalls.llm_tokens import count_text

_Batch: TypeAlias = Callable[[list[str], str, int], list[int]]
HEAD: Final = struct.Struct("!I")
IDLE_S: Final = 900.0
NOFILE: Final = 16
MEMORY_BYTES: Final = 2 << 30
NOBODY: Final = 65534


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What comes back: a count, or why there is none."""

    counted: Counted | None = None
    error: str = ""


def counter(encoding: str) -> Count:
    """Counts with a vocabulary; an empty name estimates.

    Raises:
        ImportError: the library that has the vocabularies is not there.
    """
    if not encoding:
        return lambda texts: [count_text(text) for text in texts]
    batch: _Batch = importlib.import_module("toktok").batch_count
    return lambda texts: batch(list(texts), encoding, 1)


def answer(data: bytes) -> Answer:
    """Answer one frame."""
    try:
        request = msgspec.json.decode(data, type=Request)
        profile = PROFILES[request.tokenizer]
        return Answer(counted=measure(request, profile, counter(profile.encoding)))
    except ImportError as error:
        return Answer(error=f"the tokenizers are not installed: {error}; install `toktok-rs`")
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        return Answer(error=f"{type(error).__name__}: {error}"[:500])


def receive(link: socket.socket, size: int) -> bytes | None:
    """So many bytes; None: the other side is gone."""
    parts: list[bytes] = []
    while size:
        part = link.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def serve(link: socket.socket) -> None:
    """Answer until nobody asks any more."""
    link.settimeout(IDLE_S)
    while (head := receive(link, HEAD.size)) is not None:
        data = receive(link, HEAD.unpack(head)[0])
        if data is None:
            return
        reply = msgspec.json.encode(answer(data))
        link.sendall(HEAD.pack(len(reply)) + reply)


def confine() -> None:
    """Give up what counting does not need: native code is run here over whatever agents send."""
    for limit, most in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, NOFILE),
        (resource.RLIMIT_AS, MEMORY_BYTES),
    ):
        resource.setrlimit(limit, (most, most))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def main() -> int:
    """Serve the socket that stands in for standard input."""
    # The kernel ends in order on Ctrl-C and may count until then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError):
        # While its files can still be read; what it lacks is said to whoever asks for a count.
        importlib.import_module("toktok")
    confine()
    with socket.socket(fileno=0) as link:
        try:
            serve(link)
        except (TimeoutError, OSError):
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
