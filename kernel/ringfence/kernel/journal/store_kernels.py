"""Kernels: registration, leases with fencing tokens, takeover of agents."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ringfence.kernel.journal.database import borrowed
from ringfence.kernel.journal.store_base import StoreBase, agent_record, statement
from ringfence.kernel.journal.types import (
    AgentKey,
    AgentRecord,
    KernelKey,
    KernelRecord,
    OwnerMoved,
    Unavailable,
)

CLAIM_BATCH = 100
ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def short_id() -> str:
    """Make five characters of base 32 that tell things of one name apart."""
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(5))


class KernelStore(StoreBase):
    """The part of the store about kernels."""

    async def register_kernel(
        self, *, host: str, pid: int, boot_id: str, data_dir: str, lease_s: float
    ) -> tuple[KernelKey, int]:
        """Enter a new start of a kernel.

        Args:
            host: host name.
            pid: process id.
            boot_id: the host's boot id.
            data_dir: absolute data directory.
            lease_s: seconds until the lease runs out unless renewed.

        Returns:
            Its key and its fencing token, larger than any before.

        Raises:
            Unavailable: the database is away.
        """
        row = await self._tuple(
            "kernels.register",
            {
                "id": f"k-{short_id()}{short_id()}",
                "host": host,
                "pid": pid,
                "boot_id": boot_id,
                "data_dir": data_dir,
                "lease_s": lease_s,
            },
        )
        if row is None:
            raise Unavailable("the database did not register the kernel")
        return KernelKey(row[0]), row[1]

    async def heartbeat(self, kernel: KernelKey, fence: int, lease_s: float) -> bool:
        """Renew the lease.

        A lease that ran out while nobody took over is renewed too; the kernel must then read all epochs again
        before it starts anything, because a revocation may have returned meanwhile.

        Returns:
            False: fenced. Another kernel took over, or this one was released; it must stop.

        Raises:
            Unavailable: the database is away.
        """
        values = {"kernel": kernel, "fence": fence, "lease_s": lease_s}
        return await self._tuple("kernels.heartbeat", values) is not None

    async def release_kernel(self, kernel: KernelKey, fence: int) -> None:
        """End the lease at once: others may take over.

        Raises:
            Unavailable: the database is away.
        """
        await self._tuple("kernels.release", {"kernel": kernel, "fence": fence})

    async def kernels(self) -> list[KernelRecord]:
        """List all starts of kernels, oldest first.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("kernels.list", KernelRecord, {})

    async def tenure(self, agent: AgentKey, kernel: KernelKey) -> int | None:
        """Number an ownership: larger than the fence of every kernel so far, and than all numbers of earlier owners.

        Returns:
            None: another kernel owns the agent.

        Raises:
            Unavailable: the database is away.
        """
        row = await self._tuple("kernels.tenure", {"agent": agent, "kernel": kernel})
        return None if row is None else int(row[0])

    async def claim_agents(
        self, kernel: KernelKey, fence: int, ids: Sequence[str] | None = None
    ) -> list[AgentRecord]:
        """Take over every agent that hasn't ended and that no living kernel owns.

        That is: never owned, released, its owner's lease run out, or its owner a dead predecessor of this
        kernel (same host, boot and data directory). Old owners are fenced, and the agents' epochs count as
        acknowledged.

        Args:
            kernel: who takes over.
            fence: its fencing token.
            ids: only these agents, those whose files the kernel has; None: all.

        Returns:
            The agents, now owned by `kernel`, in key order.

        Raises:
            OwnerMoved: this kernel itself is fenced or past its lease.
            Unavailable: the database is away. What was claimed before stays claimed; calling again is safe.
        """
        claimed: list[AgentRecord] = []
        values = {
            "kernel": kernel,
            "fence": fence,
            "limit": CLAIM_BATCH,
            "ids": None if ids is None else list(ids),
        }
        while True:
            # One transaction a batch bounds the number of advisory locks held at once.
            rows = await self._all("kernels.claim", agent_record, values)
            claimed += rows
            if len(rows) < CLAIM_BATCH:
                break
        if await self._tuple("kernels.may_claim", values) is None:
            raise OwnerMoved("this kernel's lease has run out or another kernel took over")
        return sorted(claimed, key=lambda agent: agent.key)

    async def release_agent(self, key: AgentKey, kernel: KernelKey) -> None:
        """Give up an agent that `kernel` owns: any kernel may claim it.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": key, "kernel": kernel}
        async with borrowed(self._pool) as connection, connection.transaction():
            await connection.execute(statement("kernels.lock_agent"), values)
            await connection.execute(statement("kernels.release_agent"), values)

    async def ping(self) -> str:
        """Ask the server for its version.

        Raises:
            Unavailable: the database is away.
        """
        row = await self._tuple("kernels.version", {})
        return "" if row is None else str(row[0])
