"""The protocol of drivers, and what drivers of objects have in common."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import BinaryIO, Final, Protocol, TypeAlias

import msgspec

ABSENT: Final = ""
"""The version of what is not there."""

NO_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType({})

Options: TypeAlias = Mapping[str, str | int | bool]
"""What the operator declares for a driver, with its secrets filled in."""


class DriverError(Exception):
    """The resource can't be used, or refuses. `str()` is one line without credentials.

    Attributes:
        sent: whether a change may have been made all the same.
    """

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


class Changed(DriverError):
    """Another version stands there than the caller expects; nothing was changed."""


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """How one thing stands.

    Attributes:
        size: of its content in bytes.
        version: changes whenever content or attributes do; never empty.
        attributes: what else belongs to it and comes back with it, such as `Content-Type`; names as the resource has them.
        modified_us: when it was changed last, microseconds since the epoch; 0: not known.
    """

    size: int
    version: str
    attributes: Mapping[str, str] = NO_ATTRIBUTES
    modified_us: int = 0


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a list."""

    key: str
    size: int
    version: str
    modified_us: int = 0


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a list, in the order of keys; `more`: whether there are others behind it."""

    objects: tuple[Listed, ...]
    more: bool = False


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One thing as it stood. Its content is kept by the kernel, outside every agent's reach.

    Attributes:
        key: what it is.
        stat: how it stood; None: nothing was there.
        sha256: of its content, in hex; empty where nothing was there.
    """

    key: str
    stat: Stat | None = None
    sha256: str = ""


class Driver(Protocol):
    """What can be kept and brought back. All of it may be called from several tasks at once, and again after a crash."""

    async def describe(self, key: str) -> Stat | None:
        """Say how something stands; None: nothing is there.

        Raises:
            DriverError: the resource can't be asked.
        """
        ...

    async def snapshot(self, key: str, into: BinaryIO, most: int) -> Snapshot:
        """Keep something: write its content into a file, in bounded memory.

        Args:
            key: what.
            into: an empty file, open for writing.
            most: bytes that are kept at most.

        Raises:
            DriverError: it is larger, changed while it was read, or can't be read. Nothing may be destroyed then.
        """
        ...

    async def verify(self, snapshot: Snapshot) -> bool:
        """Whether what stands there now is what was kept: content and attributes, byte for byte.

        Raises:
            DriverError: the resource can't be asked.
        """
        ...

    async def restore(self, snapshot: Snapshot, content: BinaryIO | None, expect: str) -> str:
        """Bring something back exactly, or remove what stands where nothing was.

        Args:
            snapshot: what was kept.
            content: a file with its content; None: nothing was there.
            expect: version that stands there now, `ABSENT` for none; what else stands there is left alone.

        Returns:
            The version that stands there then; `ABSENT`: none.

        Raises:
            Changed: something else stands there.
            DriverError: it can't be brought back.
        """
        ...


class ObjectDriver(Driver, Protocol):
    """A driver that does the work of `object.*` too: keys are text with `/`, content is bytes."""

    async def list(self, prefix: str, after: str, limit: int) -> Page:
        """List objects whose key begins with `prefix` and comes after `after`.

        Raises:
            DriverError: they can't be listed.
        """
        ...

    def read(self, key: str, version: str, start: int, length: int) -> AsyncIterator[bytes]:
        """Read a part of an object in pieces.

        Args:
            key: which.
            version: that `describe` gave.
            start: first byte.
            length: bytes; never more than there are.

        Raises:
            Changed: it has another version by now, or is gone.
            DriverError: it can't be read.
        """
        ...

    async def write(
        self, key: str, content: BinaryIO, size: int, attributes: Mapping[str, str], expect: str
    ) -> str:
        """Make an object or another content of it, all or nothing, and give its version.

        Args:
            key: which.
            content: a file, read from where it stands.
            size: bytes that it has from there on.
            attributes: all that it has afterwards.
            expect: version that stands there now, `ABSENT` for none.

        Raises:
            Changed: something else stands there.
            DriverError: it can't be written; `sent` says whether it may have been.
        """
        ...

    async def remove(self, key: str, expect: str) -> None:
        """Remove an object. Arguments and errors as for `write`."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class Objects(ABC):
    """`snapshot`, `verify` and `restore` of whatever can describe, read, write and remove objects.

    Attributes:
        identity: which target it is, without credentials; what was kept of another one is not brought back here. Empty: any.
    """

    identity: str = ""

    @abstractmethod
    async def describe(self, key: str) -> Stat | None:
        """See `Driver`."""

    @abstractmethod
    async def list(self, prefix: str, after: str, limit: int) -> Page:
        """See `ObjectDriver`."""

    @abstractmethod
    def read(self, key: str, version: str, start: int, length: int) -> AsyncIterator[bytes]:
        """See `ObjectDriver`."""

    @abstractmethod
    async def write(
        self, key: str, content: BinaryIO, size: int, attributes: Mapping[str, str], expect: str
    ) -> str:
        """See `ObjectDriver`."""

    @abstractmethod
    async def remove(self, key: str, expect: str) -> None:
        """See `ObjectDriver`."""

    async def close(self) -> None:
        """See `ObjectDriver`."""
        return

    async def snapshot(self, key: str, into: BinaryIO, most: int) -> Snapshot:
        """See `Driver`."""
        stat = await self.describe(key)
        if stat is None:
            return Snapshot(key=key)
        if stat.size > most:
            raise DriverError(f"`{key}` has {stat.size} bytes, and {most} are kept at most")
        digest, size = hashlib.sha256(), 0
        async for piece in self.read(key, stat.version, 0, stat.size):
            size += len(piece)
            digest.update(piece)
            await asyncio.to_thread(into.write, piece)
        if size != stat.size:
            raise DriverError(f"`{key}` gave {size} bytes and not the {stat.size} that it has; try again")
        return Snapshot(key=key, stat=stat, sha256=digest.hexdigest())

    async def verify(self, snapshot: Snapshot) -> bool:
        """See `Driver`."""
        now, before = await self.describe(snapshot.key), snapshot.stat
        if now is None or before is None:
            return now is before
        if now.size != before.size or dict(now.attributes) != dict(before.attributes):
            return False
        return now.version == before.version or await self.sha256_of(snapshot.key, now) == snapshot.sha256

    async def sha256_of(self, key: str, stat: Stat) -> str:
        """Hash of the content that stands there, in hex; empty where it changes meanwhile."""
        digest = hashlib.sha256()
        try:
            async for piece in self.read(key, stat.version, 0, stat.size):
                digest.update(piece)
        except Changed:
            return ""
        return digest.hexdigest()

    async def restore(self, snapshot: Snapshot, content: BinaryIO | None, expect: str) -> str:
        """See `Driver`."""
        if snapshot.stat is None or content is None:
            if expect != ABSENT:
                await self.remove(snapshot.key, expect)
            return ABSENT
        return await self.write(snapshot.key, content, snapshot.stat.size, snapshot.stat.attributes, expect)
