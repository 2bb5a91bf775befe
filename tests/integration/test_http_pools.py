"""Connections in small pools: no more than may be, kept for the next, and a place is free again however a request ends."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

import httpx
import pytest
from ringfence.syscalls.http_pools import POOL, Pools

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Host:
    """Answers when it is let, and counts who is connected."""

    def __init__(self) -> None:
        self.url = ""
        self.connected = self.most = self.made = self.asked = 0
        self.go = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        self.made += 1
        self.most = max(self.most, self.connected)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.asked += 1
                await self.go.wait()
                writer.write(ANSWER)
        self.connected -= 1
        writer.close()

    async def reached(self, asked: int) -> None:
        async with asyncio.timeout(30):
            while self.asked < asked:
                await asyncio.sleep(0.001)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    host = Host()
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
    host.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    yield host
    host.go.set()
    server.close()


async def test_more_than_may_be_wait_and_what_is_kept_is_used_again(host: Host) -> None:
    pools = Pools(ssl.create_default_context(), most=2 * POOL, keep=True)
    async with httpx.AsyncClient(transport=pools, timeout=30) as client:
        waiting = [asyncio.ensure_future(client.get(host.url)) for _ in range(3 * POOL)]
        await host.reached(2 * POOL)
        assert (host.connected, host.asked) == (2 * POOL, 2 * POOL)
        host.go.set()
        assert [one.text for one in await asyncio.gather(*waiting)] == ["ok"] * 3 * POOL
        made = host.made
        assert (await client.get(host.url)).text == "ok"
        # One pool has room for all that come one after another.
        assert (host.made, host.most) == (made, 2 * POOL)
        assert [pool.busy for pool in pools._pools] == [0, 0]


async def test_a_place_is_free_again_however_a_request_ends(host: Host) -> None:
    pools = Pools(ssl.create_default_context(), most=POOL, keep=False)
    async with httpx.AsyncClient(transport=pools, timeout=30) as client:
        given_up = [asyncio.ensure_future(client.get(host.url)) for _ in range(POOL)]
        await host.reached(POOL)
        for one in given_up:
            one.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        assert pools._pools[0].busy == 0
        with pytest.raises(httpx.ConnectError):
            await client.get("http://127.0.0.1:9/")
        host.go.set()
        async with client.stream("GET", host.url):
            assert pools._pools[0].busy == 1
        assert pools._pools[0].busy == 0
        assert [(await client.get(host.url)).text for _ in range(2 * POOL)] == ["ok"] * 2 * POOL
