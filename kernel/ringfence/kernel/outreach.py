"""The kernel's ways out to people and back: webhooks that tell, the callback that hears what they decide, and A2A."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfence.kernel.a2a.door import A2aDoor
from ringfence.kernel.server.callback import CallbackDoor
from ringfence.kernel.webhooks import Webhooks

if TYPE_CHECKING:
    from ringfence.kernel.operations.kernel import Kernel


class Outreach:
    """All, as the kernel file declares them; without a declaration none does anything."""

    def __init__(self, kernel: Kernel) -> None:
        self._webhooks = Webhooks(kernel)
        self._callback = CallbackDoor(kernel)
        self._a2a = A2aDoor(kernel)

    async def open(self) -> None:
        """Start them. An address that can't be listened at is no reason not to start: `status` says so."""
        await self._webhooks.open()
        await self._callback.apply()
        await self._a2a.apply()

    async def apply(self) -> None:
        """Take over what the kernel file says now."""
        await self._webhooks.apply()
        await self._callback.apply()
        await self._a2a.apply()

    async def close(self) -> None:
        """End them; what was not delivered is delivered by the next kernel."""
        await self._a2a.close()
        await self._callback.close()
        await self._webhooks.close()

    def callback(self) -> dict[str, Any] | None:
        """Where decisions are heard, for `status`; None: nowhere."""
        return self._callback.report()

    def a2a(self) -> dict[str, Any] | None:
        """Where clients are heard, for `status`; None: nowhere."""
        return self._a2a.report()

    async def webhooks(self) -> list[dict[str, Any]]:
        """How receivers do, for `status`.

        Raises:
            Unavailable: the database is away.
        """
        return await self._webhooks.report()
