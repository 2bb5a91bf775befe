"""Conditions narrow what rules allow, whatever the facts are, and what can't be known counts as matched."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.policy.conditions import Condition, untainting
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.facts import Facts, Read
from ringfence.policy.kernel_file import conditions_of, parse_kernel_file
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.problems import ManifestError
from ringfence.policy.rules import parse_rule
from ringfence.policy.types import Decision, Request, Verdict

HEAD = "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: a}\nspec:\n  run: {command: [x]}\n"
CLEAN = Facts(
    tainted="", reads=(), environment="", created=True, now=datetime(2026, 3, 2, 12, tzinfo=UTC), shares={}
)
ORDER = [Verdict.DENY, Verdict.ASK, Verdict.ALLOW]


def conditions(*lines: str) -> tuple[Condition, ...]:
    listed = "".join(f"    - {line}\n" for line in lines)
    return parse_manifest(f"{HEAD}  when:\n{listed}" if lines else HEAD).when


def policy(
    allow: list[str], ask: Sequence[str] = (), deny: Sequence[str] = (), when: tuple[Condition, ...] = ()
) -> AgentPolicy:
    held = [(f"g{nr}", parse_rule(text, rule_id=f"g{nr}")) for nr, text in enumerate(allow)]
    held += [(f"a{nr}", parse_rule(text, "ask", rule_id=f"a{nr}")) for nr, text in enumerate(ask)]
    return AgentPolicy(
        "a", held, [parse_rule(text, "deny", rule_id=f"d{nr}") for nr, text in enumerate(deny)], (), when
    )


def decide(found: AgentPolicy, action: str, resource: Any, facts: Facts | None = CLEAN) -> Decision:
    context = {} if facts is None else {"facts": facts}
    return found.decide(Request(principal="a", action=action, resource=resource, context=context))


def verdict(
    line: str, facts: Facts | None, action: str = "http.post", resource: Any = "https://a.test/x"
) -> str:
    rule = 'http.*: "**"' if action.startswith("http") else '"*": "**"'
    found = policy([rule], when=conditions(line))
    return decide(found, action, resource, facts).verdict.value


# -- properties -------------------------------------------------------------------------------------------------------

PATHS = ["/workspace/a", "/workspace/a/b", "/workspace/b", "/workspace/b/c"]
ACTIONS = ["fs.read", "fs.write", "fs.delete", "fs.list", "fs.append"]
rules = st.tuples(
    st.sampled_from(["fs.*", *ACTIONS]), st.sampled_from(["/workspace/**", "/workspace/a/**", "/workspace/*"])
).map(lambda r: f'{r[0]}: "{r[1]}"')
TESTS = [
    "if: tainted, then: {then}",
    "if: {{created: false}}, then: {then}",
    "if: {{created: true, tainted: true}}, then: {then}",
    "if: {{budget: {{total: calls, over: 50%}}}}, then: {then}",
    'if: {{hours: {{from: "08:00", to: "10:00", timezone: UTC}}}}, then: {then}',
    "if: {{amount: {{field: /n, over: 5}}}}, then: {then}",
    "require: {{fresh: 10s}}",
    'require: {{fresh: 10s, of: [{{fs.read: "/workspace/a"}}]}}',
]
lines = st.tuples(
    st.sampled_from(["fs.*", "fs.read", "fs.write", "fs.delete"]),
    st.sampled_from(["", ", resource: /workspace/a/**", ", resource: /workspace/b"]),
    st.sampled_from(TESTS),
    st.sampled_from(["ask", "deny"]),
).map(lambda c: "{action: " + c[0] + c[1] + ", " + c[2].format(then=c[3]) + "}")
read = st.builds(
    Read,
    action=st.just("fs.read"),
    resource=st.sampled_from(PATHS),
    step=st.just(3),
    age_s=st.sampled_from([1.0, 100.0]),
    changed=st.sampled_from(["", "it changed"]),
)
facts = st.builds(
    Facts,
    tainted=st.sampled_from([None, "", "x at step 1"]),
    reads=st.one_of(st.none(), st.lists(read, max_size=3).map(tuple)),
    created=st.sampled_from([None, True, False]),
    now=st.sampled_from([None, datetime(2026, 3, 2, 9, tzinfo=UTC), datetime(2026, 3, 2, 12, tzinfo=UTC)]),
    arguments=st.sampled_from([None, {"n": 1}, {"n": 9}, {"n": "1"}]),
    shares=st.sampled_from([None, {}, {"calls": 0.1}, {"calls": 0.9}]),
)


@given(
    st.lists(rules, max_size=4),
    st.lists(rules, max_size=2),
    st.lists(rules, max_size=2),
    st.lists(lines, max_size=4),
    lines,
    st.one_of(st.none(), facts),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_a_condition_or_a_deny_never_allows_and_order_never_matters(
    allow: list[str],
    ask: list[str],
    deny: list[str],
    held: list[str],
    more: str,
    known: Facts | None,
    shuffle: random.Random,
) -> None:
    bare, some = policy(allow, ask, deny), policy(allow, ask, deny, conditions(*held))
    narrower = policy(allow, ask, deny, conditions(*held, more))
    denied = policy(allow, ask, [*deny, 'fs.*: "/workspace/a/**"'], conditions(*held))
    mixed = [list(part) for part in (allow, ask, deny, held)]
    for part in mixed:
        shuffle.shuffle(part)
    other = policy(mixed[0], mixed[1], mixed[2], conditions(*mixed[3]))
    for action, path in product(ACTIONS, PATHS):
        answers = [decide(one, action, path, known) for one in (bare, some, narrower, denied, other)]
        ranks = [ORDER.index(answer.verdict) for answer in answers]
        assert ranks[0] >= ranks[1] >= ranks[2]
        assert ranks[1] >= ranks[3]
        assert ranks[1] == ranks[4]
        # Asked again, and by a policy that was made anew as after a restart, it is the same answer.
        again = policy(allow, ask, deny, conditions(*held))
        assert decide(some, action, path, known) == answers[1] == decide(again, action, path, known)
        if known is None:
            # Nothing known: whatever a condition speaks of is not simply allowed.
            spoken = [c for c in some.conditions if c.speaks_of(action, path)]
            assert not spoken or answers[1].verdict is not Verdict.ALLOW


@given(st.lists(rules, min_size=1, max_size=3), st.lists(lines, min_size=1, max_size=3), facts)
@settings(max_examples=60, deadline=None)
def test_what_is_less_known_is_never_more_allowed(allow: list[str], held: list[str], known: Facts) -> None:
    found = policy(allow, when=conditions(*held))
    for action, path in product(ACTIONS, PATHS):
        full = ORDER.index(decide(found, action, path, known).verdict)
        assert ORDER.index(decide(found, action, path, Facts()).verdict) <= full
        assert ORDER.index(decide(found, action, path, None).verdict) <= full


# -- each fact --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "facts", "expected"),
    [
        ("{action: http.post, if: tainted, then: ask}", {"tainted": "x"}, "ask"),
        ("{action: http.post, if: tainted, then: deny}", {"tainted": "x"}, "deny"),
        ("{action: http.post, if: tainted, then: deny}", {}, "allow"),
        ("{action: http.get, if: tainted, then: deny}", {"tainted": "x"}, "allow"),
        ('{action: http.*, resource: "https://a.test/**", if: tainted, then: deny}', {"tainted": "x"}, "deny"),
        ('{action: http.*, resource: "https://b.test/**", if: tainted, then: deny}', {"tainted": "x"}, "allow"),
        ("{action: http.post, if: {environment: prod}, then: ask}", {"environment": "prod"}, "ask"),
        ("{action: http.post, if: {environment: [live, prod]}, then: ask}", {"environment": "prod"}, "ask"),
        ("{action: http.post, if: {environment: prod}, then: ask}", {"environment": "staging"}, "allow"),
        ("{action: http.post, if: {environment: prod}, then: ask}", {"environment": ""}, "allow"),
        ("{action: http.post, if: {environment: prod}, then: ask}", {"environment": None}, "ask"),
        ("{action: http.post, if: {environment: prod, tainted: true}, then: ask}", {"environment": "prod"}, "allow"),
        (
            "{action: http.post, if: {environment: prod, tainted: true}, then: ask}",
            {"environment": "prod", "tainted": "x"},
            "ask",
        ),
        ("{action: http.post, if: {amount: {field: /json/n, over: 5}}, then: ask}", {"arguments": {"json": {"n": 5}}}, "allow"),
        ("{action: http.post, if: {amount: {field: /json/n, over: 5}}, then: ask}", {"arguments": {"json": {"n": 5.1}}}, "ask"),
        ("{action: http.post, if: {amount: {field: /json/n, over: 5}}, then: ask}", {"arguments": {"json": {"n": "1"}}}, "ask"),
        ("{action: http.post, if: {amount: {field: /json/n, over: 5}}, then: ask}", {"arguments": {"json": {"n": True}}}, "ask"),
        ("{action: http.post, if: {amount: {field: /json/n, over: 5}}, then: ask}", {"arguments": {}}, "ask"),
        ("{action: http.post, if: {amount: {field: /json/n, over: 5}}, then: ask}", {"arguments": {"json": {"n": 10**400}}}, "ask"),
        ("{action: http.post, if: {amount: {field: /l/1, over: 5}}, then: ask}", {"arguments": {"l": [9, 1]}}, "allow"),
        ("{action: http.post, if: {amount: {field: /a~1b/~0, over: 5}}, then: ask}", {"arguments": {"a/b": {"~": 1}}}, "allow"),
        ("{action: http.post, if: {budget: {total: usd, over: 80%}}, then: ask}", {"shares": {"usd": 0.8}}, "allow"),
        ("{action: http.post, if: {budget: {total: usd, over: 80%}}, then: ask}", {"shares": {"usd": 0.81}}, "ask"),
        ("{action: http.post, if: {budget: {total: usd, over: 80%}}, then: ask}", {"shares": {}}, "ask"),
        (
            "{action: http.post, if: {budget: {total: usd, over: 80%, of: family}}, then: ask}",
            {"shares": {"usd": 0.9}, "shared": {("family", "usd"): 0.8, ("siblings", "usd"): 0.9}},
            "allow",
        ),
        (
            "{action: http.post, if: {budget: {total: usd, over: 80%, of: 'team=b,env=a'}}, then: deny}",
            {"shared": {("env=a,team=b", "usd"): 0.81}},
            "deny",
        ),
        (
            "{action: http.post, if: {budget: {total: usd, over: 80%, of: fleet}}, then: ask}",
            {"shares": {"usd": 0.1}, "shared": {}},
            "ask",
        ),
    ],
)  # fmt: skip
def test_each_fact(line: str, facts: dict[str, Any], expected: str) -> None:
    assert verdict(line, dataclasses.replace(CLEAN, **facts)) == expected


@pytest.mark.parametrize(
    ("window", "utc", "inside"),
    [
        ('from: "08:00", to: "18:00", timezone: Europe/Berlin', "2026-03-02T07:00", True),
        ('from: "08:00", to: "18:00", timezone: Europe/Berlin', "2026-03-02T06:59", False),
        ('from: "08:00", to: "18:00", timezone: Europe/Berlin', "2026-03-02T17:00", False),
        ('from: "08:00", to: "18:00", timezone: Europe/Berlin', "2026-07-02T06:00", True),  # summer time
        ('from: "08:00", to: "18:00", days: [mon], timezone: UTC', "2026-03-02T09:00", True),
        ('from: "08:00", to: "18:00", days: [tue], timezone: UTC', "2026-03-02T09:00", False),
        ('from: "22:00", to: "06:00", days: [mon], timezone: UTC', "2026-03-02T23:00", True),
        ('from: "22:00", to: "06:00", days: [mon], timezone: UTC', "2026-03-03T05:59", True),
        ('from: "22:00", to: "06:00", days: [mon], timezone: UTC', "2026-03-02T05:00", False),
        ('from: "22:00", to: "06:00", days: [mon], timezone: UTC', "2026-03-03T22:00", False),
    ],
)
def test_hours_are_those_of_a_zone(window: str, utc: str, inside: bool) -> None:
    known = dataclasses.replace(CLEAN, now=datetime.fromisoformat(utc).replace(tzinfo=UTC))
    within = verdict("{action: http.post, if: {hours: {" + window + "}}, then: deny}", known)
    without = verdict("{action: http.post, if: {outside: {" + window + "}}, then: deny}", known)
    assert (within, without) == (("deny", "allow") if inside else ("allow", "deny"))


def test_freshness_names_what_aged_and_what_changed() -> None:
    line = '{action: sql.write, require: {fresh: 15m, of: [{sql.read: {database: crm}}, {fs.read: "/workspace/**"}]}}'
    found = policy(["sql.write: {database: crm}"], when=conditions(line))

    def asked(*reads: Read) -> Decision:
        return decide(found, "sql.write", "crm/invoices", dataclasses.replace(CLEAN, reads=reads))

    rows = Read(action="sql.read", resource="crm/invoices", step=4, age_s=10.0)
    file = Read(action="fs.read", resource="/workspace/a", step=5, age_s=20.0)
    page = Read(action="http.get", resource="https://a.test/", step=1, age_s=99999.0)
    assert asked(rows, file, page).verdict is Verdict.ALLOW
    missing = asked(rows, page)
    assert (missing.verdict, missing.stale) == (Verdict.DENY, True)
    assert "nothing was read of" in missing.reason
    old = asked(Read(action="sql.read", resource="crm/invoices", step=4, age_s=901.0), file)
    assert "sql.read of `crm/invoices` at step 4 is 901 s old, more than 900 s" in old.reason
    changed = asked(
        rows, Read(action="fs.read", resource="/workspace/a", step=5, age_s=1.0, changed="the file changed")
    )
    assert "`/workspace/a` at step 5 is no longer current: the file changed" in changed.reason
    everything = policy(
        ["sql.write: {database: crm}"], when=conditions("{action: sql.write, require: {fresh: 15m}}")
    )
    assert decide(everything, "sql.write", "crm/invoices").verdict is Verdict.ALLOW


def test_all_that_asks_is_named_so_that_an_approval_covers_no_other() -> None:
    found = policy(
        ['http.post: "**"'],
        ['http.post: "https://a.test/**"'],
        when=conditions(
            "{action: http.post, if: tainted, then: ask}",
            "{action: http.post, if: {environment: prod}, then: ask}",
        ),
    )
    known = dataclasses.replace(CLEAN, tainted="x", environment="prod")
    decision = decide(found, "http.post", "https://a.test/x", known)
    assert decision.asks == ("a0", "w1", "w2")
    assert set(decision.asks) <= set(decision.rules)
    assert decide(found, "http.post", "https://a.test/x").asks == ()


def test_a_hidden_path_follows_its_condition() -> None:
    found = policy(
        ['fs.*: "/workspace/**"'],
        when=conditions("{action: fs.read, resource: secret/**, if: tainted, then: deny}"),
    )
    dirty = dataclasses.replace(CLEAN, tainted="x")
    assert found.visible("fs.read", "/workspace/secret/a", CLEAN)
    assert not found.visible("fs.read", "/workspace/secret/a", dirty)
    assert not found.visible("fs.read", "/workspace/secret/a")
    assert found.visible("fs.read", "/workspace/open", dirty)


def test_a_command_that_can_not_be_followed_falls_under_a_condition() -> None:
    line = '{action: exec.run, resource: "git push *", if: tainted, then: deny}'
    dirty = dataclasses.replace(CLEAN, tainted="x")
    found = policy(['exec.run: "*"'], when=conditions(line))
    assert decide(found, "exec.run", ("git", "status"), dirty).verdict is Verdict.ALLOW
    for argv in (("git", "push"), ("sh", "-c", "cd x && git push origin"), ("sh", "-c", "$TOOL push")):
        assert decide(found, "exec.run", argv, dirty).verdict is Verdict.DENY, argv


# -- the kernel file --------------------------------------------------------------------------------------------------


def test_conditions_come_from_ceilings_roles_and_environments() -> None:
    file = parse_kernel_file(
        """
apiVersion: ringfence/v1
kind: Kernel
spec:
  ceilings: {when: [{action: http.*, if: tainted, then: ask}]}
  roles:
    base: {environment: staging, when: [{action: sql.write, require: {fresh: 1h}}], allow: [{fs.read: "/workspace/**"}]}
    clerk: {roles: [base], allow: [{fs.write: "/workspace/out/**"}], deny: [{fs.write: "/workspace/out/x"}]}
  untaint: [{exec.run: "sanitise *"}, ask]
"""
    )
    manifest = parse_manifest(
        HEAD + "  permissions: {roles: [clerk]}\n  when: [{action: http.post, if: tainted, then: deny}]\n"
    )
    assert [c.id for c in conditions_of(manifest, file)] == [
        *(
            "cw1",
            "w1",
            "base.w1",
            "base.pin-http",
            "base.pin-sql",
            "base.pin-llm",
            "base.pin-object",
            "base.pin-mcp",
            "base.pin-a2a",
        ),
    ]
    assert [r.id for r in file.roles["clerk"]] == ["clerk.1", "base.1", "clerk.2"]
    assert untainting(file.untaint, "exec.run", ("sanitise", "a")) == "u1"
    assert untainting(file.untaint, "exec.run", ("sh", "-c", "sanitise a")) == ""
    assert untainting(file.untaint, "ask", "") == "u2"


@pytest.mark.parametrize(
    ("roles", "what"),
    [
        ("{a: {roles: [b]}}", "takes `b`, which is none"),
        ("{a: {roles: [a]}}", "takes itself"),
        ("{a: {roles: [b]}, b: {roles: [c]}, c: {roles: [a]}}", "takes itself"),
    ],
)
def test_roles_that_can_not_be_taken(roles: str, what: str) -> None:
    with pytest.raises(ManifestError, match=what):
        parse_kernel_file(f"apiVersion: ringfence/v1\nkind: Kernel\nspec: {{roles: {roles}}}\n")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{action: fs.read, if: {environment: prod}, then: ask}", "only resources of"),
        ("{action: http.get, if: {created: false}, then: ask}", "only resources of"),
        ("{action: http.get, if: {tainted: false}, then: ask}", "can't be `false`"),
        ("{action: http.get, if: {}, then: ask}", "asks about nothing"),
        ("{action: http.get, if: {hours: {from: '8', to: '18:00', timezone: UTC}}, then: ask}", "no time of a day"),
        ("{action: http.get, if: {hours: {from: '08:00', to: '08:00', timezone: UTC}}, then: ask}", "ends when it begins"),
        ("{action: http.get, if: {hours: {from: '08:00', to: '18:00', timezone: Mars/X}}, then: ask}", "no time zone"),
        ("{action: http.get, if: {hours: {from: '08:00', to: '18:00'}}, then: ask}", "no `timezone`"),
        ("{action: http.get, if: {budget: {total: usd, over: 100%}}, then: ask}", "below 100 %"),
        ("{action: http.get, if: {budget: {total: usd, over: 10%, of: us}}, then: ask}", "`us` is nobody's budget"),
        ("{action: http.get, if: {budget: {total: euro, over: 10%}}, then: ask}", "euro"),
        ("{action: http.get, if: {amount: {field: json, over: 1}}, then: ask}", "no place among arguments"),
        ("{action: http.get, resource: /workspace/a, if: tainted, then: ask}", "http"),
        ("{action: now, resource: x, if: tainted, then: ask}", "no resource to name"),
        ("{action: sql.write, require: {fresh: 1h, of: [{fs.write: /workspace/a}]}}", "reads nothing"),
        ("{action: sql.write, require: {fresh: 1h, of: []}}", "names nothing"),
        ("{action: http.post, if: tainted, then: allow}", "allow"),
    ],
)  # fmt: skip
def test_what_is_no_condition(line: str, what: str) -> None:
    with pytest.raises(ManifestError, match=what):
        conditions(line)


@pytest.mark.parametrize("template", TESTS)
def test_the_text_of_a_condition_reads_back_as_itself(template: str) -> None:
    (found,) = conditions(
        "{action: fs.write, resource: /workspace/a/**, " + template.format(then="ask") + "}"
    )
    (again,) = conditions(found.text)
    assert again == found
