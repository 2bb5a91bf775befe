"""Several questions of one call: deny beats ask beats allow, and a limited grant counts for the call that used it up."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.journal.types import GrantRecord
from ringfence.kernel.rights import Rights
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.types import Verdict
from ringfence.syscalls.base import Question
from support.grants import grant

KERNEL = parse_kernel_file("apiVersion: ringfence/v1\nkind: Kernel\nspec: {}\n", "test")
MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: bot}
spec:
  run: {command: ["true"]}
  permissions:
    allow: []
    deny: [{fs.*: "/workspace/denied/**"}]
"""
ORDER = (Verdict.DENY, Verdict.ASK, Verdict.ALLOW)


def rights(*grants: GrantRecord) -> Rights:
    manifest = parse_manifest(MANIFEST, "test")
    return Rights(agent="bot", manifest=manifest, kernel_file=KERNEL, grants=grants, epoch=7)


def ask(path: str, action: str = "fs.read") -> Question:
    return Question(action=action, resource=f"/workspace/{path}")


BASE = (
    grant(1, 'fs.read: "/workspace/**"'),
    grant(2, 'fs.read: "/workspace/asked/**"', "ask"),
    grant(3, 'fs.write: "/workspace/free/**"'),
)
QUESTIONS = {
    ask("free/a"): Verdict.ALLOW,
    ask("free/a", "fs.write"): Verdict.ALLOW,
    ask("asked/a"): Verdict.ASK,
    ask("denied/a"): Verdict.DENY,
    ask("asked/a", "fs.write"): Verdict.DENY,
}


@given(st.lists(st.sampled_from(sorted(QUESTIONS, key=str)), max_size=6))
def test_the_worst_answer_counts_whatever_the_order(questions: list[Question]) -> None:
    made = rights(*BASE)
    wanted = min((QUESTIONS[q] for q in questions), key=ORDER.index, default=Verdict.DENY)
    judgement = made.judge(tuple(questions), "READ")
    assert judgement.verdict is wanted
    assert made.judge(tuple(questions), "READ") is judgement
    explained = msgspec.json.decode(b"{" + judgement.tail)
    assert explained["epoch"] == 7
    assert explained["grants"] == list(judgement.grants)
    if wanted is Verdict.ALLOW:
        used = {"g3" if q.action == "fs.write" else "g1" for q in questions}
        assert set(judgement.grants) == used


def test_what_is_spent_revoked_or_expired_allows_nothing() -> None:
    rule = 'fs.read: "/workspace/**"'
    for dead in (grant(1, rule, uses_left=0), grant(1, rule, revoked=True), grant(1, rule, expires_in=-1)):
        made = rights(dead)
        assert made.judge((ask("a"),), "READ").verdict is Verdict.DENY
        assert made.grants == {}
        assert not made.limited
        assert not made.expired
    alive = rights(grant(1, rule, uses_left=2, expires_in=1000))
    assert alive.judge((ask("a"),), "READ").verdict is Verdict.ALLOW
    assert alive.limited == {"g1"}


def test_the_last_use_counts_for_the_call_that_took_it_alone() -> None:
    made = rights(grant(1, 'fs.read: "/workspace/**"', uses_left=0), grant(2, 'fs.write: "/workspace/**"'))
    both = (ask("a"), ask("a", "fs.write"))
    assert made.judge(both, "WRITE").verdict is Verdict.DENY
    own = made.judge(both, "WRITE", frozenset({"g1"}))
    assert (own.verdict, set(own.grants)) == (Verdict.ALLOW, {"g1", "g2"})
    assert made.judge(both, "WRITE", frozenset({"g2", "g9"})).verdict is Verdict.DENY
    assert made.judge((*both, ask("denied/a")), "WRITE", frozenset({"g1"})).verdict is Verdict.DENY
    assert made.judge(both, "WRITE").verdict is Verdict.DENY


@pytest.mark.parametrize("dead", [{"revoked": True}, {"expires_in": -1.0}])
def test_a_use_of_what_was_taken_away_does_not_count(dead: dict[str, float]) -> None:
    revoked, expires = bool(dead.get("revoked")), dead.get("expires_in")
    made = rights(grant(1, 'fs.read: "/workspace/**"', uses_left=0, revoked=revoked, expires_in=expires))
    assert made.judge((ask("a"),), "READ", frozenset({"g1"})).verdict is Verdict.DENY
