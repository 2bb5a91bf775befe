"""What holds for any rules and any call: order says nothing, a deny wins and only takes away, a restart changes nothing."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.rules import Rule, parse_rule
from ringfence.policy.types import Decision, Request, Resource, Verdict

PATTERNS = {
    "fs.*": ["/workspace/**", "/workspace/a/*", "/workspace/a/.env", "**/.env", "/workspace/*"],
    "fs.read": ["/workspace/a/**", "/workspace/b"],
    "fs.write": ["/workspace/a/**", "/workspace/a/b"],
    "http.*": ["https://h.example/**", "https://*.example/a/*", "https://h.example/a"],
    "http.post": ["https://h.example/a/*", "https://h.example/b"],
    "state.*": ["jobs/*", "**", "jobs/1"],
    "exec.run": ["*", "git *", "sh -c *", "rm *", "git status"],
    "spawn": ["worker-*", "*"],
}
RESOURCES: list[tuple[str, Resource]] = [
    *((action, path) for action in ("fs.read", "fs.write", "fs.delete") for path in ("/workspace/a/b", "/workspace/a/.env", "/workspace/b")),
    *((action, url) for action in ("http.get", "http.post") for url in ("https://h.example/a/b", "https://h.example/b", "https://x.example/a/b")),
    ("state.get", "jobs/1"),
    ("state.put", "jobs/1/2"),
    ("exec.run", ("git", "status")),
    ("exec.run", ("sh", "-c", "git status && rm a")),
    ("exec.run", ("sh", "-c", "$x >$y")),
    ("spawn", "worker-1"),
    ("now", ""),
]  # fmt: skip
ORDER = [Verdict.DENY, Verdict.ASK, Verdict.ALLOW]

texts = st.sampled_from([f'{action}: "{one}"' for action, known in PATTERNS.items() for one in known])
allows = st.lists(st.tuples(st.sampled_from([Verdict.ALLOW, Verdict.ALLOW, Verdict.ASK]), texts), max_size=6)
denies = st.lists(texts, max_size=3)


def policy(grants: list[tuple[Verdict, str]], denied: list[str]) -> AgentPolicy:
    held = [(f"g{n}", parse_rule(text, how, rule_id=f"g{n}")) for n, (how, text) in enumerate(grants)]
    return AgentPolicy(
        "a", held, [parse_rule(text, "deny", rule_id=f"d{n}") for n, text in enumerate(denied)]
    )


def decided(made: AgentPolicy, action: str, resource: Resource) -> Decision:
    return made.decide(Request(principal="a", action=action, resource=resource))


def all_of(made: AgentPolicy) -> list[Verdict]:
    return [decided(made, action, resource).verdict for action, resource in RESOURCES]


@given(allows, denies, st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_no_order_of_rules_or_questions_matters(
    grants: list[tuple[Verdict, str]], denied: list[str], chance: random.Random
) -> None:
    expected = dict(zip(RESOURCES, all_of(policy(grants, denied)), strict=True))
    chance.shuffle(grants)
    chance.shuffle(denied)
    asked = list(RESOURCES)
    chance.shuffle(asked)
    made = policy(grants, denied)
    for action, resource in [*asked, *reversed(asked)]:
        assert decided(made, action, resource).verdict is expected[action, resource]


@given(allows, denies, texts)
@settings(max_examples=50)
def test_one_more_deny_or_ask_never_allows(
    grants: list[tuple[Verdict, str]], denied: list[str], more: str
) -> None:
    before = all_of(policy(grants, denied))
    for narrower in (policy(grants, [*denied, more]), policy(grants, [more, *denied])):
        assert all(
            ORDER.index(new) <= ORDER.index(old) for new, old in zip(all_of(narrower), before, strict=True)
        )


@given(allows, denies, texts)
@settings(max_examples=50)
def test_a_deny_always_wins(grants: list[tuple[Verdict, str]], denied: list[str], more: str) -> None:
    alone = AgentPolicy("a", [("g", parse_rule('"*": "**"'))], [parse_rule(more, "deny")])
    made = policy([*grants, (Verdict.ALLOW, '"*": "**"')], [*denied, more])
    for action, resource in RESOURCES:
        if decided(alone, action, resource).verdict is Verdict.DENY:
            found = decided(made, action, resource)
            assert found.verdict is Verdict.DENY
            assert found.rules[0].startswith("d")
            assert found.grants == ()


@given(allows, denies)
@settings(max_examples=50)
def test_rules_that_were_written_down_and_read_again_decide_the_same(
    grants: list[tuple[Verdict, str]], denied: list[str]
) -> None:
    made = policy(grants, denied)

    def again(rule: Rule) -> Rule:
        return parse_rule(rule.text, rule.verdict, rule_id=rule.id)

    read = [again(rule) for rule in made.rules]
    restarted = AgentPolicy(
        "a",
        [(rule.id, rule) for rule in read if rule.verdict is not Verdict.DENY],
        [rule for rule in read if rule.verdict is Verdict.DENY],
    )
    for action, resource in RESOURCES:
        assert decided(restarted, action, resource).verdict is decided(made, action, resource).verdict
        assert decided(restarted, action, resource).grants == decided(made, action, resource).grants
