"""`memory.append`: keep a text that can be found again, in one transaction with the outcome."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from ringfence.syscalls.base import Env, Plan, Question, Work
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.memory_common import check_language, check_space, check_tags, stored_space

TEXT_BYTES_MAX: Final = 64 << 10
METADATA_BYTES_MAX: Final = 16 << 10


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The text and what goes with it."""

    text: str = ""
    tags: list[str] = []
    metadata: Any = None
    space: str = ""
    language: str = ""


class Result(msgspec.Struct, frozen=True):
    """Id of the entry."""

    id: str


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check the entry.

    Raises:
        InvalidRequest: no text, one that is too large, or metadata that is no object.
    """
    del env
    size = len(arguments.text.encode())
    if not 1 <= size <= TEXT_BYTES_MAX:
        raise InvalidRequest(
            f"an entry has 1 to {TEXT_BYTES_MAX} bytes of text, this one has {size}; keep longer ones in parts"
        )
    metadata: object = arguments.metadata
    if metadata is not None and not isinstance(metadata, dict):
        raise InvalidRequest('`metadata` is no JSON object; give one such as `{"source": "notes.md"}`')
    if len(canonical_json(arguments.metadata)) > METADATA_BYTES_MAX:
        raise InvalidRequest(f"the metadata is larger than {METADATA_BYTES_MAX} bytes; keep less")
    check_tags(arguments.tags)
    check_language(arguments.language)
    space = check_space(arguments.space)
    return Plan(resource=space, questions=(Question(action="memory.append", resource=space),))


def transaction(arguments: Arguments) -> Work:
    """What to commit."""
    values = {
        "text": arguments.text,
        "tags": arguments.tags,
        "metadata": canonical_json(arguments.metadata or {}).decode(),
        "space": stored_space(arguments.space),
        "language": check_language(arguments.language),
    }
    return Work(statement="memory_append", values=values)


def finish(arguments: Arguments, done: int) -> Result:
    """What the agent gets once it is committed."""
    del arguments
    return Result(id=f"e{done}")
