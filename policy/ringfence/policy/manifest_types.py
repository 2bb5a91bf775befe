"""What a manifest says, as values. Sizes in bytes, durations in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ringfence.policy.approving import People
from ringfence.policy.conditions import Condition
from ringfence.policy.problems import Problem
from ringfence.policy.rules import Rule, Rules
from ringfence.policy.units import Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to start. `workspace` is as written, relative to the manifest; None: an empty one."""

    command: tuple[str, ...]
    workspace: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A read-only directory of the host inside the sandbox, at the same path, and where the file names it."""

    path: str
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A wall that has to stand, in `form` if it names one, and where the file demands it. The wall `all` is every one."""

    wall: str
    form: str = ""
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)

    @property
    def text(self) -> str:
        """As it is written."""
        return f"{self.wall}:{self.form}" if self.form else self.wall


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Walls and limits of one agent.

    Attributes:
        backend: None where the kernel's own choice holds.
        mounts: of a kernel file: what manifests may name, and all beneath.
        require: walls that have to stand besides those that always have to; None: nothing is said, which for an agent
            means all that the backend has.
        doors: servers of the kernel's on the loopback of the program's sandbox, such as `models`; empty: it has no network.
    """

    backend: str | None = None
    workspace: str = "mediated"
    memory_bytes: int = 256 << 20
    pids: int = 64
    cpu: float = 1.0
    disk_bytes: int = 1 << 30
    timeout_s: float = 7200.0
    mounts: tuple[Mount, ...] = ()
    require: tuple[Demand, ...] | None = None
    doors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Quotas and budgets: rates by action pattern, totals by name, and the context window.

    Attributes:
        on_exhausted: what becomes of an agent that has spent a total: `park`, or `refuse` the call alone.
    """

    rate: Mapping[str, Rate] = field(default_factory=dict[str, Rate])
    total: Mapping[str, float] = field(default_factory=dict[str, float])
    context_max_tokens: int | None = None
    context_on_overflow: str = "refuse"
    on_exhausted: str = "park"


NO_LIMITS = Budgets()
"""Stands for all that have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Approvals:
    """How long a parked call waits, how long its process does, and who has to approve it."""

    expire_s: float = 86400.0
    linger_s: float = 30.0
    people: People = field(default_factory=People)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """What calls may differ in and still be taken for the same after a restart.

    Attributes:
        action: the one that it is about, or `mcp.NAME.*`.
        at: parts of a JSON pointer into the arguments, `*` for any; empty: all of them.
        pattern: what is ignored of the texts there; empty: everything there is.
        line: where it stands in the file, and `column`.
    """

    action: str
    at: tuple[str, ...] = ()
    pattern: str = ""
    line: int = field(default=1, compare=False)
    column: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """When a program is started again. `resume: own`: it resumes itself and gets no replay."""

    policy: str = "on-failure"
    max: int = 5
    resume: str = "replay"
    ignore: tuple[Ignored, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When to run: a cron line in a time zone, or an interval.

    Attributes:
        missed: what becomes of times that passed while nobody could begin a run: `once`, `all` or `skip`.
        overlap: what a time does that finds the last run not over: `skip`, `queue` or `replace`.
        jitter_s: a run begins up to so much after its time, each time otherwise.
    """

    cron: str = ""
    every_s: float | None = None
    timezone: str = "UTC"
    missed: str = "once"
    overlap: str = "skip"
    jitter_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """One thing that an agent says it can do."""

    id: str
    name: str
    description: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """An agent that takes tasks by A2A, and what its card says.

    Attributes:
        description: what it is for; empty: nothing is said.
        skills: empty: one is made of the description.
    """

    description: str = ""
    skills: tuple[Skill, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One agent as its author asks for it. Parsed, checked, immutable.

    Attributes:
        roles: roles of the kernel file that it takes.
        delegates: agents that it may start with rights of their own.
        serve: what its card says, where it takes tasks by A2A; None: it doesn't.
        environment: the only one whose resources it may use; empty: any.
        when: conditions on facts; they narrow what the rules say.
    """

    name: str
    run: Run
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    rules: Rules = field(default_factory=Rules)
    roles: tuple[str, ...] = ()
    delegates: tuple[str, ...] = ()
    serve: Serve | None = None
    environment: str = ""
    when: tuple[Condition, ...] = ()
    budgets: Budgets = field(default_factory=Budgets)
    approvals: Approvals = field(default_factory=Approvals)
    restart: Restart = field(default_factory=Restart)
    schedule: Schedule | None = None
    priority: str = "normal"
    later: tuple[Problem, ...] = ()

    @property
    def allow(self) -> tuple[Rule, ...]:
        """Rules that allow."""
        return self.rules.allow

    @property
    def ask(self) -> tuple[Rule, ...]:
        """Rules that ask."""
        return self.rules.ask

    @property
    def deny(self) -> tuple[Rule, ...]:
        """Rules that deny."""
        return self.rules.deny

    def unsupported(self) -> list[Problem]:
        """What is well-formed but can't be enforced by this release; a kernel refuses such a manifest at submit."""
        return list(self.later)
