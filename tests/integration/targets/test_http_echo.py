"""A target that gives its caller's credential back, in whatever part of an answer: none of it reaches the agent."""

from __future__ import annotations

import asyncio
import base64
import gzip
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ringfence.policy.engine import AgentPolicy
from ringfence.syscalls import http_get, http_post
from ringfence.syscalls.declared import HttpResource
from ringfence.syscalls.errors import CallFailed, InvalidRequest, OutcomeUnknown, SyscallError
from ringfence.syscalls.http_client import close_clients

if TYPE_CHECKING:
    from conftest import Call

TOKEN = "Tok/en+va=lue-7b2d"


@dataclass
class Wire:
    """A server that answers with the very bytes it is told to, in the pieces it is told to."""

    pieces: list[bytes] = field(default_factory=list[bytes])
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert TOKEN.encode() in head
        for piece in self.pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    made = Wire()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    await close_clients()
    server.close()
    await server.wait_closed()


@pytest.fixture
def send(wire: Wire, make_call: Callable[..., Call]) -> Callable[..., Any]:
    async def send(verb: Any = http_get, **arguments: Any) -> Any:
        resource = HttpResource(
            name="api",
            base=f"http://127.0.0.1:{wire.port}/v1",
            headers={"Authorization": f"Bearer {TOKEN}"},
            effects=(),
            idempotency_header=None,
            secrets=(TOKEN,),
        )
        env: Any = SimpleNamespace(
            agent="agent", http={"api": resource}, llm={}, sql={}, objects={}, mcp={}, a2a={}
        )
        made = verb.Arguments(url=f"{resource.base}/x", **arguments)
        call = make_call(env=env, plan=verb.plan(made, env), policy=AgentPolicy("agent", [], [], []))
        return await verb.run(call, made)

    return send


def chunked(*parts: bytes, **headers: str) -> list[bytes]:
    """A streamed answer, a chunk a piece."""
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    first = f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n{head}\r\n".encode()
    return [first, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def torn(data: bytes, width: int = 3) -> list[bytes]:
    return [data[at : at + width] for at in range(0, len(data), width)]


@pytest.mark.parametrize("ahead", ["", "u:", "ab"])
async def test_a_body_torn_into_chunks(wire: Wire, send: Any, ahead: str) -> None:
    coded = base64.b64encode(f"{ahead}{TOKEN}".encode())
    wire.pieces = chunked(*torn(f"<{TOKEN}> ".encode() + coded + b" " + TOKEN.encode().hex().encode()))
    result = await send()
    text = result.body.decode()
    assert text.startswith("<[redacted]> ")
    assert text.endswith("[redacted] [redacted]")
    assert b"VG9r" not in coded[:4] or "VG9r" not in text


async def test_a_squeezed_body_torn_into_chunks(wire: Wire, send: Any) -> None:
    wire.pieces = chunked(*torn(gzip.compress(f"<{TOKEN}>".encode())), content_encoding="gzip")
    assert (await send()).body == b"<[redacted]>"


async def test_headers_their_names_and_where_a_redirect_leads(wire: Wire, send: Any) -> None:
    wire.pieces = [
        f"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/?t={TOKEN}\r\nx-one: {TOKEN}\r\n"
        f"x-{TOKEN.replace('/', '').replace('=', '').lower()}: 1\r\ncontent-length: 0\r\n\r\n".encode()
    ]
    result = await send(http_post)
    shown = str(result.headers)
    assert TOKEN not in shown
    assert "[redacted]" in result.headers["location"]


def raw(text: str) -> list[bytes]:
    return torn(text.encode("latin-1"), 5)


@pytest.mark.parametrize(
    "answer",
    [
        f"{TOKEN} is your token\r\n\r\n",
        f"HTTP/1.1 2{TOKEN} OK\r\n\r\n",
        f"HTTP/1.1 200 OK\r\n{TOKEN} \r\n\r\n",
        f"HTTP/1.1 200 OK\r\ncontent-length: {TOKEN}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\ntransfer-encoding: {TOKEN}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{TOKEN}\r\n",
        f"HTTP/1.1 200 OK\r\ncontent-encoding: {TOKEN}\r\ncontent-length: 0\r\n\r\n",
        f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(TOKEN)}\r\n\r\n{TOKEN}",
    ],
    ids=["no HTTP", "status", "header", "length", "transfer", "chunk", "encoding", "gzip"],
)
async def test_an_error_quotes_nothing_of_what_came(wire: Wire, send: Any, answer: str) -> None:
    wire.pieces = raw(answer)
    caught: SyscallError | None = None
    try:
        await send(http_post)
    except (CallFailed, OutcomeUnknown) as error:
        caught = error
    if caught is not None:
        shown = f"{caught.message} {caught.metadata}".lower()
        assert "tok" not in shown.replace("token", "")
        assert caught.__cause__ is None


@pytest.mark.parametrize("header", ["Range", "if-range"])
async def test_an_answer_is_not_asked_for_in_pieces_of_a_credential(send: Any, header: str) -> None:
    with pytest.raises(InvalidRequest, match="which has a credential"):
        await send(headers={header: "bytes=0-2"})
