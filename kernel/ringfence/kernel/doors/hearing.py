"""Parts of a reply on their way from a host to a program, while the call runs."""

from __future__ import annotations

import asyncio
from collections import deque


class Parts:
    """Holds what the program has not taken yet: no more than a reply may be long.

    Attributes:
        count: of all parts.
        spoiled: whether what follows may not be shown as it comes.
    """

    def __init__(self) -> None:
        self.count = 0
        self.spoiled = False
        self._held: deque[tuple[bytes, str]] = deque()
        self._bell = asyncio.Event()

    def part(self, data: bytes, kind: str) -> None:
        """Take the next part."""
        self.count += 1
        self._held.append((data, kind))
        self._bell.set()

    def spoil(self) -> None:
        """Hear that no more comes."""
        self.spoiled = True

    def take(self) -> tuple[bytes, str] | None:
        """The next one; None: there is none now."""
        if self._held:
            return self._held.popleft()
        self._bell.clear()
        return None

    async def wait(self) -> None:
        """Wait for one."""
        await self._bell.wait()
