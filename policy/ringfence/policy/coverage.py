"""Finds rules that can never have a say."""

from __future__ import annotations

from ringfence.policy.actions import applies
from ringfence.policy.problems import Problem
from ringfence.policy.rules import Rule, Rules


def never_matching(rules: Rules) -> list[Problem]:
    """Rules that can never have a say, since one deny beside them covers all they match."""
    problems: list[Problem] = []
    for rule in (*rules.allow, *rules.ask):
        deny = next((deny for deny in rules.deny if covers(deny, rule)), None)
        if deny is not None:
            problems.append(
                Problem(
                    line=rule.line,
                    column=rule.column,
                    message=f"the rule `{rule.text}` can never match: `{deny.text}` on line {deny.line} denies all of it",
                    fix="remove one of the two",
                )
            )
    return problems


def covers(deny: Rule, rule: Rule) -> bool:
    """Whether a deny matches everything that another rule matches. Sound, not complete."""
    if not applies(deny.action_pattern, rule.action_pattern, forbids=True):
        return False
    return all(any(mine.covers(theirs) for mine in deny.compiled()) for theirs in rule.compiled())
