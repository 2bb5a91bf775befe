"""What a parent means for the rights of its child."""

from __future__ import annotations

from ringfence.policy.kernel_file import KernelFile
from ringfence.policy.manifest_types import Manifest
from ringfence.policy.types import Decision, Verdict

DEPTH_MAX = 4
"""How many generations there may be below an agent that was submitted."""

CHILDREN_MAX = 64
"""Children of one agent that have not ended."""

TREE_MAX = 256
"""Agents below one that was submitted, that have not ended."""


def delegated_roles(child: Manifest, parent: Manifest, file: KernelFile) -> tuple[str, ...]:
    """Roles whose rules a child has without the meet: it takes them, and its parent's manifest delegates them.

    A child's own `delegates` is a part of its parent's, so what stands there was delegated by whoever submitted the first.
    """
    return tuple(role for role in child.roles if role in parent.delegates and role in file.roles)


def meet(own: Decision, above: Decision, parent: str) -> Decision:
    """The stricter of two decisions on one question, saying what the parent has to do with it.

    Args:
        own: what the child's rules say; no deny.
        above: what its parent may.
        parent: id of the parent; its rules are named `PARENT/RULE`.
    """
    theirs = _of_parent(above.rules, parent)
    facts = tuple(dict.fromkeys((*own.facts, *_of_parent(above.facts, parent))))
    if above.verdict is Verdict.DENY:
        reason = f"its parent `{parent}` may not either: {above.reason}"
        return Decision(verdict=Verdict.DENY, rules=theirs, reason=reason, facts=facts, stale=above.stale)
    grants = tuple(dict.fromkeys((*own.grants, *above.grants)))
    asks = (*_asks(own), *_of_parent(_asks(above), parent))
    if own.verdict is Verdict.ASK:
        both = (*own.rules, *theirs)
        # Where only rules ask, the first one stands for both, as it does for one agent.
        asks = asks if own.asks or above.asks else ()
        return Decision(
            verdict=Verdict.ASK, rules=both, grants=grants, reason=own.reason, asks=asks, facts=facts
        )
    if above.verdict is Verdict.ASK:
        reason = f"its parent `{parent}` has to ask as well: {above.reason}"
        asks = asks if above.asks else ()
        both = (*theirs, *own.rules)
        return Decision(verdict=Verdict.ASK, rules=both, grants=grants, reason=reason, asks=asks, facts=facts)
    reason = f"{own.reason}; its parent `{parent}` may too: {above.reason}"
    return Decision(verdict=Verdict.ALLOW, rules=(*own.rules, *theirs), grants=grants, reason=reason)


def _of_parent(ids: tuple[str, ...], parent: str) -> tuple[str, ...]:
    return tuple(one if "/" in one.partition(":")[0] else f"{parent}/{one}" for one in ids)


def _asks(decision: Decision) -> tuple[str, ...]:
    """What a decision asks about: all that conditions named, else the first rule."""
    return (decision.asks or decision.rules[:1]) if decision.verdict is Verdict.ASK else ()
