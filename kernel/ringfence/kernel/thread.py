"""One agent that this kernel owns: its rights, budgets, place in the journal and calls in flight."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.course import Course, Listeners
from ringfence.kernel.facts import Facts
from ringfence.kernel.journal.types import AgentKey, AgentRecord, StoredRow
from ringfence.kernel.reads import History
from ringfence.kernel.replay import Lineage, Replay, Try
from ringfence.kernel.rights import Rights
from ringfence.kernel.waits import Wait, show

if TYPE_CHECKING:
    from ringfence.kernel.budgets import Budgets
    from ringfence.kernel.environment import AgentEnvironment
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.resting import Folded
    from ringfence.policy.manifest_types import Manifest
    from ringfence.sandbox.workspace import Workspace

FINAL_STATES = frozenset({"done", "failed", "killed"})
NO_GRANTS: frozenset[str] = frozenset()
LIVELY: Final[Mapping[str, Callable[[], Any]]] = {
    "replay": Replay,
    "facts": Facts,
    **dict.fromkeys(("flights", "by_lane", "waits", "lanes", "effects"), dict),
    **dict.fromkeys(("consumed_effects", "unsettled"), set),
}
"""Parts of a thread that are let go while it rests and nothing is in them, and how they begin when somebody asks for one."""


class Thread(Course):
    """The live side of one agent. All of it is touched from the kernel's event loop alone."""

    __slots__ = (
        "__weakref__",
        "_changed",
        "_doors",
        "_environment",
        "_history",
        "_next_step",
        "_reload",
        "_reloading",
        "_resolved",
        "_rights",
        "_token_hash",
        "asleep",
        "branch",
        "budgets",
        "by_lane",
        "consumed_effects",
        "effects",
        "epoch_work",
        "error",
        "facts",
        "flights",
        "id",
        "key",
        "lanes",
        "lineage",
        "loading",
        "manifest",
        "operation",
        "purged",
        "record",
        "replay",
        "restarts",
        "settling",
        "state",
        "storing",
        "unsettled",
        "waiting_for",
        "waits",
    )

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
        super().__init__()
        self.record = record
        self.key: AgentKey = record.key
        self.id = record.id
        self.manifest = manifest
        self._rights: Rights | None = rights
        self.budgets = budgets
        self._environment: AgentEnvironment | None = environment
        self.lineage = lineage
        self.branch = lineage.branch
        self.replay = Replay()
        self.facts = Facts()
        self._history: History | None = None
        self.lanes: dict[str, int] = {}
        self.flights: dict[int, Flight] = {}
        self.by_lane: dict[tuple[str, int], Flight] = {}
        self.effects: dict[str, Try] = {}
        self.consumed_effects: set[str] = set()
        self.state = record.state
        self.waiting_for = record.waiting_for
        self.error = record.error
        self.restarts = record.restarts
        self.waits: dict[int, Wait] = {}
        self.asleep = record.asleep  # its process was ended because all of it waits; its calls go on
        self.operation = asyncio.Lock()
        self.loading = asyncio.Lock()
        self._resolved: asyncio.Condition | None = None  # there when somebody has waited for it: few ever do
        self._changed: asyncio.Condition | None = None
        self.storing = asyncio.Lock()
        self.purged = NO_GRANTS
        # Places whose call began its effect and could not be recorded: settled before they are asked for again.
        self.settling = asyncio.Lock()
        self.unsettled: set[tuple[str, int]] = set()
        self.epoch_work: dict[int, asyncio.Task[list[dict[str, Any]]]] = {}
        self._next_step = next_step
        self._reload = reload
        self._reloading = asyncio.Lock()
        self._token_hash = b""
        self._doors: Listeners | None = None

    @property
    def doors(self) -> Listeners:
        """Doors of other protocols that hear of it: most agents have none."""
        if self._doors is None:
            self._doors = Listeners()
        return self._doors

    @property
    def hear_waits(self) -> Sequence[Callable[[Flight, Wait], None]]:
        """Those of them that want to hear that a call waits."""
        return () if self._doors is None else tuple(self._doors.wait)

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

    @property
    def rights(self) -> Rights:
        """What it may."""
        if self._rights is None:
            self.unfold()
            assert self._rights is not None  # noqa: S101 - made a line before
        return self._rights

    @rights.setter
    def rights(self, rights: Rights) -> None:
        self.unfold()
        self._rights = rights

    @property
    def environment(self) -> AgentEnvironment:
        """What the kernel lends to its calls."""
        if self._environment is None:
            self.unfold()
            assert self._environment is not None  # noqa: S101 - made a line before
        return self._environment

    @property
    def history(self) -> History:
        """What it read and made, as far as anybody asked."""
        if self._history is None:
            self._history = History()
        return self._history

    @history.setter
    def history(self, history: History | None) -> None:
        self._history = history

    @property
    def workspace(self) -> Workspace:
        """Its files."""
        return self.environment.workspace if self.folded is None else self.folded.workspace

    @property
    def epoch(self) -> int:
        """Policy epoch of its rights."""
        return self.rights.epoch if self.folded is None else self.folded.rights.epoch

    def fold(self, folded: Folded) -> None:
        """Keep what rights and environment are made from in their place."""
        self.folded, self._rights, self._environment, self._history = folded, None, None, None
        self._token_hash = b""  # there is no process that could show it
        for name in LIVELY:
            part = getattr(self, name)
            if part.bare if isinstance(part, Replay | Facts) else not part:
                delattr(self, name)

    if not TYPE_CHECKING:  # it would take every misspelt name for a part

        def __getattr__(self, name: str) -> Any:
            """Begin a part anew that was let go."""
            make = LIVELY.get(name)
            if make is None:
                raise AttributeError(name)
            part = make()
            setattr(self, name, part)
            return part

    def unfold(self) -> None:
        """Make rights and environment again; nothing where they are there."""
        if self.folded is not None:
            # INVARIANT: whoever holds an environment yet has the one that is in force, for its lock is the workspace's.
            self._rights, self._environment = self.folded.unfold(self)
            self.folded = None

    async def current_rights(self) -> Rights:
        """Rights to decide under, read again when a grant's life has ended."""
        if self.rights.expired:
            await self.refresh(None)
        return self.rights

    async def refresh(self, epoch: int | None) -> Rights:
        """Read the rights again, unless they are already those of `epoch` or later."""
        async with self._reloading:
            if epoch is None or self.epoch < epoch:
                rights = await self._reload(self)
                if self.folded is not None:
                    self.folded = self.folded.under(rights)
                else:
                    self.rights = rights
                    self.environment.rights_changed(rights)
                if self._doors is not None:
                    for told in tuple(self._doors.rights):
                        told()
                return rights
            return self.rights

    def recorded(self, row: StoredRow, generation: int) -> None:
        """Take the outcome of a call that ran in `generation`.

        A later start, or a read of the past that is under way, has to find it: the program asks for it again.
        """
        if generation != self.generation or row.outcome == "unknown":
            self.replay.add(row)
        if self.arrived is not None:
            self.arrived.append(row)

    # -- who waits for it -----------------------------------------------------------------------------------------

    @property
    def changed(self) -> asyncio.Condition:
        """Changes of its state."""
        if self._changed is None:
            self._changed = asyncio.Condition()
        return self._changed

    @property
    def resolved(self) -> asyncio.Condition:
        """That an operator has settled a call, or that it is started again."""
        if self._resolved is None:
            self._resolved = asyncio.Condition()
        return self._resolved

    async def announce(self) -> None:
        """Wake those who wait for a change of this agent's state."""
        if self._changed is not None:
            async with self._changed:
                self._changed.notify_all()

    async def announce_resolved(self) -> None:
        """Wake its calls that wait for an operator."""
        if self._resolved is not None:
            async with self._resolved:
                self._resolved.notify_all()
