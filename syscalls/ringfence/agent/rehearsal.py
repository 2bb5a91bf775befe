"""Goes once through what a program does first, before there is one, so that it takes less time when there is.

A warm interpreter does it before programs are forked from it, and so does a process that waits to become one. Both ends of
the connection are its own; nothing stays of it but what Python and Linux make at the first use of something: caches,
specialised code, pages that are no longer shared with the process it was forked from.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
from typing import Final

from ringfence.agent import wire
from ringfence.agent.runtime import Ringfence
from ringfence.agent.session import Session
from ringfence.v1.syscalls_pb2 import Reply, StreamResponse, Welcome

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_ACK, _END_HEADERS = 1, 4
_OK: Final = b"\x88"  # `:status 200`
_SETTING: Final = struct.pack(">HI", 4, 65535)  # as many bytes as a stream may send anyway
_PATH: Final = "rehearsal"


def rehearse() -> None:
    """Boot, make one call and leave."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        theirs.sendall(_answers())
        session = Session(wire.Settings(socket=_PATH, token=_PATH), connected=ours)
        try:
            ringfence = Ringfence(session, 1, None)
            ringfence.fs.read_bytes(_PATH)
            ringfence.join()
        finally:
            session.close()


def _answers() -> bytes:
    """All that a kernel would answer, in one piece."""
    read = {"data": base64.b64encode(_PATH.encode()).decode(), "size_bytes": len(_PATH), "version": _PATH}
    frames = (
        StreamResponse(welcome=Welcome(agent=_PATH, thread=_PATH)),
        StreamResponse(reply=Reply(id=1, step=1, result=json.dumps(read).encode())),
    )
    told = _frame(_SETTINGS, 0, 0, _SETTING) + _frame(_SETTINGS, _ACK, 0, b"")
    told += _frame(_HEADERS, _END_HEADERS, 1, _OK)
    for frame in frames:
        message = frame.SerializeToString()
        told += _frame(_DATA, 0, 1, struct.pack(">BI", 0, len(message)) + message)
    return told


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload
