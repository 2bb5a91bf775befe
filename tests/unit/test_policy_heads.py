"""Finding rules by how their patterns begin loses none: decisions are those of all rules, looked at one by one."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.heads import Heads, head_of, words_of
from ringfence.policy.matcher import compile_pattern, subject
from ringfence.policy.rules import Rule, parse_rule
from ringfence.policy.types import Request, Verdict

NAMES = st.sampled_from(["a", "b", "ab"])
PARTS = st.one_of(NAMES, st.sampled_from(["*", "**", "a*"]))
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda parts: "/workspace/" + "/".join(parts))
PATH_PATTERNS = st.one_of(
    st.lists(PARTS, min_size=1, max_size=3).map(lambda parts: "/workspace/" + "/".join(parts)),
    st.lists(PARTS, min_size=1, max_size=2).map(lambda parts: "/".join(["**", *parts])),
)
HOSTS = st.sampled_from(["a.test", "b.a.test"])
PORTS = st.sampled_from(["", ":8080"])
URLS = st.builds(
    lambda scheme, host, port, parts: f"{scheme}://{host}{port}/{'/'.join(parts)}",
    st.sampled_from(["http", "https"]),
    HOSTS,
    PORTS,
    st.lists(NAMES, max_size=3),
)
URL_PATTERNS = st.one_of(
    st.just("**"),
    st.builds(
        lambda scheme, host, port, parts: f"{scheme}://{host}{port}/{'/'.join(parts)}",
        st.sampled_from(["http", "https"]),
        st.one_of(HOSTS, st.sampled_from(["*.test", "**.a.test", "*.a.test"])),
        st.one_of(PORTS, st.just(":*")),
        st.lists(PARTS, max_size=3),
    ),
)
TABLES = st.sampled_from(["a", "a/b", "a/s.b", "b", "b/c"])
TABLE_PATTERNS = st.sampled_from(["a", "a/b", "a/s.*", "*", "*/b", "b", "a/*"])
KINDS = st.one_of(
    st.tuples(st.just("path"), PATH_PATTERNS, PATHS),
    st.tuples(st.just("url"), URL_PATTERNS, URLS),
    st.tuples(st.just("table"), TABLE_PATTERNS, TABLES),
    st.tuples(st.just("name"), st.sampled_from(["a", "a*", "*", "b"]), NAMES),
    st.tuples(
        st.just("key"), st.sampled_from(["a/b", "a/*", "**", "*/b"]), st.sampled_from(["a", "a/b", "b/b"])
    ),
)
VERDICTS = st.sampled_from([Verdict.ALLOW, Verdict.ASK, Verdict.DENY])


@given(KINDS)
@settings(max_examples=600)
@example(("table", "a/s.b", "a"))  # a statement that touches no table is matched by a rule on tables
@example(("url", "http://a.test:*/a", "http://a.test:8080/a"))
@example(("path", "/workspace/a/**", "/workspace/a"))
def test_whatever_a_pattern_matches_begins_with_its_head(case: tuple[str, str, str]) -> None:
    kind, text, resource = case
    pattern, asked = compile_pattern(kind, text), subject(kind, resource)
    if pattern.permits(asked) or pattern.forbids(asked):
        head = head_of(pattern)
        assert any(words[: len(head)] == head for words in words_of(asked))
        assert Heads([[pattern]]).of(asked) == (0,)


@given(st.lists(st.tuples(VERDICTS, PATH_PATTERNS), min_size=1, max_size=12), PATHS)
@settings(max_examples=300)
def test_a_decision_is_that_of_all_rules_looked_at_one_by_one(
    lines: list[tuple[Verdict, str]], path: str
) -> None:
    rules = [
        parse_rule(f'fs.read: "{text}"', verdict.value, rule_id=f"r{number}")
        for number, (verdict, text) in enumerate(lines)
    ]
    asked = subject("path", path)

    def matching(verdict: Verdict) -> list[Rule]:
        return [
            rule
            for rule in rules
            if rule.verdict is verdict and any(pattern.permits(asked) for pattern in rule.compiled())
        ]

    denies = [rule for rule in rules if rule.verdict is Verdict.DENY]
    policy = AgentPolicy("a", [(r.id, r) for r in rules if r.verdict is not Verdict.DENY], denies)
    decision = policy.decide(Request(principal="a", action="fs.read", resource=path))
    if matching(Verdict.DENY):
        expected = Verdict.DENY
    elif matching(Verdict.ASK):
        expected = Verdict.ASK
    else:
        expected = Verdict.ALLOW if matching(Verdict.ALLOW) else Verdict.DENY
    assert decision.verdict is expected
    named = [rule.id for rule in matching(expected)]
    assert all(rule in named for rule in decision.rules)
    assert bool(named) is bool(decision.rules)


def test_only_what_may_match_is_looked_at() -> None:
    patterns = [compile_pattern("path", f"/workspace/d{n}/**") for n in range(1000)]
    heads = Heads([[pattern] for pattern in [*patterns, compile_pattern("path", "**/.env")]])
    assert heads.of(subject("path", "/workspace/d7/x")) == (7, 1000)
