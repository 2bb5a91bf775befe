"""Cards of the declared agents elsewhere, as the kernel takes them: pinned like the definitions of MCP tools, and kept beside these.

INVARIANT: an agent whose card is another by now is sent nothing new unless a person says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.outreach_mcp_definitions import compare, difference
from ringfence.syscalls.a2a_common import client_module
from ringfence.syscalls.codec import holds_nul
from ringfence.syscalls.errors import CallFailed, JournalUnavailable
from ringfence.syscalls.mcp_common import Definition, Lost, Sent, definition_bytes
from ringfence.syscalls.redaction import redactor_of

if TYPE_CHECKING:
    from ringfence.kernel.journal.store import Store
    from ringfence.kernel.journal.store_mcp import McpToolRecord
    from ringfence.syscalls.declared import A2aResource

CARD: Final = "card"
"""What stands where a tool's name would."""

_LOOK_S: Final = 30.0


def kept_as(peer: str) -> str:
    """What stands where a server's name would; no resource has a name with a colon."""
    return f"a2a:{peer}"


@dataclass(slots=True)
class Cards:
    """The cards of all declared agents."""

    store: Store
    _declared: Callable[[], Mapping[str, A2aResource]]

    @property
    def declared(self) -> Mapping[str, A2aResource]:
        """The agents by name, as the kernel file in force has them."""
        return self._declared()

    async def look(self, peer: str) -> Definition:
        """The card that an agent shows now, held against what was taken.

        Raises:
            CallFailed: it can't be reached, or shows none.
            JournalUnavailable: the database is away.
        """
        resource = self._resource(peer)
        data = await self._shown(resource)
        try:
            one, news = compare(CARD, data, await self.known(peer), resource.card)
            if news is not None:
                await self.store.see_mcp_tools(kept_as(peer), [news])
        except Unavailable as error:
            raise JournalUnavailable(f"the database is away: {error}; make the call again") from error
        return one

    async def taken(self, peer: str) -> Definition:
        """The card that was taken; it is looked at where none was.

        Raises:
            CallFailed: none was, and it can't be had.
            JournalUnavailable: the database is away.
        """
        resource = self._resource(peer)
        try:
            known = await self.known(peer)
        except Unavailable as error:
            raise JournalUnavailable(f"the database is away: {error}; make the call again") from error
        if known is not None and known.taken and resource.card in {"", known.taken_hash}:
            return Definition(tool=CARD, taken=known.taken.encode(), taken_hash=known.taken_hash)
        found = await self.look(peer)
        if not found.taken:
            raise _failed(resource, "shows another card than the one that the kernel file names")
        return found

    def doubt(self, peer: str, card: Definition) -> ChangedCard:
        """Why a message to an agent whose card changed waits."""
        return ChangedCard(self, peer, card)

    async def known(self, peer: str) -> McpToolRecord | None:
        """What is kept of a card; None: it was never seen.

        Raises:
            Unavailable: the database is away.
        """
        return next(iter(await self.store.mcp_tools(kept_as(peer))), None)

    def _resource(self, peer: str) -> A2aResource:
        resource = self.declared.get(peer)
        if resource is None:
            raise CallFailed(f"`{peer}` is not declared any more; nothing was sent", sent="no")
        return resource

    @staticmethod
    async def _shown(resource: A2aResource) -> bytes:
        client = await client_module()
        limit = min(resource.timeout_s, _LOOK_S)
        try:
            async with asyncio.timeout(limit):
                card: Mapping[str, Any] = await client.fetch_card(resource, Sent())
        except (Lost, TimeoutError) as error:
            raise _failed(resource, str(error) or f"did not show its card within {limit:g} s") from None
        if holds_nul(card):
            raise _failed(resource, "shows a card with a NUL character, which can't be kept")
        return definition_bytes(card)


class ChangedCard:
    """An agent that shows another card by now; until an operator takes that, messages wait."""

    def __init__(self, cards: Cards, peer: str, card: Definition) -> None:
        self._cards, self._peer, self._card = cards, peer, card

    @property
    def about(self) -> str:
        """Whoever approves has seen this card."""
        return self._card.offered_hash

    async def why(self) -> str:
        """In words for people; empty: it was taken meanwhile."""
        one = await self._cards.known(self._peer)
        if one is not None and one.taken_hash == self._card.offered_hash:
            return ""
        return f"the A2A agent `{self._peer}` shows another card than before; see: ringfence a2a card {self._peer}"

    def detail(self) -> Mapping[str, Any]:
        """What changed."""
        return {
            "definition": {"taken": self._card.taken_hash, "offered": self._card.offered_hash},
            "diff": difference(self._card.taken, self._card.offered),
        }


def _failed(resource: A2aResource, why: str) -> CallFailed:
    """An agent that can't be written to, for people and without its credentials."""
    return CallFailed(
        f"`{resource.name}` {redactor_of(resource.secrets).text(why)}; nothing was sent", sent="no"
    )
