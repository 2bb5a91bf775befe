"""Rates of upstreams that kernels share."""

from __future__ import annotations

from dataclasses import dataclass

from ringfence.kernel.journal.store_base import StoreBase
from ringfence.kernel.journal.types import JournalError, KernelKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePart:
    """What a kernel has of a rate from here on.

    Attributes:
        part: of the whole, from 0 to 1.
        tokens: calls that it may make of it now.
        short: whether it has less than is its, as long as others don't give some up.
        gave: whether it has less than before.
        crowded: whether more kernels want some than the rate has calls, so that they take turns.
    """

    part: float
    tokens: float
    short: bool
    gave: bool
    crowded: bool


class RateStore(StoreBase):
    """The part of the store about rates of upstreams."""

    async def share_rate(
        self,
        kernel: KernelKey,
        name: str,
        *,
        count: float,
        span_s: float,
        tokens: float,
        want: bool,
        used: bool,
    ) -> RatePart:
        """Take a part of a rate anew; meanwhile the kernel goes by none.

        Args:
            kernel: whose part.
            name: of the upstream.
            count: calls of the whole rate within `span_s`.
            span_s: seconds.
            tokens: calls that are left of the part that it had.
            want: whether it wants any.
            used: whether it made a call since it took the one that it had.

        Raises:
            Unavailable: the database is away.
        """
        values = {
            "kernel": kernel,
            "name": name,
            "count": count,
            "span_s": span_s,
            "tokens": tokens,
            "want": want,
            "used": used,
        }
        found = await self._first("rates.share", RatePart, values)
        if found is None:
            raise JournalError("the database gave no part of a rate")
        return found
