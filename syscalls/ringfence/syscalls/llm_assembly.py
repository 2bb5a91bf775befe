"""Puts a request to a model together again, from what is recorded of it: parts that were taken out, and contents of pointers.

INVARIANT: what is counted is what is sent: the content of a pointer is found once, and kept by its hash before it is counted.
What a person is asked about is found before that (`pointed`), and the kernel holds the one against the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import fs_common, llm_parts, llm_sources
from ringfence.syscalls.approving import Pointed
from ringfence.syscalls.errors import CallFailed, Internal, InvalidRequest, NoSuchResource, SyscallError
from ringfence.syscalls.lent import ArtifactFound
from ringfence.syscalls.llm_sources import Content, Pointer

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env, Question

CONTENT_BYTES_MAX: Final = 12 << 20
"""Contents of all pointers of one request."""


class Whole(NamedTuple):
    """Messages, and what is sent besides, as the host gets them."""

    messages: list[Any]
    extra: Any


def questions(messages: list[Any], env: Env) -> tuple[Question, ...]:
    """What rules have to allow beside asking the model.

    Raises:
        InvalidRequest: something in the prompt comes from where nobody can judge it.
        NoSuchResource: a path leads nowhere.
    """
    return llm_sources.questions(messages, lambda path: _resolved(env, path))


async def found(call: Call, messages: list[Any]) -> Mapping[Pointer, ArtifactFound]:
    """What the program's pointers name, each with an artifact that holds its content as it is now.

    Raises:
        NoSuchResource: the agent has no such artifact, or no such file.
        InvalidRequest: together they are too long.
        CallFailed: the content of a file can't be kept.
    """
    named: dict[Pointer, ArtifactFound] = {}
    async for pointer, one, data in _each(call.env, messages):
        if one.tainted:
            call.taint(f"version {one.version} of the artifact `{one.name}`, which was kept under a taint")
        if data is not None:
            await call.env.artifacts.keep_page(data, one, call.step)
        named[pointer] = one
    return named


async def pointed(env: Env, messages: list[Any]) -> tuple[Pointed, ...]:
    """What the program's pointers name now. Keeps nothing.

    Raises:
        NoSuchResource: the agent has no such artifact, or no such file.
        InvalidRequest: together they are too long.
    """
    return tuple([told(pointer, one) async for pointer, one, _ in _each(env, messages)])


def told(pointer: Pointer, one: ArtifactFound) -> Pointed:
    """What a pointer names, for whoever approves it."""
    return Pointed(
        pointer=pointer.text,
        sha256=one.ref,
        media_type=one.media_type,
        size_bytes=one.size_bytes,
        version=one.version,
    )


async def _each(env: Env, messages: list[Any]) -> AsyncGenerator[tuple[Pointer, ArtifactFound, bytes | None]]:
    """Each pointer with what it names, and of a file its content, which no artifact has yet."""
    size = 0
    for pointer in sorted(llm_sources.pointers(messages)):
        one, data = await (_artifact(env, pointer) if pointer.artifact else _file(env, pointer))
        size += one.size_bytes
        if size > CONTENT_BYTES_MAX:
            raise InvalidRequest(
                f"what the pointers of this request name has more than {CONTENT_BYTES_MAX} bytes; send fewer, or smaller ones"
            )
        yield pointer, one, data


async def _artifact(env: Env, pointer: Pointer) -> tuple[ArtifactFound, None]:
    one = await env.artifacts.find(pointer.artifact, "", 0)
    if one is None:
        raise NoSuchResource(f"this agent has no artifact `{pointer.artifact}`", pointer=pointer.text)
    return one, None


async def _file(env: Env, pointer: Pointer) -> tuple[ArtifactFound, bytes]:
    path = _resolved(env, pointer.path)
    with _naming(pointer.path):
        data = await asyncio.to_thread(_read, env, path)
    ref = hashlib.sha256(data).hexdigest()
    media_type = llm_sources.media_type_of(pointer.name, data, "")
    one = ArtifactFound(name=f"sent.{ref}", version=0, ref=ref, media_type=media_type, size_bytes=len(data))
    return one, data


def _resolved(env: Env, path: str) -> str:
    with _naming(path):
        return fs_common.resolve(env, path)


@contextlib.contextmanager
def _naming(path: str) -> Generator[None]:
    """Have a refusal say that a pointer is what was not found, and not the model."""
    try:
        yield
    except SyscallError as error:
        error.metadata["pointer"] = path
        raise


def _read(env: Env, path: str) -> bytes:
    most = CONTENT_BYTES_MAX + 1
    try:
        read = env.workspace.read_within(path, 0, 0, max_bytes=most, only_below=None, as_agent=True)
    except WorkspaceError as error:
        raise fs_common.refusal(error) from error
    if read is None:
        raise Internal(f"`{path}` could not be read; report this")
    return read.data


def extent(call: Call, messages: list[Any], extra: Any) -> int:
    """Bytes that a request has beyond its recorded arguments."""
    sources: Mapping[Pointer, ArtifactFound] = getattr(call.plan.data, "sources", {})
    return llm_parts.extent([messages, extra]) + sum(one.size_bytes for one in sources.values())


@contextlib.asynccontextmanager
async def whole(
    call: Call, messages: list[Any], extra: Any, sources: Mapping[Pointer, ArtifactFound]
) -> AsyncGenerator[Whole]:
    """The request as it was made, with what its pointers name. While it is held there is room for so many bytes less.

    Args:
        call: whose request it is.
        messages: as recorded.
        extra: as recorded.
        sources: from `found`.

    Raises:
        CallFailed: something of it can't be read.
        InvalidRequest: a text in it only looks like a pointer.
    """
    taken = llm_parts.kept([messages, extra])
    size = sum(one.size_bytes for one in taken) + sum(one.size_bytes for one in sources.values())
    async with call.env.artifacts.room(size):
        read = call.env.artifacts.read
        parts: dict[str, bytes] = {}
        for one in sorted(taken):
            # INVARIANT: a pointer gives an agent nothing but what it has itself.
            if await call.env.artifacts.find(one.name, "", 0) is None:
                raise CallFailed(
                    f"a part of the request is gone: this agent has no artifact `{one.name}`", sent="no"
                )
            parts[one.name] = await read(one.ref, 0, one.size_bytes)
        contents: dict[Pointer, Content] = {}
        for pointer, one in sources.items():
            data = await read(one.ref, 0, one.size_bytes)
            kind = llm_sources.media_type_of(pointer.name, data, one.media_type)
            contents[pointer] = Content(data, kind)
        made, rest = messages, extra
        if parts:
            made, rest = llm_parts.put_back(made, parts), llm_parts.put_back(rest, parts)
        yield Whole(llm_sources.filled(made, contents), rest)
