"""Sending an HTTP call: one request, once, with the credential that the agent never sees.

The clients of this process follow no redirects, keep no cookies, read no proxy settings from the environment
and never retry by themselves. Whether the request had begun to leave is known exactly, from the transport's own
trace, and decides between a plain failure and an unknown outcome. An upstream that asks to be left alone is left
alone by all agents; what may be sent twice is sent again after that.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, Final

import httpx
from ringfence.syscalls.base import Call, Effect
from ringfence.syscalls.declared import HttpResource, HttpUndo
from ringfence.syscalls.errors import (
    BudgetExhausted,
    CallFailed,
    InvalidRequest,
    OutcomeUnknown,
    SnapshotFailed,
)
from ringfence.syscalls.http_pools import Pools
from ringfence.syscalls.http_reach import deliver, reachable
from ringfence.syscalls.payload import Room
from ringfence.syscalls.ratelimits import wait_of
from ringfence.syscalls.redaction import Redactor, redactor_for
from ringfence.syscalls.refusals import outcome_unknown
from ringfence.syscalls.upstream import ATTEMPTS_MAX, upstream_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping, Sequence

    from ringfence.syscalls.http_common import Target

BODY_BYTES_MAX: Final = 16 << 20
CONNECTIONS_MAX: Final = 128
HEADER_BYTES_MAX: Final = 128 << 10
"""Headers of an answer: the transport takes no more than 100 KiB of them."""
_AT_ONCE_BYTES_MAX: Final = 256 << 10
_LENGTH_DIGITS: Final = 16

_READABLE_ENCODINGS: Final = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})
# About the bytes on the wire, which the agent doesn't see, or a credential of the operator's session.
_DROPPED_HEADERS: Final = frozenset(
    {"content-encoding", "transfer-encoding", "connection", "keep-alive", "set-cookie", "set-cookie2"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the target answered: any status, redirects and errors too. Names of headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def room_of(call: Call) -> Room:
    """How large the answer of a planned call may be. What only reads can be refused its answer, so it does with any room."""
    target: Target = call.plan.data
    most = HEADER_BYTES_MAX + (0 if target.method == "HEAD" else BODY_BYTES_MAX)
    return Room(most=most, least=1 if target.reads else HEADER_BYTES_MAX)


@dataclass(slots=True)
class Sent:
    """Whether the request has begun to leave this process."""

    begun: bool = False

    async def trace(self, name: str, info: Mapping[str, Any]) -> None:
        """Called by the transport at each stage."""
        del info
        if name.endswith("send_request_headers.started"):
            self.begun = True


@dataclass(slots=True)
class _Clients:
    """The clients of one event loop, by host and by whether they keep connections open."""

    loop: asyncio.AbstractEventLoop
    by_host: dict[tuple[str, bool], httpx.AsyncClient] = field(
        default_factory=dict[tuple[str, bool], httpx.AsyncClient]
    )


_current: list[_Clients] = []


async def close_clients() -> None:
    """Close every connection of this process; the kernel calls it last. Later calls open new ones."""
    while _current:
        for client in _current.pop().by_host.values():
            await client.aclose()


async def send(call: Call, body: bytes) -> Answer:
    """Send the planned request.

    Raises:
        SnapshotFailed: what it destroys or changes has to be kept and can't be; nothing is sent.
        CallFailed: nothing was sent, or sending it again does nothing twice; `sent` in the metadata says
            which.
        OutcomeUnknown: it may have arrived, and the target takes no key.
        QuotaExceeded: the target asks its callers to wait for longer than this call can, or again and again.
        Revoked: from `check_live`, before anything is sent.
    """
    target: Target = call.plan.data
    resource = target.resource
    keeps = call.plan.effect is not None or not target.reads
    keeps = keeps and await _protect(call, target, body)
    upstream = upstream_of(resource)
    await call.failpoint("before_effect")
    for attempt in range(1, ATTEMPTS_MAX + 1):
        number = await upstream.wait(call)
        answer = await _send_once(call, body)
        upstream.heard(number, answer.headers)
        wait_s = wait_of(answer.status, answer.headers, answer.body, attempt)
        if wait_s is None:
            await call.failpoint("after_effect")
            if keeps:
                await _look_after(call, target)
            return answer
        upstream.told(wait_s)
        if not call.plan.idempotent:
            # Only the agent knows whether what was refused may be sent again.
            return answer
    raise upstream.exceeded(ATTEMPTS_MAX)


async def _protect(call: Call, target: Target, body: bytes) -> bool:
    """Keep what the call destroys or changes. Returns whether the resource says how."""
    from ringfence.syscalls.http_undo import keep, undo_of  # noqa: PLC0415 - it sends through the clients here

    undo = undo_of(target.resource, target.method, target.url)
    if undo is None and call.plan.effect is Effect.DESTROY and not call.plan.no_return:
        raise SnapshotFailed(
            f"`{target.resource.name}` no longer says how this {target.method} is undone, and nobody was asked; nothing was sent, "
            "make the call again"
        )
    if undo is not None and undo.compensate and call.plan.effect is Effect.DESTROY:
        _require_nameable(target, undo, body)
    if undo is None or not undo.keep:
        return False
    await keep(call, undo, target, body)
    return True


def _require_nameable(target: Target, undo: HttpUndo, body: bytes) -> None:
    # INVARIANT: what destroys runs by a rule alone only where there is a way back, whatever body its caller chose.
    from ringfence.syscalls.http_compensate import NoWay, Recorded, check_nameable  # noqa: PLC0415 - the same

    about = Recorded(
        url=target.url, headers=target.headers, body=body, status=0, answer_headers={}, answer=b""
    )
    try:
        check_nameable(target.resource, undo, about)
    except NoWay as error:
        raise SnapshotFailed(f"nothing could make up for the call: {error}; nothing was sent") from None


async def _look_after(call: Call, target: Target) -> None:
    from ringfence.syscalls.http_undo import note_after  # noqa: PLC0415 - the same

    await note_after(call, target)


async def _send_once(call: Call, body: bytes) -> Answer:
    target: Target = call.plan.data
    resource = target.resource
    sent = Sent()
    request = _request(call, target, body, sent)
    timeout_s = min(resource.timeout_s, call.deadline_s)
    # A kept connection may be closed by the target just as it is used, which would leave the outcome unknown.
    client = client_of(request.url.host, keep=call.plan.idempotent)
    try:
        # Resolved before the last look at the rights: from there on nothing waits but for the connection.
        async with asyncio.timeout(timeout_s):
            addresses = await reachable(request.url, resource.name, resource.addresses)
        await call.check_live()
        async with asyncio.timeout(timeout_s):
            return await _exchange(call, client, request, addresses)
    except TimeoutError:
        raise _failure(call, target, sent, f"did not answer within {timeout_s:g} s") from None
    except httpx.TransportError as error:
        raise _failure(
            call, target, sent, reason_of(error, redactor_for(call.env, resource.secrets))
        ) from None


def _request(call: Call, target: Target, body: bytes, sent: Sent) -> httpx.Request:
    headers = {
        "accept": "*/*",
        "user-agent": "ringfence",
        **target.headers,
        **{name.lower(): value for name, value in target.resource.headers.items()},
        "accept-encoding": "gzip, deflate",
    }
    # A verb that only reads has no effect id: it carries no key, rather than the same empty one for every call.
    if target.resource.idempotency_header is not None and call.effect_id:
        headers[target.resource.idempotency_header.lower()] = call.effect_id
    url = httpx.URL(target.url)
    if str(url) != target.url:
        raise InvalidRequest(
            f"`{target.url.partition('?')[0]}` can't be sent as it is written; escape its characters"
        )
    return httpx.Request(
        target.method,
        url,
        headers=headers,
        content=body if body or not target.reads else None,
        extensions={"trace": sent.trace},
    )


async def _exchange(
    call: Call, client: httpx.AsyncClient, request: httpx.Request, addresses: Sequence[str]
) -> Answer:
    resource: HttpResource = call.plan.data.resource
    hide = redactor_for(call.env, resource.secrets)
    response = await deliver(client, request, addresses)
    if resource.untrusted:
        # A refusal of it says something too.
        call.taint(f"the resource `{resource.name}`")
    try:
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if encoding not in _READABLE_ENCODINGS:
            raise CallFailed(
                f"`{resource.name}` answered {response.status_code} in the encoding `{hide.text(encoding)[:40]}`, "
                "which was not asked for; the request was carried out",
                sent="yes",
            )
        body = await _body(call, response)
    except httpx.DecodingError as error:
        raise CallFailed(
            f"the answer of `{resource.name}` can't be decoded: {reason_of(error, hide)}", sent="yes"
        ) from None
    finally:
        await response.aclose()
    headers = {
        hide.text(name.lower()): hide.text(value)
        for name, value in response.headers.items()
        if name.lower() not in _DROPPED_HEADERS and not (encoding and name.lower() == "content-length")
    }
    # A long answer is searched beside the loop: other calls don't wait for it.
    clean = hide.body(body) if len(body) <= _AT_ONCE_BYTES_MAX else await asyncio.to_thread(hide.body, body)
    return Answer(status=response.status_code, headers=headers, body=clean)


async def _body(call: Call, response: httpx.Response) -> bytes:
    """The body of an answer.

    Raises:
        CallFailed: it is too large; of a verb that doesn't only read also for a budget.
        BudgetExhausted: it is larger than what a budget of bytes has left.
    """
    name, parts, size = call.plan.data.resource.name, list[bytes](), 0
    counted = call.answer_max is not None
    head = sum(len(name) + len(value) + 8 for name, value in response.headers.items())
    async for part in response.aiter_bytes():
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise CallFailed(
                f"`{name}` answered {response.status_code} with more than {BODY_BYTES_MAX} bytes; the request was "
                "carried out, ask for less",
                sent="yes",
            )
        if counted:
            await _afford(call, response, head + size)
        parts.append(part)
    return b"".join(parts)


async def _afford(call: Call, response: httpx.Response, size: int) -> None:
    """Have a budget of bytes cover what has come of an answer."""
    call.receiving(size)
    said = response.headers.get("content-length", "")
    whole = int(said) if said.isdecimal() and len(said) < _LENGTH_DIGITS else 0
    try:
        await call.afford(min(max(size, whole), BODY_BYTES_MAX) if size > (call.answer_max or 0) else size)
    except BudgetExhausted as error:
        if call.plan.data.reads:
            raise
        # INVARIANT: what was carried out is never refused as if it had not been, or it would be made again.
        raise CallFailed(
            f"`{call.plan.data.resource.name}` answered {response.status_code}; the request was carried out, and its answer is "
            f"larger than what is left: {error.message}",
            sent="yes",
            budget="bytes",
        ) from None


def _failure(call: Call, target: Target, sent: Sent, what: str) -> CallFailed | OutcomeUnknown:
    name = target.resource.name
    if not sent.begun:
        return CallFailed(f"`{name}` {what}; nothing was sent", sent="no")
    if call.plan.idempotent:
        return CallFailed(f"`{name}` {what}; the request may have arrived", sent="maybe")
    text = f"`{name}` {what}; the {target.method} may have arrived and the target takes no key"
    return outcome_unknown(call, text, sent="maybe")


def reason_of(error: httpx.TransportError | httpx.DecodingError, hide: Redactor) -> str:
    """What happened, on one line and without address or credential."""
    if isinstance(error, httpx.ConnectTimeout):
        return "can't be reached in time"
    if isinstance(error, httpx.ConnectError):
        return "can't be reached"
    if isinstance(error, httpx.TimeoutException):
        return "did not answer in time"
    # INVARIANT: behind a colon the transport quotes what was sent or came, in a spelling of its own.
    text = hide.text(" ".join(str(error).split())).partition(":")[0] or type(error).__name__
    return f"broke the connection ({text[:200]})"


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


def client_of(host: str, *, keep: bool) -> httpx.AsyncClient:
    """The client of this event loop for one host of a declared resource, with connections that are kept or not.

    INVARIANT: hosts share none: requests go to addresses, and a connection that was made for one name never serves another.
    """
    loop = asyncio.get_running_loop()
    clients = next((item for item in _current if item.loop is loop), None)
    if clients is None:
        clients = _Clients(loop)
        _current.append(clients)
    client = clients.by_host.get((host, keep))
    if client is None:
        client = httpx.AsyncClient(
            transport=Pools(_tls(), most=CONNECTIONS_MAX, keep=keep),
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(None, pool=30.0),
            # INVARIANT: agents share these clients, so a cookie one of them is given must not be sent for
            # another.
            cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=[])),
        )
        clients.by_host[host, keep] = client
    return client
