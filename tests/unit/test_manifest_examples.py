"""Every rule, pattern and condition that the reference shows is tried: on what it is about, and on what it is not."""

from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.facts import Facts, Read, Told
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.manifest import parse_manifest, parse_rule
from ringfence.policy.problems import ManifestError, PatternError
from ringfence.policy.types import Request, Verdict

TEXT = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
HEAD = "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: a}\nspec:\n  run: {command: [x]}\n"
W = "/workspace"
API = "https://api.example.com/v1"

Try = tuple[str, Any]
EXAMPLES: dict[str, tuple[list[Try], list[Try]]] = {
    'fs.read: "/workspace/**"': (
        [("fs.read", W), ("fs.read", f"{W}/a/.b"), ("fs.list", f"{W}/a"), ("fs.stat", W), ("fs.search", W)],
        [("fs.read", "/workspaces/a"), ("fs.read", "/etc/passwd"), ("fs.write", f"{W}/a"), ("fs.move", f"{W}/a")],
    ),
    'fs.write: "/workspace/out/**"': (
        [("fs.write", f"{W}/out"), ("fs.append", f"{W}/out/a/b")],
        [("fs.write", f"{W}/outside"), ("fs.write", f"{W}/a/out/b"), ("fs.delete", f"{W}/out/a")],
    ),
    "sql.read: {database: crm, tables: [invoices, customers]}": (
        [("sql.read", "crm/invoices"), ("sql.read", "crm/public.customers"), ("sql.read", "crm")],
        [("sql.read", "crm/hr.invoices"), ("sql.read", "crm/notes"), ("sql.read", "crm2/invoices"), ("sql.write", "crm/invoices")],
    ),
    "sql.read: {database: crm, tables: [invoices]}": ([("sql.read", "crm/invoices")], [("sql.read", "crm/customers")]),
    "sql.read: {database: crm}": (
        [("sql.read", "crm"), ("sql.read", "crm/a"), ("sql.read", "crm/hr.a")],
        [("sql.read", "shop"), ("sql.write", "crm/a")],
    ),
    "sql.write: {database: crm, tables: [notes]}": ([("sql.write", "crm/notes")], [("sql.write", "crm/note"), ("sql.read", "crm/notes")]),
    'http.get: "https://api.example.com/v1/*"': (
        [("http.get", f"{API}/items"), ("http.head", f"{API}/items"), ("http.get", f"{API}/items?a=b"), ("http.get", f"{API}/items/")],
        [
            *[("http.get", f"{API}/admin/secrets"), ("http.get", API), ("http.get", "https://api.example.com/V1/items")],
            *[("http.get", "http://api.example.com/v1/items"), ("http.get", "https://api.example.com:8443/v1/items")],
            *[("http.get", "https://xapi.example.com/v1/items"), ("http.post", f"{API}/items")],
        ],
    ),
    'http.get: "https://example.com/**"': ([("http.get", "https://example.com/a/b")], [("http.get", "https://a.example.com/a")]),
    'exec.run: "git status"': (
        [("exec.run", ("git", "status"))],
        [("exec.run", ("git", "status", "-s")), ("exec.run", ("git",)), ("exec.run", ("sh", "-c", "git status"))],
    ),
    'exec.run: "git diff *"': (
        [("exec.run", ("git", "diff")), ("exec.run", ("git", "diff", "--stat", "a"))],
        [("exec.run", ("git", "difftool")), ("exec.run", ("git", "push"))],
    ),
    'state.*: "jobs/**"': (
        [("state.put", "jobs/a/b"), ("state.get", "jobs"), ("state.delete", "jobs/a")],
        [("state.put", "jobsx"), ("state.get", "other/jobs/a")],
    ),
    'state.put: "jobs/*"': ([("state.put", "jobs/a")], [("state.put", "jobs/a/b"), ("state.put", "jobs"), ("state.get", "jobs/a")]),
    'claim.take: "jobs/**"': (
        [("claim.take", "jobs/a"), ("claim.renew", "jobs/a"), ("claim.release", "jobs/a")],
        [("claim.take", "other"), ("state.put", "jobs/a")],
    ),
    'memory.*: "own"': ([("memory.append", "own"), ("memory.search", "own")], [("memory.append", "team")]),
    'messages.send: "clerk-*"': ([("messages.send", "clerk-7")], [("messages.send", "clerk"), ("messages.receive", "clerk-7")]),
    'messages.receive: "*"': ([("messages.receive", "me")], [("messages.send", "me")]),
    'tasks.update: "*"': ([("tasks.update", "shop")], [("messages.receive", "shop")]),
    'object.get: "backups/2026/**"': (
        [("object.get", "backups/2026/a"), ("object.list", "backups/2026")],
        [("object.get", "backups/2025/a"), ("object.delete", "backups/2026/a"), ("object.list", "backups")],
    ),
    'artifacts.*: "*"': ([("artifacts.put", "a"), ("artifacts.get", "a")], [("state.get", "a")]),
    'spawn: "worker-*"': ([("spawn", "worker-1")], [("spawn", "boss")]),
    'spawn: "name"': ([("spawn", "name")], [("spawn", "names")]),
    'spawn: "NAME"': ([("spawn", "NAME")], [("spawn", "name")]),
    'llm.complete: "gpt-*"': ([("llm.complete", "gpt-5")], [("llm.complete", "other-gpt-5")]),
    'a2a.*: "clerk"': ([("a2a.send", "clerk"), ("a2a.get", "clerk")], [("a2a.send", "clerks")]),
    'mcp.github.*: "*"': ([("mcp.github.issue", "a")], [("mcp.gitlab.issue", "a")]),
    'mcp.github.@resource: "repo://acme/*"': (
        [("mcp.github.@resource", "repo://acme/a/b")],
        [("mcp.github.@resource", "repo://acm"), ("mcp.github.resource", "repo://acme/a"), ("mcp.gitlab.@resource", "repo://acme/a")],
    ),
    'mcp.github.@prompt: "review"': (
        [("mcp.github.@prompt", "review")],
        [("mcp.github.@prompt", "reviews"), ("mcp.github.@resource", "review"), ("mcp.github.review", "review")],
    ),
    'mcp.server.*: "*"': ([("mcp.server.tool", "a")], [("mcp.servers.tool", "a")]),
    'mcp.server.tool: "*"': ([("mcp.server.tool", "a")], [("mcp.server.tools", "a")]),
    'fs.delete: "/workspace/data/**"': ([("fs.delete", f"{W}/data/a")], [("fs.delete", f"{W}/database"), ("fs.write", f"{W}/data/a")]),
    'fs.*: "/workspace/.env"': (
        [("fs.read", f"{W}/.env"), ("fs.delete", f"{W}/.env"), ("fs.move", f"{W}/.env")],
        [("fs.read", f"{W}/.env.local"), ("fs.read", f"{W}/a/.env")],
    ),
    'fs.*: "**/.env"': ([("fs.read", f"{W}/.env"), ("fs.write", f"{W}/a/b/.env")], [("fs.read", f"{W}/.envrc"), ("fs.read", f"{W}/.env/a")]),
    'exec.run: "sanitise *"': ([("exec.run", ("sanitise", "a"))], [("exec.run", ("sh", "-c", "sanitise a"))]),
    "now": ([("now", "")], [("fs.read", f"{W}/a")]),
}  # fmt: skip


def rules_of_the_reference() -> set[str]:
    (whole,) = [block for block in BLOCKS if "kind: Kernel" in block]
    manifest, kernel = parse_manifest(BLOCKS[0]), parse_kernel_file(whole)
    found = {rule.text for rule in (*manifest.rules, *kernel.ceilings.rules, *kernel.untaint)}
    found |= {rule.text for role in kernel.declared_roles.values() for rule in role.rules}
    for code in re.findall(r"`([^`\n]+)`", TEXT):
        if ":" in code or code == "now":
            try:
                found.add(parse_rule(code).text)
            except (ManifestError, PatternError):
                continue  # it is no rule
    return found


def test_every_rule_that_is_shown_has_an_example() -> None:
    assert rules_of_the_reference() - set(EXAMPLES) == set()


@pytest.mark.parametrize("text", EXAMPLES)
def test_a_rule_is_about_this_and_not_about_that(text: str) -> None:
    yes, no = EXAMPLES[text]
    allow = AgentPolicy("a", [("g1", parse_rule(text))])
    everything = parse_rule('"*": "**"')
    for verdict in (Verdict.DENY, Verdict.ASK):
        forbid = AgentPolicy("a", [("g1", everything)], [parse_rule(text, verdict)])
        for action, resource in yes:
            if resource == "crm" and "tables" in text:
                continue  # of a statement without a table only a deny of the whole database speaks
            asked = Request(principal="a", action=action, resource=resource)
            assert forbid.decide(asked).verdict is verdict, (action, resource)
    for action, resource in yes:
        asked = Request(principal="a", action=action, resource=resource)
        # A move has to be allowed by itself; what an agent may always do needs no rule.
        assert allow.decide(asked).verdict is Verdict.ALLOW, (action, resource)
    for action, resource in no:
        asked = Request(principal="a", action=action, resource=resource)
        assert allow.decide(asked).verdict is Verdict.DENY, (action, resource)


@pytest.mark.parametrize(
    ("shown", "rule", "yes", "no"),
    [
        ("`/workspace/a` is only a", 'fs.read: "/workspace/a"', [("fs.read", f"{W}/a")], [("fs.read", f"{W}/a/b"), ("fs.read", f"{W}/ab")]),
        ("`/workspace/a/**` is a and all beneath", 'fs.read: "/workspace/a/**"', [("fs.read", f"{W}/a"), ("fs.read", f"{W}/a/b/c")], [("fs.read", f"{W}/ab")]),
        ("`/workspace/*` is one level", 'fs.read: "/workspace/*"', [("fs.read", f"{W}/.a")], [("fs.read", f"{W}/a/b"), ("fs.read", W)]),
        ("`out/*.csv` is below", 'fs.read: "out/*.csv"', [("fs.read", f"{W}/out/a.csv")], [("fs.read", f"{W}/out/a/b.csv"), ("fs.read", f"{W}/x/out/a.csv")]),
        ("`**/.env` is anywhere", 'fs.read: "**/.env"', [("fs.read", f"{W}/.env"), ("fs.read", f"{W}/a/.env")], [("fs.read", f"{W}/a.env")]),
        (r"`\[id\].tsx`", r'fs.read: "/workspace/\\[id\\].tsx"', [("fs.read", f"{W}/[id].tsx")], [("fs.read", f"{W}/i.tsx")]),
        (r"`\*`", r'fs.read: "/workspace/\\*"', [("fs.read", f"{W}/*")], [("fs.read", f"{W}/a")]),
        ("`*.example.com`", 'http.get: "https://*.example.com/**"', [("http.get", "https://a.example.com/x")], [("http.get", "https://example.com/x"), ("http.get", "https://a.b.example.com/x")]),
        ("`*-svc.example.com`", 'http.get: "https://*-svc.example.com/**"', [("http.get", "https://a-svc.example.com/x")], [("http.get", "https://a.example.com/x"), ("http.get", "https://a-svc.b.example.com/x")]),
        ("`**` any number of them", 'http.get: "https://**.example.com/**"', [("http.get", "https://a.b.example.com/x"), ("http.get", "https://example.com/x")], [("http.get", "https://badexample.com/x")]),
        ("`:*` is any port", 'http.get: "https://a.test:*/**"', [("http.get", "https://a.test:8443/x"), ("http.get", "https://a.test/x")], [("http.get", "http://a.test/x")]),
        ("`?kind=public&page=*`", 'http.get: "https://a.test/x?kind=public&page=*"', [("http.get", "https://a.test/x?kind=public&page=7")], [("http.get", "https://a.test/x?page=7&kind=public"), ("http.get", "https://a.test/x"), ("http.get", "https://a.test/x?kind=public&page=7&a=b")]),
        ('`"**"` is any URL', 'http.get: "**"', [("http.get", "https://a.test/x?y")], [("http.post", "https://a.test/x")]),
        ('`tables: ["hr.*"]`', 'sql.read: {database: crm, tables: ["hr.*"]}', [("sql.read", "crm/hr.people")], [("sql.read", "crm/people"), ("sql.read", "crm/fin.people")]),
        ("`\"find . -name '*.py'\"`", "exec.run: \"find . -name '*.py'\"", [("exec.run", ("find", ".", "-name", "*.py"))], [("exec.run", ("find", ".", "-name", "a.py"))]),
        ("`jobs/*`, `jobs/**`", 'state.get: "jobs/*"', [("state.get", "jobs/a")], [("state.get", "jobs/a/b")]),
    ],
)  # fmt: skip
def test_a_pattern_that_is_explained(shown: str, rule: str, yes: list[Try], no: list[Try]) -> None:
    assert shown in TEXT
    policy = AgentPolicy("a", [("g1", parse_rule(rule))])
    for tries, expected in ((yes, Verdict.ALLOW), (no, Verdict.DENY)):
        for action, resource in tries:
            assert (
                policy.decide(Request(principal="a", action=action, resource=resource)).verdict is expected
            ), resource


@pytest.mark.parametrize(
    "rule",
    [
        *[f'fs.read: "/workspace/{text}"' for text in ("a?", "[ab]", "{a,b}", "a/", "a/../b")],
        *['fs.read: "/etc/passwd"', 'fs.read: "~/x"', "sql.read: {database: crm, tables: []}"],
        *[f'http.get: "https://{text}"' for text in ("a.test/x/..", "a.test/%2e%2e/x", "u:p@a.test/x", "0x7f.1/x", "a.test//x")],
        *['exec.run: "cd x && ls"', 'fs.fly: "/workspace/a"', 'fs.read: "/workspace/a\u200b"'],
    ],
)  # fmt: skip
def test_what_the_reference_calls_an_error_is_one(rule: str) -> None:
    with pytest.raises(ManifestError):
        parse_rule(rule)


# -- conditions -------------------------------------------------------------------------------------------------------

NOON = datetime(2026, 3, 2, 11, tzinfo=UTC)  # a Monday
CALM = Facts(
    tainted="",
    reads=(),
    environment="",
    created=True,
    now=NOON,
    arguments={"json": {"amount": 1}},
    shares={"usd": 0.1},
    told=Told(input="write to ann@a.test", values=frozenset({"bob@b.test"})),
)
STATUS = Read(action="http.get", resource="https://api.example.com/v1/status", step=1, age_s=10)
CONDITIONS: dict[str, tuple[str, Any, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "{action: http.post, if: tainted": ("http.post", "https://a.test/x", [{"tainted": "x"}, {"tainted": None}], [{}]),
    '{action: http.post, resource: "https://pay': (
        "http.post",
        "https://pay.example.com/x",
        [{"arguments": {"json": {"amount": 101}}}, {"arguments": {}}],
        [{}, {"arguments": {"json": {"amount": 100}}}],
    ),
    "{action: sql.write, if: {environment: prod": (
        "sql.write",
        "crm/a",
        [{"environment": "prod", "tainted": "x"}],
        [{"environment": "prod"}, {"tainted": "x"}],
    ),
    "{action: fs.delete, if: {created": ("fs.delete", f"{W}/a", [{"created": False}, {"created": None}], [{}]),
    "{action: http.post, if: {outside": (
        "http.post",
        "https://a.test/x",
        [{"now": NOON.replace(hour=22)}, {"now": NOON.replace(day=1)}, {"now": None}],
        [{}],
    ),
    "{action: llm.complete, if: {budget": ("llm.complete", "m", [{"shares": {"usd": 0.9}}, {"shares": {}}], [{}]),
    '{action: http.post, resource: "https://mail': (
        "http.post",
        "https://mail.example.com/send",
        [{"arguments": {"json": {"to": "eve@x.test"}}}, {"arguments": {"json": {"to": "ann@a.test", "cc": ["eve@x.test"]}}}, {"told": None}],
        [{"arguments": {"json": {"to": "ann@a.test"}}}, {"arguments": {"json": {"to": ["bob@b.test"]}}}],
    ),
    "{action: sql.write, require": (
        "sql.write",
        "crm/a",
        [{"reads": (dataclasses.replace(STATUS, age_s=901),)}, {"reads": (dataclasses.replace(STATUS, changed="x"),)}],
        [{}, {"reads": (STATUS,)}],
    ),
    "{action: http.post, require": (
        "http.post",
        "https://a.test/x",
        [{"reads": ()}, {"reads": (dataclasses.replace(STATUS, age_s=301),)}],
        [{"reads": (STATUS,)}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("beginning", CONDITIONS)
def test_a_condition_that_is_shown(beginning: str) -> None:
    action, resource, matching, other = CONDITIONS[beginning]
    lines = [line for line in BLOCKS[1].splitlines() if line.strip().removeprefix("- ").startswith(beginning)]
    assert len(lines) == 1, beginning
    when = parse_manifest(f"{HEAD}  when:\n  {lines[0]}\n").when
    policy = AgentPolicy("a", [("g1", parse_rule('"*": "**"'))], (), (), when)

    def verdict(facts: dict[str, Any]) -> Verdict:
        context = {"facts": dataclasses.replace(CALM, **facts)}
        return policy.decide(
            Request(principal="a", action=action, resource=resource, context=context)
        ).verdict

    assert [verdict(facts) for facts in matching] == [when[0].then] * len(matching)
    assert [verdict(facts) for facts in other] == [Verdict.ALLOW] * len(other)


def test_every_condition_that_is_shown_has_an_example() -> None:
    shown = [line.strip().removeprefix("- ") for line in BLOCKS[1].splitlines() if "action:" in line]
    assert [line for line in shown if not any(line.startswith(beginning) for beginning in CONDITIONS)] == []
