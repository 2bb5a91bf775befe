"""Speaking MCP: one session with one server, over HTTP or over a stream. The only module that knows the `mcp` package.

It is imported when the first server is used, for that takes long (see `mcp_sessions`). What the package would do by itself and the
kernel must not is prevented at the edge of it: requests follow no redirect, go to addresses that were looked at, carry the operator's
credential and nothing of the environment, and answers are bounded before they are read.

INVARIANT: a request that is part of a call is sent once. Whether it began to leave, and what came of it, stands in its `Sent`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    Implementation,
    PaginatedRequestParams,
)
from pydantic import BaseModel, ConfigDict, ValidationError
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.http_reach import addresses_of
from ringfence.syscalls.mcp_common import (
    ANSWER_BYTES_MAX,
    EFFECT_ID,
    Lost,
    Refused,
    Sent,
)
from ringfence.syscalls.mcp_input import needed_by
from ringfence.syscalls.mcp_methods import CALLS, LISTS, REQUESTS

if TYPE_CHECKING:
    import ssl

    from mcp.client._transport import TransportStreams
    from ringfence.syscalls.declared import McpResource

CLOSE_S: Final = 5.0
"""Longest that the end of a session may take."""

UNREAD: Final = "gave an answer that can't be read"
_LOST: Final = frozenset({CONNECTION_CLOSED, REQUEST_TIMEOUT, PARSE_ERROR})
_ANSWERS: Final = ("application/json", "text/event-stream")
_READABLE: Final = frozenset({"", "identity"})
_PORTS: Final = {"http": 80, "https": 443}
_STREAM_LINES: Final = 16
_OTHERS: Final = ""
"""What requests that are no calls are known by."""
_NO_ANSWER: Final = 599
_BAD: Final = 400

# INVARIANT: the package logs what it is sent, and it may be sent a credential.
for _name in ("mcp", "httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class _Raw(BaseModel):
    """A result as it came: what it is made of is looked at where it is passed on."""

    model_config = ConfigDict(extra="allow")


class Session:
    """One session with one server, in a task of its own: whoever calls may be cancelled, and it goes on."""

    def __init__(self, transport: Any, sent: dict[str, Sent], version: str) -> None:
        self._transport = transport
        self._sent = sent
        self._version = version
        self._over = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(), name="ringfence mcp session")

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return not self._task.done() and not self._over.is_set()

    async def _live(self) -> None:
        try:
            info = Implementation(name="ringfence", version=self._version)
            async with Client(self._transport, cache=None, client_info=info) as client:
                if not self._client.done():
                    self._client.set_result(client)
                await self._over.wait()
        except asyncio.CancelledError:
            if not self._client.done():
                self._client.cancel()
            raise
        except BaseException as error:  # noqa: BLE001 - the package raises groups, with whatever the server caused in them
            if not self._client.done():
                self._client.set_exception(self._lost(error))

    def _lost(self, error: BaseException) -> Lost:
        """Why the server can't be greeted, as HTTP has it where it does."""
        seen = self._sent.get(_OTHERS, Sent())
        if seen.lost:
            return Lost(seen.lost)
        return Lost(f"answered {seen.status} to a greeting" if seen.status >= _BAD else _reason(error))

    async def ready(self, within_s: float) -> None:
        """Wait until the server has been greeted.

        Raises:
            Lost: it can't be reached, or speaks something else.
            TimeoutError: it took longer.
        """
        async with asyncio.timeout(within_s):
            await asyncio.shield(self._client)

    async def listed(self, kind: str) -> list[dict[str, Any]]:
        """All that the server lists of a kind, each as the protocol has it; nothing where it has none of that kind.

        Args:
            kind: a key of `LISTS`.

        Raises:
            Lost: the session is over, or what it says is no such list.
        """
        one = LISTS[kind]
        client = await asyncio.shield(self._client)
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        try:
            while True:
                params = None if cursor is None else PaginatedRequestParams(cursor=cursor)
                page = await getattr(client.session, one.method)(params=params)
                items = getattr(page, one.field)
                found += [item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in items]
                if len(found) > one.most:
                    raise Lost(f"lists more than {one.most} {kind}")
                if not page.next_cursor or page.next_cursor == cursor:
                    return found
                cursor = page.next_cursor
        except MCPError as error:
            if error.code == METHOD_NOT_FOUND and one.optional:
                return []
            raise Lost(
                UNREAD if error.code == PARSE_ERROR else f"does not list its {kind} (error {error.code})"
            ) from None
        except (ValidationError, ValueError) as error:
            raise Lost(f"says what is no list of {kind} ({type(error).__name__})") from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, RuntimeError) as error:
            raise Lost(_reason(error)) from None

    async def ask(self, method: str, params: Mapping[str, Any], effect_id: str, sent: Sent) -> dict[str, Any]:
        """Send one request, once; gives the result as it came.

        Args:
            method: a key of `REQUESTS`.
            params: of it, without `_meta`.
            effect_id: sent along, and what `sent` is known by.
            sent: told how far it comes.

        Raises:
            Lost: nobody can tell what came of it, unless `sent` says that nothing was sent.
            Refused: the server answered with an error.
        """
        client = await asyncio.shield(self._client)
        request = REQUESTS[method].model_validate(
            {"method": method, "params": {**params, "_meta": {EFFECT_ID: effect_id}}}
        )
        self._sent[effect_id] = sent
        try:
            raw = await client.session.send_request(request, _Raw)
        except MCPError as error:
            if sent.status == _BAD:
                sent.code, sent.needs = error.code, needed_by(error.error.data)
            if sent.lost or (sent.status >= _BAD and not _worded(method, sent, error)):
                raise Lost(sent.lost or f"answered {sent.status}") from None
            if error.code in _LOST:
                raise Lost(UNREAD if error.code == PARSE_ERROR else "gave no answer") from None
            raise Refused(str(error), error.code) from None
        except ValidationError:
            raise Lost("gave an answer that the protocol does not know") from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, RuntimeError, ValueError) as error:
            raise Lost(_reason(error)) from None
        else:
            return dict(raw.model_extra or {})
        finally:
            self._sent.pop(effect_id, None)

    async def close(self) -> None:
        """End it; never raises."""
        self._over.set()
        done, _ = await asyncio.wait([self._task], timeout=CLOSE_S)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)
        if self._client.done() and not self._client.cancelled():
            self._client.exception()
        if self._task.done() and not self._task.cancelled():
            self._task.exception()


def _worded(method: str, sent: Sent, error: MCPError) -> bool:
    """Whether an error of HTTP says in the protocol's words why something that only reads is not given."""
    return method not in CALLS and sent.status == _BAD and error.code != INTERNAL_ERROR


def _reason(error: BaseException) -> str:
    """What stopped a session, without what the server wrote: that may be anything."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if isinstance(error, CallFailed):
        return error.message
    if isinstance(error, Lost):
        return str(error)
    if isinstance(error, MCPError):
        return f"refuses to be greeted (error {error.code})"
    return f"ended the session ({type(error).__name__})"


# -- over HTTP --------------------------------------------------------------------------------------------------------


def open_http(resource: McpResource, version: str) -> Session:
    """A session over HTTP."""
    sent: dict[str, Sent] = {}
    return Session(_http(resource, sent), sent, version)


@asynccontextmanager
async def _http(resource: McpResource, sent: dict[str, Sent]) -> AsyncGenerator[TransportStreams]:
    timeout = httpx2.Timeout(None, connect=resource.timeout_s, pool=resource.timeout_s)
    async with (
        httpx2.AsyncClient(transport=_Edge(resource, sent), timeout=timeout, trust_env=False) as client,
        streamable_http_client(
            resource.base, http_client=client, max_sse_event_size=ANSWER_BYTES_MAX
        ) as streams,
    ):
        yield streams


@cache
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context(trust_env=False)


class _Edge(httpx2.AsyncBaseTransport):
    """Where requests leave: adds the credential, looks at the address, bounds the answer, and notes what became of a call."""

    def __init__(self, resource: McpResource, sent: dict[str, Sent]) -> None:
        self._resource = resource
        self._sent = sent
        self._inner = httpx2.AsyncHTTPTransport(verify=_tls(), trust_env=False, retries=0)
        # A kept connection may be closed by the server just as it is used, which would leave the outcome of a call unknown.
        once = httpx2.Limits(max_keepalive_connections=0)
        self._once = httpx2.AsyncHTTPTransport(verify=_tls(), trust_env=False, retries=0, limits=once)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request.

        Raises:
            CallFailed: it can't be sent.
        """
        resource, sent = self._resource, self._of(request)
        try:
            host = request.url.host
            port = request.url.port or _PORTS[request.url.scheme]
            addresses = await addresses_of(host, port, resource.name, resource.addresses)
            self._dress(request, sent)
            if sent is not None and sent.able:
                request = _declaring(request, sent)
            way = self._inner if sent is None or sent is self._sent.get(_OTHERS) else self._once
            response = await self._deliver(way, request, addresses)
        except (CallFailed, httpx2.HTTPError) as error:
            if sent is None:
                raise
            # The session of others goes on: the call hears of it by its `Sent`.
            sent.lost = error.message if isinstance(error, CallFailed) else _said(error)
            return httpx2.Response(_NO_ANSWER, request=request)
        if sent is not None:
            sent.status = response.status_code
            sent.headers = {name.lower(): value for name, value in response.headers.items()}
            kind = response.headers.get("content-type", "").lower()
            call = sent is not self._sent.get(_OTHERS)
            if call and response.status_code < _BAD and not kind.startswith(_ANSWERS):
                # The package words it as an error of the server's own, as if nothing had been done.
                sent.lost = UNREAD
        # INVARIANT: nothing is sent twice, wherever an answer says it should go.
        response.headers.pop("location", None)
        encoding = response.headers.get("content-encoding", "").strip().lower()
        response.stream = _Bounded(response.stream, readable=encoding in _READABLE)
        response.headers.pop("content-encoding", None)
        return response

    def _of(self, request: httpx2.Request) -> Sent | None:
        """What is known of the call that a request carries; None: it carries none."""
        if request.method != "POST":
            return None
        try:
            said = json.loads(request.content)
            if said.get("method") in REQUESTS:
                return self._sent.get(said["params"]["_meta"][EFFECT_ID])
        except (ValueError, AttributeError, KeyError, TypeError):
            return None
        # Of everything else only the last is known: why a server can't be greeted.
        self._sent[_OTHERS] = fresh = Sent()
        return fresh

    def _dress(self, request: httpx2.Request, sent: Sent | None) -> None:
        request.headers["accept-encoding"] = "identity"
        request.headers["user-agent"] = "ringfence"
        if sent is not None:
            for name, value in sent.carry.items():
                request.headers[name] = value
            request.extensions = {**request.extensions, "trace": sent.trace}
        for name, value in self._resource.headers.items():
            request.headers[name] = value

    @staticmethod
    async def _deliver(
        way: httpx2.AsyncHTTPTransport, request: httpx2.Request, addresses: list[str]
    ) -> httpx2.Response:
        """Send to the first address that takes a connection; name and certificate stay those of its host."""
        host, url = request.url.host, request.url
        for nr, address in enumerate(addresses):
            if address != host:
                request.url = url.copy_with(host=address)
                request.extensions = {**request.extensions, "sni_hostname": url.raw_host.decode("ascii")}
            try:
                return await way.handle_async_request(request)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if nr == len(addresses) - 1:
                    raise
            finally:
                request.url = url
        raise httpx2.ConnectError("it has no address")

    async def aclose(self) -> None:
        """Close its connections."""
        await self._inner.aclose()
        await self._once.aclose()


def _declaring(request: httpx2.Request, sent: Sent) -> httpx2.Request:
    """The request of a call, with what its caller can do for the server."""
    said = json.loads(request.content)
    if not sent.declare(said["params"]["_meta"]):
        return request
    headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
    return httpx2.Request(
        request.method,
        request.url,
        headers=headers,
        content=json.dumps(said).encode(),
        extensions=request.extensions,
    )


def _said(error: httpx2.HTTPError) -> str:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return "can't be reached"
    return f"broke the connection ({type(error).__name__})"


class _Bounded(httpx2.AsyncByteStream):
    """An answer of bounded size. What breaks it is an error that the package expects."""

    def __init__(self, inner: Any, *, readable: bool) -> None:
        self._inner = inner
        self._readable = readable

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        if not self._readable:
            raise httpx2.StreamError("the answer has an encoding that was not asked for")
        try:
            async for part in self._inner:
                size += len(part)
                if size > ANSWER_BYTES_MAX:
                    raise httpx2.StreamError(f"the answer has more than {ANSWER_BYTES_MAX} bytes")
                yield part
        except httpx2.HTTPError as error:
            raise httpx2.StreamError(_said(error)) from None

    async def aclose(self) -> None:
        """Let go of it."""
        await self._inner.aclose()
