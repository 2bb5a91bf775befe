"""What becomes of an agent while this kernel owns it, and who hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from ringfence.kernel.journal.types import ScheduleRecord, StoredRow
from ringfence.kernel.waits import Wait

if TYPE_CHECKING:
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.pool_shares import Member
    from ringfence.kernel.releases import Releases
    from ringfence.kernel.resting import Folded, LetGo
    from ringfence.kernel.retries import Retry
    from ringfence.kernel.thread import Thread
    from ringfence.sandbox.types import Program
    from ringfence.syscalls.hearing import Hearing

NOTHING_MOVED: Mapping[int, int] = MappingProxyType({})


class Listeners:
    """What doors of other protocols want to hear of an agent.

    Attributes:
        wait: told that a call waits, and for what.
        rights: told that the rights were read again, and may be others.
        parts: who hears a call while it runs, by its place.
    """

    def __init__(self) -> None:
        self.wait: set[Callable[[Flight, Wait], None]] = set()
        self.rights: set[Callable[[], None]] = set()
        self.parts: dict[tuple[str, int], Hearing] = {}


class Course:
    """What becomes of an agent, as it begins.

    Attributes:
        pools: budgets that it has together with other agents; None: none.
        releases: gives replies out in their recorded order, while its program replays several lanes.
        retry: the newest start of a program that failed; it is waited for where the agent says so.
        borrowed: whether its files are in the data directory of another kernel, which has it back after a rollback.
        going_back: whether a rollback of it is recorded and not at its end: nobody starts it.
        asks_anew: whether its next start is a person's after its end, so that what nobody answered in time is asked again.
        let_go: calls of its that wait and that nobody keeps: its next start makes them again. See `resting`.
        moved_us: by how much the wall clock was set while such calls waited, by step.
    """

    __slots__ = (
        "arrived",
        "asks_anew",
        "borrowed",
        "ended_runs",
        "fenced",
        "folded",
        "frozen",
        "generation",
        "going_back",
        "let_go",
        "live_lanes",
        "loaded",
        "moved_us",
        "on_rest",
        "parking",
        "pools",
        "program",
        "releases",
        "retry",
        "schedule",
        "shown",
        "steps",
        "unreadable",
    )

    def __init__(self) -> None:
        self.pools: Member | None = None
        self.releases: Releases | None = None
        self.retry: Retry | None = None
        self.asks_anew = False
        self.let_go: tuple[LetGo, ...] = ()
        self.moved_us: Mapping[int, int] = NOTHING_MOVED
        self.folded: Folded | None = None  # what rights and environment are made from; None: they are there
        self.steps: int = 0
        self.live_lanes = 0  # as the program reported it; 0: it didn't
        self.shown: tuple[str, str] | None = None  # the state and text that waits gave the agent
        self.schedule: ScheduleRecord | None = None
        self.ended_runs = 0  # of its schedule, under this kernel
        self.on_rest: Callable[[Thread, bool], None] | None = None
        self.program: Program | None = None
        self.frozen = False
        self.parking: asyncio.Future[bool] | None = (
            None  # whether it is to be parked; None: nothing speaks for it
        )
        self.generation = 0
        self.going_back = False
        self.fenced = False
        self.borrowed = False
        self.arrived: list[StoredRow] | None = None  # outcomes recorded while the past is being read
        self.loaded = False  # whether `replay` is that of the present branch
        self.unreadable = ""  # why the checkpoint to go on from can't be read; empty: it can
