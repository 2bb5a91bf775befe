"""One agent that this kernel owns: its rights, budgets, place in the journal and calls in flight."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ringfence.kernel.facts import Facts
from ringfence.kernel.journal.types import AgentKey, AgentRecord, ScheduleRecord, StoredRow
from ringfence.kernel.reads import History
from ringfence.kernel.replay import Lineage, Replay, Try
from ringfence.kernel.rights import Rights
from ringfence.kernel.waits import Wait, show

if TYPE_CHECKING:
    from ringfence.kernel.budgets import Budgets
    from ringfence.kernel.environment import AgentEnvironment
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.pool_shares import Member
    from ringfence.kernel.releases import Releases
    from ringfence.kernel.retries import Retry
    from ringfence.policy.manifest_types import Manifest
    from ringfence.sandbox.types import Program

FINAL_STATES = frozenset({"done", "failed", "killed"})


class Thread:
    """The live side of one agent. All of it is touched from the kernel's event loop alone.

    Attributes:
        pools: budgets that it has together with other agents; None: none.
        releases: gives replies out in their recorded order, while its program replays several lanes.
        retry: the newest start of a program that failed; it is waited for where the agent says so.
    """

    pools: Member | None = None
    releases: Releases | None = None
    retry: Retry | None = None

    def __init__(
        self,
        *,
        record: AgentRecord,
        manifest: Manifest,
        rights: Rights,
        budgets: Budgets,
        environment: AgentEnvironment,
        lineage: Lineage,
        next_step: int,
        reload: Callable[[Thread], Awaitable[Rights]],
    ) -> None:
        self.record = record
        self.key: AgentKey = record.key
        self.id = record.id
        self.manifest = manifest
        self.rights = rights
        self.budgets = budgets
        self.environment = environment
        self.lineage = lineage
        self.branch = lineage.branch
        self.replay = Replay()
        self.facts = Facts()
        self.history = History()
        self.lanes: dict[str, int] = {}
        self.flights: dict[int, Flight] = {}
        self.by_lane: dict[tuple[str, int], Flight] = {}
        self.effects: dict[str, Try] = {}
        self.consumed_effects: set[str] = set()
        self.state = record.state
        self.waiting_for = record.waiting_for
        self.error = record.error
        self.restarts = record.restarts
        self.steps = 0
        self.waits: dict[int, Wait] = {}
        self.live_lanes = 0  # as the program reported it; 0: it didn't
        self.shown: tuple[str, str] | None = None  # the state and text that waits gave the agent
        self.asleep = record.asleep  # its process was ended because all of it waits; its calls go on
        self.schedule: ScheduleRecord | None = None
        self.ended_runs = 0  # of its schedule, under this kernel
        self.on_rest: Callable[[Thread, bool], None] | None = None
        self.program: Program | None = None
        self.frozen = False
        self.parking: asyncio.Future[bool] | None = (
            None  # whether it is to be parked; None: nothing speaks for it
        )
        self.generation = 0
        self.operation = asyncio.Lock()
        self.loading = asyncio.Lock()
        self.resolved = asyncio.Condition()
        self.changed = asyncio.Condition()
        self.storing = asyncio.Lock()
        self.fenced = False
        self.arrived: list[StoredRow] | None = None  # outcomes recorded while the past is being read
        self.loaded = False  # whether `replay` is that of the present branch
        self.unreadable = ""  # why the checkpoint to go on from can't be read; empty: it can
        self.purged: frozenset[str] = frozenset()
        # Places whose call began its effect and could not be recorded: settled before they are asked for again.
        self.settling = asyncio.Lock()
        self.unsettled: set[tuple[str, int]] = set()
        self.epoch_work: dict[int, asyncio.Task[list[dict[str, Any]]]] = {}
        self._next_step = next_step
        self._reload = reload
        self._reloading = asyncio.Lock()
        self._token_hash = b""

    # -- identity -------------------------------------------------------------------------------------------------

    def new_token(self) -> str:
        """A token for the next start; the one before stops working."""
        token = secrets.token_urlsafe(32)
        self._token_hash = hashlib.sha256(token.encode()).digest()
        return token

    def token_matches(self, token: str) -> bool:
        """Whether this is the token of the present start. Takes the same time for every wrong one."""
        offered = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        return bool(self._token_hash) and hmac.compare_digest(offered, self._token_hash)

    # -- steps ----------------------------------------------------------------------------------------------------

    def take_step(self) -> int:
        """The next thread-wide sequence number. Numbers grow over all branches and are never used again."""
        step = self._next_step
        self._next_step += 1
        self.steps += 1
        return step

    def took_off(self, flight: Flight) -> None:
        """A call is in flight from here on."""
        self.flights[flight.step] = flight
        self.by_lane[flight.lane, flight.lane_step] = flight
        if self.waits:
            show(self)

    def landed(self, flight: Flight) -> None:
        """A call is over."""
        self.flights.pop(flight.step, None)
        self.by_lane.pop((flight.lane, flight.lane_step), None)
        if self.waits or self.asleep:
            show(self, over=True)

    def next_of(self, lane: str) -> int:
        """The step that a lane of the present start comes to next."""
        start = self.replay.first_step if lane == "0" else 0
        return self.lanes.get(lane, start)

    @property
    def last_step(self) -> int:
        """The newest step that was given out; 0 before the first."""
        return self._next_step - 1

    # -- rights ---------------------------------------------------------------------------------------------------

    async def current_rights(self) -> Rights:
        """Rights to decide under, read again when a grant's life has ended."""
        if self.rights.expired:
            await self.refresh(None)
        return self.rights

    async def refresh(self, epoch: int | None) -> Rights:
        """Read the rights again, unless they are already those of `epoch` or later."""
        async with self._reloading:
            if epoch is None or self.rights.epoch < epoch:
                self.rights = await self._reload(self)
                await self.environment.rights_changed(self.rights)
            return self.rights

    def recorded(self, row: StoredRow, generation: int) -> None:
        """Take the outcome of a call that ran in `generation`.

        A later start, or a read of the past that is under way, has to find it: the program asks for it again.
        """
        if generation != self.generation or row.outcome == "unknown":
            self.replay.add(row)
        if self.arrived is not None:
            self.arrived.append(row)

    async def announce(self) -> None:
        """Wake those who wait for a change of this agent's state."""
        async with self.changed:
            self.changed.notify_all()
