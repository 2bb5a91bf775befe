"""Decisions: deny beats ask beats allow in any order, nothing allowed means denied, and whatever breaks is a deny."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.policy import engine
from ringfence.policy.actions import KNOWN_ACTIONS, OWN_ACTIONS, ROWS, applies, match_action
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.rules import Rule, parse_rule, rule_for
from ringfence.policy.types import Decision, Request, Resource, Verdict


def rule(text: str, verdict: str = "allow", rule_id: str = "r1", origin: str = "manifest") -> Rule:
    return parse_rule(text, verdict, rule_id=rule_id, origin=origin)


def policy(
    *allow: str, ask: tuple[str, ...] = (), deny: tuple[str, ...] = (), ceilings: tuple[str, ...] = ()
) -> AgentPolicy:
    grants = [(f"g{n}", rule(text, "allow", f"r{n}")) for n, text in enumerate(allow, 1)]
    grants += [(f"k{n}", rule(text, "ask", f"a{n}")) for n, text in enumerate(ask, 1)]
    return AgentPolicy(
        "bot",
        grants,
        [rule(text, "deny", f"d{n}") for n, text in enumerate(deny, 1)],
        [rule(text, "deny", f"c{n}", "ceilings") for n, text in enumerate(ceilings, 1)],
    )


def decide(made: AgentPolicy, action: str, resource: Resource = "") -> Decision:
    return made.decide(Request(principal="bot", action=action, resource=resource))


def test_what_nothing_allows_is_denied_and_says_how_to_get_it() -> None:
    decision = decide(policy('fs.read: "/workspace/**"'), "fs.write", "/workspace/it's")
    assert decision.verdict is Verdict.DENY
    assert decision.rules == ()
    assert decision.grants == ()
    assert decision.reason == (
        "nothing allows fs.write on `/workspace/it's`; ask the operator: "
        """ringfence grant bot 'fs.write: "/workspace/it'"'"'s"'"""
    )


def test_an_empty_policy_allows_nothing_but_the_agents_own_thread() -> None:
    empty = AgentPolicy("bot", [])
    for action in KNOWN_ACTIONS:
        expected = Verdict.ALLOW if action in OWN_ACTIONS else Verdict.DENY
        for resource in ("", "*", "x"):
            decision = decide(empty, action, resource)
            assert decision.verdict is expected or resource
            assert action in OWN_ACTIONS or decision.verdict is Verdict.DENY


def test_own_actions_can_be_taken_away() -> None:
    assert decide(policy(deny=("now",)), "now").verdict is Verdict.DENY
    assert decide(policy(ask=("random",)), "random").verdict is Verdict.ASK
    assert decide(policy(ceilings=('"*": "**"',)), "sleep").verdict is Verdict.DENY


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_deny_beats_ask_beats_allow_in_every_order(order: tuple[int, ...]) -> None:
    texts = [
        'fs.write: "/workspace/**"',
        'fs.*: "/workspace/a/**"',
        'fs.write: "/workspace/a/*"',
        'fs.write: "**"',
    ]
    for verdicts in itertools.product(("allow", "ask", "deny"), repeat=4):
        rules = [rule(texts[at], verdicts[at], f"r{at}") for at in order]
        grants = [(item.id, item) for item in rules if item.verdict is Verdict.ALLOW]
        others = [item for item in rules if item.verdict is not Verdict.ALLOW]
        strongest = next(v for v in ("deny", "ask", "allow") if v in verdicts)
        for denies, ceilings in ((others, []), ([], others)):
            made = AgentPolicy("bot", grants, denies, ceilings)
            decision = decide(made, "fs.write", "/workspace/a/b")
            assert decision.verdict == strongest
            assert decision.rules
            assert {item.verdict for item in rules if item.id == decision.rules[0]} == {strongest}


def test_casbin_itself_denies_what_a_deny_matches() -> None:
    made = policy(
        'fs.read: "/workspace/**"', ask=('fs.read: "/workspace/b"',), deny=('fs.*: "/workspace/a"',)
    )
    rows = made._action("fs.read")
    for path, allowed, rules in (
        ("/workspace/a", False, ["d1"]),
        ("/workspace/b", True, ["a1", "r1"]),
        ("/workspace/c", True, ["r1"]),
    ):
        assert rows.decide(engine.subject("path", path)) == (
            allowed,
            [row for row in rows.rows if row.rule.id in rules],
        )
    assert policy()._action("fs.read").decide(engine.subject("path", "/workspace/a")) == (False, [])


def test_reasons_name_the_rule_and_where_it_stands() -> None:
    made = policy(
        'fs.*: "/workspace/**"',
        ask=('fs.delete: "/workspace/data/**"',),
        deny=('fs.*: "/workspace/.env"',),
        ceilings=('fs.*: "**/.ssh/**"',),
    )
    assert decide(made, "fs.read", "/workspace/.env") == Decision(
        verdict=Verdict.DENY,
        rules=("d1",),
        reason="""denied by rule d1 'fs.*: "/workspace/.env"' of the manifest""",
    )
    denied = decide(made, "fs.read", "/workspace/.ssh/id")
    assert denied.reason == """denied by rule c1 'fs.*: "**/.ssh/**"' of the ceilings"""
    asked = decide(made, "fs.delete", "/workspace/data/x")
    assert (asked.verdict, asked.rules, asked.grants) == (Verdict.ASK, ("a1",), ("k1",))
    allowed = decide(made, "fs.read", "/workspace/x")
    assert (allowed.verdict, allowed.rules, allowed.grants) == (Verdict.ALLOW, ("r1",), ("g1",))


def test_the_first_grant_that_matches_is_the_one_used() -> None:
    made = policy('fs.read: "/workspace/a"', 'fs.read: "/workspace/**"')
    assert decide(made, "fs.read", "/workspace/a").grants == ("g1",)
    assert decide(made, "fs.read", "/workspace/b").grants == ("g2",)


def test_rights_to_the_same_thing_go_together() -> None:
    made = policy(
        'fs.read: "/workspace/**"', 'http.get: "https://h.example/**"', deny=('fs.read: "/workspace/.env"',)
    )
    for action in ("fs.read", "fs.list", "fs.stat", "fs.search"):
        assert decide(made, action, "/workspace/a").verdict is Verdict.ALLOW
        assert decide(made, action, "/workspace/.env").verdict is Verdict.DENY
    assert decide(made, "http.head", "https://h.example/x").verdict is Verdict.ALLOW
    assert decide(made, "fs.append", "/workspace/a").verdict is Verdict.DENY
    listing = policy('fs.list: "/workspace/**"')
    assert decide(listing, "fs.read", "/workspace/a").verdict is Verdict.DENY
    writing = policy('fs.write: "/workspace/**"')
    assert decide(writing, "fs.append", "/workspace/a").verdict is Verdict.ALLOW
    assert decide(writing, "fs.move", "/workspace/a").verdict is Verdict.DENY


@pytest.mark.parametrize("action", ["fs.read", "fs.write", "fs.delete", "fs.move"])
def test_a_move_is_no_way_around_a_deny(action: str) -> None:
    made = policy('fs.move: "/workspace/**"', deny=(f'{action}: "/workspace/secret"',))
    assert decide(made, "fs.move", "/workspace/secret").verdict is Verdict.DENY
    assert decide(made, "fs.move", "/workspace/other").verdict is Verdict.ALLOW


def test_tables() -> None:
    made = policy(
        "sql.read: {database: crm}",
        "sql.write: {database: crm, tables: [invoices]}",
        deny=("sql.*: {database: crm, tables: [salaries, hr.*]}",),
    )
    for resource, action, verdict in (
        ("crm/invoices", "sql.read", "allow"),
        ("crm/public.invoices", "sql.read", "allow"),
        ("crm", "sql.read", "allow"),
        ("crm/salaries", "sql.read", "deny"),
        ("crm/public.salaries", "sql.read", "deny"),
        ("crm/hr.people", "sql.read", "deny"),
        ("crm/invoices", "sql.write", "allow"),
        ("crm/customers", "sql.write", "deny"),
        ("crm", "sql.write", "allow"),
        ("other/invoices", "sql.read", "deny"),
        ("other", "sql.read", "deny"),
    ):
        assert decide(made, action, resource).verdict == verdict, (action, resource)


def test_denials_of_dot_files_hold_wherever_they_are() -> None:
    # C18
    made = policy(
        'fs.*: "/workspace/**"', deny=('fs.*: "**/.env"', 'fs.*: "secret.txt"', 'fs.*: "/workspace/.ssh/**"')
    )
    denied = ["/.env", "/a/.env", "/a/b/c/.env", "/secret.txt", "/.ssh", "/.ssh/id", "/.ssh/a/b"]
    for action in sorted(action for action in ROWS if action.startswith("fs.")):
        for path in denied:
            assert decide(made, action, f"/workspace{path}").verdict is Verdict.DENY
        for path in ("/env", "/a/x.env", "/a/secret.txt", "/.sshx", "/.env.example"):
            assert decide(made, action, f"/workspace{path}").verdict is Verdict.ALLOW


def test_masks_hold_what_is_denied_for_reading_and_not_what_is_merely_not_allowed() -> None:
    # C13 and C06
    made = policy(
        'fs.read: "/workspace/src/**"',
        ask=('fs.read: "/workspace/ask"',),
        deny=(
            'fs.read: "/workspace/.env"',
            'fs.write: "/workspace/readonly"',
            'fs.list: "/workspace/listed"',
        ),
        ceilings=('fs.*: "**/.ssh/**"',),
    )
    paths = [
        "/workspace/src/a",
        "/workspace/.env",
        "/workspace/readonly",
        "/workspace/other",
        "/workspace/ask",
    ]
    paths += ["/workspace/x/.ssh", "/workspace/x/.ssh/id", "/workspace/listed", "/workspace/odd\u200bname"]
    masked = ["/workspace/.env", "/workspace/x/.ssh", "/workspace/x/.ssh/id", "/workspace/odd\u200bname"]
    assert made.masks(paths) == masked
    assert made.mask_patterns() == ["**/.ssh/**", "/workspace/.env"]
    assert policy(deny=('"*": "**"',)).masks(["/workspace/a"]) == ["/workspace/a"]


RULES = [
    'fs.read: "/workspace/**"',
    'fs.*: "/workspace/a/*"',
    'fs.write: "/workspace/*"',
    'fs.read: "**/b"',
    'fs.list: "/workspace/a"',
    '"*": "**"',
    'fs.move: "/workspace/a/**"',
]
PATHS = [
    "/workspace",
    "/workspace/a",
    "/workspace/b",
    "/workspace/a/b",
    "/workspace/a/c/b",
    "/workspace/..",
    "x",
]
CHOICE = st.lists(st.tuples(st.sampled_from(RULES), st.sampled_from(["allow", "ask", "deny"])), max_size=6)


def reference(rules: list[Rule], action: str, path: str) -> str:
    """The meaning of rules, without any engine."""
    found = {
        item.verdict.value
        for item in rules
        if applies(item.action_pattern, action, forbids=item.verdict is not Verdict.ALLOW)
        and any(pattern.permits(engine.subject("path", path)) for pattern in item.compiled())
    }
    return next((verdict for verdict in ("deny", "ask", "allow") if verdict in found), "deny")


@given(
    CHOICE,
    st.permutations(["fs.read", "fs.list", "fs.append", "fs.move", "fs.delete"]),
    st.permutations(PATHS),
)
@settings(max_examples=150, deadline=None)
def test_every_answer_is_what_the_rules_mean_whatever_was_asked_before(
    chosen: list[tuple[str, str]], actions: list[str], paths: list[str]
) -> None:
    rules = [rule(text, verdict, f"r{n}") for n, (text, verdict) in enumerate(chosen)]
    grants = [(item.id, item) for item in rules if item.verdict is Verdict.ALLOW]
    made = AgentPolicy("bot", grants, [item for item in rules if item.verdict is not Verdict.ALLOW])
    for action, path in itertools.product(actions, paths):
        canonical = path.startswith("/workspace") and ".." not in path
        expected = reference(rules, action, path) if canonical else "deny"
        for _ in range(2):
            assert decide(made, action, path).verdict == expected
            assert made.visible(action, path) is (expected == "allow")


def test_order_of_queries_and_neighbouring_names_change_no_verdict() -> None:
    # C11: a pattern for one name must not speak about a name that begins with it.
    made = AgentPolicy("bob", [("g1", rule('spawn: "book.*"')), ("g2", rule('llm.complete: "gpt-4.*"'))])
    questions = [("spawn", "book.1"), ("spawn", "booking"), ("spawn", "bookx1"), ("llm.complete", "gpt-4x1")]
    expected = {"book.1": "allow", "booking": "deny", "bookx1": "deny", "gpt-4x1": "deny"}
    for order in itertools.permutations(questions):
        for action, name in order:
            assert (
                made.decide(Request(principal="bob", action=action, resource=name)).verdict == expected[name]
            )
            assert (
                made.decide(Request(principal="bobby", action=action, resource=name)).verdict is Verdict.DENY
            )


def test_roles_of_neighbouring_names_are_others() -> None:
    """C11: whoever has the role `booking` has nothing of `book`, whatever was asked before."""
    text = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  roles:\n"
    text += '    book: {allow: [{state.get: "book.*"}, {state.get: book_1}]}\n    booking: {allow: [{state.get: desk}]}\n'
    roles = parse_kernel_file(text).roles
    made = {
        who: AgentPolicy(who, [(f"g{n}", one) for n, one in enumerate(roles[role].allow)])
        for who, role in (("bob", "book"), ("bobby", "booking"))
    }
    asked = [("bobby", "book_1"), ("bob", "book_1"), ("bobby", "desk"), ("bob", "bookx1"), ("bob", "book.x")]
    allowed = {("bob", "book_1"), ("bobby", "desk"), ("bob", "book.x")}
    for order in itertools.permutations([*asked, asked[0]]):
        for who, key in order:
            found = made[who].decide(Request(principal=who, action="state.get", resource=key)).verdict
            assert (found is Verdict.ALLOW) is ((who, key) in allowed), (order, who, key)


def test_the_rule_that_is_proposed_allows_the_call_and_is_narrow() -> None:
    cases: list[tuple[str, Resource, Resource]] = [
        ("fs.write", "/workspace/a[1]*.txt", "/workspace/a[1]x.txt"),
        ("http.post", "https://h.example/a%20b/*", "https://h.example/a%20b/c"),
        ("sql.write", "crm/invoices", "crm/customers"),
        ("sql.write", "crm/hr.people", "crm/people"),
        ("state.put", "jobs/1", "jobs/2"),
        ("exec.run", ("git", "commit", "-m", "it's *"), ("git", "commit", "-m", "it's x")),
        ("llm.complete", "gpt-5", "gpt-51"),
    ]
    for action, resource, other in cases:
        made = AgentPolicy("bot", [("g1", parse_rule(rule_for(action, resource)))])
        assert decide(made, action, resource).verdict is Verdict.ALLOW, (action, resource)
        assert decide(made, action, other).verdict is Verdict.DENY, (action, other)


def test_action_patterns() -> None:
    assert match_action("*", "mcp.a.b")
    assert match_action("fs.*", "fs.read")
    assert not match_action("fs.*", "fsx.read")
    assert not match_action("fs", "fs.read")
    assert match_action("mcp.*", "mcp.server.tool")
    assert match_action("mcp.*.tool", "mcp.server.tool")
    assert not match_action("mcp.*.tool", "mcp.server.other")
    assert not match_action("mcp.server.*", "mcp.other.tool")
    assert match_action("mcp.server.*", "mcp.server.a.tool.with.dots")
    assert not match_action("mcp.server.tool", "mcp.server.tool.more")
    assert {"fs.read", "exec.run", "sql.write", "checkpoint.save", "now"} <= ROWS
    # Calls of tools are judged as the tools.
    assert {
        "mcp.call",
        "mcp.tools",
        "mcp.resources",
        "mcp.read",
        "mcp.prompts",
        "mcp.prompt",
        "mcp.complete",
    } == ROWS - KNOWN_ACTIONS
