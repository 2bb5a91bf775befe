"""Sends trees to a host: only what it lacks, and what it must not see not at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from ringfence.sandbox import openat
from ringfence.sandbox.remote import content, trees, wire
from ringfence.sandbox.remote.calls import Calls
from ringfence.sandbox.remote.channels import Bytes, Channel, ChannelLostError
from ringfence.sandbox.remote.trees import Known
from ringfence.sandbox.types import SandboxError, SandboxLostError

KNOWN_MAX = 512
"""Trees of which a kernel remembers what it has sent; of others it says everything again."""
FRESH_S = 60.0
"""How long a directory that is shown read-only counts as unchanged without being looked at."""


class Sender:
    """What one session's host has of this kernel's files."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._known: OrderedDict[tuple[str, str], Known] = OrderedDict()
        self._looked: dict[str, float] = {}
        self._locks: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def use(self, agent: str, top: Path, hidden: frozenset[bytes] = frozenset()) -> AsyncGenerator[str]:
        """The name of a tree at the host that is as `top` is now; it stays so until the context ends.

        Args:
            agent: whose tree it is.
            top: on this host; nothing may change it meanwhile.
            hidden: relative paths whose content is not sent.

        Raises:
            SandboxError: it can't be read, or not be kept there.
        """
        key = (agent, str(top))
        async with self._locked(key):
            yield await self._bring(key, agent, top, hidden)

    async def shared(self, top: Path) -> str:
        """The same for a directory that every agent is shown; it is looked at once in a while.

        Raises:
            SandboxError: as for `use`.
        """
        key = ("", str(top))
        async with self._locked(key):
            known = self._known.get(key)
            if known is not None and time.monotonic() - self._looked.get(str(top), 0.0) < FRESH_S:
                return known.tree
            tree = await self._bring(key, "", top, frozenset())
            self._looked[str(top)] = time.monotonic()
            return tree

    def forget(self, agent: str) -> None:
        """The host has lost trees of an agent, or shared ones: all of them are told again."""
        for key in [key for key in self._known if key[0] in {agent, ""}]:
            del self._known[key]

    @contextlib.asynccontextmanager
    async def _locked(self, key: tuple[str, str]) -> AsyncGenerator[None]:
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._locks[key][1] - 1
            if users:
                self._locks[key] = (lock, users)
            else:
                del self._locks[key]

    async def _bring(self, key: tuple[str, str], agent: str, top: Path, hidden: frozenset[bytes]) -> str:
        known = self._known.get(key, Known())
        found = await asyncio.to_thread(trees.scan, top, known, hidden)
        tree = await self._offer(agent, top, known, found)
        if not tree:
            tree = await self._offer(agent, top, Known(), found)
        found.tree = tree
        self._known[key] = found
        self._known.move_to_end(key)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return tree

    async def _offer(self, agent: str, top: Path, known: Known, found: Known) -> str:
        """Tell the host of a tree; answers its name there, empty where it does not know `known` any more."""
        make = self._calls.channels.make
        listing, needs, files = make(sends=True), make(receives=True), make(sends=True)
        body = wire.Offer(
            agent=agent, base=known.tree, listing=listing.number, needs=needs.number, content=files.number
        )
        channels = (listing, needs, files)
        try:
            values = await self._calls.order(body, feed=lambda: self._tell(top, known, found, channels))
        finally:
            for channel in channels:
                await asyncio.shield(asyncio.create_task(channel.reset()))
        return str(values.get("tree", ""))

    async def _tell(
        self, top: Path, known: Known, found: Known, channels: tuple[Channel, Channel, Channel]
    ) -> None:
        listing, needs, files = channels
        try:
            for delta in trees.changes(known, found):
                await listing.send(trees.encode(delta))
            await listing.end()
            wanted = await _digests(needs)
            await self._send(top, found, wanted, files)
            await files.end()
        except ChannelLostError:
            return  # the answer to the order says why
        except BaseException:
            # Else the host would wait for the rest.
            for channel in channels:
                await asyncio.shield(asyncio.create_task(channel.reset()))
            raise

    async def _send(self, top: Path, found: Known, wanted: Sequence[bytes], files: Channel) -> None:
        if not wanted:
            return
        places = {entry.digest: path for path, entry in found.entries.items() if entry.digest}
        for digest in wanted:
            if digest not in places:
                raise SandboxError(
                    "the sandbox host asks for a file that it was not told of; look at its version"
                )
            path = top / os.fsdecode(places[digest])
            try:
                fd = os.open(path, openat.FILE)
                try:
                    sent = await content.send(files, fd)
                finally:
                    os.close(fd)
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise SandboxError(f"`{path}` can't be sent to the sandbox host: {reason}") from error
            except content.ChangedError as error:
                raise SandboxLostError(f"`{path}` changed while it was sent; try again") from error
            if sent != digest:
                raise SandboxLostError(f"`{path}` changed while it was sent; try again")


async def _digests(channel: Channel) -> list[bytes]:
    stream = Bytes(channel)
    found: list[bytes] = []
    while head := await stream.some(content.DIGEST_BYTES):
        if len(head) < content.DIGEST_BYTES:
            head += await stream.exactly(content.DIGEST_BYTES - len(head))
        found.append(head)
        if len(found) > trees.ENTRIES_MAX:
            raise SandboxError("the sandbox host asks for more files than there are; look at its version")
    return found
