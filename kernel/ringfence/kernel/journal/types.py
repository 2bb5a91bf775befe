"""Records of the journal: what callers hand to it and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import Any, NamedTuple, NewType

import msgspec
from ringfence.kernel.journal.deltas import Base, PackedSave
from ringfence.syscalls.base import Atomic

AgentKey = NewType("AgentKey", int)
KernelKey = NewType("KernelKey", int)


class Phase(IntEnum):
    """What a journal row says about its step."""

    INTENT = 0
    OUTCOME = 1
    PROGRESS = 2
    EVENT = 3


class JournalError(Exception):
    """The journal could not do what was asked; nothing of it is committed."""


class Unavailable(JournalError):
    """The database can't be reached or can't commit. Nothing may run."""


class EpochMoved(JournalError):
    """The agent's policy epoch is no longer the one the call was decided under: decide again."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"policy epoch is {epoch} now")
        self.epoch = epoch


class OwnerMoved(JournalError):
    """Another kernel owns the agent now, or this kernel's lease has run out."""


class Moved(NamedTuple):
    """A key that is no longer at the version that was read, and who wrote the one that it has."""

    version: int
    agent: str
    step: int
    read: int


class Unheld(NamedTuple):
    """A work claim that is not the caller's any more, and whose it is: empty where it is nobody's."""

    fence: int
    agent: str
    step: int
    given: int


class StateConflict(JournalError):
    """An ATOMIC change read keys that are no longer current, or rests on claims that are lost. Nothing of it is committed.

    Attributes:
        keys: the keys that moved.
        claims: the claims that are lost.
    """

    def __init__(self, keys: dict[str, Moved], claims: dict[str, Unheld] | None = None) -> None:
        super().__init__("state changed")
        self.keys = keys
        self.claims = claims or {}


class NothingYet(JournalError):
    """ATOMIC work found nothing to do yet: wait and try again. Nothing of this entry is committed."""


class BadRow(JournalError):
    """The row can't be stored: NUL or a lone surrogate in a text, a number out of range, or too large."""


class Damaged(JournalError):
    """A checkpoint is not what was saved: its checksum differs.

    Attributes:
        step: the step that saved it.
        schema_version: as it was saved with.
    """

    def __init__(self, step: int, schema_version: int) -> None:
        super().__init__(
            f"checkpoint `{step}` (schema version {schema_version}) is damaged: its checksum differs"
        )
        self.step = step
        self.schema_version = schema_version


class Ambiguous(JournalError):
    """Several agents have this name: `ids`, newest first."""

    def __init__(self, name: str, ids: list[str]) -> None:
        super().__init__(f"several agents are named `{name}`; use an id: {', '.join(ids)}")
        self.ids = ids


class Row(msgspec.Struct, kw_only=True):
    """One journal row before the writer gives it its place in the chain. Made for every call, so no dataclass.

    Attributes:
        chain: `agents.key` for an agent's chain, minus `kernels.key` for a kernel's own.
        step: thread-wide sequence number; 0 for events.
        lane: lane id, empty for events.
        effect: READ, WRITE, DESTROY, EXTERNAL, or empty for events.
        verdict: allow, deny, ask, or empty.
        outcome: ok, error, denied, refused, unknown, cancelled, parked; empty for an intent.
        digest: SHA-256 of the canonical arguments; empty for events.
        effect_id: hex, or empty.
        started_us: wall clock, microseconds since the epoch.
        body: canonical JSON with everything else.
    """

    chain: int
    phase: Phase
    action: str
    resource: str = ""
    step: int = 0
    branch: int = 0
    lane: str = ""
    lane_step: int = 0
    effect: str = ""
    verdict: str = ""
    outcome: str = ""
    digest: bytes = b""
    effect_id: str = ""
    started_us: int = 0
    duration_us: int = 0
    body: bytes = b"{}"


class Entry(msgspec.Struct, kw_only=True):
    """One append.

    Attributes:
        row: what to write.
        epoch: policy epoch the call was decided under; None for rows that no revocation concerns.
        atomic: work to commit in the same transaction.
        finish: makes the row's body from what the atomic work did (StateDone, None for a checkpoint, what the statement
            of a Work answered). What it raises fails this entry, and undoes its work.
    """

    row: Row
    epoch: int | None = None
    atomic: Atomic | PackedSave | None = None
    finish: Callable[[Any], bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """One journal row as it is stored; `archived`: it was read from a file, and is the same row."""

    chain: int
    pos: int
    phase: Phase
    step: int
    branch: int
    lane: str
    lane_step: int
    action: str
    resource: str
    effect: str
    verdict: str
    outcome: str
    digest: bytes
    effect_id: str
    started_us: int
    duration_us: int
    body: bytes
    hash: bytes
    archived: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """One agent as the database knows it."""

    key: AgentKey
    id: str
    name: str
    thread: str
    branch: int
    state: str
    waiting_for: str
    error: str
    manifest: str
    source: str
    input: bytes
    epoch: int
    acked_epoch: int
    owner: KernelKey | None
    uid: int | None
    restarts: int
    exit_code: int | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    asleep: bool = False
    wake_at: datetime | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """When an agent runs by itself, and how it went.

    Attributes:
        next_at: when it fires next; None while paused, or where it never will.
        running: whether a run has begun and not ended.
        runs: how many have begun.
        last_at: when the last one began.
        last_outcome: how the last one ended: `done`, `failed` or `replaced`; empty while it runs, and before the first.
        queued: times that wait for a run of their own, oldest first; `settled_at`: up to when all were dealt with.
    """

    agent: AgentKey
    next_at: datetime | None
    paused: bool
    running: bool
    runs: int
    last_at: datetime | None
    last_outcome: str
    last_error: str
    queued: tuple[datetime, ...] = ()
    settled_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """One start of a kernel.

    Attributes:
        fence: its fencing token; below zero once another kernel took over from it.
        alive: whether its lease still runs, by the database's clock.
    """

    key: KernelKey
    id: str
    host: str
    pid: int
    boot_id: str
    data_dir: str
    fence: int
    lease_until: datetime
    started_at: datetime
    released_at: datetime | None
    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRecord:
    """One stored, revocable permission: a line of the manifest or a later grant.

    Attributes:
        id: `g` and a number, unique in the database.
        origin: `manifest` or `operator`.
        verdict: allow or ask.
        rule: the rule's text in the manifest's own form, as `fs.read: "/workspace/**"`.
    """

    id: str
    agent: AgentKey
    origin: str
    verdict: str
    rule: str
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    uses_left: int | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRecord:
    """One parked call that waits for a person, or what was decided about it.

    Attributes:
        id: `a` and its number, unique in the database.
        arguments: canonical JSON, as the agent made the call.
        digest: SHA-256 of them.
        edited: canonical JSON that an operator put in their place, or None.
        asks: (rule id, action, resource) of everything that asked; resource as policy saw it.
        versions: how the target stood when it was asked, by path.
        detail: what people are shown beside the arguments, such as a diff.
        state: pending, approved, denied, expired or voided.
        good_until: an approved one holds until then for the same call of the same agent; None: for this one alone.
        people: how many have to approve it.
        not_by: who can't approve it, as they submitted the agent; empty: nobody is kept from it.
        votes: what each person said, in order: `by`, `at`, `verdict`, `reason`, `edited`, and where there are any `for_ms`,
            `message` (the id of a callback) and `void` (who approved other arguments after that).
    """

    key: int
    id: str
    agent: AgentKey
    step: int
    branch: int
    lane: str
    lane_step: int
    action: str
    resource: str
    effect: str
    arguments: str
    digest: bytes
    edited: str | None
    asks: tuple[tuple[Any, ...], ...]
    versions: Mapping[str, str]
    detail: Mapping[str, Any]
    state: str
    created_at: datetime
    expires_at: datetime
    decided_at: datetime | None
    decided_by: str | None
    reason: str
    good_until: datetime | None
    people: int = 1
    not_by: str = ""
    votes: tuple[Mapping[str, Any], ...] = ()

    @property
    def living(self) -> tuple[Mapping[str, Any], ...]:
        """The votes that count now: approvals of the same arguments, each by another person."""
        return tuple(v for v in self.votes if v["verdict"] == "approved" and "void" not in v)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRecord:
    """One branch: its prefix is the parent's journal up to and with `cut_step`."""

    branch: int
    parent: int | None
    cut_step: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """One saved state of an agent.

    Attributes:
        state: canonical JSON.
        base: what a later one may rest on; None: it was not read from the store.
    """

    step: int
    branch: int
    lane_step: int
    schema_version: int
    next_child: int
    state: bytes
    base: Base | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """One message, memory entry or artifact that a rollback moves, or can't.

    Attributes:
        kind: `message`, `memory` or `artifact`.
        target: id of the message or entry; name and version of the artifact.
        action: of a message `return` to the mailbox, `take` again, `void`, `send` again, or `taken`: another agent has
            received it, so it can't be called back; of the others `hide` or `restore`.
        detail: from whom or to whom; the space.
        step: that sent it; 0 where it doesn't matter.
    """

    kind: str
    target: str
    action: str
    detail: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVersion:
    """One version of one key of the shared state. `value` None: deleted. `tainted`: whether who wrote it was, if it was looked for."""

    key: str
    version: int
    value: bytes | None
    agent: str
    step: int
    tainted: bool = False
