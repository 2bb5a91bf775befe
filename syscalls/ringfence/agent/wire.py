"""Frames and JSON: what both transports share about the protocol. No I/O."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from ringfence.agent.errors import InvalidRequest, KernelGone, RingfenceError, from_reason
from ringfence.v1.syscalls_pb2 import Call, Hello, Reply, StreamRequest, Welcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION: Final = "0.1.0"
STREAM: Final = "/ringfence.v1.SyscallService/Stream"
MESSAGE_BYTES: Final = 64 << 20
ARGUMENT_BYTES: Final = MESSAGE_BYTES - (1 << 16)  # leaves room for the envelope

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_DECODER: Final = json.JSONDecoder()
_LEAVES: Final = frozenset({str, int, float, bool, type(None)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where the kernel is.

    Attributes:
        socket: path of the agent's own socket.
        token: token of this start.
    """

    socket: str
    token: str


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Find the kernel from `RINGFENCE_SOCKET` and `RINGFENCE_TOKEN`.

    Raises:
        KernelGone: a variable is not set.
    """
    for name in ("RINGFENCE_SOCKET", "RINGFENCE_TOKEN"):
        if not environment.get(name):
            raise KernelGone(
                f"`{name}` is not set: this program runs in a sandbox only; start it with `ringfence submit`"
            )
    return Settings(socket=environment["RINGFENCE_SOCKET"], token=environment["RINGFENCE_TOKEN"])


def hello_frame(settings: Settings) -> StreamRequest:
    """Give the first frame of every stream."""
    client = f"ringfence.agent {VERSION} python/{sys.version_info.major}.{sys.version_info.minor}"
    return StreamRequest(hello=Hello(token=settings.token, protocol=1, client=client))


def call_frame(
    *, number: int, lane: str, step: int, action: str, arguments: bytes, lanes: int
) -> StreamRequest:
    """Give the frame of one call."""
    call = Call(id=number, lane=lane, step=step, action=action, arguments=arguments, lanes=lanes)
    return StreamRequest(call=call)


def lanes_frame(lanes: int) -> StreamRequest:
    """Give the frame that says how many lanes go on, between calls."""
    return StreamRequest(lanes=lanes)


def encode(action: str, arguments: Mapping[str, Any]) -> bytes:
    """Serialise the arguments of a call.

    Raises:
        InvalidRequest: they aren't JSON, or too large for one message.
    """
    try:
        data = _ENCODER.encode(arguments).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"arguments of `{action}` are not JSON: {error}; pass plain values") from None
    if len(data) > ARGUMENT_BYTES:
        raise InvalidRequest(
            f"arguments of `{action}` take {len(data)} bytes, more than {ARGUMENT_BYTES}; send them in parts"
        )
    return data


def check_plain(what: str, value: object) -> None:
    """See that a value comes back from JSON as it went in, but for tuples, which come back as lists.

    Raises:
        InvalidRequest: it holds something else, or a mapping with keys that aren't strings.
    """
    if value is None or isinstance(value, (str, int, float)):
        return
    if isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            if not isinstance(key, str):
                raise InvalidRequest(
                    f"{what} has the key `{key!r}`, which would come back as text; use strings as keys"
                )
            if type(item) not in _LEAVES:
                check_plain(what, item)
        return
    if isinstance(value, (list, tuple)):
        for item in cast("Sequence[object]", value):
            if type(item) not in _LEAVES:
                check_plain(what, item)
        return
    raise InvalidRequest(f"{what} holds a `{type(value).__name__}`, which is not JSON; convert it first")


def result_of(reply: Reply) -> dict[str, Any]:
    """Decode a reply.

    Raises:
        RingfenceError: the typed error, where the reply is a failure.
    """
    if reply.HasField("failure"):
        failure = reply.failure
        raise from_reason(failure.reason, failure.message, failure.metadata, reply.step)
    result = _DECODER.decode(reply.result.decode()) if reply.result else None
    # An operator who settles a call may give any JSON as its result, also none.
    return cast("dict[str, Any]", result) if isinstance(result, dict) else {}


def same_thread(first: Welcome, again: Welcome) -> bool:
    """Whether a new stream continues what the first one was welcomed to."""
    return (first.agent, first.thread, first.branch) == (again.agent, again.thread, again.branch)


def silent_error(settings: Settings) -> RingfenceError:
    """Give the error of a connection that is taken and never welcomed."""
    return KernelGone(
        f"something took the connection at `{settings.socket}` but never answered: see `ringfence status`"
    )


def closed_error() -> RingfenceError:
    """Give the error of a call after the end of the `boot` block."""
    return KernelGone("the connection is closed: the call came after the end of the `agent.boot()` block")
