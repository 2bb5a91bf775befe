"""Notifications between kernels: wake-ups and revocations only, for each takes a global lock at commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import psycopg
from psycopg import sql
from ringfence.kernel.journal.database import KEEPALIVE, borrowed
from ringfence.kernel.journal.store_base import StoreBase, statement

logger = logging.getLogger(__name__)

RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 2.0
STOP_AGAIN_S = 0.5

Callback = Callable[[str, str], None]


class Listener:
    """One connection that listens, with a task that keeps it alive.

    The callback gets (channel, payload). After every (re)connect it gets each channel once with an empty
    payload: whatever was announced meanwhile is lost, so look for yourself.
    """

    def __init__(self, dsn: str, channels: Sequence[str], callback: Callback) -> None:
        self._dsn = dsn
        self._channels = tuple(channels)
        self._callback = callback
        self._ready = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="ringfence listen")

    async def ready(self) -> None:
        """Wait until it listens for the first time."""
        await self._ready.wait()

    async def stop(self) -> None:
        """Stop listening; no callback comes after it returned."""
        # Python 3.11's wait_for, on which the driver waits, may drop a cancellation: say it until it is heard.
        while not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=STOP_AGAIN_S)

    async def _run(self) -> None:
        delay = RECONNECT_FIRST_S
        while True:
            try:
                connection = await psycopg.AsyncConnection.connect(
                    self._dsn, autocommit=True, application_name="ringfence listen", **KEEPALIVE
                )
                async with connection:
                    for channel in self._channels:
                        await connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
                    delay = RECONNECT_FIRST_S
                    self._ready.set()
                    for channel in self._channels:
                        self._deliver(channel, "")
                    async for notice in connection.notifies():
                        self._deliver(notice.channel, notice.payload)
            except psycopg.Error as error:
                logger.warning("listening stopped, trying again: %s", type(error).__name__)
            await asyncio.sleep(delay)
            delay = min(delay * 2, RECONNECT_MAX_S)

    def _deliver(self, channel: str, payload: str) -> None:
        try:
            self._callback(channel, payload)
        except Exception:
            # One bad payload must not end the listening that revocation relies on.
            logger.exception("a listener failed on channel %s", channel)


class NotifyStore(StoreBase):
    """The part of the store about notifications."""

    async def notify(self, channel: str, payload: str) -> None:
        """Send a notification to all listeners, on every kernel.

        Raises:
            Unavailable: the database is away.
            BadRow: the payload is 8000 bytes or longer, or holds NUL.
        """
        async with borrowed(self._pool) as connection:
            await connection.execute(statement("notify.send"), {"channel": channel, "payload": payload})

    def listen(self, channels: Sequence[str], callback: Callback) -> Listener:
        """Call `callback(channel, payload)` for every notification, until the listener is stopped."""
        return Listener(self._dsn, channels, callback)
