"""The rights of one agent under one policy epoch: what its manifest, its grants and the operator's ceilings allow together.

A spawned agent's rights end at its parent's: both are asked the same, and the stricter answer counts. A role that the
parent's manifest delegates is the exception: what the role says itself is not put to the parent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from ringfence.kernel.journal.types import GrantRecord
from ringfence.kernel.kinship import delegated_roles, meet
from ringfence.policy.actions import OWN_ACTIONS, applies
from ringfence.policy.conditions import Condition, untainting
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.facts import NOTHING_KNOWN, Facts
from ringfence.policy.kernel_file import KernelFile, conditions_of
from ringfence.policy.manifest_types import Manifest
from ringfence.policy.rules import Rule, parse_rule
from ringfence.policy.types import Decision, Request, Verdict
from ringfence.syscalls.base import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The meet of the decisions on all questions of one call.

    `tail` is the part of a journal body that explains it, rendered once for all calls that share it. `asking` is
    everything that asks for a person, as (rule id, action, resource). `facts` is what conditions found.
    """

    verdict: Verdict
    decision: Decision
    grants: tuple[str, ...]
    tail: bytes
    asking: frozenset[tuple[Any, ...]] = frozenset()
    facts: tuple[str, ...] = ()


_EVERYTHING = frozenset({"*", "**"})

IRREVERSIBLE = "irreversible"
"""Stands for the rule where a call asks because it destroys and nothing could undo it."""
DOUBTFUL = "definition"
"""Stands for the rule where a call asks because what it calls is no longer what was taken."""
STRAYED = "diverged"
"""Stands for the rule where a call asks because its program took another way after a restart than before."""


def asked_anyway(
    judgement: Judgement, why: str, question: Question, rule: str = IRREVERSIBLE, about: str = ""
) -> Judgement:
    """The judgement of a call that no rule lets run without a person.

    Args:
        judgement: what rules and conditions say.
        why: in words for people.
        question: what the call does.
        rule: what stands for the rule that asks.
        about: what an approval is about, besides the question.
    """
    if judgement.verdict is Verdict.DENY:
        return judgement
    asks = judgement.asking | {(rule, question.action, about or question.resource)}
    told = b'"%s":' % rule.encode() + msgspec.json.encode(why) + b"," + judgement.tail
    return dataclasses.replace(judgement, verdict=Verdict.ASK, asking=asks, tail=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What rights are made from: a tenth of their size."""

    agent: str
    manifest: Manifest
    kernel_file: KernelFile
    grants: tuple[GrantRecord, ...]
    epoch: int
    parent: Given | None

    def make(self) -> Rights:
        """The rights."""
        return Rights(
            agent=self.agent,
            manifest=self.manifest,
            kernel_file=self.kernel_file,
            grants=self.grants,
            epoch=self.epoch,
            parent=None if self.parent is None else self.parent.make(),
        )


class Rights:
    """Immutable: a revocation or a grant makes a new one."""

    def __init__(
        self,
        *,
        agent: str,
        manifest: Manifest,
        kernel_file: KernelFile,
        grants: Sequence[GrantRecord],
        epoch: int,
        parent: Rights | None = None,
    ) -> None:
        self.agent = agent
        self.epoch: int = epoch
        now = datetime.now(UTC)
        alive = [g for g in grants if g.revoked_at is None and (g.expires_at is None or g.expires_at > now)]
        self._manifest, self._kernel_file, self.parent = manifest, kernel_file, parent
        self._alive = tuple(alive)
        self._spent = {g.id: g for g in alive if g.uses_left == 0}
        grants = [g for g in alive if g.uses_left != 0]
        self.grants = {g.id: g for g in grants}
        self.limited = frozenset(g.id for g in grants if g.uses_left is not None)
        if parent is not None:
            self.limited |= parent.limited
        ends = [g.expires_at for g in alive if g.expires_at is not None]
        self._stale_at = time.monotonic() + (min(ends) - now).total_seconds() if ends else None
        pairs = [
            (
                g.id,
                parse_rule(
                    g.rule, g.verdict, rule_id=g.id, origin="manifest" if g.origin == "manifest" else "grant"
                ),
            )
            for g in grants
            if g.verdict != Verdict.DENY
        ]
        denies = [rule for rule in effective_rules(manifest, kernel_file) if rule.verdict == Verdict.DENY]
        own = [
            parse_rule(g.rule, g.verdict, rule_id=g.id, origin="operator")
            for g in grants
            if g.verdict == Verdict.DENY
        ]
        denies += own
        # Roles that a parent delegates lift what it may not, but not what an operator denied to it.
        self._barred: tuple[Rule, ...] = (*own, *(() if parent is None else parent.barred))
        conditions = conditions_of(manifest, kernel_file)
        self.policy = AgentPolicy(agent, pairs, denies, kernel_file.ceilings.rules, conditions)
        # What rules alone say, for who asks before the facts are known.
        self._by_rules = self.policy
        if conditions:
            self._by_rules = AgentPolicy(agent, pairs, denies, kernel_file.ceilings.rules)
        self.conditional = bool(conditions) or (parent is not None and parent.conditional)
        self.delegated = () if parent is None else delegated_roles(manifest, parent.manifest, kernel_file)
        self._free = self._delegated_policy(grants, pairs, denies) if self.delegated else None
        text = "\n".join(
            [
                *(f"{r.id} {r.text}" for r in (*denies, *conditions)),
                *sorted(f"{g.id} {g.verdict} {g.rule}" for g in grants),
            ]
        )
        if parent is not None:
            text += f"\n{parent.agent} {parent.version} {' '.join(self.delegated)}"
        self.version = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._judgements: dict[tuple[Question, ...], Judgement] = {}
        self._having: dict[frozenset[str], Rights] = {}

    def _delegated_policy(
        self, grants: Sequence[GrantRecord], pairs: Sequence[tuple[str, Rule]], denies: Sequence[Rule]
    ) -> AgentPolicy:
        """What the delegated roles permit. Only they: an ask of the child's own permits nothing that its parent may not."""
        texts = {(str(r.verdict), r.text) for role in self.delegated for r in self._kernel_file.roles[role]}
        of_role = {g.id for g in grants if g.origin == "manifest" and (g.verdict, g.rule) in texts}
        kept = [(g, rule) for g, rule in pairs if g in of_role]
        return AgentPolicy(self.agent, kept, (*denies, *self._barred), self._kernel_file.ceilings.deny)

    @property
    def given(self) -> Given:
        """What they are made from."""
        return Given(
            agent=self.agent,
            manifest=self._manifest,
            kernel_file=self._kernel_file,
            grants=self._alive,
            epoch=self.epoch,
            parent=None if self.parent is None else self.parent.given,
        )

    @property
    def barred(self) -> tuple[Rule, ...]:
        """What operators deny to this agent and to those above it, beside their manifests."""
        return self._barred

    @property
    def manifest(self) -> Manifest:
        """Whose rules these are."""
        return self._manifest

    @property
    def kernel_file(self) -> KernelFile:
        """The operator's file that they stand under."""
        return self._kernel_file

    def conditions_on(self, questions: Iterable[Question]) -> tuple[Condition, ...]:
        """Conditions that speak of what questions ask: of this agent and of those above it."""
        if not self.conditional:
            return ()
        found = dict.fromkeys(
            item
            for question in questions
            for item in self.policy.conditions_on(question.action)
            if item.speaks_of(question.action, question.resource)
        )
        if self.parent is not None:
            found |= dict.fromkeys(self.parent.conditions_on(questions))
        return tuple(found)

    def untaints(self, question: Question) -> str:
        """The operator's rule by which a call that asks this ends the taint of its thread; empty: none."""
        return untainting(self._kernel_file.untaint, question.action, question.resource)

    @property
    def expired(self) -> bool:
        """Whether a grant's life has ended since this was made."""
        if self.parent is not None and self.parent.expired:
            return True
        return self._stale_at is not None and time.monotonic() >= self._stale_at

    def decide(self, question: Question, effect: str, facts: Facts | None = None) -> Decision:
        """Decide one question; never raises. Without facts every condition on its action matches."""
        request = Request(
            principal=self.agent, action=question.action, resource=question.resource, effect=effect
        )
        if facts is not None and self.conditional:
            request = dataclasses.replace(request, context={"facts": facts})
        own = self.policy.decide(request)
        if self.parent is None or own.verdict is Verdict.DENY:
            return own
        if self._free is not None:
            free = self._free.decide(request)
            if free.verdict is not Verdict.DENY:
                # What the child has to ask by itself it has to ask all the same.
                return free if own.verdict is Verdict.ALLOW else own
        return meet(own, self.parent.decide(question, effect, facts), self.parent.agent)

    def reaches(self, question: Question) -> bool:
        """Whether rules alone leave a question open or allow it; conditions may still narrow that. Never raises."""
        request = Request(principal=self.agent, action=question.action, resource=question.resource)
        if self._by_rules.decide(request).verdict is Verdict.DENY:
            return False
        free = self._free is not None and self._free.decide(request).verdict is not Verdict.DENY
        return free or self.parent is None or self.parent.reaches(question)

    def reaches_some(self, family: str) -> bool:
        """Whether an allow or ask rule may speak for an action of a family, such as `mcp.github`, or of that name."""
        wanted = family.split(".")
        for rule in self.policy.rules:
            given = rule.action_pattern.split(".")
            fits = all(part in ("*", label) for part, label in zip(given, wanted, strict=False))
            if rule.verdict is not Verdict.DENY and fits and (len(given) >= len(wanted) or given[-1] == "*"):
                return self.parent is None or self._free is not None or self.parent.reaches_some(family)
        return False

    def visible(self, action: str, path: str, facts: Facts = NOTHING_KNOWN) -> bool:
        """Whether the agent may do an action on a canonical path, without asking anyone. Never raises."""
        if not self.policy.visible(action, path, facts):
            return False
        if self.parent is None or (self._free is not None and self._free.visible(action, path)):
            return True
        return self.parent.visible(action, path, facts)

    def offers(self, action: str) -> bool:
        """Whether the agent may do an action, or ask for it, on some resource; not on which. Never raises."""
        if not _offers(self.policy, action):
            return False
        if self.parent is None or (self._free is not None and _offers(self._free, action)):
            return True
        return self.parent.offers(action)

    def masks(self, paths: Iterable[str]) -> list[str]:
        """Those of the given canonical paths that commands must not see: what this agent or its parent is denied to read."""
        if self.parent is None:
            return self.policy.masks(paths)
        paths = list(paths)
        hidden = set(self.policy.masks(paths))
        free = self._free
        hidden.update(
            path for path in self.parent.masks(paths) if free is None or not free.visible("fs.read", path)
        )
        return [path for path in paths if path in hidden]

    @property
    def spent(self) -> frozenset[str]:
        """Limited grants without a use left, of this agent and of those above it."""
        own = frozenset(self._spent)
        return own if self.parent is None else own | self.parent.spent

    def judge(
        self,
        questions: tuple[Question, ...],
        effect: str,
        used: frozenset[str] = frozenset(),
        facts: Sequence[Facts] | None = None,
    ) -> Judgement:
        """Decide all questions: deny beats ask beats allow.

        Args:
            questions: what to decide.
            effect: of the call.
            used: limited grants that the call has used up already; its own use counts though it was the last one.
            facts: of each question; without them every condition on their actions matches.
        """
        if used and not used.isdisjoint(self.spent):
            return self.having(used & self.spent).judge(questions, effect, facts=facts)
        if facts is not None:
            pairs = zip(questions, facts, strict=True)
            return self._judged(questions, [self.decide(asked, effect, known) for asked, known in pairs])
        cached = self._judgements.get(questions)
        if cached is not None:
            return cached
        judgement = self._judged(questions, [self.decide(question, effect) for question in questions])
        # Bounded, since an agent chooses the questions: it must not grow the kernel.
        if len(self._judgements) >= 4096:  # noqa: PLR2004
            self._judgements.clear()
        self._judgements[questions] = judgement
        return judgement

    def _judged(self, questions: Sequence[Question], decisions: Sequence[Decision]) -> Judgement:
        order = {Verdict.DENY: 0, Verdict.ASK: 1, Verdict.ALLOW: 2}
        worst = min(
            decisions,
            key=lambda d: order[d.verdict],
            default=Decision(verdict=Verdict.DENY, reason="no question"),
        )
        grants = tuple(dict.fromkeys(g for d in decisions for g in d.grants))
        rules = list(dict.fromkeys(r for d in decisions for r in d.rules))
        explain: dict[str, object] = {
            "rules": list(worst.rules) if worst.verdict is not Verdict.ALLOW else rules,
            "grants": list(grants),
            "reason": worst.reason,
            "epoch": self.epoch,
            "policy_version": self.version,
        }
        found = tuple(dict.fromkeys(fact for d in decisions for fact in d.facts))
        if found:
            explain["because"] = found
        asking = [
            (rule, question.action, question.resource)
            for question, decision in zip(questions, decisions, strict=True)
            if decision.verdict is Verdict.ASK
            for rule in decision.asks or decision.rules[:1] or ("",)
        ]
        return Judgement(
            verdict=worst.verdict,
            decision=worst,
            grants=grants,
            tail=msgspec.json.encode(explain)[1:],
            asking=frozenset(asking),
            facts=found,
        )

    def having(self, spent: frozenset[str]) -> Rights:
        """These rights and some grants that have no use left."""
        found = self._having.get(spent)
        if found is None:
            mine = sorted(spent & frozenset(self._spent))
            kept = [dataclasses.replace(self._spent[grant], uses_left=None) for grant in mine]
            found = Rights(
                agent=self.agent,
                manifest=self._manifest,
                kernel_file=self._kernel_file,
                grants=[*self.grants.values(), *kept],
                epoch=self.epoch,
                parent=None if self.parent is None else self.parent.having(spent),
            )
            self._having[spent] = found
        return found


def _offers(policy: AgentPolicy, action: str) -> bool:
    """Whether rules let an action through or ask about it for some resource, so that it is worth a try."""
    rules = policy.rules
    denies = (rule for rule in rules if rule.verdict is Verdict.DENY and _EVERYTHING & set(rule.patterns))
    if any(applies(rule.action_pattern, action, forbids=True) for rule in denies):
        return False
    # A rule that asks about another door of the same thing permits nothing at this one.
    others = (rule for rule in rules if rule.verdict is not Verdict.DENY)
    return action in OWN_ACTIONS or any(
        applies(rule.action_pattern, action, forbids=False) for rule in others
    )


def effective_rules(manifest: Manifest, kernel_file: KernelFile) -> tuple[Rule, ...]:
    """Rules of a manifest with those of its roles.

    Raises:
        KeyError: the operator declared no such role; holds its name.
    """
    rules = list(manifest.rules)
    for role in manifest.roles:
        rules.extend(kernel_file.roles[role])
    return tuple(rules)
