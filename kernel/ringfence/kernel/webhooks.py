"""Tells receivers outside what waits for a person: takes events from the outbox, signs them and posts them.

An event is in the outbox by the transaction that it tells of, and leaves it when its receiver has answered with a 2xx. So it
is delivered at least once, over every crash, and each time with the same id.

INVARIANT: what a receiver does or doesn't do delays its own events alone: each has a task and a bounded queue of its own,
and no call of an agent ever waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from ringfence.kernel.config import VERSION
from ringfence.kernel.journal.store_outbox import OutboxRecord
from ringfence.kernel.journal.types import JournalError
from ringfence.kernel.secrets import SecretsError
from ringfence.kernel.signing import BadKey, key_of, sign
from ringfence.policy.outreach import WebhookDecl
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.http_client import client_of, reason_of
from ringfence.syscalls.http_reach import deliver, reachable
from ringfence.syscalls.redaction import Redactor, redactor_for

if TYPE_CHECKING:
    from ringfence.kernel.operations.kernel import Kernel

log = logging.getLogger(__name__)

POLL_S = 1.0
"""How often the outbox is looked at for one receiver."""

ANSWER_S = 10.0
"""How long a receiver may take for one event."""

LEASE_S = 20.0
"""How long what one kernel sends is nobody else's to send; longer than an answer may take."""

AT_ONCE = 4
"""Events of one receiver under way."""

RETRY_FIRST_S = 5.0
RETRY_MAX_S = 3600.0
AGE_S_MAX = 3 * 86_400.0
"""How long an event is tried; then it is dropped, and `status` counts it."""

WAITING_MAX = 10_000
"""Events that wait for one receiver; beyond it the oldest are dropped, and counted."""

SWEEP_S = 30.0
_SUCCESS = range(200, 300)


class Refused(Exception):
    """An event was not delivered. `str()` is one line; `retry_after_s` is what the receiver asked for."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def delay_s(attempts: int, asked_s: float = 0.0, spread: float | None = None) -> float:
    """How long to wait after so many attempts: twice as long each time, with jitter, so that nobody is hit by all at once.

    Args:
        attempts: made so far.
        asked_s: what the receiver asked for.
        spread: from 0 to 1, where in the interval; None: at random.
    """
    longest = min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(attempts - 1, 20))
    share = random.random() if spread is None else spread  # noqa: S311 - jitter, no secret
    return max(longest * (0.5 + share / 2), min(asked_s, RETRY_MAX_S))


class Webhooks:
    """The receivers that this kernel's file declares."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._hooks: Mapping[str, WebhookDecl] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Declare them, and go on at once with what an earlier kernel left."""
        await self._take_over(hurry=True)

    async def apply(self) -> None:
        """Take over what the kernel file says now. Where the database is away, that is done when it is back."""
        await self._take_over(hurry=False)

    async def _take_over(self, *, hurry: bool) -> None:
        await self.close()
        self._hooks = self._kernel.ownership.resources.file.webhooks
        try:
            await self._declare(hurry=hurry)
        except JournalError as error:
            log.warning("the webhooks can't be declared now: %s", error)
            self._tasks = [asyncio.create_task(self._declared_later(), name="ringfence webhooks")]
        else:
            self._start()

    async def _declare(self, *, hurry: bool) -> None:
        store = self._kernel.core.store
        own = next(k for k in await store.kernels() if k.key == self._kernel.core.kernel)
        told = {name: hook.events for name, hook in self._hooks.items()}
        await store.declare_webhooks(told, own.host, own.data_dir)
        if hurry and self._hooks:
            await store.hurry_outbox(list(self._hooks))

    async def _declared_later(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(JournalError):
                await self._declare(hurry=True)
                self._start()
                return

    def _start(self) -> None:
        self._tasks += [
            asyncio.create_task(self._serve(hook), name=f"ringfence webhook {name}")
            for name, hook in self._hooks.items()
        ]
        if self._hooks:
            self._tasks.append(asyncio.create_task(self._sweep(), name="ringfence webhook sweep"))

    async def close(self) -> None:
        """Send nothing any more; what is under way is sent again by the next kernel."""
        while self._tasks:
            # The one that declares them later may just have started others.
            tasks, self._tasks = self._tasks, []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def report(self) -> list[dict[str, Any]]:
        """How each receiver does, for `status`.

        Raises:
            Unavailable: the database is away.
        """
        found = await self._kernel.core.store.webhooks(list(self._hooks)) if self._hooks else []
        return [
            {
                "name": one.name,
                "url": self._hooks[one.name].url,
                "events": list(one.events),
                "waiting": one.waiting,
                "oldest_at": _shown(one.oldest_at),
                "delivered_at": _shown(one.delivered_at),
                "failing_since": _shown(one.failing_since),
                "error": one.last_error or None,
                "dropped": one.dropped,
            }
            for one in found
            if one.name in self._hooks
        ]

    async def _sweep(self) -> None:
        while True:
            try:
                said = self._kernel.ownership.resources.file.retention.webhooks_s
                age = AGE_S_MAX if said is None else said
                await self._kernel.core.store.sweep_outbox(list(self._hooks), age, WAITING_MAX)
            except JournalError as error:
                log.warning("the outbox can't be swept now: %s", error)
            await asyncio.sleep(SWEEP_S)

    async def _serve(self, hook: WebhookDecl) -> None:
        while True:
            try:
                due = await self._kernel.core.store.claim_outbox(hook.name, AT_ONCE, LEASE_S)
                await asyncio.gather(*(self._send(hook, event) for event in due))
            except JournalError as error:
                log.warning("webhook %s can't be told now: %s", hook.name, error)
                due = []
            except Exception:
                # One event that can't be handled must not end the telling of all others.
                log.exception("a bug kept webhook %s from being told", hook.name)
                due = []
            if not due:
                await asyncio.sleep(POLL_S)

    async def _send(self, hook: WebhookDecl, event: OutboxRecord) -> None:
        store = self._kernel.core.store
        try:
            await self._post(hook, event)
        except Refused as refused:
            if event.attempts == 1:
                log.warning("webhook %s was not told: %s", hook.name, refused)
            pause = delay_s(event.attempts, refused.retry_after_s)
            await store.outbox_failed(event.key, pause, str(refused)[:500])
        else:
            await store.outbox_sent(event.key)

    async def _post(self, hook: WebhookDecl, event: OutboxRecord) -> None:
        """Post one event.

        Raises:
            Refused: it was not taken.
        """
        name = hook.key.secret
        try:
            # Looked up each time: a key that was set meanwhile counts.
            key = key_of(self._kernel.secrets.get(name), name)
        except (SecretsError, BadKey) as error:
            raise Refused(str(error)) from None
        # INVARIANT: no secret of the kernel leaves it, whatever an agent wrote into what a person is told.
        hide = redactor_for(self._kernel.ownership.resources, ())
        body = msgspec.json.encode(hide.value(msgspec.json.decode(event.body)))
        timestamp = int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": f"ringfence/{VERSION}",
            "webhook-id": event.message,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(key, event.message, timestamp, body),
        }
        request = httpx.Request("POST", hook.url, headers=headers, content=body)
        await post(request, f"webhook {hook.name}", hook.addresses, hide)


async def post(request: httpx.Request, name: str, networks: Sequence[str], hide: Redactor) -> None:
    """Send something to a receiver outside, once, at an address that was looked at. No redirect is followed.

    Args:
        request: with its host's name.
        name: of the receiver, for people.
        networks: where that may lead besides public addresses.
        hide: leaves secrets out of what is said of a failure.

    Raises:
        Refused: it was not taken.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            addresses = await reachable(request.url, name, networks)
            response = await deliver(client_of(request.url.host, keep=False), request, addresses)
            await response.aclose()
    except TimeoutError:
        raise Refused(f"no answer within {ANSWER_S:g} s") from None
    except CallFailed as error:
        raise Refused(error.message) from None
    except httpx.TransportError as error:
        raise Refused(reason_of(error, hide)) from None
    if response.status_code not in _SUCCESS:
        asked = response.headers.get("retry-after", "")
        later = float(asked) if asked.isascii() and asked.isdigit() and len(asked) < 9 else 0.0  # noqa: PLR2004 - seconds
        raise Refused(f"it answered {response.status_code}, and only 2xx takes an event", later)


def _shown(moment: Any) -> str | None:
    from ringfence.kernel.operations.kernel import rfc3339  # noqa: PLC0415 - it imports much of the kernel

    return rfc3339(moment)
