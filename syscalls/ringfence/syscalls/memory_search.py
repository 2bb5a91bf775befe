"""`memory.search`: find texts that were kept, by their words."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Question
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.memory_common import check_language, check_space, check_tags, stored_space

QUERY_BYTES_MAX: Final = 4 << 10
LIMIT: Final = 10
LIMIT_MAX: Final = 100
OFFSET_MAX: Final = 10_000


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The words, and which part of what they find."""

    query: str = ""
    limit: int = 0
    offset: int = 0
    tags: list[str] = []
    space: str = ""
    language: str = ""


class MemoryEntry(msgspec.Struct, frozen=True):
    """One entry."""

    id: str
    text: str
    tags: list[str]
    metadata: Any
    score: float
    created_at: str
    agent: str


class Result(msgspec.Struct, frozen=True):
    """Entries, best first."""

    entries: list[MemoryEntry]
    truncated: bool


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check the query.

    Raises:
        InvalidRequest: it is too long, or a bound is out of range.
    """
    del env
    if len(arguments.query.encode()) > QUERY_BYTES_MAX:
        raise InvalidRequest(f"the query is longer than {QUERY_BYTES_MAX} bytes; give fewer words")
    if not 0 <= arguments.limit <= LIMIT_MAX:
        raise InvalidRequest(f"`limit` is {arguments.limit}; it has to lie between 0 and {LIMIT_MAX}")
    if not 0 <= arguments.offset <= OFFSET_MAX:
        raise InvalidRequest(
            f"`offset` is {arguments.offset}; it has to lie between 0 and {OFFSET_MAX}, narrow the query"
        )
    check_tags(arguments.tags)
    check_language(arguments.language)
    space = check_space(arguments.space)
    return Plan(resource=space, questions=(Question(action="memory.search", resource=space),))


async def run(call: Call, arguments: Arguments) -> Result:
    """Search."""
    limit = arguments.limit or LIMIT
    found = await call.env.memory.search(
        stored_space(arguments.space),
        arguments.query.strip(),
        arguments.tags,
        check_language(arguments.language),
        limit=limit + 1,
        offset=arguments.offset,
    )
    tainted = next((one for one in found[:limit] if one.tainted), None)
    if tainted is not None:
        call.taint(f"the memory `{tainted.id}`, which `{tainted.agent}` kept while it was tainted")
    entries = [
        MemoryEntry(
            id=one.id,
            text=one.text,
            tags=list(one.tags),
            metadata=msgspec.json.decode(one.metadata),
            score=one.score,
            created_at=one.created_at,
            agent=one.agent,
        )
        for one in found[:limit]
    ]
    return Result(entries=entries, truncated=len(found) > limit)
