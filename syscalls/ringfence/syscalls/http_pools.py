"""Connections to one host in small pools, so that a request costs the same however many are under way.

A pool of the HTTP package looks at all of its connections when a request comes and when one ends, and asks Linux about each idle
one: with fifty agents at one host that was two fifths of the kernel's time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

import httpx

if TYPE_CHECKING:
    import ssl

POOL: Final = 8
"""Connections of one pool."""


class _Pool:
    """One of them, and how many requests it has under way."""

    def __init__(self, tls: ssl.SSLContext, *, keep: bool) -> None:
        limits = httpx.Limits(max_connections=POOL, max_keepalive_connections=POOL if keep else 0)
        self.transport = httpx.AsyncHTTPTransport(verify=tls, trust_env=False, limits=limits)
        self.busy = 0


class Pools(httpx.AsyncBaseTransport):
    """Sends each request by the first pool that has room.

    Args:
        tls: how hosts prove who they are.
        most: connections of all pools together, rounded up to whole pools.
        keep: whether connections are kept for the next request.
    """

    def __init__(self, tls: ssl.SSLContext, *, most: int, keep: bool) -> None:
        self._tls = tls
        self._keep = keep
        self._most = -(-most // POOL)
        self._pools: list[_Pool] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it.

        Raises:
            httpx.TransportError: as the package says.
        """
        pool = self._roomy()
        pool.busy += 1
        try:
            response = await pool.transport.handle_async_request(request)
        except BaseException:
            pool.busy -= 1
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101 - an asynchronous transport has no others
        response.stream = _Counted(response.stream, pool)
        return response

    def _roomy(self) -> _Pool:
        for pool in self._pools:
            if pool.busy < POOL:
                return pool
        if len(self._pools) < self._most:
            self._pools.append(_Pool(self._tls, keep=self._keep))
            return self._pools[-1]
        return min(self._pools, key=lambda pool: pool.busy)  # it waits for its turn there

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            await pool.transport.aclose()


class _Counted(httpx.AsyncByteStream):
    """An answer that is under way until it is closed."""

    def __init__(self, inner: httpx.AsyncByteStream, pool: _Pool) -> None:
        self._inner = inner
        self._pool: _Pool | None = pool

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        """Let go of it."""
        try:
            await self._inner.aclose()
        finally:
            if self._pool is not None:
                self._pool.busy -= 1
                self._pool = None
