"""Where a request goes: the host's name is resolved once, its addresses are looked at, and one of these is used.

INVARIANT: between the look at an address and the connection no name is resolved again, so a name can't lead elsewhere in
between. A name leads to public addresses alone, and to those that the operator declared with the resource.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

import httpx
from ringfence.policy.networks import Address, Network, reaches
from ringfence.syscalls.errors import CallFailed

ADDRESSES_MAX: Final = 8
"""Addresses of one name that are tried."""

_LOOPBACK: Final = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_PORTS: Final = {"http": 80, "https": 443}


def networks_of(host: str, declared: Sequence[str]) -> tuple[Network, ...]:
    """Networks that a host may lead to besides public ones: what is declared; loopback where its name says so."""
    found = tuple(ipaddress.ip_network(text) for text in declared)
    local = host == "localhost" or host.endswith(".localhost")
    return (*found, *_LOOPBACK) if local else found


def _literal(host: str) -> Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]"))
    return None


async def addresses_of(host: str, port: int, name: str, declared: Sequence[str]) -> list[str]:
    """Addresses that a request may be sent to, in the resolver's order.

    Args:
        host: a canonical name, or an address, which the operator declared by writing it.
        port: of the request.
        name: of the resource, for people.
        declared: networks of the resource.

    Raises:
        CallFailed: the name leads nowhere, or only where the resource may not; nothing was sent.
    """
    if _literal(host) is not None:
        return [host.strip("[]")]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise CallFailed(
            f"`{name}` can't be reached: the name `{host}` is not known; nothing was sent", sent="no"
        ) from None
    every = list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
    networks = networks_of(host, declared)
    usable = [text for text in every if reaches(ipaddress.ip_address(text), networks)]
    if not usable:
        shown = ", ".join(every[:3]) or "no address"
        raise CallFailed(
            f"`{name}` can't be reached: `{host}` leads to `{shown}`, which is no public address and none that the resource "
            f'declares; nothing was sent; the operator can add `addresses: ["{every[0] if every else ""}"]` to it',
            sent="no",
        )
    return usable[:ADDRESSES_MAX]


def at_address(request: httpx.Request, address: str) -> httpx.Request:
    """The same request, sent to an address; name and certificate stay those of its host."""
    host = request.url.host
    if address == host:
        return request
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.raw_host.decode("ascii")},
    )


async def reachable(url: httpx.URL, name: str, declared: Sequence[str]) -> list[str]:
    """Addresses of a URL's host; see `addresses_of`."""
    return await addresses_of(url.host, url.port or _PORTS[url.scheme], name, declared)


async def deliver(
    client: httpx.AsyncClient, request: httpx.Request, addresses: Sequence[str]
) -> httpx.Response:
    """Send a request to the first address of its host that takes a connection.

    Args:
        client: of this host alone: a connection is known by its address, and must not serve another name.
        request: with its host's name.
        addresses: what `reachable` found, at least one.

    Raises:
        httpx.TransportError: as the client says.
    """
    *others, last = addresses
    for address in others:
        # Where no connection came about, nothing had begun to leave: the next address may be tried.
        with contextlib.suppress(httpx.ConnectError, httpx.ConnectTimeout):
            return await client.send(at_address(request, address), stream=True)
    return await client.send(at_address(request, last), stream=True)
