"""Messages between a kernel and a sandbox host, and how they are framed: four bytes of length, then MessagePack.

Greetings open a connection. Everything else but `Beat` is *counted*: each side counts what it sent and what it received, and
after a cut the next connection goes on from there.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

VERSION = 1
"""Of the protocol; a kernel and a host of different versions refuse each other."""
FRAME_BYTES_MAX = 4 << 20
"""More than Linux takes as the arguments and environment of a program."""
GREETING_BYTES_MAX = 4096
DATA_BYTES_MAX = 64 << 10
_LENGTH_BYTES = 4


class WireError(Exception):
    """The other side doesn't speak this protocol. The message is for the log."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    pass


# -- greetings, never counted -------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True):
    """First word of a kernel.

    Attributes:
        version: of the protocol.
        owner: the kernel's data directory, by a name of its own that never changes.
        epoch: grows each time that a kernel starts there.
        nonce: of this kernel process; two with one epoch are told apart by it.
        session: the one to go on with; empty for a new one.
        received: how many counted messages of it the kernel has had.
    """

    version: int
    owner: str
    epoch: int
    nonce: str
    session: str = ""
    received: int = 0


class Probe(_Message, frozen=True, kw_only=True):
    """First word of one who only asks for the walls; no session comes of it."""

    version: int


class Welcome(_Message, frozen=True, kw_only=True):
    """The host's answer to `Hello`.

    Attributes:
        session: to go on with after a cut.
        resumed: it is the one that was asked for; otherwise everything of an earlier one has ended.
        received: how many counted messages of it the host has had.
        lease_s: how long the host keeps sandboxes alive without a connection.
        ended: agents of earlier kernels whose sandboxes were ended for this one.
        provides: directories that the host has itself at the same path.
    """

    session: str
    resumed: bool
    received: int
    lease_s: float
    ended: list[str] = []
    provides: list[str] = []


class Walls(_Message, frozen=True, kw_only=True):
    """The answer to `Probe`: what `Wall` holds, for each wall."""

    walls: list[dict[str, str | bool]]


class Refused(_Message, frozen=True, kw_only=True):
    """The other side is not served; it says why and closes."""

    message: str


class Beat(_Message, frozen=True, kw_only=True):
    """A sign of life, and how many counted messages have been received."""

    received: int


# -- orders and answers -------------------------------------------------------------------------------------------


class Limited(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`Limits` on their way."""

    memory_bytes: int
    pids: int
    cpu: float
    disk_bytes: int
    timeout_s: float


class StartProgram(_Message, frozen=True, kw_only=True):
    """Start a program from trees that were sent before.

    Attributes:
        stdin: channel with its standard input, written by the kernel.
        stdout: channel of its standard output, written by the host.
        image: tree seen as `/program`.
        binds: trees seen read-only, by path inside.
        mounts: the same, of what a manifest asks for.
        require: walls that have to stand.
        provided: directories of the host itself, at the same path.
        doors: port of its loopback that leads to the kernel; 0: it has no doors. The answer says `doors` where there are some.
    """

    agent: str
    argv: list[bytes]
    env: dict[bytes, bytes]
    image: str
    binds: dict[bytes, str]
    mounts: dict[bytes, str]
    provided: list[bytes]
    require: list[str]
    limits: Limited
    stdin: int
    stdin_bytes: int
    stdout: int
    stderr: int
    doors: int = 0


class RunCommand(_Message, frozen=True, kw_only=True):
    """Run a command on a tree that was sent before; what the tree hides is masked.

    Attributes:
        upper: channel that brings back what it left (`upper.Left` frames), written by the host.
    """

    agent: str
    argv: list[bytes]
    env: dict[bytes, bytes]
    lower: str
    binds: dict[bytes, str]
    mounts: dict[bytes, str]
    provided: list[bytes]
    require: list[str]
    cwd: bytes
    limits: Limited
    stdin: int
    stdin_bytes: int
    upper: int


class Offer(_Message, frozen=True, kw_only=True):
    """A tree that is to be there, as changes to an earlier one.

    Attributes:
        agent: whose it is; an agent's trees belong to one user of the host.
        base: tree that it is made of; empty: of nothing.
        listing: channel with the changes (`trees.Delta` frames), written by the kernel.
        needs: channel with the digests that the host lacks, written by the host.
        content: channel with their content, written by the kernel.
    """

    agent: str
    base: str
    listing: int
    needs: int
    content: int


class Act(_Message, frozen=True, kw_only=True):
    """What is to be done with a program: `kill`, `pause` or `resume`."""

    program: int
    what: str


class Bye(_Message, frozen=True, kw_only=True):
    """The kernel ends: everything of its session ends with it."""


Body = StartProgram | RunCommand | Offer | Act | Bye


class Order(_Message, frozen=True, kw_only=True):
    """Something to do, by a number that the answer bears too."""

    call: int
    body: Body


class Cancel(_Message, frozen=True, kw_only=True):
    """Give up an order; it is answered nevertheless."""

    call: int


class Answer(_Message, frozen=True, kw_only=True):
    """How an order went.

    Attributes:
        values: what came of it.
        error: empty, or why it failed.
        lost: the failure speaks only against this attempt.
    """

    call: int
    values: dict[str, str | int | list[str] | dict[str, str]] = {}
    error: str = ""
    lost: bool = False


class Ended(_Message, frozen=True, kw_only=True):
    """A program has ended, and nothing of it is left."""

    program: int
    reason: str
    code: int


# -- channels -----------------------------------------------------------------------------------------------------


class Open(_Message, frozen=True, kw_only=True):
    """A connection of a program to the syscall socket, or to its doors, made by the host."""

    channel: int
    program: int
    door: bool = False


class Data(_Message, frozen=True, kw_only=True):
    """Bytes of a channel, at most `DATA_BYTES_MAX` and never more than was credited."""

    channel: int
    data: bytes


class Credit(_Message, frozen=True, kw_only=True):
    """So many more bytes may be sent."""

    channel: int
    size: int


class End(_Message, frozen=True, kw_only=True):
    """Nothing more comes in this direction; the other may go on."""

    channel: int


class Reset(_Message, frozen=True, kw_only=True):
    """The channel is of no use any more, in both directions."""

    channel: int


Greeting = Hello | Probe
Counted = Order | Cancel | Answer | Ended | Open | Data | Credit | End | Reset
Reply = Welcome | Walls | Refused
_Any = Beat | Order | Cancel | Answer | Ended | Open | Data | Credit | End | Reset

_encoder = msgspec.msgpack.Encoder()
_messages = msgspec.msgpack.Decoder(_Any)
_greetings = msgspec.msgpack.Decoder(Greeting)
_replies = msgspec.msgpack.Decoder(Reply)
_T = TypeVar("_T")


def encode(message: msgspec.Struct) -> bytes:
    """One frame.

    Raises:
        WireError: it is larger than any frame may be.
    """
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(f"a message of {len(body)} bytes is too large to send")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def _body(reader: asyncio.StreamReader, most: int) -> bytes:
    size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if size > most:
        raise WireError(f"a frame of {size} bytes is too large")
    return await reader.readexactly(size)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a frame is no message: {error}") from error


async def read(reader: asyncio.StreamReader) -> Counted | Beat:
    """The next message.

    Raises:
        WireError: it is none.
        asyncio.IncompleteReadError: the connection ended.
        OSError: it broke.
    """
    return _decoded(_messages, await _body(reader, FRAME_BYTES_MAX))


async def read_greeting(reader: asyncio.StreamReader) -> Greeting:
    """A client's first word; errors as for `read`."""
    return _decoded(_greetings, await _body(reader, GREETING_BYTES_MAX))


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """The host's answer to a greeting; errors as for `read`."""
    return _decoded(_replies, await _body(reader, FRAME_BYTES_MAX))
