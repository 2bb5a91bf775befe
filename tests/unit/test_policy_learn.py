"""Learned rules allow every call that was made and nothing that was denied, and the manifest's parser takes them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.learn import Used, as_yaml, learn
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.rules import parse_rule
from ringfence.policy.types import Request, Verdict

HEAD = "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: learned}\nspec:\n  run: {command: [a]}\n"

# Few letters, so that things lie side by side; and some that mean something in patterns, YAML or a shell.
word = st.text(st.sampled_from("ab*?'\"#: -\\{[é"), min_size=1, max_size=3).filter(lambda t: t.strip() == t)
plain = st.sampled_from(["a", "b", "c", "d", "data", "x.txt"])
path = st.lists(st.one_of(plain, word.filter(lambda t: t not in {".", ".."})), min_size=1, max_size=3).map(
    lambda parts: "/workspace/" + "/".join(parts)
)
url = st.lists(plain, max_size=3).map(lambda parts: "https://api.example.com/" + "/".join(parts))
key = st.lists(plain, min_size=1, max_size=3).map("/".join)
table = st.tuples(st.sampled_from(["crm", "shop"]), plain).map(
    lambda two: f"{two[0]}/{two[1].replace('.', '_')}"
)
command = st.lists(st.one_of(plain, word), min_size=1, max_size=4).map(tuple)
resources = {
    "fs.read": path,
    "fs.stat": path,
    "fs.write": path,
    "fs.delete": path,
    "fs.move": path,
    "http.get": url,
    "http.post": url,
    "state.put": key,
    "state.get": key,
    "sql.read": table,
    "sql.write": table,
    "exec.run": command,
    "llm.complete": plain,
    "messages.send": plain,
}
use = st.sampled_from(sorted(resources)).flatmap(
    lambda action: st.builds(
        Used,
        action=st.just(action),
        resource=resources[action],
        verdict=st.sampled_from([Verdict.ALLOW] * 8 + [Verdict.ASK, Verdict.DENY]),
    )
)


def policy_of(text: str) -> AgentPolicy:
    indented = "".join(f"  {line}\n" for line in text.splitlines())
    manifest = parse_manifest(HEAD + indented, "learned.yaml")
    assert manifest.unsupported() == []
    grants = [(f"g{nr}", rule) for nr, rule in enumerate(manifest.rules)]
    return AgentPolicy("learned", grants)


def verdict_of(policy: AgentPolicy, one: Used) -> Verdict:
    request = Request(principal="learned", action=one.action, resource=one.resource, effect="WRITE")
    return policy.decide(request).verdict


@settings(max_examples=60, deadline=None)
@given(st.lists(use, max_size=12), st.booleans())
def test_learned_rules_allow_what_was_done_and_not_what_was_denied(used: list[Used], denied: bool) -> None:
    found = learn(used)
    policy = policy_of(as_yaml(found, denied=denied))
    verdicts: dict[object, set[Verdict]] = {}
    asked = {one.resource for one in used if one.verdict is Verdict.ASK}
    allowed = {one.resource for one in used if one.verdict is Verdict.ALLOW}
    for one in used:
        verdicts.setdefault((one.action, one.resource), set()).add(one.verdict)
    for one in used:
        got = verdicts[one.action, one.resource]
        said = verdict_of(policy, one)
        if one in found.uncovered:
            assert said is Verdict.DENY, one
        elif Verdict.ASK in got:
            assert said is Verdict.ASK, one
        elif Verdict.ALLOW in got:
            # A rule that asks about deleting a path asks about moving it too, whatever was allowed then.
            assert said is Verdict.ALLOW or (one.resource in asked and said is Verdict.ASK), one
        elif one.resource not in allowed | asked:
            assert said is Verdict.DENY, one


def uses(action: str, *resources: object, verdict: Verdict = Verdict.ALLOW) -> list[Used]:
    return [Used(action=action, resource=each, verdict=verdict) for each in resources]  # type: ignore[arg-type] - strings and tuples


def test_several_neighbours_become_one_pattern() -> None:
    out = [f"/workspace/out/{nr}" for nr in range(3)]
    assert learn(uses("fs.write", *out)).allow == ('fs.write: "/workspace/out/*"',)
    two = learn(uses("fs.write", *out[:2])).allow
    assert two == ('fs.write: "/workspace/out/0"', 'fs.write: "/workspace/out/1"')
    words = [("git", "log", f"-{nr}") for nr in range(3)]
    assert learn(uses("exec.run", *words)).allow == ('exec.run: "git log *"',)
    shell = [("sh", "-c", f"echo {nr}") for nr in range(3)]
    assert len(learn(uses("exec.run", *shell)).allow) == 3  # what follows `-c` may be anything
    assert learn(uses("sql.read", "crm/a", "crm/b")).allow == ("sql.read: {database: crm, tables: [a, b]}",)
    hosts = [f"https://api.example.com/{nr}" for nr in range(3)]
    assert len(learn(uses("http.get", *hosts)).allow) == 3  # a host as a whole is no place
    pages = [f"https://api.example.com/v1/{nr}" for nr in range(3)]
    assert learn(uses("http.get", *pages)).allow == ('http.get: "https://api.example.com/v1/*"',)


def test_a_pattern_never_takes_in_what_was_denied() -> None:
    out = [f"/workspace/out/{nr}" for nr in range(3)]
    secret = uses("fs.write", "/workspace/out/secret", verdict=Verdict.DENY)
    found = learn([*uses("fs.write", *out), *secret])
    assert found.allow == tuple(f'fs.write: "{path}"' for path in out)
    assert found.denied == ('fs.write: "/workspace/out/secret"',)
    assert '#   - fs.write: "/workspace/out/secret"' in as_yaml(found, denied=True)
    assert "secret" not in as_yaml(found, denied=False)


def test_what_another_rule_says_anyway_is_left_out() -> None:
    found = learn([*uses("fs.read", "/workspace/a"), *uses("fs.stat", "/workspace/a"), *uses("now", "")])
    assert found.allow == ('fs.read: "/workspace/a"',)


def test_what_a_deny_stands_against_is_told_apart_from_what_no_rule_allows() -> None:
    refused = uses("fs.write", "/workspace/a", "/workspace/b", verdict=Verdict.DENY)
    found = learn(refused, lambda one: "denied by rule d1" if one.resource == "/workspace/b" else "")
    assert found.denied == ('fs.write: "/workspace/a"', 'fs.write: "/workspace/b"')
    assert found.barred == (('fs.write: "/workspace/b"', "denied by rule d1"),)
    shown = as_yaml(found, denied=True)
    assert '#   - fs.write: "/workspace/b"  # denied by rule d1' in shown
    # It stands there once, where it belongs.
    assert shown.count("/workspace/b") == 1
    # The rule that is proposed does allow what was denied.
    policy = AgentPolicy("learned", [("g", parse_rule(found.denied[0]))])
    assert verdict_of(policy, refused[0]) is Verdict.ALLOW


def test_what_a_deny_stands_against_is_named_once_and_made_no_wider() -> None:
    pay = "https://bank.example.com/pay"
    refused = uses(
        "http.post", *(f"{pay}/no{end}" for end in ("", "/", "?a=1", ";x", ".")), verdict=Verdict.DENY
    )
    missing = uses("http.post", f"{pay}/yes", verdict=Verdict.DENY)
    found = learn([*refused, *missing], lambda one: "denied by rule d1" if "/no" in str(one.resource) else "")
    rules = [rule for rule, _ in found.barred]
    assert sorted(rules) == sorted(set(rules))
    assert f'http.post: "{pay}/*"' not in found.denied
    assert set(found.denied) == {f'http.post: "{pay}/yes"', *rules}


def test_a_statement_without_a_table_asks_for_no_more_tables() -> None:
    found = learn([*uses("sql.read", "crm/a", "crm"), *uses("sql.write", "crm/a")])
    assert found.allow == (
        "sql.read: {database: crm, tables: [a]}",
        "sql.write: {database: crm, tables: [a]}",
    )
    policy = AgentPolicy("learned", [("g", parse_rule(found.allow[0]))])
    assert verdict_of(policy, uses("sql.read", "crm")[0]) is Verdict.ALLOW
