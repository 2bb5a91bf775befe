"""What a syscall's body is given and what it must provide. Bodies see these protocols, never the kernel.

A body is a module with the name of its row (`fs_read` for `fs.read`) and these names:

    class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True): fields of the request message
    class Result(msgspec.Struct, frozen=True): fields of the response message
    def plan(arguments, env) -> Plan          # no effect; raises InvalidRequest
    async def run(call, arguments) -> Result  # rows of every class but ATOMIC
    def plan_at_once(arguments, env) -> Plan, def run_at_once(call, arguments) -> Result | None
        # reads that wait for nothing may have both: called one after the other, without a turn of the event loop between;
        # None: it would take long, so `run` does it
    async def recover(call, arguments) -> Result | Rerun  # rows RESTORE, ROLL_FORWARD, ASK_TARGET
    def transaction(arguments) -> Atomic, def finish(arguments, done) -> Result   # ATOMIC rows
    async def wait(call, arguments) -> Result | None   # optional, ATOMIC rows: at first, and after each try that found nothing; a result ends the call
    async def prepare(call, arguments) -> Atomic   # optional, ATOMIC rows: in place of transaction, before every try
    async def settle(call, arguments, done) -> None    # with prepare: what was committed, or None where nothing was
    async def locate(arguments, env) -> Plan | None    # optional: the plan again, once it is known what the arguments name
    async def measure(call, arguments, window) -> Plan  # optional: the plan of an allowed call again, with what it takes
    async def pointed(call, arguments) -> tuple[Pointed, ...]  # optional: what the arguments point to now, for who is asked about it
    def room(call, arguments) -> Room   # optional: how large the answer may be, asked where bytes are counted; see `payload`

The table checks all of it at boot, field by field against the descriptor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec
from ringfence.policy.types import Resource, Verdict
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.usage import Meter
from ringfence.sandbox.workspace import Workspace
from ringfence.syscalls.approving import Confirmed, Pointed
from ringfence.syscalls.confined import Confined
from ringfence.syscalls.declared import HttpResource, LlmResource, SqlResource
from ringfence.syscalls.lent import AsyncLock, Doubt, Lent
from ringfence.syscalls.payload import Carries

if TYPE_CHECKING:
    from ringfence.syscalls.sql_target.records import Touched


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What a model may be sent at most.

    Attributes:
        max_tokens: of one prompt; None: any.
        page: whether results of tools leave a prompt that is longer.
    """

    max_tokens: int | None = None
    page: bool = False


class Effect(Enum):
    """What a call does to the world. Order is severity."""

    READ = 1
    WRITE = 2
    DESTROY = 3
    EXTERNAL = 4


class Recovery(Enum):
    """What recovery does with a call caught between effect and outcome."""

    REPEAT = 1
    RESTORE = 2
    ROLL_FORWARD = 3
    ASK_TARGET = 4
    ATOMIC = 5
    KEYED = 6


NOTHING_RESERVED: Mapping[str, float] = MappingProxyType({})


class Rerun(Enum):
    """Answer of `recover`: no effect happened, so the call is run again from its start."""

    RERUN = 1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One thing policy has to allow for this call. Made and hashed for every call, so no dataclass: a tenth of the time."""

    action: str
    resource: Resource


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a call is about to do, found without doing it.

    Attributes:
        resource: as people see it in `steps`.
        questions: all must be allowed.
        foreseen: those that are put again while it runs, when more is known; before, only a deny of one counts.
        effect: raised above the row's for this call, or None.
        idempotent: False for an external call whose resource takes no key; recovery then reports it as unknown.
        no_return: why nothing can undo it, in words for people that begin with "can't be undone"; empty: something can, or it need
            not. A call that destroys and has no way back is never let run by a rule: a person is asked.
        doubt: why a person is asked whatever rules say; None: nothing is doubtful.
        reserve: amounts of totals (`tokens`, `usd`) that the call may take at most; reserved before it runs.
        pointed: what its arguments point to, as the call will have it; found by `measure`. An approval holds for this alone.
        data: whatever `run` wants to find again in `call.plan.data`.
    """

    resource: str
    questions: tuple[Question, ...]
    foreseen: tuple[Question, ...] = ()
    effect: Effect | None = None
    idempotent: bool = True
    no_return: str = ""
    doubt: Doubt | None = None
    reserve: Mapping[str, float] = NOTHING_RESERVED
    pointed: tuple[Pointed, ...] = ()
    data: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """ATOMIC work on the shared state, committed with the outcome.

    Attributes:
        reads: versions that keys must still have.
        puts: new values.
        deletes: keys to remove.
        claims: work claims that the agent must still hold, with their fences.
    """

    reads: Mapping[str, int] = field(default_factory=dict[str, int])
    puts: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    deletes: Sequence[str] = ()
    claims: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDone:
    """What the transaction did: new versions and old ones (0: there was none) by key."""

    versions: Mapping[str, int]
    previous: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSave:
    """ATOMIC save of the agent's own state as canonical JSON."""

    state: bytes
    schema_version: int
    next_child: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """ATOMIC work that one SQL statement does, committed with the outcome.

    The statement stands in the journal's `atomic.sql`. It takes one jsonb parameter: the values, and who calls as
    `agent` (key), `agent_id`, `lane`, `step` and `branch`. It returns one jsonb value, which `finish` gets decoded; None
    where it returns null or no row. Two answers never reach `finish`: `{"conflict": {key: [version, by, step, read]}}` fails
    the call as a conflict, and `{"again": true}` leads back to the body's `wait`.

    INVARIANT: a statement that answers conflict or again has changed nothing.

    Attributes:
        statement: its name in `atomic.sql`.
        values: JSON values; bytes arrive as base64.
        claim: key of the work claim that it is about: its row is there and locked before the statement runs.
    """

    statement: str
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    claim: str = ""


Atomic: TypeAlias = StateChange | CheckpointSave | Work


@dataclass(frozen=True, slots=True, kw_only=True)
class StateValue:
    """One key as `state.get` finds it. `value` is JSON, None where there is no value.

    `tainted_by`: the agent that wrote it, where it was tainted then; else empty.
    """

    value: bytes | None
    version: int
    tainted_by: str = ""


class NeedsApproval(Exception):
    """A rule asks about something that no person has approved yet. Nothing has happened."""


WaitKind: TypeAlias = Literal["timer", "message", "approval", "budget", "rate", "credential", "task"]
"""What a call may wait for."""


class StateReader(Protocol):
    """Reads the shared state."""

    async def get(self, key: str) -> StateValue:
        """Read one key."""
        ...


class Env(Lent, Confined, Protocol):
    """What the kernel lends to bodies: one per agent, frozen."""

    @property
    def agent(self) -> str:
        """Agent id."""
        ...

    @property
    def workspace(self) -> Workspace:
        """The live workspace."""
        ...

    @property
    def snapshots(self) -> SnapshotStore:
        """Rollback points of this agent, outside its reach."""
        ...

    @property
    def meter(self) -> Meter:
        """The size of the live workspace, and its limit. For whoever holds the lock."""
        ...

    @property
    def state(self) -> StateReader:
        """The shared state."""
        ...

    @property
    def http(self) -> Mapping[str, HttpResource]:
        """HTTP resources by name."""
        ...

    @property
    def sql(self) -> Mapping[str, SqlResource]:
        """SQL resources by name."""
        ...

    @property
    def llm(self) -> Mapping[str, LlmResource]:
        """Hosts of language models by name."""
        ...

    def visible(self, action: str, path: str) -> bool:
        """Whether policy lets this agent do `action` on a canonical path: used to leave out what it may not see."""
        ...

    def masked(self) -> Sequence[str]:
        """Canonical paths of the live workspace that commands must not see."""
        ...

    def lock(self) -> AsyncLock:
        """The workspace's lock: one command at a time, and fs changes wait for it."""
        ...


class Call(Carries, Protocol):
    """One call in flight, as its body sees it."""

    @property
    def env(self) -> Env:
        """What the kernel lends."""
        ...

    @property
    def plan(self) -> Plan:
        """The plan that was decided."""
        ...

    @property
    def step(self) -> int:
        """Thread-wide sequence number; names the rollback point of this call."""
        ...

    @property
    def effect_id(self) -> str:
        """Stable over retries, restarts and branches."""
        ...

    @property
    def deadline_s(self) -> float:
        """Seconds that the body may still take."""
        ...

    @property
    def memo(self) -> dict[str, Any]:
        """What `wait` wants to find again before the next try. Lost with the kernel."""
        ...

    @property
    def age_s(self) -> float:
        """Seconds since this kernel took the call."""
        ...

    async def judge(self, questions: Sequence[Question]) -> Sequence[Verdict]:
        """Ask policy about more than the plan knew, in order; records the rules. Raises nothing on a deny."""
        ...

    @property
    def asks_what_it_made(self) -> bool:
        """Whether a condition in force asks if the thread itself made what the call changes."""
        ...

    async def judge_made(self, touched: Touched) -> None:
        """Say which rows the call is about to change, and judge it anew by whether the thread made all of them.

        Raises:
            Denied: a condition refuses it.
            NeedsApproval: a condition asks; let it pass: the body is run again from its start once a person has approved.
        """
        ...

    async def require(self, questions: Sequence[Question]) -> None:
        """Judge, and raise `Denied` naming the first refusal.

        Raises:
            Denied: a rule denies it.
            NeedsApproval: a rule asks; let it pass: the body is run again from its start once a person has approved.
        """
        ...

    async def confirm(
        self, questions: Sequence[Question], *, question: str = "", detail: Mapping[str, Any] | None = None
    ) -> Confirmed:
        """Judge more questions like `require`, but wait here for a person where something asks, keeping what was done.

        Args:
            questions: what policy has to allow.
            question: what the program itself asks; empty: only rules ask.
            detail: what the person is shown beside the arguments, as plain JSON.

        Raises:
            Denied: a rule or a person denies it, or nobody answered in time.
        """
        ...

    async def record(self, progress: bytes) -> None:
        """Make progress durable in the journal before an effect counts; `recover` finds the last one in `progress`."""
        ...

    @property
    def progress(self) -> bytes | None:
        """What the crashed attempt recorded last, else None."""
        ...

    def taint(self, source: str) -> None:
        """Say that the call has read something untrusted, what it was for people: its answer taints the thread."""
        ...

    def settle(self, used: Mapping[str, float]) -> None:
        """Say what the call really took of what its plan reserved; the last word counts. Unsaid: all of it."""
        ...

    def add_point(self, covers: Sequence[str], kind: str, size_bytes: int) -> None:
        """Declare that a verified rollback point named after `step` is durable; the outcome row carries it."""
        ...

    def raise_effect(self, effect: Effect) -> None:
        """Raise the effect found while running, for exec.run and sql.write; checks the `destructive` budget."""
        ...

    def waiting(
        self, kind: WaitKind, text: str, until_us: int | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Say that the call waits while the block is entered: the agent shows it, and may be put to sleep meanwhile.

        Args:
            kind: what for.
            text: the same for people.
            until_us: when the wait ends by itself, wall clock in microseconds since the epoch; None: it doesn't.
        """
        ...

    async def failpoint(self, name: str) -> None:
        """A named place where fault tests kill the kernel; does nothing otherwise."""
        ...

    async def check_live(self) -> None:
        """Look at the policy epoch and the lease once more, right before an effect.

        Raises:
            Revoked: a grant this call uses is gone.
            Fenced: the lease has run out.
        """
        ...
