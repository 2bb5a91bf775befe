"""Everything in the database that is not on the hot path."""

from __future__ import annotations

from typing import Self

from ringfence.kernel.journal.database import connect_pool
from ringfence.kernel.journal.store_agents import AgentStore
from ringfence.kernel.journal.store_approvals import ApprovalStore
from ringfence.kernel.journal.store_atoms import AtomStore
from ringfence.kernel.journal.store_blobs import BlobStore
from ringfence.kernel.journal.store_budgets import BudgetStore
from ringfence.kernel.journal.store_grants import GrantStore
from ringfence.kernel.journal.store_handovers import HandoverStore
from ringfence.kernel.journal.store_homes import HomeStore
from ringfence.kernel.journal.store_kernels import KernelStore
from ringfence.kernel.journal.store_kin import KinStore
from ringfence.kernel.journal.store_mcp import McpStore
from ringfence.kernel.journal.store_move import MoveStore
from ringfence.kernel.journal.store_outbox import OutboxStore
from ringfence.kernel.journal.store_pools import PoolStore
from ringfence.kernel.journal.store_pushes import PushStore
from ringfence.kernel.journal.store_rates import RateStore
from ringfence.kernel.journal.store_schedules import ScheduleStore
from ringfence.kernel.journal.store_segments import SegmentStore
from ringfence.kernel.journal.store_tasks import TaskStore


class Store(
    KernelStore,
    AgentStore,
    GrantStore,
    ApprovalStore,
    BudgetStore,
    PoolStore,
    RateStore,
    SegmentStore,
    AtomStore,
    BlobStore,
    ScheduleStore,
    MoveStore,
    KinStore,
    OutboxStore,
    HandoverStore,
    HomeStore,
    McpStore,
    PushStore,
    TaskStore,
):
    """The kernel's view of its database, on a pool of connections. Every method may raise Unavailable."""

    @classmethod
    async def open(cls, dsn: str) -> Self:
        """Connect.

        Args:
            dsn: libpq connection string or URL; the schema is there already.

        Raises:
            Unavailable: no connection within a few seconds, or the DSN can't be read.
        """
        return cls(await connect_pool(dsn), dsn)

    def hurry(self, seconds: float) -> None:
        """Wait no longer than this for a connection from now on."""
        self._pool.timeout = seconds

    async def close(self) -> None:
        """Close all connections. Listeners are stopped by whoever made them."""
        await self._pool.close()
