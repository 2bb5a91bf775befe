"""The part of the callback where systems outside put messages into agents' mailboxes, by `POST /v1/hooks/NAME/agents/AGENT`.

Whoever posts has been told from everybody else by then: what is here is how much a hook takes, and what it is answered.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.journal.types import JournalError
from ringfence.kernel.operations import hooks
from ringfence.kernel.rates import Buckets
from ringfence.kernel.server.posted import HttpProblem, Message

if TYPE_CHECKING:
    from ringfence.kernel.operations.kernel import Kernel
    from ringfence.policy.hooks import HookDecl

log = logging.getLogger(__name__)

DELIVERIES_KEPT_S: Final = 30 * 86_400
"""How long the id of a delivery is known, so that it is delivered once."""

SWEEP_EVERY_S: Final = 3600.0


class Hooks:
    """What this kernel's hooks take."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._buckets = Buckets("hook")
        self._swept_at = -math.inf
        self._sweeping: asyncio.Task[None] | None = None

    async def take(self, hook: HookDecl, agent: str, message: Message) -> dict[str, Any]:
        """Put what was posted into a mailbox.

        Raises:
            HttpProblem: the hook has had too many.
            Problem: it can't be delivered.
        """
        wait_s = self._buckets.take_now(hook.name, hook.rate)
        if wait_s > 0:
            text = f"the hook `{hook.name}` takes {hook.rate.text}; send it again later"
            raise HttpProblem(429, "TooMany", text, retry_after_s=math.ceil(wait_s))
        self._sweep()
        return await hooks.deliver(
            self._kernel,
            hook,
            agent,
            message.headers["webhook-id"],
            bytes(message.body),
            json=_is_json(message.headers.get("content-type", "")),
        )

    def _sweep(self) -> None:
        """Forget old deliveries now and then."""
        if time.monotonic() - self._swept_at > SWEEP_EVERY_S:
            self._swept_at = time.monotonic()
            self._sweeping = asyncio.create_task(self._forget())

    async def _forget(self) -> None:
        try:
            await self._kernel.core.store.forget_deliveries(DELIVERIES_KEPT_S)
        except JournalError as error:
            log.warning("old deliveries are not forgotten now: %s", error)

    async def close(self) -> None:
        """Wait for what is under way."""
        if self._sweeping is not None:
            await self._sweeping


def _is_json(said: str) -> bool:
    """Whether a `content-type` says that the body is JSON."""
    kind = said.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")
