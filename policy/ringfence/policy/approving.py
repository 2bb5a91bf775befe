"""How many people have to approve a call that waits for a person, and who may not: of a manifest, and of the ceilings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ringfence.policy.actions import applies, kind_of
from ringfence.policy.matcher import CommandPattern, CommandSubject, subject
from ringfence.policy.problems import PatternError
from ringfence.policy.reader import Fields, Numbers, Reader
from ringfence.policy.rules import Rule
from ringfence.policy.strict_yaml import Items, Node
from ringfence.policy.types import Resource, Verdict

KEYS: Final = ("people", "for", "not_submitter")
"""Keys that a manifest's `approvals` and those of the ceilings share."""

PEOPLE_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class People:
    """Who has to approve.

    Attributes:
        number: different people that have to approve a call; one denial denies it.
        of: calls that this is about; empty: all that ask.
        not_submitter: whether who submitted the agent can't approve them.
        line: where the number stands in its file.
    """

    number: int = 1
    of: tuple[Rule, ...] = ()
    not_submitter: bool = False
    line: int = field(default=0, compare=False)

    def concerns(self, action: str, resource: Resource) -> bool:
        """Whether it is about this call; never raises."""
        return not self.of or any(_speaks_of(rule, action, resource) for rule in self.of)


def read_people(reader: Reader, fields: Fields, what: str, numbers: Numbers) -> People:
    """Read the keys `people`, `for` and `not_submitter` of a section."""
    number, line = 1, 0
    if "people" in fields:
        line = fields["people"][0].line
        number = reader.integer(fields["people"][1], f"{what}.people", 1, PEOPLE_MAX, 1)
    rules: tuple[Rule, ...] = ()
    if "for" in fields:
        node = fields["for"][1]
        rules = reader.rules(node, f"{what}.for", Verdict.ASK, numbers)
        if "people" not in fields and "not_submitter" not in fields:
            reader.wrong(node, f"`{what}.for` says no number", "add `people: 2`")
        if isinstance(node, Items) and not node.items:
            # INVARIANT: an empty list must not come to mean every call, nor none.
            reader.wrong(node, f"`{what}.for` is empty", "name the calls, or leave it out to mean all")
    barred = "not_submitter" in fields and reader.flag(fields["not_submitter"][1], f"{what}.not_submitter")
    return People(number=number, of=rules, not_submitter=barred, line=line)


def read_ceiling(reader: Reader, node: Node) -> People:
    """The section `approvals` of the ceilings."""
    what = "spec.ceilings.approvals"
    return read_people(reader, reader.mapping(node, what, KEYS), what, Numbers("ceilings", "cp"))


def _speaks_of(rule: Rule, action: str, resource: Resource) -> bool:
    """Whether a rule speaks of a call. As wide as a deny: what can't be read is one of those that need more people."""
    if not applies(rule.action_pattern, action, forbids=True):
        return False
    try:
        asked = subject(kind_of(action), resource)
        found = rule.compiled()
    except PatternError:
        return True
    return any(
        pattern.forbids(asked)
        or (
            isinstance(asked, CommandSubject)
            and isinstance(pattern, CommandPattern)
            and pattern.may_forbid(asked)
        )
        for pattern in found
    )
