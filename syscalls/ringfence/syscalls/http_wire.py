"""One request of the kernel's own to a declared resource, beside the calls of agents: with its credential, once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import httpx
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.http_client import client_of
from ringfence.syscalls.http_reach import deliver, reachable

if TYPE_CHECKING:
    from ringfence.syscalls.declared import HttpResource

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

ANSWER_BYTES_MAX: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the resource answered."""

    status: int
    content_type: str
    body: bytes


async def ask(
    resource: HttpResource,
    method: str,
    url: str,
    *,
    within_s: float,
    body: bytes | None = None,
    content_type: str = "",
    headers: Mapping[str, str] = NO_HEADERS,
) -> Said:
    """Send one request.

    Args:
        resource: whose credential is used.
        method: upper case.
        url: canonical, below the resource's base.
        within_s: seconds for all of it.
        body: what is sent; None: nothing.
        content_type: of the body.
        headers: more of them.

    Raises:
        TimeoutError: it took longer.
        httpx.HTTPError: it can't be reached, or its answer can't be read or is too long.
    """
    every = {"accept": "*/*", "user-agent": "ringfence", **{name.lower(): v for name, v in headers.items()}}
    every |= {name.lower(): value for name, value in resource.headers.items()}
    if content_type:
        every["content-type"] = content_type
    try:
        request = httpx.Request(method, url, headers=every, content=body)
    except (httpx.InvalidURL, UnicodeError) as error:
        # What is sent back may have come from the target: a type of content that no request can have.
        raise httpx.ConnectError(f"no such request can be sent: {type(error).__name__}") from None
    async with asyncio.timeout(within_s):
        try:
            addresses = await reachable(request.url, resource.name, resource.addresses)
        except CallFailed as error:
            raise httpx.ConnectError(error.message, request=request) from None
        response = await deliver(client_of(request.url.host, keep=False), request, addresses)
        try:
            parts: list[bytes] = []
            size = 0
            async for part in response.aiter_bytes():
                size += len(part)
                if size > ANSWER_BYTES_MAX:
                    raise httpx.DecodingError("the answer is too long", request=request)
                parts.append(part)
        finally:
            await response.aclose()
    return Said(
        status=response.status_code,
        content_type=response.headers.get("content-type", ""),
        body=b"".join(parts),
    )
