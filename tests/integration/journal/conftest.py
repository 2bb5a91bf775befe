"""Kernels, agents and journals on a real server, and a proxy that cuts connections where a test says."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import AgentKey, AgentRecord, Entry, KernelKey, Phase, Row
from ringfence.kernel.journal.writer import Journal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


@dataclass(frozen=True, slots=True)
class KernelStart:
    key: KernelKey
    fence: int


class World:
    """One database with its kernels and agents; everything opened through it is closed after the test."""

    def __init__(self, dsn: str, store: Store) -> None:
        self.dsn = dsn
        self.store = store
        self.closing: list[Callable[[], Awaitable[Any]]] = []

    async def kernel(self, lease_s: float = 600, data_dir: str = "/data", host: str = "host") -> KernelStart:
        return KernelStart(
            *await self.store.register_kernel(
                host=host, pid=1, boot_id="boot", data_dir=data_dir, lease_s=lease_s
            )
        )

    async def agent(self, owner: KernelStart | None, name: str = "bot", grants: Any = ()) -> AgentRecord:
        return await self.store.create_agent(
            name=name,
            thread="",
            manifest="m",
            source="s.yaml",
            labels={"team": "finance"},
            input=b"\0\xff",
            owner=None if owner is None else owner.key,
            uid_base=100_000,
            grants=list(grants),
        )

    async def journal(self, kernel: KernelStart, *agents: AgentRecord, dsn: str = "", **more: Any) -> Journal:
        journal = Journal(dsn or self.dsn, kernel.key, kernel.fence, **more)
        await journal.start()
        self.closing.append(journal.stop)
        for agent in agents:
            await journal.adopt(agent.key)
        return journal

    async def rows(self, chain: int) -> list[Any]:
        return [row async for row in self.store.audit(chain)]

    async def sql(self, statement: str, values: Any = None) -> list[tuple[Any, ...]]:
        """Runs something the store has no method for, as an operator or an intruder would."""
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            cursor = await connection.execute(statement, values)  # type: ignore[arg-type]  # a test's own text
            return await cursor.fetchall() if cursor.description else []


@pytest.fixture
async def world(dsn: str) -> AsyncIterator[World]:
    store = await Store.open(dsn)
    world = World(dsn, store)
    try:
        yield world
    finally:
        for close in reversed(world.closing):
            await close()
        await store.close()


@pytest.fixture
def entry() -> Callable[..., Entry]:
    """Makes an outcome of an agent; keywords that Entry has go to the entry, the others to the row."""

    def make(chain: AgentKey | int, step: int = 1, **more: Any) -> Entry:
        of_entry = {name: more.pop(name) for name in ("epoch", "atomic", "finish") if name in more}
        facts: dict[str, Any] = {
            "phase": Phase.OUTCOME,
            "action": "fs.read",
            "resource": "/workspace/a",
            "lane": "0",
            "lane_step": step,
            "effect": "READ",
            "verdict": "allow",
            "outcome": "ok",
            "digest": b"d" * 32,
        }
        return Entry(row=Row(chain=chain, step=step, **(facts | more)), **of_entry)

    return make


class Proxy:
    """Stands between a journal and the server. A test arms it with bytes to watch for.

    Attributes:
        cut_before: a message that holds these bytes never reaches the server; the connection is cut.
        cut_after: a message that holds these bytes reaches the server and is answered, but the answer is lost.
        hold_before, hold_after: the same, but the server's side of the connection stays open: a half-open connection.
        refuse: new connections are closed at once.
        cuts: how often it cut.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.cut_before: bytes | None = None
        self.cut_after: bytes | None = None
        self.hold_before: bytes | None = None
        self.hold_after: bytes | None = None
        self.refuse = False
        self.cuts = 0
        self.refused = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._held: list[asyncio.StreamWriter] = []

    async def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        if self.refuse:
            self.refused.set()
            to_client.close()
            return
        server, to_server = await asyncio.open_unix_connection(self._target)
        self._writers |= {to_client, to_server}
        back = asyncio.create_task(self._forward(server, to_client))
        try:
            await self._watch(client, to_server, server, to_client, back)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
            to_client.close()
            if to_server in self._writers:
                to_server.close()

    async def _watch(self, client: Any, to_server: Any, server: Any, to_client: Any, back: Any) -> None:
        while data := await client.read(1 << 20):
            name = self._armed(data)
            if name is not None:
                setattr(self, name, None)
                self.cuts += 1
                if name.endswith("after"):
                    back.cancel()
                    await asyncio.gather(back, return_exceptions=True)
                    to_server.write(data)
                    await to_server.drain()
                    await _until_ready(server)
                if name.startswith("hold"):
                    self._writers.discard(to_server)
                    self._held.append(to_server)
                return
            to_server.write(data)
            await to_server.drain()

    def _armed(self, data: bytes) -> str | None:
        for name in ("cut_before", "cut_after", "hold_before", "hold_after"):
            wanted = getattr(self, name)
            if wanted is not None and wanted in data:
                return name
        return None

    async def _forward(self, server: Any, to_client: Any) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await server.read(1 << 20):
                to_client.write(data)
                await to_client.drain()
            to_client.close()

    def close(self) -> None:
        for writer in (*self._writers, *self._held):
            writer.close()


async def _until_ready(server: asyncio.StreamReader) -> None:
    """Reads answers until the server says that it is ready for the next query: so what committed has committed."""
    seen = b""
    while not seen.endswith((b"Z\0\0\0\5I", b"Z\0\0\0\5T", b"Z\0\0\0\5E")):
        part = await server.read(1 << 16)
        if not part:
            return
        seen = (seen + part)[-4096:]


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy and the DSN that goes through it."""
    parts = conninfo_to_dict(dsn)
    directory = Path(tempfile.mkdtemp(prefix="rf-px-", dir="/tmp"))
    proxy = Proxy(f"{parts['host']}/.s.PGSQL.{parts['port']}")
    listening = await asyncio.start_unix_server(proxy.serve, directory / f".s.PGSQL.{parts['port']}")
    try:
        yield proxy, make_conninfo(dsn, host=str(directory))
    finally:
        listening.close()
        proxy.close()
        shutil.rmtree(directory)
