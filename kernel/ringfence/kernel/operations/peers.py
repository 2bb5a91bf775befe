"""Agents elsewhere as operators see them: who is declared, which card was taken, and taking another one."""

from __future__ import annotations

import json
from typing import Any

from ringfence.kernel.journal.store_approvals import CHANNEL_APPROVAL
from ringfence.kernel.operations.kernel import Kernel, rfc3339
from ringfence.kernel.outreach_a2a import CARD, kept_as
from ringfence.kernel.outreach_mcp_definitions import difference
from ringfence.kernel.problems import Problem, conflict
from ringfence.policy.lookalikes import unmasked
from ringfence.syscalls.declared import A2aResource
from ringfence.syscalls.errors import SyscallError
from ringfence.syscalls.redaction import redactor_of


async def listing(kernel: Kernel) -> dict[str, Any]:
    """Every declared agent, and whether its card changed."""
    kept = {one.server: one for one in await kernel.core.store.mcp_tools()}
    return {
        "peers": [
            {
                "name": name,
                "url": one.base,
                "skills": list(one.skills) or None,
                "trusted": not one.untrusted,
                "unavailable": one.unavailable or None,
                "seen": kept_as(name) in kept,
                "changed": kept_as(name) in kept and bool(kept[kept_as(name)].offered_hash),
            }
            for name, one in sorted(kernel.ownership.resources.a2a.items())
        ]
    }


async def card(kernel: Kernel, peer: str, *, look: bool, operator: str) -> dict[str, Any]:
    """The card of an agent as it was taken, and what it shows instead by now.

    Args:
        kernel: this one.
        peer: its name.
        look: ask the agent first.
        operator: who asks.

    Raises:
        Problem: no such agent, its card was never seen, or it can't be asked.
    """
    resource = _declared(kernel, peer)
    if look:
        if resource.unavailable:
            raise Problem(
                f"`{peer}` is unavailable: {resource.unavailable}", exit_code=1, reason="Unavailable"
            )
        try:
            await kernel.ownership.servers.cards.look(peer)
        except SyscallError as error:
            raise Problem(error.message, exit_code=1, reason=error.reason) from error
        await kernel.core.operator_event("operator.a2a_look", peer, operator=operator)
    one = await kernel.ownership.servers.cards.known(peer)
    if one is None:
        raise Problem(
            f"the card of `{peer}` was never seen; look with: ringfence a2a card {peer} --look",
            exit_code=4,
            reason="NoSuchCard",
        )
    hide = redactor_of(resource.secrets).text
    return {
        "peer": peer,
        "card": _json(one.taken, hide),
        "hash": one.taken_hash,
        "taken_at": rfc3339(one.taken_at),
        "taken_by": one.taken_by or None,
        "offered": _json(one.offered, hide),
        "offered_hash": one.offered_hash or None,
        "offered_at": rfc3339(one.offered_at),
        "diff": unmasked(hide(difference(one.taken, one.offered))) if one.offered else None,
    }


def _json(text: str, hide: Any) -> Any:
    return json.loads(hide(text)) if text else None


def _declared(kernel: Kernel, peer: str) -> A2aResource:
    resource = kernel.ownership.resources.a2a.get(peer)
    if resource is None:
        known = ", ".join(f"`{name}`" for name in sorted(kernel.ownership.resources.a2a)) or "none"
        raise Problem(
            f"no A2A agent `{peer[:80]}` is declared; declared: {known}", exit_code=4, reason="NoSuchPeer"
        )
    return resource


async def accept(kernel: Kernel, peer: str, wanted: str, operator: str) -> dict[str, Any]:
    """Take the card that an agent shows now; messages that waited for it go on as rules say.

    Args:
        kernel: this one.
        peer: its name.
        wanted: hash of the card that the operator has seen; empty: the one that is shown.
        operator: who takes it.

    Raises:
        Problem: it shows no other one, or not this one, or the kernel file names the only one that is taken.
    """
    resource = _declared(kernel, peer)
    one = await kernel.ownership.servers.cards.known(peer)
    if one is None or not one.offered_hash:
        raise Problem(
            f"`{peer}` shows no other card; see: ringfence a2a card {peer} --look",
            exit_code=4,
            reason="NoSuchCard",
        )
    if resource.card:
        raise conflict(
            f"the kernel file says which card of `{peer}` is taken; write `card: {one.offered_hash}` there and reload"
        )
    if wanted and wanted != one.offered_hash:
        raise conflict(f"`{peer}` shows {one.offered_hash} by now; look at it: ringfence a2a card {peer}")
    # INVARIANT: on record before it counts.
    await kernel.core.operator_event(
        "operator.a2a_accept", peer, operator=operator, taken=one.taken_hash, offered=one.offered_hash
    )
    taken = await kernel.core.store.accept_mcp_tool(kept_as(peer), CARD, one.offered_hash, operator)
    if taken is None:
        raise conflict(f"`{peer}` shows another card by now; look at it again")
    kernel.core.approvals.notice(None)
    await kernel.core.store.notify(CHANNEL_APPROVAL, "")
    return {"peer": peer, "hash": taken.taken_hash, "before": one.taken_hash, "by": operator}
