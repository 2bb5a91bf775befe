"""`artifacts.put`: keep bytes under a name. They are durable before the commit that gives them the name."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Question, Work
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.llm_paging import PREFIX
from ringfence.syscalls.llm_parts import SENT

DATA_BYTES_MAX: Final = (3 << 20) - (64 << 10)
"""What fits into one call: its arguments are bounded, and bytes are base64 there."""
DEFAULT_MEDIA_TYPE: Final = "application/octet-stream"
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?", re.ASCII)
_REF: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MEDIA_TYPE: Final = re.compile(
    r"[A-Za-z0-9!#$&^_.+-]{1,63}/[A-Za-z0-9!#$&^_.+-]{1,63}(;[ -~]{1,100})?", re.ASCII
)


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Name, content and media type."""

    name: str = ""
    data: bytes = b""
    media_type: str = ""


class Result(msgspec.Struct, frozen=True):
    """Where to find it again."""

    ref: str
    version: int
    size_bytes: int


def check_name(name: str) -> str:
    """Return a name, or refuse it.

    Raises:
        InvalidRequest: it is none.
    """
    if _NAME.fullmatch(name) is None or _REF.fullmatch(name) is not None:
        raise InvalidRequest(
            f"`{name[:200]}` is no name of an artifact; write up to 128 letters, digits, `.`, `-` and `_`, "
            "with a letter or digit at its ends"
        )
    return name


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check name, size and media type.

    Raises:
        InvalidRequest: one of them can't be.
    """
    del env
    name = check_name(arguments.name)
    if name.startswith(PREFIX):
        # INVARIANT: what a pointer in a prompt names is what was paged out there, byte for byte.
        raise InvalidRequest(f"names that begin with `{PREFIX}` are the kernel's; choose another")
    if SENT.fullmatch(name) is not None:
        raise InvalidRequest(f"`{name}` names by its hash what was sent to a model; choose another name")
    if len(arguments.data) > DATA_BYTES_MAX:
        raise InvalidRequest(
            f"the content of `{name}` has {len(arguments.data)} bytes; one call carries at most {DATA_BYTES_MAX}, "
            "put it in parts or write a file with `fs.write` and `fs.append`"
        )
    if arguments.media_type and _MEDIA_TYPE.fullmatch(arguments.media_type) is None:
        raise InvalidRequest(
            f"`{arguments.media_type[:100]}` is no media type; write one such as `text/plain`"
        )
    return Plan(resource=name, questions=(Question(action="artifacts.put", resource=name),))


async def wait(call: Call, arguments: Arguments) -> None:
    """Keep the bytes: a name that is committed always has them."""
    await call.env.artifacts.keep(arguments.data)


def transaction(arguments: Arguments) -> Work:
    """What to commit."""
    values = {
        "name": arguments.name,
        "ref": hashlib.sha256(arguments.data).hexdigest(),
        "media_type": arguments.media_type or DEFAULT_MEDIA_TYPE,
        "size_bytes": len(arguments.data),
    }
    return Work(statement="artifact_put", values=values)


def finish(arguments: Arguments, done: dict[str, Any]) -> Result:
    """What the agent gets once it is committed."""
    ref = hashlib.sha256(arguments.data).hexdigest()
    return Result(ref=ref, version=done["version"], size_bytes=len(arguments.data))
