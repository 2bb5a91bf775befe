"""The decision: the only user of casbin.

One immutable `AgentPolicy` per agent and policy epoch holds a small casbin enforcer for each action, made when that action is
first asked about. The model's one function is our exact matcher. A decision is kept in a dictionary of the instance, so a new
epoch, which is a new instance, can't see an old answer.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import casbin  # pyright: ignore[reportMissingTypeStubs] - it has none
from casbin.util import SimpleEval  # pyright: ignore[reportMissingTypeStubs] - the same
from ringfence.policy.actions import OWN_ACTIONS, applies, kind_of
from ringfence.policy.conditions import Condition, conditions_on, narrow
from ringfence.policy.facts import NOTHING_KNOWN, Facts
from ringfence.policy.heads import Heads
from ringfence.policy.lookalikes import unmasked
from ringfence.policy.matcher import (
    WORKSPACE,
    CommandPattern,
    CommandSubject,
    Pattern,
    Subject,
    compile_pattern,
    subject,
)
from ringfence.policy.problems import PatternError
from ringfence.policy.rules import Rule, rule_for
from ringfence.policy.shell_places import UNKNOWN
from ringfence.policy.types import Decision, Request, Resource, Verdict

_MODEL: Final = """
[request_definition]
r = query

[policy_definition]
p = row, eft

[policy_effect]
e = some(where (p.eft == allow)) && !some(where (p.eft == deny))

[matchers]
m = row_matches(r.query, p.row)
"""
_CACHE_ENTRIES: Final = 2048
_CACHE_TEXT: Final = 512
_CACHE_ACTIONS: Final = 256
_CACHE_ENFORCERS: Final = 512
_SHOWN: Final = 200


def _silent_logger() -> logging.Logger:
    # INVARIANT: casbin logs the arguments of denied requests. Its enforcers get this logger, which no configuration reaches.
    logger = logging.Logger("silent", level=logging.CRITICAL + 1)  # noqa: LOG001 - must not be in the registry
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


_SILENT: Final = _silent_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A rule that speaks about one action, compiled."""

    rule: Rule
    grant: str
    verdict: Verdict
    patterns: tuple[Pattern, ...]

    def matches(self, asked: Subject) -> bool:
        if self.verdict is Verdict.ALLOW:
            return any(pattern.permits(asked) for pattern in self.patterns)
        return any(pattern.forbids(asked) for pattern in self.patterns)

    def may_match(self, asked: CommandSubject) -> bool:
        return any(isinstance(item, CommandPattern) and item.may_forbid(asked) for item in self.patterns)


class _Query:
    """One question on its way through the enforcer; remembers which rows matched."""

    __slots__ = ("asked", "hits", "rows")

    def __init__(self, asked: Subject, rows: Sequence[_Row]) -> None:
        self.asked: Final = asked
        self.rows: Final = rows
        self.hits: Final[list[_Row]] = []

    def matches(self, row: str) -> bool:
        found = self.rows[int(row)]
        if found.matches(self.asked):
            self.hits.append(found)
            return True
        return False


def _row_matches(query: _Query, row: str) -> bool:
    return query.matches(row)


class _Action:
    """The rows of one action, denies first, and their enforcer."""

    __slots__ = ("_enforcers", "_heads", "forbids", "kind", "permits", "rows")

    def __init__(self, action: str, rows: Sequence[_Row]) -> None:
        self.kind: Final = kind_of(action)
        order = {Verdict.DENY: 0, Verdict.ASK: 1, Verdict.ALLOW: 2}
        self.rows: Final = tuple(sorted(rows, key=lambda row: order[row.verdict]))
        self.forbids: Final = tuple(row for row in self.rows if row.verdict is not Verdict.ALLOW)
        self.permits: Final = tuple(row for row in self.rows if row.verdict is Verdict.ALLOW)
        self._heads: Final = Heads(row.patterns for row in self.rows)
        self._enforcers: Final[dict[tuple[int, ...], Any]] = {}

    def decide(self, asked: Subject) -> tuple[bool, list[_Row]]:
        """What casbin says, and the rows that matched: the first matching deny alone, or every ask and allow."""
        # Casbin looks at every row that it holds, so it gets only those that may match, in their order.
        held = self._heads.of(asked)
        if not held:
            return False, []
        enforcer = self._enforcers.get(held)
        if enforcer is None:
            enforcer = _enforcer([(number, self.rows[number].verdict) for number in held])
            # An agent's rules have few such sets; what an agent asks can't make more of them than this.
            if len(self._enforcers) < _CACHE_ENFORCERS:
                self._enforcers[held] = enforcer
        query = _Query(asked, self.rows)
        # INVARIANT: an ask counts as an allow for casbin. It narrows what casbin allowed and never widens it.
        allowed = enforcer.enforce(query)
        return allowed is True, query.hits

    def doubts(self, asked: Subject) -> _Row | None:
        """The first deny or ask rule that may be meant, where a command holds something that can't be followed."""
        if not isinstance(asked, CommandSubject):
            return None
        return next((row for row in self.forbids if row.may_match(asked)), None)


class _Enforcer(casbin.Enforcer):
    """Casbin's, which parses the model's one expression at each decision; here it is parsed once."""

    @staticmethod
    def _get_expression(expr: str, functions: Any = None) -> Any:
        found: Any = SimpleEval("", functions)
        found.expr, found.ast_parsed_value = _parsed(expr)
        return found


@cache
def _parsed(expr: str) -> tuple[str, Any]:
    theirs: Any = casbin.Enforcer
    found = theirs._get_expression(expr)  # noqa: SLF001 - its own reading of the text, done once
    return found.expr, found.ast_parsed_value


def _enforcer(rows: Sequence[tuple[int, Verdict]]) -> Any:
    """An enforcer for some rows, given by number."""
    enforcer: Any = _Enforcer(casbin.Enforcer.new_model(text=_MODEL))
    enforcer.logger = _SILENT
    enforcer.add_function("row_matches", _row_matches)
    effects = [[str(number), "deny" if verdict is Verdict.DENY else "allow"] for number, verdict in rows]
    enforcer.model.add_policies("p", "p", effects)
    if not enforcer.enabled or enforcer.get_policy() != effects:
        raise RuntimeError("casbin does not hold the rows it was given")
    return enforcer


class AgentPolicy:
    """What one agent may do at one policy epoch. Immutable; safe to use from several threads.

    Args:
        agent: agent id.
        grants: allow rules (and the manifest's ask rules) with the id of the grant that each belongs to, in the order in
            which they are used up: the first that matches is the one a call uses.
        denies: the manifest's and roles' deny rules; ask rules may stand here too.
        ceilings: the operator's deny and ask rules.
        conditions: of all of them: they narrow what the rules say.

    Raises:
        ValueError: an allow rule among the denies or ceilings.
        PatternError: a rule that was not made by this package's parsers.
    """

    def __init__(
        self,
        agent: str,
        grants: Sequence[tuple[str, Rule]],
        denies: Sequence[Rule] = (),
        ceilings: Sequence[Rule] = (),
        conditions: Sequence[Condition] = (),
    ) -> None:
        rows = [_row(rule, "") for rule in (*ceilings, *denies)]
        if any(row.verdict is Verdict.ALLOW for row in rows):
            raise ValueError("an allow rule can't stand among denies or ceilings: pass it with its grant")
        rows.extend(_row(rule, grant) for grant, rule in grants)
        self.agent: Final = agent
        self.rules: Final = tuple(row.rule for row in rows)
        self._rows: Final = tuple(rows)
        self._actions: Final[dict[str, _Action]] = {}
        self._decided: Final[dict[tuple[str, Resource], Decision]] = {}
        self.conditions: Final = tuple(conditions)
        self._conditions: Final[dict[str, tuple[Condition, ...]]] = {}

    def conditions_on(self, action: str) -> tuple[Condition, ...]:
        """Conditions that speak about an action, whatever its resource."""
        found = self._conditions.get(action)
        if found is None:
            found = conditions_on(action, self.conditions)
            if len(self._conditions) < _CACHE_ACTIONS:
                self._conditions[action] = found
        return found

    def decide(self, request: Request) -> Decision:
        """Answer one question. Never raises: whatever goes wrong inside is a deny that says so."""
        try:
            if request.principal == self.agent:
                found = self._decided.get((request.action, request.resource))
                base = found if found is not None else self._decide(request)
                return self._narrowed(request, base) if self.conditions else base
            reason = f"`{_shown(request.principal)}` is not the agent of this policy; report this as a bug of the kernel"
        except Exception as error:  # noqa: BLE001 - fail closed, whatever it is
            reason = f"the decision failed ({type(error).__name__}), so it is denied; report this as a bug of the kernel"
        return Decision(verdict=Verdict.DENY, reason=reason)

    def _narrowed(self, request: Request, base: Decision) -> Decision:
        conditions = self.conditions_on(request.action)
        if not conditions or base.verdict is Verdict.DENY:
            return base
        facts = request.context.get("facts", NOTHING_KNOWN)
        if not isinstance(facts, Facts):
            raise TypeError("`facts` are no facts")
        return narrow(base, conditions, subject(kind_of(request.action), request.resource), facts)

    def visible(self, action: str, path: str, facts: Facts = NOTHING_KNOWN) -> bool:
        """Whether the agent may do an action on a canonical path, without asking anyone. Never raises."""
        try:
            rows = self._action(action)
            asked = subject(rows.kind, path)
            if any(row.matches(asked) for row in rows.forbids):
                return False
            if not any(row.matches(asked) for row in rows.permits):
                return False
            return not any(c.is_about(asked) and c.matches(facts) for c in self.conditions_on(action))
        except Exception:  # noqa: BLE001 - fail closed, whatever it is
            return False

    def masks(self, paths: Iterable[str]) -> list[str]:
        """Those of the given canonical paths that commands must not see: denied for reading, not merely un-allowed.

        A path that policy can't read, because it is not canonical, is masked too.
        """
        denies = [row for row in self._action("fs.read").forbids if row.verdict is Verdict.DENY]
        return [path for path in paths if _masked(path, denies)]

    def mask_patterns(self) -> list[str]:
        """Patterns of the paths that commands must not see."""
        denies = (row for row in self._action("fs.read").forbids if row.verdict is Verdict.DENY)
        return list(dict.fromkeys(pattern for row in denies for pattern in row.rule.patterns))

    def _action(self, action: str) -> _Action:
        found = self._actions.get(action)
        if found is None:
            rows = [
                row
                for row in self._rows
                if applies(row.rule.action_pattern, action, forbids=row.verdict is not Verdict.ALLOW)
            ]
            found = _Action(action, rows)
            if len(self._actions) < _CACHE_ACTIONS:
                self._actions[action] = found
        return found

    def _decide(self, request: Request) -> Decision:
        decision = self._judge(request.action, request.resource)
        if _length(request.resource) <= _CACHE_TEXT:
            if len(self._decided) >= _CACHE_ENTRIES:
                self._decided.clear()
            self._decided[request.action, request.resource] = decision
        return decision

    def _judge(self, action: str, resource: Resource) -> Decision:
        rows = self._action(action)
        try:
            asked = subject(rows.kind, resource)
        except PatternError as error:
            return Decision(
                verdict=Verdict.DENY, reason=f"{action} on `{_shown(resource)}` is refused: {error}"
            )
        allowed, hits = rows.decide(asked)
        by = {verdict: [row for row in hits if row.verdict is verdict] for verdict in Verdict}
        if denied := by[Verdict.DENY]:
            return _decision(Verdict.DENY, denied, f"denied by {_named(denied[0].rule)}")
        if not allowed:
            return _own(action) if action in OWN_ACTIONS else self._nothing_allows(action, resource)
        if asking := by[Verdict.ASK]:
            return _decision(Verdict.ASK, asking, f"{_named(asking[0].rule)} asks an operator first")
        granted = by[Verdict.ALLOW][:1]
        if doubtful := rows.doubts(asked):
            return _decision(Verdict.ASK, [doubtful, *granted], _doubt(doubtful.rule, asked))
        if why := _unread(granted, asked):
            return _decision(Verdict.ASK, granted, f"{why}, so an operator has to look")
        for opens in sorted(_anywhere(granted, asked)):
            if not self._all_files(opens):
                why = f"{UNKNOWN}, and not every file may have {opens}, so an operator has to look"
                return _decision(Verdict.ASK, granted, why)
        return _decision(Verdict.ALLOW, granted, f"allowed by {_named(granted[0].rule)}")

    def _all_files(self, action: str) -> bool:
        """Whether an action is allowed on every file of the workspace, and no rule or condition says otherwise of any."""
        rows = self._action(action)
        whole = compile_pattern("path", f"{WORKSPACE}/**")
        return (
            not rows.forbids
            and not self.conditions_on(action)
            and any(item.covers(whole) for row in rows.permits for item in row.patterns)
        )

    def _nothing_allows(self, action: str, resource: Resource) -> Decision:
        on = f" on `{_shown(resource)}`" if resource else ""
        reason = f"nothing allows {action}{on}"
        try:
            rule = rule_for(action, resource)
        except PatternError:
            # Some keys, such as `a//b`, are matched by `**` alone.
            return Decision(verdict=Verdict.DENY, reason=reason)
        if len(rule) <= 2 * _SHOWN:
            reason = f"{reason}; ask the operator: ringfence grant {self.agent} {shlex.quote(rule)}"
        return Decision(verdict=Verdict.DENY, reason=reason)


def _row(rule: Rule, grant: str) -> _Row:
    return _Row(rule=rule, grant=grant, verdict=rule.verdict, patterns=rule.compiled())


def _masked(path: str, denies: Sequence[_Row]) -> bool:
    try:
        asked = subject("path", path)
    except PatternError:
        return True
    return any(row.matches(asked) for row in denies)


def _doubt(rule: Rule, asked: Subject) -> str:
    why = asked.reading.opaque if isinstance(asked, CommandSubject) else ""
    return f"{why or 'a part of the command is not written out'}, so {_named(rule)} may be meant; an operator has to look"


def _unread(granted: Sequence[_Row], asked: Subject) -> str:
    """Why a command could not be read to its end; empty: it was, or its rule has it word for word."""
    if not isinstance(asked, CommandSubject) or not asked.reading.opaque:
        return ""
    return "" if _written_out(granted, asked) else asked.reading.opaque


def _anywhere(granted: Sequence[_Row], asked: Subject) -> set[str]:
    """What a command may do to any file by redirections that are not written out; nothing where its rule has it word for word."""
    if not isinstance(asked, CommandSubject) or not asked.reading.anywhere:
        return set()
    return set() if _written_out(granted, asked) else asked.reading.anywhere


def _written_out(granted: Sequence[_Row], asked: Subject) -> bool:
    known = [item for row in granted for item in row.patterns if item.permits(asked)]
    return any(isinstance(item, CommandPattern) and item.written_out for item in known)


def _own(action: str) -> Decision:
    return Decision(verdict=Verdict.ALLOW, reason=f"{action} needs no rule: it touches nothing of others")


def _decision(verdict: Verdict, rows: Sequence[_Row], reason: str) -> Decision:
    grants = () if verdict is Verdict.DENY else tuple(row.grant for row in rows if row.grant)
    return Decision(verdict=verdict, rules=tuple(row.rule.id for row in rows), grants=grants, reason=reason)


def _named(rule: Rule) -> str:
    return f"rule {rule.id} '{rule.text}' of the {rule.origin}"


def _length(resource: Resource) -> int:
    return len(resource) if isinstance(resource, str) else sum(len(word) + 1 for word in resource)


def _shown(resource: Resource) -> str:
    """A resource for people: one line, bounded, nothing invisible."""
    text = resource if isinstance(resource, str) else shlex.join(resource)
    text = unmasked(text[: _SHOWN + 1])
    text = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
