"""The HTTP side of the A2A door: who asks, how much, and which agent it is about; the rest is the SDK's."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import re
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import uvicorn
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers.response_helpers import agent_card_to_dict
from a2a.server.routes.common import DefaultServerCallContextBuilder
from a2a.server.routes.jsonrpc_routes import create_jsonrpc_routes
from a2a.server.routes.rest_routes import create_rest_routes
from ringfence.kernel.a2a import shown
from ringfence.kernel.a2a.bounding import bounding
from ringfence.kernel.a2a.connection import Connection
from ringfence.kernel.a2a.door import listen_url
from ringfence.kernel.a2a.handler import Handler
from ringfence.kernel.a2a.push import Pushes
from ringfence.kernel.operations import tasks
from ringfence.kernel.problems import Problem
from ringfence.kernel.rates import Bucket, Buckets
from ringfence.kernel.secrets import SecretsError
from ringfence.kernel.server.operator_door import to_problem
from ringfence.policy.units import Rate
from starlette.applications import Starlette

if TYPE_CHECKING:
    from ringfence.kernel.journal.types import AgentRecord
    from ringfence.kernel.operations.kernel import Kernel
    from ringfence.kernel.server.gate import Complaints
    from ringfence.policy.hooks import HookDecl
    from ringfence.policy.serving import A2aDecl
    from starlette.requests import Request

BODY_BYTES_MAX: Final = 1 << 20
"""Longest body of a request."""

CONNECTIONS_MAX: Final = 64
"""Connections and requests at a time; one more gets 503."""

CLIENT_REQUESTS_MAX: Final = 32
"""Requests of one client at a time, so that one that waits or streams much leaves room for others."""

GOODBYE_S: Final = 2
"""How long requests under way have when the kernel stops."""

BODY_S: Final = 10.0
"""How long a body may take to come in."""

CARDS: Final = Rate(count=20, per_s=1.0)
"""How many cards are given out: whoever reaches the address may ask for one."""

log = logging.getLogger(__name__)
# What a client sends must not fill the kernel's log; bugs are told here.
for _name in ("a2a", "uvicorn"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)

_PATH: Final = re.compile(r"/agents/([A-Za-z0-9][A-Za-z0-9._-]{0,127})(/.*)?", re.ASCII)
_NO_JSON: Final = -32700
"""Of JSON-RPC."""
_CARD: Final = "/.well-known/agent-card.json"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _Refused(Exception):
    """An answer of the door's own: status, stable reason, one line, and further headers."""

    def __init__(self, status: int, reason: str, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.headers = headers


class _Context(DefaultServerCallContextBuilder):
    """Hands the client on that the door has made out."""

    def build(self, request: Request) -> ServerCallContext:
        context = super().build(request)
        context.state["client"] = request.scope["ringfence.client"]
        return context


class _Server(uvicorn.Server):
    """One that leaves signals to the kernel."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Web:
    """Serves one address.

    Attributes:
        declared: what the kernel file says, clients and all.
    """

    def __init__(self, kernel: Kernel, declared: A2aDecl, complaints: Complaints) -> None:
        self.declared = declared
        self._kernel = kernel
        self._complaints = complaints
        self._pushes = Pushes(kernel)
        self._buckets = Buckets("client")
        self._busy: Counter[str] = Counter()
        self._cards = Bucket("cards", CARDS, "a2a", time.monotonic)
        self._server = _Server(
            uvicorn.Config(
                self._serve,
                interface="asgi3",
                lifespan="off",
                proxy_headers=False,
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS_MAX,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=GOODBYE_S,
                h11_max_incomplete_event_size=16 << 10,
                http=Connection,
                ws="none",
            )
        )
        self._running: asyncio.Task[None] | None = None

    def start(self, listener: socket.socket) -> None:
        """Serve on a socket that listens."""
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]), name="ringfence a2a")
        self._pushes.start()

    async def stop(self) -> None:
        """End it, and what is under way."""
        await self._pushes.stop()
        self._server.should_exit = True
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    # -- one request ------------------------------------------------------------------------------------------------

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begun = False

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._answer(scope, receive, sent)
        except _Refused as refused:
            await _refuse(send, refused)
        except Exception:
            log.exception("a request of a client could not be answered")
            if begun:
                raise  # The web server cuts the connection: nobody takes half an answer for a whole one.
            await _refuse(send, _Refused(500, "Internal", "the kernel could not answer; its log says why"))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _PATH.fullmatch(scope["path"])
        if found is None:
            raise _Refused(404, "NoSuchPath", "there is nothing here but `/agents/NAME`")
        name, rest = found[1], found[2] or "/"
        if rest == _CARD:
            if scope["method"] not in {"GET", "HEAD"}:
                raise _Refused(405, "BadMethod", "a card is only read", (b"allow", b"GET"))
            _refuse_early(self._cards.take_now(), "too many cards are asked for; ask again later")
            record, serve = await self._agent(name, None)
            url = f"{self.declared.url or listen_url(self.declared)}/agents/{name}"
            card = shown.card(record.name, serve, url, "1", push=bool(self.declared.push))
            await _respond(send, 200, msgspec.json.encode(agent_card_to_dict(card)))
            return
        client = self._client(scope)
        text = f"the client `{client.name}` has {client.rate.text}; send it again later"
        _refuse_early(self._buckets.take_now(client.name, client.rate), text)
        record, _ = await self._agent(name, client)
        body = await _read(receive)
        wrong = _no_json(body)
        if wrong and rest == "/":
            told = {"code": _NO_JSON, "message": wrong}
            answer = msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": told})
            await _respond(send, 200, answer)
            return
        if wrong:
            raise _Refused(400, "BadRequest", wrong)
        inner = {
            **scope,
            "path": rest,
            "raw_path": rest.encode(),
            "root_path": "",
            "ringfence.client": client,
        }
        if self._busy[client.name] >= CLIENT_REQUESTS_MAX:
            text = f"`{client.name}` has {CLIENT_REQUESTS_MAX} requests that wait or stream; end some first"
            raise _Refused(429, "TooMany", text, (b"retry-after", b"5"))
        self._busy[client.name] += 1
        try:
            await self._app(record)(inner, _again(body, receive), bounding(send))
        finally:
            self._busy[client.name] -= 1

    def _app(self, record: AgentRecord) -> Starlette:
        handler = Handler(self._kernel, record)
        builder = _Context()
        routes = [
            *create_jsonrpc_routes(handler, "/", context_builder=builder),
            *create_rest_routes(handler, context_builder=builder),
        ]
        return Starlette(routes=routes)

    async def _agent(self, name: str, client: HookDecl | None) -> tuple[AgentRecord, Any]:
        try:
            return await tasks.agent_of(self._kernel, name, client)
        except Problem as problem:
            raise _Refused(404, problem.reason, problem.message) from None
        except Exception as error:  # noqa: BLE001 - every error becomes one line for whoever asks
            raise _Refused(503, "Unavailable", to_problem(error).message) from None

    def _client(self, scope: Scope) -> HookDecl:
        """Who asks, by the bearer token.

        Raises:
            _Refused: nobody that is declared.
        """
        given = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
        kind, _, token = given.partition(b" ")
        found: HookDecl | None = None
        for client in self.declared.clients.values():
            try:
                # Looked up each time: a key that was taken away or changed counts at once.
                key = self._kernel.secrets.get(client.key.secret).strip()
            except SecretsError as error:
                self._complaints.say(f"nobody is heard as client `{client.name}`: {error}")
                continue
            # All are compared, whichever it is.
            if key and hmac.compare_digest(key, token.strip()):
                found = client
        if kind.lower() != b"bearer" or found is None:
            self._complaints.say("a request without the key of a client was refused")
            text = "the request has no bearer token of a client of this kernel; nothing was done"
            raise _Refused(401, "BadCredential", text, (b"www-authenticate", b"Bearer"))
        return found


def _refuse_early(wait_s: float, text: str) -> None:
    """Refuse who comes too early, by seconds.

    Raises:
        _Refused: there are any.
    """
    if wait_s > 0:
        raise _Refused(429, "TooMany", text, (b"retry-after", str(math.ceil(wait_s)).encode()))


def _no_json(body: bytes) -> str:
    """What is wrong with a body; empty: nothing. The SDK's own parser takes lone surrogates and `NaN`, and falls over them later."""
    try:
        if body:
            msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"the body is no JSON: {error}"
    return ""


async def _refuse(send: Send, refused: _Refused) -> None:
    body = msgspec.json.encode({"error": {"reason": refused.reason, "message": str(refused)}})
    await _respond(send, refused.status, body, *refused.headers)


async def _respond(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    told = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})


async def _read(receive: Receive) -> bytes:
    """The body, within its bound.

    Raises:
        _Refused: it is too long, or doesn't come.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Refused(400, "BadRequest", "the request was cut off")
                body += message.get("body", b"")
                if len(body) > BODY_BYTES_MAX:
                    raise _Refused(413, "TooLong", f"the body is longer than {BODY_BYTES_MAX} bytes")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise _Refused(408, "Timeout", f"the body did not come within {BODY_S:g} s") from None


def _again(body: bytes, receive: Receive) -> Receive:
    """Give out a body that was read, then what comes behind it."""
    given = False

    async def receive_again() -> MutableMapping[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return receive_again
