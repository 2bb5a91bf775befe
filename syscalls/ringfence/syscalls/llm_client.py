"""Asks a model's host for one reply and settles what it cost.

The host's own usage is the truth. Where a reply is cut, what was received is charged: its usage if that came, else our
count of the prompt and of the text so far. A reply of which nothing came after it was asked for keeps its whole
reservation, since nobody knows what the host has done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import httpx
import msgspec
from ringfence.syscalls.base import Call
from ringfence.syscalls.declared import LlmResource
from ringfence.syscalls.errors import CallFailed, QuotaExceeded, ReplyCut
from ringfence.syscalls.http_client import BODY_BYTES_MAX, Sent, client_of, reason_of
from ringfence.syscalls.http_reach import deliver, reachable
from ringfence.syscalls.lent import ArtifactFound
from ringfence.syscalls.llm_ledger import closeness_of
from ringfence.syscalls.llm_live import Live
from ringfence.syscalls.llm_paging import Page, Paging
from ringfence.syscalls.llm_reply import Reply, decode, error_of
from ringfence.syscalls.llm_sources import Pointer
from ringfence.syscalls.llm_wire import WIRES, Parts, Wire, sent_headers
from ringfence.syscalls.ratelimits import wait_of
from ringfence.syscalls.redaction import Redactor, redactor_for
from ringfence.syscalls.upstream import ATTEMPTS_MAX, upstream_of
from ringfence.syscalls.words import shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MILLION: Final = 1_000_000
GOOD: Final = 200
PARTIAL_CHARS_MAX: Final = 16 << 10
_SPENT_CODES: Final = frozenset({"insufficient_quota", "billing_hard_limit_reached"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request for a reply, kept in `Plan.data`.

    Attributes:
        resource: the host.
        model: that is asked.
        body: the request as JSON; empty until it is measured, and where it is put together when it is sent.
        prompt_tokens: what is sent, as it is reserved.
        raw_tokens: the same as it was counted.
        tokenizer: what it was counted with.
        max_tokens: most tokens of the reply.
        stream: whether the reply is sent in parts.
        wire: format of request and reply.
        headers: the program's that go along.
        pages: results of tools that left the prompt.
        left: their bytes, by the artifact's name.
        paging: what the journal keeps of that; None: nothing left.
        sources: artifacts with what the program's pointers name.
    """

    resource: LlmResource
    model: str
    body: bytes
    prompt_tokens: int
    raw_tokens: int = 0
    tokenizer: str = ""
    max_tokens: int
    stream: bool
    wire: Wire = WIRES[""]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    pages: Sequence[Page] = ()
    left: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    paging: Paging | None = None
    sources: Mapping[Pointer, ArtifactFound] = field(default_factory=dict[Pointer, ArtifactFound])

    def worst(self) -> Mapping[str, float]:
        """What it takes at most, by total."""
        return self.amounts(self.prompt_tokens, self.max_tokens)

    def amounts(self, prompt: int, completion: int) -> Mapping[str, float]:
        """Totals of so many tokens read and written."""
        cost = (prompt * self.resource.price_input + completion * self.resource.price_output) / MILLION
        return {"tokens": float(prompt + completion), "usd": cost}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A reply with what it was charged."""

    reply: Reply
    prompt: int
    completion: int
    estimated: bool
    usd: float


@dataclass(slots=True)
class _Attempt:
    """One request and what has come of it."""

    sent: Sent
    stream: Parts | None = None
    wait_s: float | None = None
    turn: int = 0


async def ask(call: Call, wanted: Ask) -> Settled:
    """Send a measured request and read the reply.

    Raises:
        CallFailed: the host refused it or can't be reached; `sent` and `status` in the metadata say which.
        QuotaExceeded: the host asks its callers to wait for longer than this call can, or again and again.
        ReplyCut: the reply ended too early; what came is in the metadata and is charged.
        Revoked: from `check_live`, before anything is sent.
    """
    upstream = upstream_of(wanted.resource)
    await call.failpoint("before_effect")
    for number in range(1, ATTEMPTS_MAX + 1):
        attempt = _Attempt(Sent())
        try:
            attempt.turn = await upstream.wait(call)
        except QuotaExceeded:
            call.settle({})
            raise
        reply = await _once(call, wanted, attempt, number)
        if reply is not None:
            await call.failpoint("after_effect")
            return _settle(call, wanted, reply)
        upstream.told(attempt.wait_s or 0.0)
    call.settle({})
    raise upstream.exceeded(ATTEMPTS_MAX)


async def _once(call: Call, wanted: Ask, attempt: _Attempt, number: int) -> Reply | None:
    """One attempt; None: the host asks to wait."""
    await call.check_live()
    name = wanted.resource.name
    try:
        async with asyncio.timeout(call.deadline_s):
            return await _exchange(call, wanted, attempt, number)
    except TimeoutError:
        raise _broken(call, wanted, attempt, f"`{name}` did not answer in time") from None
    except httpx.TransportError as error:
        raise _broken(call, wanted, attempt, f"`{name}` {reason_of(error, _hiding(call, wanted))}") from None
    except httpx.DecodingError as error:
        raise _broken(
            call,
            wanted,
            attempt,
            f"the answer of `{name}` can't be decoded: {reason_of(error, _hiding(call, wanted))}",
        ) from None
    except asyncio.CancelledError:
        # Killed or revoked while the host was writing: what came is charged, the call itself tells why it ended.
        _charge_received(call, wanted, attempt)
        raise


async def _exchange(call: Call, wanted: Ask, attempt: _Attempt, number: int) -> Reply | None:
    resource = wanted.resource
    headers = {
        "content-type": "application/json",
        "accept": "text/event-stream" if wanted.stream else "application/json",
        "user-agent": "ringfence",
        "accept-encoding": "gzip, deflate",
        **sent_headers(wanted.wire, wanted.headers),
        **{name.lower(): value for name, value in resource.headers.items()},
    }
    request = httpx.Request(
        "POST",
        f"{resource.base}{wanted.wire.path}",
        headers=headers,
        content=wanted.body,
        extensions={"trace": attempt.sent.trace},
    )
    async with asyncio.timeout(resource.timeout_s):
        try:
            addresses = await reachable(request.url, resource.name, resource.addresses)
        except CallFailed:
            call.settle({})
            raise
        response = await deliver(client_of(request.url.host, keep=True), request, addresses)
    upstream_of(resource).heard(attempt.turn, {n.lower(): value for n, value in response.headers.items()})
    if resource.untrusted:
        call.taint(f"the model host `{resource.name}`")
    try:
        if response.status_code != GOOD:
            return await _refused(call, wanted, response, attempt, number)
        if wanted.stream and "json" not in response.headers.get("content-type", ""):
            return await _parts(call, wanted, response, attempt)
        data = await _read(response, resource)
    finally:
        await response.aclose()
    document = _hiding(call, wanted).value(decode(data))
    reply = None if document is None else wanted.wire.whole(document)
    if reply is None:
        what = "chat completion" if wanted.wire.path == WIRES[""].path else f"reply of `{wanted.wire.path}`"
        raise CallFailed(f"`{resource.name}` answered with something that is no {what}", sent="yes")
    return reply


async def _refused(call: Call, wanted: Ask, response: httpx.Response, attempt: _Attempt, number: int) -> None:
    """An answer that is no reply: nothing was written, so nothing is charged.

    Raises:
        CallFailed: unless the host asks to wait.
    """
    resource, status = wanted.resource, response.status_code
    body = await _read(response, resource)
    call.settle({})
    message, code = error_of(decode(body))
    headers = {name.lower(): value for name, value in response.headers.items()}
    attempt.wait_s = wait_of(status, headers, body, number)
    if attempt.wait_s is not None and code not in _SPENT_CODES:
        return
    said = f": {shown(_hiding(call, wanted).text(message))}" if message else ""
    more = {"body": passed} if (passed := _passed_on(wanted, body, _hiding(call, wanted))) else {}
    raise CallFailed(
        f"`{resource.name}` answered {status}{said}",
        status=str(status),
        sent="yes",
        resource=resource.name,
        **more,
    )


def _passed_on(wanted: Ask, body: bytes, hide: Redactor) -> str:
    """A host's own error document, for a program that speaks its protocol; empty: there is none, or nobody does."""
    document = decode(body) if wanted.wire is not WIRES[""] and len(body) <= PARTIAL_CHARS_MAX else None
    return "" if document is None else msgspec.json.encode(hide.value(document)).decode()


async def _read(response: httpx.Response, resource: LlmResource) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in _timed(response, resource):
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise CallFailed(f"`{resource.name}` answered with more than {BODY_BYTES_MAX} bytes", sent="yes")
        parts.append(part)
    return b"".join(parts)


async def _timed(response: httpx.Response, resource: LlmResource) -> AsyncIterator[bytes]:
    """The body in parts, each within the host's time."""
    parts = response.aiter_bytes()
    while True:
        async with asyncio.timeout(resource.timeout_s):
            part = await anext(parts, None)
        if part is None:
            return
        yield part


async def _parts(call: Call, wanted: Ask, response: httpx.Response, attempt: _Attempt) -> Reply:
    """A streamed reply.

    Raises:
        ReplyCut: it stopped before its end.
    """
    stream = attempt.stream = wanted.wire.stream()
    if call.hearing is not None:
        stream.heard = Live(call.hearing, _hiding(call, wanted)).take
    name, size = wanted.resource.name, 0
    async for part in _timed(response, wanted.resource):
        first, size = not size, size + len(part)
        stream.feed(part)
        if first:
            await call.failpoint("mid_stream")
        if size > BODY_BYTES_MAX:
            raise _broken(call, wanted, attempt, f"`{name}` sent more than {BODY_BYTES_MAX} bytes")
        if stream.ended or stream.broken:
            break
    if stream.reply.error:
        said = shown(_hiding(call, wanted).text(stream.reply.error))
        raise _broken(call, wanted, attempt, f"`{name}` broke the reply off: {said}")
    if stream.broken:
        raise _broken(call, wanted, attempt, f"`{name}` sent a part of the reply that can't be read")
    if not stream.complete:
        raise _broken(call, wanted, attempt, f"`{name}` ended the reply in the middle")
    return _masked(stream.assembled(), _hiding(call, wanted))


def _settle(call: Call, wanted: Ask, reply: Reply) -> Settled:
    usage = reply.usage
    prompt = wanted.prompt_tokens if usage is None else usage.prompt
    completion = reply.counted if usage is None else usage.completion
    amounts = wanted.amounts(prompt, completion)
    call.settle(amounts)
    if usage is not None:
        closeness = closeness_of(wanted.resource.name, wanted.resource.base, wanted.model)
        closeness.told(wanted.raw_tokens, usage.prompt, wanted.tokenizer)
    return Settled(
        reply=reply, prompt=prompt, completion=completion, estimated=usage is None, usd=amounts["usd"]
    )


def _charge_received(call: Call, wanted: Ask, attempt: _Attempt) -> Settled | None:
    """Charge what came; None: nothing did."""
    if attempt.stream is not None:
        if call.answer_max is not None:
            call.receiving(len(attempt.stream.assembled().text.encode("utf-8", "replace")))
        return _settle(call, wanted, _masked(attempt.stream.assembled(), _hiding(call, wanted)))
    call.settle(wanted.worst() if attempt.sent.begun else {})
    return None


def _broken(call: Call, wanted: Ask, attempt: _Attempt, what: str) -> CallFailed | ReplyCut:
    settled = _charge_received(call, wanted, attempt)
    if not attempt.sent.begun:
        return CallFailed(f"{what}; nothing was sent and nothing is charged", sent="no")
    if settled is None:
        worst = wanted.worst()
        return ReplyCut(
            f"{what}; nothing of the reply came, and {worst['tokens']:g} tokens are charged, the most it can have taken; "
            "make the call again",
            partial="",
            tokens=f"{worst['tokens']:g}",
            usd=f"{worst['usd']:.6f}",
            sent="maybe",
        )
    tokens, how = (
        settled.prompt + settled.completion,
        "as counted here" if settled.estimated else "by its usage",
    )
    text = settled.reply.text
    return ReplyCut(
        f"{what}; {len(text)} characters came and {tokens} tokens are charged, {how}; "
        "the text so far is in the error's `partial`",
        partial=text[:PARTIAL_CHARS_MAX],
        tokens=str(tokens),
        usd=f"{settled.usd:.6f}",
        sent="yes",
    )


def _hiding(call: Call, wanted: Ask) -> Redactor:
    return redactor_for(call.env, wanted.resource.secrets)


def _masked(reply: Reply, hide: Redactor) -> Reply:
    """Take echoed secrets out of an assembled message: in a stream they may be torn over parts."""
    reply.message = hide.value(reply.message)
    reply.document = hide.value(reply.document)
    reply.model, reply.finish = hide.text(reply.model), hide.text(reply.finish)
    return reply
