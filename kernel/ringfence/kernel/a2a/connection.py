"""One connection of a client: a request has to come within a time, so that nobody holds a place by saying nothing."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S: Final = 10.0
"""How long a request's line and headers may take to come in, from the connection's or the last answer's end on."""


class Connection(H11Protocol):
    """The web server's own, which waits for a head for ever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came; once a head is whole nothing is waited for but its body, which is the door's matter."""
        super().data_received(data)
        if self._answering:
            self._unwatch()
        elif self._late is None:
            # The head of a further request has begun, and the web server's own timer has ended with that.
            self._watch()

    @property
    def _answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _watch(self) -> None:
        self._late = self.loop.call_later(HEAD_S, self._end)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self._late = None
        if not self._answering:
            self.transport.abort()
