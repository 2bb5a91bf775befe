"""Who has to approve a call: how many different people, and whether who submitted the agent counts among them.

The strictest of the agent's manifest, those above it and the operator's ceilings counts, so no manifest weakens what the
operator asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from ringfence.kernel.journal.types import ApprovalRecord
    from ringfence.kernel.rights import Rights


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Who has to approve one call.

    Attributes:
        people: how many, at least one.
        not_submitter: whether who submitted the agent can't.
    """

    people: int = 1
    not_submitter: bool = False

    def met_by(self, record: ApprovalRecord, submitter: str) -> bool:
        """Whether an approval asks for as much."""
        barred = not self.not_submitter or not submitter or record.not_by == submitter
        return barred and record.people >= self.people


def needs_of(rights: Rights, asks: Iterable[tuple[Any, ...]]) -> Needs:
    """What is needed for everything that asks, as (rule id, action, resource), under the rights in force."""
    number, barred = 1, False
    asks = list(asks)
    one: Rights | None = rights
    while one is not None:
        for said in (one.manifest.approvals.people, one.kernel_file.ceilings.people):
            if any(said.concerns(action, resource) for _, action, resource in asks):
                number = max(number, said.number)
                barred = barred or said.not_submitter
        one = one.parent
    return Needs(people=number, not_submitter=barred)
