"""A child never gets more than its parent, but for the roles that its parent delegates; whatever the rules are."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.kernel.journal.types import AgentKey, GrantRecord
from ringfence.kernel.kinship import meet
from ringfence.kernel.rights import Rights
from ringfence.policy.facts import Facts
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.types import Decision, Verdict
from ringfence.syscalls.base import Question
from support.grants import grant

KERNEL = parse_kernel_file(
    """
apiVersion: ringfence/v1
kind: Kernel
spec:
  roles:
    worker: {allow: [{fs.write: "/workspace/a/**"}], deny: [{fs.write: "/workspace/a/b"}]}
    other: {allow: [{fs.*: "/workspace/**"}]}
""",
    "test",
)
ROLE = 'fs.write: "/workspace/a/**"'
ORDER = [Verdict.DENY, Verdict.ASK, Verdict.ALLOW]
PATHS = ["/workspace/a", "/workspace/a/b", "/workspace/a/c", "/workspace/b", "/workspace/b/c/d", "/workspace"]
PATTERNS = ["/workspace/**", "/workspace/a/**", "/workspace/*", "/workspace/a/b", "**/c", "/workspace/b/**"]
ACTIONS = ["fs.read", "fs.write", "fs.delete"]
QUESTIONS = [Question(action=action, resource=path) for action in ACTIONS for path in PATHS]

rules = st.tuples(st.sampled_from(["fs.*", *ACTIONS]), st.sampled_from(PATTERNS)).map(
    lambda r: f'{r[0]}: "{r[1]}"'
)
grants = st.lists(st.tuples(st.sampled_from(["allow", "allow", "ask"]), rules), max_size=5)
denies = st.lists(rules, max_size=2)


def rights(
    name: str,
    held: list[tuple[str, str]],
    denied: list[str],
    parent: Rights | None,
    *,
    roles: tuple[str, ...] = (),
    delegates: tuple[str, ...] = (),
    key: int = 0,
) -> Rights:
    lines = "".join(f"      - {rule}\n" for rule in denied)
    text = (
        f"apiVersion: ringfence/v1\nkind: Agent\nmetadata: {{name: {name}}}\nspec:\n  run: {{command: [x]}}\n"
        f"  delegates: [{', '.join(delegates)}]\n  permissions:\n    roles: [{', '.join(roles)}]\n"
    )
    manifest = parse_manifest(text + (f"    deny:\n{lines}" if denied else ""), "test")
    records = [
        dataclasses.replace(grant(100 * key + nr, rule, verdict), origin="manifest", agent=AgentKey(key))
        for nr, (verdict, rule) in enumerate(held)
    ]
    return Rights(agent=name, manifest=manifest, kernel_file=KERNEL, grants=records, epoch=1, parent=parent)


def strictness(decision: Decision) -> int:
    return ORDER.index(decision.verdict)


@settings(deadline=None)
@given(grants, denies, grants, denies, grants, denies)
def test_a_descendant_gets_exactly_the_strictest_of_all_above(
    top: list[tuple[str, str]],
    top_denies: list[str],
    middle: list[tuple[str, str]],
    middle_denies: list[str],
    low: list[tuple[str, str]],
    low_denies: list[str],
) -> None:
    parent = rights("top", top, top_denies, None, key=1)
    child = rights("middle", middle, middle_denies, parent, roles=("other",), key=2)
    grandchild = rights("low", low, low_denies, child, key=3)
    alone = [
        parent,
        rights("middle", middle, middle_denies, None, roles=("other",), key=2),
        rights("low", low, low_denies, None, key=3),
    ]
    for question in QUESTIONS:
        expected = min(strictness(one.decide(question, "READ")) for one in alone)
        found = grandchild.decide(question, "READ")
        assert strictness(found) == expected, question
        assert strictness(child.decide(question, "READ")) == min(
            strictness(one.decide(question, "READ")) for one in alone[:2]
        )
        judged = grandchild.judge((question,), "READ")
        assert judged.verdict is found.verdict
        assert bool(judged.asking) == (found.verdict is Verdict.ASK)
        # Each verdict names what made it so: a rule, or whose lack of one.
        assert found.rules or "nothing allows" in found.reason


@settings(deadline=None)
@given(grants, denies, grants, denies)
def test_what_is_seen_and_masked_follows_the_same_meet(
    top: list[tuple[str, str]], top_denies: list[str], low: list[tuple[str, str]], low_denies: list[str]
) -> None:
    parent = rights("top", top, top_denies, None, key=1)
    child = rights("low", low, low_denies, parent, key=2)
    alone = rights("low", low, low_denies, None, key=2)
    for path in PATHS:
        assert child.visible("fs.read", path) == (
            parent.visible("fs.read", path) and alone.visible("fs.read", path)
        )
    assert set(child.masks(PATHS)) == set(parent.masks(PATHS)) | set(alone.masks(PATHS))


@settings(deadline=None)
@given(grants, denies, grants, denies)
def test_what_may_be_allowed_or_asked_is_offered(
    top: list[tuple[str, str]], top_denies: list[str], low: list[tuple[str, str]], low_denies: list[str]
) -> None:
    parent = rights("top", top, top_denies, None, delegates=("worker",), key=1)
    for child in (
        parent,
        rights("low", [*low, ("allow", ROLE)], low_denies, parent, roles=("worker",), key=2),
    ):
        for question in QUESTIONS:
            if child.decide(question, "READ").verdict is not Verdict.DENY:
                assert child.offers(question.action), question


def test_what_nothing_allows_or_everything_denies_is_not_offered() -> None:
    read = rights(
        "one", [("allow", 'fs.read: "/workspace/**"'), ("ask", 'fs.delete: "/workspace/a"')], [], None
    )
    offered = {a for a in ("fs.read", "fs.list", "fs.delete", "fs.write", "fs.move", "now") if read.offers(a)}
    assert offered == {"fs.read", "fs.list", "fs.delete", "now"}
    below = rights("two", [("allow", 'fs.*: "**"')], [], read, key=2)
    assert (below.offers("fs.read"), below.offers("fs.write")) == (True, False)
    barred = rights("one", [("allow", 'fs.*: "**"')], ['fs.*: "**"', 'now: "*"'], None)
    assert not any(barred.offers(a) for a in ("fs.read", "fs.list", "now"))


@settings(deadline=None)
@given(grants, denies, grants, denies)
def test_a_delegated_role_adds_what_the_role_says_and_nothing_else(
    top: list[tuple[str, str]], top_denies: list[str], low: list[tuple[str, str]], low_denies: list[str]
) -> None:
    parent = rights("top", top, top_denies, None, delegates=("worker",), key=1)
    held = [*low, ("allow", ROLE)]
    child = rights("low", held, low_denies, parent, roles=("worker",), key=2)
    alone = rights("low", held, low_denies, None, roles=("worker",), key=2)
    met = rights(
        "low", held, low_denies, rights("top", top, top_denies, None, key=1), roles=("worker",), key=2
    )
    for question in QUESTIONS:
        found = strictness(child.decide(question, "READ"))
        of_role = question.action == "fs.write" and str(question.resource).startswith("/workspace/a")
        expected = alone if of_role else met
        assert found == strictness(expected.decide(question, "READ")), question


def test_a_revoked_grant_of_the_role_is_no_delegation_any_more() -> None:
    parent = rights("top", [], [], None, delegates=("worker",), key=1)
    question = Question(action="fs.write", resource="/workspace/a/x")
    kept = rights("low", [("allow", ROLE)], [], parent, roles=("worker",), key=2)
    assert kept.decide(question, "WRITE").verdict is Verdict.ALLOW
    assert (
        rights("low", [], [], parent, roles=("worker",), key=2).decide(question, "WRITE").verdict
        is Verdict.DENY
    )


def test_a_parents_limited_grant_is_used_up_by_its_child() -> None:
    limited = dataclasses.replace(grant(1, ROLE, uses_left=1), agent=AgentKey(1))
    spent = dataclasses.replace(limited, uses_left=0)
    question = Question(action="fs.write", resource="/workspace/a/x")

    def child_of(record: GrantRecord) -> Rights:
        manifest = parse_manifest(
            "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: top}\nspec: {run: {command: [x]}}\n",
            "test",
        )
        parent = Rights(agent="top", manifest=manifest, kernel_file=KERNEL, grants=[record], epoch=1)
        return rights("low", [("allow", ROLE)], [], parent, key=2)

    assert child_of(limited).limited == {"g1"}
    assert "g1" in child_of(limited).judge((question,), "WRITE").grants
    assert child_of(spent).judge((question,), "WRITE").verdict is Verdict.DENY
    # The call that used it up goes on under it.
    assert child_of(spent).judge((question,), "WRITE", frozenset({"g1"})).verdict is Verdict.ALLOW


def test_an_ask_of_its_own_or_of_the_ceilings_is_no_delegation() -> None:
    parent = rights("top", [], [], None, delegates=("worker",), key=1)
    child = rights("low", [("ask", 'fs.delete: "/workspace/**"')], [], parent, roles=("worker",), key=2)
    question = Question(action="fs.delete", resource="/workspace/a/x")
    assert child.decide(question, "DESTROY").verdict is Verdict.DENY
    asking = rights(
        "low", [("ask", 'fs.write: "/workspace/**"'), ("allow", ROLE)], [], parent, roles=("worker",), key=2
    )
    assert (
        asking.decide(Question(action="fs.write", resource="/workspace/a/x"), "WRITE").verdict is Verdict.ASK
    )


def test_the_meet_says_who_it_is_about() -> None:
    own = Decision(verdict=Verdict.ALLOW, rules=("r1",), grants=("g1",), reason="allowed")
    above = Decision(verdict=Verdict.ALLOW, rules=("g9", "x/r2"), grants=("g9",), reason="allowed")
    found = meet(own, above, "p-1")
    assert (found.rules, found.grants) == (("r1", "p-1/g9", "x/r2"), ("g1", "g9"))
    denied = meet(own, Decision(verdict=Verdict.DENY, reason="nothing allows it"), "p-1")
    assert (denied.verdict, denied.rules) == (Verdict.DENY, ())
    assert "`p-1`" in denied.reason


CONDITIONS = [
    "{action: fs.write, if: tainted, then: deny}",
    "{action: fs.*, resource: /workspace/a/**, if: tainted, then: ask}",
    "{action: fs.delete, require: {fresh: 10s}}",
    "{action: fs.read, if: {created: false}, then: ask}",
]


def conditional(
    name: str, held: list[tuple[str, str]], when: list[str], parent: Rights | None, key: int
) -> Rights:
    lines = "".join(f"    - {line}\n" for line in when)
    text = (
        f"apiVersion: ringfence/v1\nkind: Agent\nmetadata: {{name: {name}}}\nspec:\n  run: {{command: [x]}}\n"
    )
    manifest = parse_manifest(text + (f"  when:\n{lines}" if when else ""), "test")
    records = [
        dataclasses.replace(grant(100 * key + nr, rule, verdict), origin="manifest", agent=AgentKey(key))
        for nr, (verdict, rule) in enumerate(held, 1)
    ]
    return Rights(agent=name, manifest=manifest, kernel_file=KERNEL, grants=records, epoch=1, parent=parent)


@given(
    grants,
    st.lists(st.sampled_from(CONDITIONS), max_size=2),
    grants,
    st.lists(st.sampled_from(CONDITIONS), max_size=2),
    st.sampled_from(["", "x", None]),
    st.sampled_from([True, False, None]),
)
@settings(max_examples=80, deadline=None)
def test_conditions_of_a_parent_bound_its_child(
    above: list[tuple[str, str]],
    above_when: list[str],
    own: list[tuple[str, str]],
    own_when: list[str],
    tainted: str | None,
    created: bool | None,
) -> None:
    facts = Facts(tainted=tainted, created=created, reads=())
    parent = conditional("parent", above, above_when, None, 1)
    child = conditional("child", own, own_when, parent, 2)
    alone = conditional("child", own, own_when, None, 2)
    for question in QUESTIONS:
        verdicts = [one.decide(question, "WRITE", facts) for one in (child, parent, alone)]
        met, theirs, mine = (ORDER.index(verdict.verdict) for verdict in verdicts)
        assert met == min(theirs, mine)
        judged = child.judge((question,), "WRITE", frozenset(), (facts,))
        assert judged.verdict is verdicts[0].verdict
        # Whatever asks is named, so that an approval of one covers no other.
        if judged.verdict is Verdict.ASK:
            assert {ask[0] for ask in judged.asking} <= set(verdicts[0].rules)


def test_what_an_operator_denies_to_a_parent_no_delegated_role_gives_back() -> None:
    asked = Question(action="fs.write", resource="/workspace/a/c")
    for denied, expected in (((), Verdict.ALLOW), (((ROLE, "deny"),), Verdict.DENY)):
        parent = rights("parent", [(how, rule) for rule, how in denied], [], None, delegates=("worker",))
        child = rights("child", [("allow", ROLE)], [], parent, roles=("worker",), key=1)
        assert child.decide(asked, "WRITE").verdict is expected
