"""A session of MCP over a stream of lines: how a server that is started here is spoken to. Imported like `mcp_client`, when it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import (
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError
from ringfence.syscalls.mcp_client import Session
from ringfence.syscalls.mcp_common import EFFECT_ID, Sent
from ringfence.syscalls.mcp_methods import REQUESTS

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

_STREAM_LINES: Final = 16


def open_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, version: str) -> Session:
    """A session over a stream of lines, each one message. The reader's limit bounds them."""
    sent: dict[str, Sent] = {}
    return Session(_lines(reader, writer, sent), sent, version)


@asynccontextmanager
async def _lines(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: Mapping[str, Sent]
) -> AsyncGenerator[TransportStreams]:
    into, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](_STREAM_LINES)
    outgoing, out_of = anyio.create_memory_object_stream[SessionMessage](_STREAM_LINES)

    async def read() -> None:
        async with into:
            while line := await _line(reader):
                message = _heard(line)
                if message is None:
                    continue  # what is no message is what a program prints
                await into.send(SessionMessage(message))

    async def write() -> None:
        async with out_of:
            async for item in out_of:
                told = _told(item, sent)
                if told is not None:
                    told.begun = True
                    told.declare(cast("Any", item.message).params["_meta"])
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                writer.write(text.encode() + b"\n")
                await writer.drain()

    async def guarded(work: Any) -> None:
        try:
            await work()
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await into.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(guarded, read)
        group.start_soon(guarded, write)
        try:
            yield incoming, outgoing
        finally:
            writer.close()
            group.cancel_scope.cancel()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty: there is none, or it is longer than it may be."""
    try:
        return await reader.readline()
    except ValueError:
        return b""


def _heard(line: bytes) -> JSONRPCMessage | None:
    """The message of a line; None: it is none. An answer that nobody can read, as one with half of a surrogate, is an error.

    Raises:
        anyio.BrokenResourceError: it was meant as a message and is no JSON, so that nobody can tell whose it was.
    """
    with contextlib.suppress(ValidationError):
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    if not line.lstrip().startswith(b"{") or b'"jsonrpc"' not in line:
        return None
    try:
        said: Any = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise anyio.BrokenResourceError from None
    if "jsonrpc" not in said or "method" in said:
        return None
    error = ErrorData(code=PARSE_ERROR, message="an answer that can't be read")
    with contextlib.suppress(ValidationError):
        return JSONRPCError(jsonrpc="2.0", id=said.get("id"), error=error)
    return None


def _told(item: SessionMessage, sent: Mapping[str, Sent]) -> Sent | None:
    message = item.message
    if not isinstance(message, JSONRPCRequest) or message.method not in REQUESTS:
        return None
    meta = cast("dict[str, Any]", (message.params or {}).get("_meta") or {})
    return sent.get(str(meta.get(EFFECT_ID, "")))
