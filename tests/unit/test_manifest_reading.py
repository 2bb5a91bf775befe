"""A manifest that is right: every key of the contract, its units, and rules that read back as themselves."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ringfence.policy.actions import KNOWN_ACTIONS, kind_of
from ringfence.policy.conditions import Condition, Tainted
from ringfence.policy.manifest import (
    ManifestError,
    Rate,
    Rule,
    parse_manifest,
    parse_rule,
    same_rule,
    select_rules,
)
from ringfence.policy.matcher import PatternError
from ringfence.policy.rules import compile_rule_pattern, render
from ringfence.policy.types import Verdict
from ringfence.policy.units import parse_count, parse_duration, parse_rate, parse_size

FULL = """\
apiVersion: ringfence/v1
kind: Agent            # strict
metadata: {name: invoice-bot, labels: {team: finance, tier: 1}}
spec:
  run:
    command: [python, agent.py]
    workspace: ./workspace
    env: {REGION: eu, DEBUG: true, LEVEL: 3}
  sandbox: {backend: native, workspace: mediated, memory: 256Mi, pids: 64, cpu: 0.5, disk: 1Gi, timeout: 2h}
  permissions:
    allow:
      - fs.read: "/workspace/**"
      - fs.write: "/workspace/out/**"
      - sql.read: {database: crm, tables: [invoices, customers]}
      - http.get: "https://api.example.com/v1/*"
      - llm.complete: {models: ["gpt-*"]}
    ask:
      - sql.write: {database: crm, tables: [invoices]}
      - fs.delete: "/workspace/data/**"
    deny:
      - fs.*: "/workspace/.env"
  when:
    - {action: "http.post", if: tainted, then: ask}
    - {action: "sql.write", require: {fresh: 15m}}
  budgets:
    rate: {http.get: 10/s, llm.complete: 60/m}
    total: {calls: 10000, tokens: 200k, usd: 5.00, destructive: 20}
    context: {max_tokens: 128k, on_overflow: page}
  approvals: {expire: 24h, linger: 30s}
  restart: {policy: on-failure, max: 5}
  schedule: {cron: "30 2 * * *", timezone: Europe/Berlin, missed: all, overlap: queue, jitter: 10m}
  priority: normal
"""

SMALL = """\
apiVersion: ringfence/v1
kind: Agent
metadata: {name: small}
spec:
  run: {command: [python, agent.py]}
"""


def test_the_manifest_of_the_contract_is_read_in_full() -> None:
    manifest = parse_manifest(FULL, "agent.yaml")
    assert (manifest.name, manifest.labels) == ("invoice-bot", {"team": "finance", "tier": "1"})
    assert manifest.run.command == ("python", "agent.py")
    assert manifest.run.workspace == "./workspace"
    assert manifest.run.env == {"REGION": "eu", "DEBUG": "true", "LEVEL": "3"}
    sandbox = manifest.sandbox
    assert (sandbox.backend, sandbox.workspace) == ("native", "mediated")
    assert (sandbox.memory_bytes, sandbox.pids, sandbox.cpu) == (256 << 20, 64, 0.5)
    assert (sandbox.disk_bytes, sandbox.timeout_s, sandbox.mounts) == (1 << 30, 7200.0, ())
    assert [item.text for item in manifest.allow] == [
        'fs.read: "/workspace/**"',
        'fs.write: "/workspace/out/**"',
        "sql.read: {database: crm, tables: [invoices, customers]}",
        'http.get: "https://api.example.com/v1/*"',
        'llm.complete: "gpt-*"',
        'artifacts.get: "paged.*"',
    ]
    assert [item.id for item in manifest.rules] == ["r1", "r2", "r3", "r4", "r5", "page", "r6", "r7", "r8"]
    assert [item.verdict for item in manifest.ask] == [Verdict.ASK, Verdict.ASK]
    assert [(item.text, item.line, item.column) for item in manifest.deny] == [
        ('fs.*: "/workspace/.env"', 21, 9)
    ]
    assert manifest.when == (
        Condition(
            id="w1",
            action="http.post",
            tests=(Tainted(),),
            then=Verdict.ASK,
            text="{action: http.post, if: tainted, then: ask}",
        ),
        Condition(
            id="w2",
            action="sql.write",
            fresh_s=900.0,
            text="{action: sql.write, require: {fresh: 900s}}",
        ),
    )
    assert manifest.budgets.rate == {
        "http.get": Rate(count=10, per_s=1.0),
        "llm.complete": Rate(count=60, per_s=60.0),
    }
    assert manifest.budgets.total == {"calls": 10000, "tokens": 200000, "usd": 5.0, "destructive": 20}
    assert (manifest.budgets.context_max_tokens, manifest.budgets.context_on_overflow) == (128000, "page")
    assert (manifest.approvals.expire_s, manifest.approvals.linger_s) == (86400.0, 30.0)
    assert (manifest.restart.policy, manifest.restart.max) == ("on-failure", 5)
    assert manifest.schedule is not None
    assert (manifest.schedule.cron, manifest.schedule.timezone) == ("30 2 * * *", "Europe/Berlin")
    assert (manifest.schedule.missed, manifest.schedule.overlap) == ("all", "queue")
    assert manifest.schedule.jitter_s == 600.0
    assert manifest.priority == "normal"


def test_mounts_and_demands_keep_their_places() -> None:
    text = SMALL + "  sandbox: {mounts: [/srv/tool, /opt], require: [all, read-only image, memory:cgroup]}\n"
    sandbox = parse_manifest(text).sandbox
    assert [(one.path, one.line, one.column) for one in sandbox.mounts] == [
        ("/srv/tool", 6, 22),
        ("/opt", 6, 33),
    ]
    assert sandbox.require is not None
    assert [(one.wall, one.form, one.line) for one in sandbox.require] == [
        ("all", "", 6),
        ("read-only image", "", 6),
        ("memory", "cgroup", 6),
    ]
    assert sandbox.require[2].text == "memory:cgroup"
    every = parse_manifest(SMALL + "  sandbox: {require: all}\n").sandbox.require
    assert every is not None
    assert [(one.text, one.line, one.column) for one in every] == [("all", 6, 22)]
    assert parse_manifest(SMALL).sandbox.require is None


def test_paging_lets_an_agent_read_again_what_left_its_prompts() -> None:
    assert parse_manifest(FULL).unsupported() == []
    paging = parse_manifest(SMALL + "  budgets: {context: {max_tokens: 1k, on_overflow: page}}\n")
    (rule,) = paging.rules.allow
    assert (rule.id, rule.text, rule.line) == ("page", 'artifacts.get: "paged.*"', 6)
    refusing = parse_manifest(SMALL + "  budgets: {context: {max_tokens: 1k}}\n")
    assert (refusing.budgets.context_on_overflow, len(refusing.rules)) == ("refuse", 0)


def test_a_workspace_of_its_own_and_a_resume_of_its_own_go_together() -> None:
    direct, own = "  sandbox: {workspace: direct}\n", "  restart: {resume: own}\n"
    every = "  schedule: {every: 1h}\n"
    for good in (direct, direct + own, direct + own + every):
        assert parse_manifest(SMALL + good).unsupported() == []
    assert parse_manifest(SMALL + direct).sandbox.workspace == "direct"
    for bad, what in ((own, "6:3: `resume: own`"), (direct + every, "7:3: a `direct` program")):
        with pytest.raises(ManifestError, match=what):
            parse_manifest(SMALL + bad)


def test_a_small_manifest_has_safe_defaults() -> None:
    manifest = parse_manifest(SMALL)
    assert len(manifest.rules) == 0
    assert manifest.unsupported() == []
    assert (manifest.sandbox.workspace, manifest.sandbox.backend) == ("mediated", None)
    assert manifest.run.workspace is None
    assert manifest.run.env == {}


def test_json_is_a_manifest_too() -> None:
    text = '{"apiVersion": "ringfence/v1", "kind": "Agent", "metadata": {"name": "j"}, "spec": {"run": {"command": ["x"]}}}'
    assert parse_manifest(text).name == "j"


def test_rules_without_a_resource_and_ask_rules_are_accepted() -> None:
    text = f"{SMALL}  permissions: {{allow: [now, {{random: '*'}}, state.*: '**'], ask: [exec.run: 'git push *'], roles: [clerk]}}\n"
    manifest = parse_manifest(text)
    assert [item.text for item in manifest.rules] == [
        "now",
        "random",
        'state.*: "**"',
        'exec.run: "git push *"',
    ]
    assert manifest.roles == ("clerk",)
    assert manifest.unsupported() == []


def test_every_action_of_the_design_can_be_named() -> None:
    samples = {"path": "/workspace/a", "url": "https://h.example/", "table": "crm", "none": "*"}
    for action in (
        *KNOWN_ACTIONS,
        "fs.*",
        "llm.*",
        "memory.*",
        "mcp.*",
        "mcp.github.*",
        "mcp.*.search",
        "mcp.a.b",
    ):
        made = parse_rule(f"{action}: {samples.get(kind_of(action), 'x')}")
        assert made.action_pattern == action


def test_units() -> None:
    assert [parse_size(text) for text in ("256Mi", "1Gi", "1.5Ki", "10MB", "7", "1k")] == [
        256 << 20,
        1 << 30,
        1536,
        10**7,
        7,
        1000,
    ]
    assert [parse_count(text) for text in ("200k", "1.5M", "10000", "5.00", "0.01")] == [
        200000,
        1500000,
        10000,
        5.0,
        0.01,
    ]
    assert [parse_duration(text) for text in ("500ms", "30s", "15m", "2h", "7d", "1.5h")] == [
        0.5,
        30,
        900,
        7200,
        604800,
        5400,
    ]
    assert parse_rate("10/s") == Rate(count=10, per_s=1.0)
    assert parse_rate("5/h") == Rate(count=5, per_s=3600.0)
    for parse in (parse_size, parse_count, parse_duration, parse_rate):
        for text in (
            "",
            "-1",
            "x",
            "1 s",
            "1e9",
            "\u0661",
            "0x1",
            "inf",
            "nan",
            "1/s/s",
            "1/w",
            "9" * 40,
            " 1",
            "1\n",
        ):
            assert parse(text) is None, (parse, text)
    assert parse_rate("0/s") is None


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ('fs.write: "/workspace/out/**"', 'fs.write: "/workspace/out/**"'),
        ("fs.write:/workspace/out/**", 'fs.write: "/workspace/out/**"'),
        ("fs.write: out/**", 'fs.write: "/workspace/out/**"'),
        ("  fs.write :  'out/it''s'  ", 'fs.write: "/workspace/out/it\'s"'),
        ("fs.*:**/.env", 'fs.*: "**/.env"'),
        ('"*": "**"', '"*": "**"'),
        ("*: *", '"*": "**"'),
        ("sql.read: {database: crm, tables: [a]}", "sql.read: {database: crm, tables: [a]}"),
        ("sql.read: {tables: [a, public.a, b], database: crm}", "sql.read: {database: crm, tables: [a, b]}"),
        ("sql.read: {database: crm}", "sql.read: {database: crm}"),
        ("sql.read: crm", "sql.read: {database: crm}"),
        ("sql.read: crm/hr.*", 'sql.read: {database: crm, tables: ["hr.*"]}'),
        (
            "sql.read: {database: crm, tables: ['1', 'null', 'a b']}",
            'sql.read: {database: crm, tables: ["1", "null", "a b"]}',
        ),
        ("http.get: https://API.example.com:443/v1/*", 'http.get: "https://api.example.com/v1/*"'),
        ("http.get:http://127.0.0.1:9000/**", 'http.get: "http://127.0.0.1:9000/**"'),
        ("exec.run: git status", 'exec.run: "git status"'),
        ("exec.run: '*'", 'exec.run: "*"'),
        ("exec.run: find . -name '*.py'", "exec.run: \"find . -name '*.py'\""),
        ("llm.complete: {models: [a, b]}", 'llm.complete: {models: ["a", "b"]}'),
        ("llm.complete: {models: [a]}", 'llm.complete: "a"'),
        ("state.get: jobs/*", 'state.get: "jobs/*"'),
        ("checkpoint.save", "checkpoint.save"),
        ("now: '*'", "now"),
        ('fs.read: "/workspace/caf\\u00e9"', 'fs.read: "/workspace/caf\u00e9"'),
    ],
)
def test_rules_from_a_line(text: str, canonical: str) -> None:
    made = parse_rule(text, "deny", rule_id="x1", origin="manifest")
    assert made.text == canonical
    assert (made.id, made.verdict, made.origin) == ("x1", Verdict.DENY, "manifest")
    assert parse_rule(made.text, "deny", rule_id="x1", origin="manifest") == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rule"),
        ("fs.write", "needs a resource"),
        ("fs.write:", "needs a resource|is empty"),
        ("fs.fly: /workspace/a", "unknown action `fs.fly`"),
        ("fs.read: /etc/passwd", "can never match"),
        ('fs.read: "a', "not valid YAML"),
        ("fs.read: {path: a}", "not a mapping"),
        ("fs.read: [a, b]", "not a list"),
        ("sql.read: {tables: [a]}", "no database"),
        ("sql.read: {database: crm, tables: []}", "0 entries"),
        ("sql.read: {database: crm, table: a}", "unknown key `table`"),
        ("sql.read: {database: crm, tables: [a, 1]}", "a number"),
        ("sql.read: {database: crm, database: x}", "twice"),
        ("sql.read: {database: a/b}", "no database"),
        ("fs.read: &a {x: 1}", "`{` has no meaning"),
        ("http.get: ftp://x/", "http"),
        ('"*": "/workspace/a"', "can't name the resource"),
        ("now: x", "can't name the resource"),
        ("fs.re*d: a", "whole part"),
        ("mcp: a", "unknown action"),
        ("fs.read: a\nfs.write: b", "no rule"),
    ],
)
def test_rules_that_are_refused_from_a_line(text: str, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_rule(text)
    assert any(part in str(caught.value) for part in said.split("|"))
    assert "\n" not in str(caught.value)


def test_a_deny_can_not_depend_on_a_query() -> None:
    assert parse_rule("http.get: https://h.example/q?a=1").patterns == ("https://h.example/q?a=1",)
    for verdict in ("deny", "ask"):
        with pytest.raises(ManifestError, match="query"):
            parse_rule("http.get: https://h.example/q?a=1", verdict)


def test_revoking_names_rules_by_id_by_text_and_by_action() -> None:
    rules = [
        parse_rule("fs.write: out/**", rule_id="g1"),
        parse_rule("fs.write: tmp/**", rule_id="g2"),
        parse_rule("sql.read: {database: crm, tables: [a, b]}", rule_id="g3"),
        parse_rule("fs.*: x", rule_id="g4"),
        parse_rule("now", rule_id="g5"),
    ]

    def chosen(argument: str) -> list[str]:
        return [item.id for item in select_rules(argument, rules)]

    assert chosen("g2") == ["g2"]
    assert chosen('fs.write: "/workspace/out/**"') == ["g1"]
    assert chosen("fs.write:/workspace/out") == []
    assert chosen("fs.write") == ["g1", "g2"]
    assert chosen("fs.*") == ["g4"]
    assert chosen("sql.read: {database: crm, tables: [b, a]}") == ["g3"]
    assert chosen("sql.read: {database: crm, tables: [a]}") == []
    assert chosen("now") == ["g5"]
    with pytest.raises(ManifestError, match="unknown action"):
        chosen("fs.fly")
    assert same_rule(rules[0], parse_rule("fs.write: /workspace/out/**", rule_id="other"))
    assert not same_rule(rules[0], parse_rule("fs.write: /workspace/out/**", "deny"))


ACTIONS = st.sampled_from(sorted({*KNOWN_ACTIONS, "fs.*", "http.*", "sql.*", "mcp.a.b", "*"}))
TEXT = st.text(alphabet=st.sampled_from("ab/*.\\\"'{}[]:, #&!|>%@`é\u0301-_1\t"), max_size=14)


@given(
    ACTIONS,
    st.lists(
        st.one_of(TEXT, TEXT.map("https://h/".__add__), TEXT.map("/workspace/".__add__)),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=1500)
@example("fs.read", ['/workspace/"\\\\'])
def test_every_rule_reads_back_from_its_text(action: str, texts: list[str]) -> None:
    patterns: list[str] = []
    for text in texts:
        try:
            patterns.append(compile_rule_pattern(action, text, Verdict.ALLOW))
        except PatternError:
            continue
    several = kind_of(action) in {"name", "table"}
    patterns = list(dict.fromkeys(patterns)) if several else patterns[:1]
    if kind_of(action) == "table":
        patterns = [item for item in patterns if item.partition("/")[0] == patterns[0].partition("/")[0]]
        if any(item.endswith("/**") for item in patterns):
            patterns = patterns[:1]
    if not patterns:
        return
    text = render(action, patterns)
    assert "\n" not in text
    again = parse_rule(text)
    assert (again.action_pattern, again.patterns, again.text) == (action, tuple(patterns), text)
    assert isinstance(again, Rule)
