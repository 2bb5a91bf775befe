"""The smallest rules for what was done: exact ones, made wider only where several resources lie side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ringfence.policy.actions import OWN_ACTIONS, kind_of
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.matcher import compile_pattern, literal_pattern
from ringfence.policy.problems import ManifestError, PatternError
from ringfence.policy.rules import Rule, parse_rule, render
from ringfence.policy.types import Request, Resource, Verdict

SEVERAL: Final = 3
"""From so many neighbours on one pattern stands for all of them."""

PRUNE_MAX: Final = 200
"""Most rules of one verdict among which those that others make needless are looked for."""

_WHO: Final = "learned"
_LISTED: Final = frozenset({"table", "name"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """One thing that was asked of policy. `verdict` is what it got."""

    action: str
    resource: Resource
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Rules as texts, by verdict; `denied` are the ones that would allow what was denied.

    `barred` are what of these does not help, with what stands in the way; `uncovered` is what no rule of the grammar can allow.
    """

    allow: tuple[str, ...]
    ask: tuple[str, ...]
    denied: tuple[str, ...]
    uncovered: tuple[Used, ...]
    barred: tuple[tuple[str, str], ...] = ()


def learn(used: Iterable[Used], denies: Callable[[Used], str] = lambda _: "") -> Learned:
    """Find rules that allow all that was allowed, ask about all that was asked, and allow nothing that was denied.

    Args:
        used: what was asked of policy.
        denies: what in force denies a use by itself, for people; empty: nothing but that no rule allows it.
    """
    seen = list(dict.fromkeys(used))
    by = {verdict: [u for u in seen if u.verdict is verdict] for verdict in Verdict}
    refused = [
        u
        for u in by[Verdict.DENY]
        if _same(u) not in {_same(a) for a in seen if a.verdict is not Verdict.DENY}
    ]
    asked = by[Verdict.ASK]
    # What was asked about once and allowed at another time was allowed by a grant meanwhile: it stays a question.
    allowed = [u for u in by[Verdict.ALLOW] if _same(u) not in {_same(a) for a in asked}]
    asking, lost = _rules(asked, Verdict.ASK, against=[*refused, *allowed])
    allowing, more = _rules(allowed, Verdict.ALLOW, against=[*refused, *asked])
    barred = dict.fromkeys((text, why) for one in refused if (text := _text(one)) and (why := denies(one)))
    # One that would not help is proposed as it is: a wider one would allow its neighbours, and not it.
    in_vain = {text for text, _ in barred}
    would, _ = _rules([one for one in refused if _text(one) not in in_vain], Verdict.ALLOW, against=[])
    return Learned(
        allow=tuple(r.text for r in allowing),
        ask=tuple(r.text for r in asking),
        denied=(*(r.text for r in would), *dict.fromkeys(text for text, _ in barred)),
        uncovered=(*lost, *more),
        barred=tuple(barred),
    )


def _text(one: Used) -> str:
    """The narrowest rule that would allow a use; empty: there is none."""
    pattern = None if one.action in OWN_ACTIONS else _exact(one, Verdict.ALLOW)
    return "" if pattern is None else _rule(one.action, (pattern,), Verdict.ALLOW).text


def as_yaml(learned: Learned, *, denied: bool) -> str:
    """A manifest's `permissions:`, without indentation.

    Args:
        learned: the rules.
        denied: show what was denied, as comments.
    """
    lines = ["permissions:"]
    for verdict, rules in (("allow", learned.allow), ("ask", learned.ask)):
        lines += [f"  {verdict}:", *(f"    - {rule}" for rule in rules)] if rules else [f"  {verdict}: []"]
    in_vain = {rule for rule, _ in learned.barred}
    helpful = [rule for rule in learned.denied if rule not in in_vain]
    if denied and helpful:
        lines += ["  # It was denied these:", *(f"  #   - {rule}" for rule in helpful)]
    if denied and learned.barred:
        lines.append("  # A rule in force stands against these, so that allowing them changes nothing:")
        lines += [f"  #   - {rule}  # {' '.join(why.split())}" for rule, why in learned.barred]
    return "\n".join(lines) + "\n"


def _same(used: Used) -> tuple[str, Resource]:
    return used.action, used.resource


def _rules(
    used: Sequence[Used], verdict: Verdict, *, against: Sequence[Used]
) -> tuple[list[Rule], list[Used]]:
    """Rules for some uses that say nothing about others; and uses that no rule reaches."""
    exact: dict[str, list[tuple[Used, str]]] = {}
    lost: list[Used] = []
    for one in used:
        if one.action in OWN_ACTIONS:
            continue
        pattern = _exact(one, verdict)
        if pattern is None:
            lost.append(one)
        else:
            exact.setdefault(one.action, []).append((one, pattern))
    rules: list[Rule] = []
    for action in sorted(exact):
        patterns = _widened(action, exact[action], verdict, against)
        rules += _as_rules(action, patterns, verdict)
    return _pruned(rules, [u for u in used if u.action not in OWN_ACTIONS and u not in lost], verdict), lost


def _exact(one: Used, verdict: Verdict) -> str | None:
    """The narrowest pattern, or None where no rule with one says the verdict of the resource."""
    kind = kind_of(one.action)
    if kind == "none":
        return "**"
    try:
        pattern = compile_pattern(kind, literal_pattern(kind, one.resource)).text
        rule = _rule(one.action, (pattern,), verdict)
    except (PatternError, ManifestError):
        return None
    return pattern if _says(_policy([rule]), one, verdict) else None


def _rule(action: str, patterns: tuple[str, ...], verdict: Verdict) -> Rule:
    return parse_rule(render(action, patterns), verdict, rule_id="learned")


def _policy(rules: Sequence[Rule]) -> AgentPolicy:
    return AgentPolicy(_WHO, [(f"g{nr}", rule) for nr, rule in enumerate(rules)])


def _says(policy: AgentPolicy, one: Used, verdict: Verdict) -> bool:
    request = Request(principal=_WHO, action=one.action, resource=one.resource, effect="WRITE")
    return policy.decide(request).verdict is verdict


def _widened(
    action: str, found: Sequence[tuple[Used, str]], verdict: Verdict, against: Sequence[Used]
) -> list[str]:
    """The patterns, with one for each group of several neighbours, unless it says something about `against`."""
    groups: dict[str, list[str]] = {}
    for one, pattern in found:
        wide = _neighbours(kind_of(action), one.resource, pattern)
        groups.setdefault(wide or pattern, []).append(pattern)
    patterns: list[str] = []
    for wide, members in groups.items():
        taken = list(dict.fromkeys(members))
        if len(taken) >= SEVERAL and wide not in taken:
            rule = _usable(action, wide, verdict)
            if rule is not None and not _touched(rule, against):
                taken = [wide]
        patterns += taken
    return list(dict.fromkeys(patterns))


def _usable(action: str, pattern: str, verdict: Verdict) -> Rule | None:
    try:
        return _rule(action, (pattern,), verdict)
    except (PatternError, ManifestError):
        return None


def _touched(rule: Rule, uses: Sequence[Used]) -> list[Used]:
    """Of some uses those that a rule says anything about."""
    policy = _policy([rule])
    return [one for one in uses if not _says(policy, one, Verdict.DENY)]


def _neighbours(kind: str, resource: Resource, pattern: str) -> str:
    """A pattern for all that lies beside a resource; empty where none is safe to guess."""
    if kind == "command":
        words = tuple(resource) if not isinstance(resource, str) else tuple(shlex.split(resource))
        # `git status` and `git log` are two things; what follows an option of an interpreter may be anything.
        if len(words) < 3 or words[1].startswith("-"):  # noqa: PLR2004 - a program, its first word, and more
            return ""
        return f"{shlex.join(words[:2])} *"
    if kind not in {"path", "url", "key"}:
        return ""
    above, slash, _ = pattern.rpartition("/")
    # Neither all keys nor a host as a whole are a place where things lie side by side.
    side_by_side = slash and above and (kind != "url" or above.count("/") > len("//"))
    return f"{above}/*" if side_by_side else ""


def _as_rules(action: str, patterns: Sequence[str], verdict: Verdict) -> list[Rule]:
    """Rules of some patterns: names and tables together, everything else one by one."""
    kind = kind_of(action)
    if kind not in _LISTED:
        return [_rule(action, (pattern,), verdict) for pattern in patterns]
    together: dict[str, list[str]] = {}
    for pattern in patterns:
        together.setdefault(pattern.partition("/")[0] if kind == "table" else "", []).append(pattern)
    rules: list[Rule] = []
    for named in together.values():
        # A statement without a table needs any rule on its database; one on all tables would be far more than that.
        members = [pattern for pattern in named if kind != "table" or not pattern.endswith("/**")] or named
        try:
            rules.append(_rule(action, tuple(members), verdict))
        except (ManifestError, PatternError):
            rules += [_rule(action, (pattern,), verdict) for pattern in members]
    return rules


def _pruned(rules: list[Rule], used: Sequence[Used], verdict: Verdict) -> list[Rule]:
    """Leave out what the others say anyway: a rule on `fs.read` also speaks about `fs.stat`."""
    if len(rules) > PRUNE_MAX:
        return rules
    kept = list(rules)
    for rule in sorted(
        rules, key=lambda r: ("*" in r.text, r.action_pattern not in {"fs.read", "fs.write", "http.get"})
    ):
        rest = [r for r in kept if r is not rule]
        policy = _policy(rest)
        if all(_says(policy, one, verdict) for one in _touched(rule, used)):
            kept = rest
    return kept
