"""Conditions: what a `when` says. They narrow what rules allow, and never widen it.

INVARIANT: what can't be known counts as matched, so a fact that is missing never lets a call through.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import time, timedelta
from decimal import Decimal
from typing import Final, Protocol
from zoneinfo import ZoneInfo

from ringfence.policy.actions import applies, kind_of
from ringfence.policy.exact import exact, plain
from ringfence.policy.facts import Facts, Read, field_of
from ringfence.policy.matcher import (
    CommandPattern,
    CommandSubject,
    Pattern,
    Subject,
    compile_pattern,
    subject,
)
from ringfence.policy.problems import PatternError
from ringfence.policy.rules import Rule
from ringfence.policy.types import Decision, Resource, Verdict

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
FAMILY: Final = "family"
"""Whose budget a condition asks about: that of the agent at the head, and who uses it: it and all that descend from it."""
SIBLINGS: Final = "siblings"
"""The parent's budget, used by all of its children."""
SHOWN_READS: Final = 3
"""Reads that a refusal names; of more it says how many."""


class Test(Protocol):
    """One thing that an `if` asks about."""

    @property
    def text(self) -> str:
        """Its form in a file."""
        ...

    def holds(self, facts: Facts) -> str:
        """Why it holds, for people; empty: it doesn't."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tainted:
    """The thread has read something that the operator declared untrusted."""

    @property
    def text(self) -> str:
        """Its form in a file."""
        return "tainted: true"

    def holds(self, facts: Facts) -> str:
        """Why it holds, for people; empty: it doesn't."""
        if facts.tainted is None:
            return "whether the thread is tainted can't be known now"
        return f"the thread is tainted by {facts.tainted}" if facts.tainted else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The resource's environment is one of these; with `other`, it has one and it is none of these."""

    names: tuple[str, ...]
    other: bool = False

    @property
    def text(self) -> str:
        """Its form in a file."""
        shown = self.names[0] if len(self.names) == 1 else f"[{', '.join(self.names)}]"
        return f"environment: {shown}" if not self.other else f"environment: not {shown}"

    def holds(self, facts: Facts) -> str:
        """Why it holds, for people; empty: it doesn't."""
        if facts.environment is None:
            return "the environment of the resource can't be known now"
        found = bool(facts.environment) and (facts.environment in self.names) is not self.other
        return f"the resource's environment is `{facts.environment}`" if found else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The thread itself made the resource, or with `made` false: it didn't."""

    made: bool

    @property
    def text(self) -> str:
        """Its form in a file."""
        return f"created: {'true' if self.made else 'false'}"

    def holds(self, facts: Facts) -> str:
        """Why it holds, for people; empty: it doesn't."""
        if facts.created_later:
            return ""
        if facts.created is None:
            return "whether this thread made the resource can't be known now"
        if facts.created is not self.made:
            return ""
        return "this thread made the resource" if self.made else "this thread did not make the resource"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """It is between two times of a day on the clock of a zone, or with `inside` false: it is not.

    A window that ends before it begins runs over midnight; its days are those on which it begins.
    """

    inside: bool
    begin: time
    end: time
    days: frozenset[int]
    timezone: str

    @property
    def text(self) -> str:
        """Its form in a file."""
        days = (
            f", days: [{', '.join(DAYS[day] for day in sorted(self.days))}]"
            if len(self.days) < len(DAYS)
            else ""
        )
        window = f'{{from: "{self.begin:%H:%M}", to: "{self.end:%H:%M}"{days}, timezone: {self.timezone}}}'
        return f"{'hours' if self.inside else 'outside'}: {window}"

    def holds(self, facts: Facts) -> str:
        """Why it holds, for people; empty: it doesn't."""
        if facts.now is None:
            return "the time can't be known now"
        local = facts.now.astimezone(ZoneInfo(self.timezone))
        clock, today = local.time().replace(tzinfo=None), local.weekday()
        if self.begin < self.end:
            within = today in self.days and self.begin <= clock < self.end
        else:
            before = (local.date() - timedelta(days=1)).weekday()
            within = (today in self.days and clock >= self.begin) or (
                before in self.days and clock < self.end
            )
        if within is not self.inside:
            return ""
        return f"it is {DAYS[today]} {clock:%H:%M} in {self.timezone}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A number among the arguments is larger than a bound, or is none."""

    field: str
    over: Decimal

    @property
    def text(self) -> str:
        """Its form in a file."""
        return f"amount: {{field: {json.dumps(self.field)}, over: {plain(self.over)}}}"

    def holds(self, facts: Facts) -> str:
        """Why it holds, for people; empty: it doesn't."""
        value = exact(field_of(facts.arguments, self.field))
        if value is None:
            return f"`{self.field}` is no number that can be read"
        return (
            ""
            if value <= self.over
            else f"`{self.field}` is {plain(value)[:40]}, more than {plain(self.over)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """More than a part of a total is used or held.

    Attributes:
        of: `family`, `siblings`, or a pool's selector; empty: the agent's own.
    """

    total: str
    over: float
    of: str = ""

    @property
    def text(self) -> str:
        """Its form in a file."""
        whose = f', of: "{self.of}"' if self.of else ""
        return f"budget: {{total: {self.total}, over: {self.over * 100:.12g}%{whose}}}"

    def holds(self, facts: Facts) -> str:
        """Why it holds, for people; empty: it doesn't."""
        if self.of:
            share = None if facts.shared is None else facts.shared.get((self.of, self.total))
        else:
            share = None if facts.shares is None else facts.shares.get(self.total)
        named = f"the budget `{self.total}`" + (f" of `{self.of}`" if self.of else "")
        if share is None:
            return f"how much of {named} is used can't be known: it has no limit"
        if share <= self.over:
            return ""
        return f"{share * 100:.3g} % of {named} is used, more than {self.over * 100:.12g} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A condition that matched, and why."""

    condition: Condition
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One line of a `when`.

    Attributes:
        id: unique among conditions and rules of one agent: `w1` in a manifest.
        action: action pattern it is about.
        patterns: canonical patterns of the resources it is about, of the kind that the action has; empty: all.
        tests: what its `if` asks about; all have to hold.
        then: `ask` or `deny`; `deny` where freshness is demanded.
        fresh_s: oldest that what was read may be; None where freshness isn't demanded.
        of: reads it is about; empty: all. Where it names some, one of each has to be there.
        text: canonical one-line form, for people.
        origin: where it stands, for people.
        line: from 1; 0 outside a file.
        column: the same.
    """

    id: str
    action: str
    patterns: tuple[str, ...] = ()
    tests: tuple[Test, ...] = ()
    then: Verdict = Verdict.DENY
    fresh_s: float | None = None
    of: tuple[Rule, ...] = ()
    text: str = ""
    origin: str = "manifest"
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)

    def compiled(self) -> tuple[Pattern, ...]:
        """The patterns as objects that decide."""
        kind = kind_of(self.action)
        return tuple(compile_pattern(kind, text) for text in self.patterns)

    def is_about(self, asked: Subject) -> bool:
        """Whether it speaks of a resource; a command that can't be followed may hold what it speaks of."""
        if not self.patterns:
            return True
        found = self.compiled()
        if any(pattern.forbids(asked) for pattern in found):
            return True
        return isinstance(asked, CommandSubject) and any(
            isinstance(pattern, CommandPattern) and pattern.may_forbid(asked) for pattern in found
        )

    def speaks_of(self, action: str, resource: Resource) -> bool:
        """Whether it speaks of an action on a resource; of one that can't be read, too."""
        if not applies(self.action, action, forbids=True):
            return False
        try:
            return not self.patterns or self.is_about(subject(kind_of(action), resource))
        except PatternError:
            return True

    def concerns(self, read: Read) -> bool:
        """Whether it is a read that this condition wants to be fresh."""
        return not self.of or any(_is_of(rule, read) for rule in self.of)

    def matches(self, facts: Facts) -> str:
        """Why it applies under these facts, for people; empty: it doesn't."""
        if self.fresh_s is not None:
            return _stale(self, facts.reads)
        reasons: list[str] = []
        for test in self.tests:
            why = test.holds(facts)
            if not why:
                return ""
            reasons.append(why)
        return " and ".join(reasons) or "it asks about nothing"


def conditions_on(action: str, conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Those that speak about an action, itself or as the same door."""
    return tuple(item for item in conditions if applies(item.action, action, forbids=True))


def untainting(rules: Sequence[Rule], action: str, resource: Resource) -> str:
    """Id of the first of an operator's rules that a call falls under as it is written; empty: none."""
    for rule in rules:
        if not applies(rule.action_pattern, action, forbids=False):
            continue
        try:
            asked = subject(kind_of(action), resource)
        except PatternError:
            continue
        if any(pattern.permits(asked) for pattern in rule.compiled()):
            return rule.id
    return ""


def narrow(base: Decision, conditions: Sequence[Condition], asked: Subject, facts: Facts) -> Decision:
    """What is left of a decision under conditions on its action: the same, or less."""
    if base.verdict is Verdict.DENY:
        return base
    found: list[Found] = []
    for item in conditions:
        why = item.matches(facts) if item.is_about(asked) else ""
        if why:
            found.append(Found(condition=item, why=why))
    if not found:
        return base
    reasons = tuple(f"{item.condition.id}: {item.why}" for item in found)
    denies = [item for item in found if item.condition.then is Verdict.DENY]
    if denies:
        return Decision(
            verdict=Verdict.DENY,
            rules=tuple(item.condition.id for item in denies),
            reason=_denied(denies[0]),
            facts=reasons,
            stale=all(item.condition.fresh_s is not None for item in denies),
        )
    own = base.asks or base.rules[:1] if base.verdict is Verdict.ASK else ()
    asking = tuple(item.condition.id for item in found)
    first = found[0]
    asks = f"{_named(first.condition)} asks an operator first: {first.why}"
    return Decision(
        verdict=Verdict.ASK,
        rules=(*own, *asking, *(rule for rule in base.rules if rule not in own)),
        grants=base.grants,
        reason=f"{base.reason}; {asks}" if own else asks,
        asks=(*own, *asking),
        facts=reasons,
    )


def _denied(found: Found) -> str:
    if found.condition.fresh_s is not None:
        return f"{found.why}: {_named(found.condition)}; read it again and retry"
    return f"denied by {_named(found.condition)}: {found.why}"


def _named(item: Condition) -> str:
    return f"condition {item.id} '{item.text}' of the {item.origin}"


def _stale(item: Condition, reads: tuple[Read, ...] | None) -> str:
    """What of the reads is too old or has changed."""
    if reads is None:
        return "what the thread has read can't be known now"
    missing = [rule.text for rule in item.of if not any(_is_of(rule, read) for read in reads)]
    if missing:
        return f"nothing was read of `{missing[0]}`, which has to be known freshly"
    limit = item.fresh_s or 0.0
    bad = [read for read in reads if item.concerns(read) and (read.changed or read.age_s > limit)]
    if not bad:
        return ""
    shown = "; ".join(_aged(read, limit) for read in bad[:SHOWN_READS])
    more = f"; and {len(bad) - SHOWN_READS} more" if len(bad) > SHOWN_READS else ""
    return shown + more


def _aged(read: Read, limit_s: float) -> str:
    what = f"{read.action} of `{read.resource}` at step {read.step}"
    if read.changed:
        return f"{what} is no longer current: {read.changed}"
    return f"{what} is {read.age_s:.0f} s old, more than {limit_s:.12g} s"


def _is_of(rule: Rule, read: Read) -> bool:
    if not applies(rule.action_pattern, read.action, forbids=False):
        return False
    try:
        asked = subject(kind_of(read.action), read.resource)
    except PatternError:
        return False
    return any(pattern.permits(asked) for pattern in rule.compiled())
