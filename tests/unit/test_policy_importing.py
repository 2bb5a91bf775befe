"""Settings that people already have become rules that are never wider."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.importing import Imported, as_manifest, import_settings
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.problems import ManifestError
from ringfence.policy.rules import Rule
from ringfence.policy.types import Request, Verdict


def imported(**lists: list[Any]) -> Imported:
    return import_settings(json.dumps({"permissions": lists}))


def policy(found: Imported) -> AgentPolicy:
    def rules(verdict: Verdict) -> list[Rule]:
        return [rule for rule, _ in found.rules[verdict]]

    grants = [(f"g{nr}", rule) for nr, rule in enumerate([*rules(Verdict.ALLOW), *rules(Verdict.ASK)])]
    return AgentPolicy("a", grants, rules(Verdict.DENY))


def verdict(found: Imported, action: str, resource: Any) -> str:
    return policy(found).decide(Request(principal="a", action=action, resource=resource)).verdict.value


@pytest.mark.parametrize(
    ("entry", "rules"),
    [
        ("Bash", ['exec.run: "*"']),
        ("Bash(git diff *)", ['exec.run: "git diff *"']),
        ("Bash(npm run test:*)", ['exec.run: "npm run test *"']),
        ("Bash(npm run build)", ['exec.run: "npm run build"']),
        ("Bash(npm*)", ['exec.run: "npm *"']),
        ("Bash(git * main)", ['exec.run: "git * main"']),
        ("Bash(cd /x && ls)", []),
        ("Bash(ls > x)", []),
        ("Bash(A=1 ls)", []),
        ("Bash(* x)", []),
        ("Read(./src/**)", ['fs.read: "/workspace/src/**"']),
        ("Read(/src/**)", ['fs.read: "/workspace/src/**"']),
        ("Read(src/*.py)", ['fs.read: "/workspace/src/*.py"']),
        ("Read(docs/)", ['fs.read: "/workspace/docs/**"']),
        ("Read(a?b)", []),
        ("Read(//etc/hosts)", []),
        ("Read(~/.ssh/**)", []),
        ("Read(../x)", []),
        ("Read", ['fs.read: "/workspace/**"']),
        ("Edit(docs/*.{md,txt})", ['fs.write: "/workspace/docs/*.md"', 'fs.write: "/workspace/docs/*.txt"']),
        ("Write(out/**)", ['fs.write: "/workspace/out/**"']),
        ("Grep", ['fs.search: "/workspace/**"']),
        ("WebFetch(domain:Example.COM.)", ['http.get: "https://example.com/**"']),
        ("WebFetch(domain:*.example.com)", ['http.get: "https://*.example.com/**"']),
        ("WebFetch(https://example.com)", []),
        ("WebSearch", []),
        ("mcp__github__create_issue", ['mcp.github.create_issue: "*"']),
        ("mcp__github", ['mcp.github.*: "*"']),
        ("mcp__github__*", ['mcp.github.*: "*"']),
        ("mcp__github__get_*", []),
        ("Task(reviewer)", ['spawn: "reviewer"']),
        ("TodoWrite", []),
    ],
)
def test_an_allow_says_the_same_or_less(entry: str, rules: list[str]) -> None:
    found = imported(allow=[entry])
    assert found.texts(Verdict.ALLOW) == rules
    assert rules or found.notes
    parse_manifest(as_manifest(found, "a", "settings.json"))


@pytest.mark.parametrize(
    ("entry", "action", "resources"),
    [
        (
            "Bash(rm:*)",
            "exec.run",
            [("rm", "-rf", "x"), ("rm",), ("rmdir", "x"), ("sh", "-c", "cd y && rm x")],
        ),
        ("Bash(curl * | sh)", "exec.run", [("curl", "x"), ("sh", "-c", "curl x | sh")]),
        ("Bash(git push * --force)", "exec.run", [("git", "push", "a", "b", "--force")]),
        ("Bash(* --force)", "exec.run", [("git", "push", "--force"), ("x", "--force")]),
        ("Bash(A=1 rm x)", "exec.run", [("rm", "x")]),
        ("Read(.env)", "fs.read", ["/workspace/.env", "/workspace/a/b/.env", "/workspace/.env/x"]),
        ("Read(./secrets)", "fs.read", ["/workspace/secrets", "/workspace/secrets/a/b"]),
        ("Read(secrets/)", "fs.read", ["/workspace/secrets/a", "/workspace/x/secrets/a"]),
        ("Read(./x/[ab]?.key)", "fs.read", ["/workspace/x/a1.key"]),
        ("Read(src/**.ts)", "fs.read", ["/workspace/src/a/b.ts", "/workspace/src/c.ts"]),
        ("Read(//home/me/project/keys/**)", "fs.read", ["/workspace/keys/a"]),
        ("Read(~/project/id_rsa)", "fs.read", ["/workspace/id_rsa"]),
        ("Edit(./main.py)", "fs.write", ["/workspace/main.py"]),
        ("Edit(./main.py)", "fs.delete", ["/workspace/main.py"]),
        ("Edit(./main.py)", "fs.append", ["/workspace/main.py"]),
        ("WebFetch(domain:evil.test)", "http.post", ["https://evil.test/x", "http://evil.test:8080/x"]),
        ("WebFetch(path:x)", "http.get", ["https://evil.test/x"]),
        ("mcp__x__del*", "mcp.x.delete", ["y"]),
        ("Task", "spawn", ["anybody"]),
    ],
)
def test_a_deny_says_the_same_or_more(entry: str, action: str, resources: list[Any]) -> None:
    found = imported(allow=["Bash", "Read", "Edit", "WebFetch", "mcp__*"], deny=[entry])
    parse_manifest(as_manifest(found, "a", "settings.json"))
    for resource in resources:
        assert verdict(found, action, resource) == "deny", resource
        asked = imported(allow=["Bash", "Read", "Edit", "WebFetch"], ask=[entry])
        assert verdict(asked, action, resource) != "allow", resource


WORD = st.sampled_from(["git", "rm", "rmdir", "push", "--force", "a", "a/b", "x.py", "main"])
PIECE = st.sampled_from(["git", "rm", "push", "--force", "a", "*", "a*", "*.py", "ma*", "rm*"])


@given(st.lists(PIECE, min_size=1, max_size=4), st.booleans(), st.lists(WORD, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_commands_are_never_wider(pieces: list[str], prefix: bool, argv: list[str]) -> None:
    spec = " ".join(pieces)
    line = " ".join(argv)
    if prefix:
        there = re.fullmatch(".*".join(map(re.escape, spec.split("*"))) + ".*", line) is not None
    else:
        text = ".*".join(map(re.escape, spec.removesuffix(" *").split("*")))
        there = re.fullmatch(text + ("( .*)?" if spec.endswith(" *") else ""), line) is not None
    entry = f"Bash({spec}{':*' if prefix else ''})"
    allowed = verdict(imported(allow=[entry]), "exec.run", tuple(argv)) == "allow"
    assert there or not allowed, (entry, argv)
    denied = (
        verdict(imported(allow=["Bash(git *)", "Bash(rm*)"], deny=[entry]), "exec.run", tuple(argv)) == "deny"
    )
    assert denied or not there, (entry, argv)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"permissions": []}', "no object"),
        ('{"a": 1}', "no list"),
        ('{"permissions": {"allow": "Bash"}}', "no list of at most"),
        ('{"permissions": {"allow": [1]}}', "entry 1 of `allow` is no text"),
        ('{"permissions": {"allow": ["Read", "Bash(x"]}}', r"entry 2 of `allow` is `Bash\(x`"),
        ('{"permissions": {"deny": ["Read(\\u200b)"]}}', "invisible"),
        ('{"permissions": {"deny": [], "deny": ["Read"]}}', "twice"),
    ],
)
def test_what_can_not_be_read_is_refused(text: str, what: str) -> None:
    with pytest.raises(ManifestError, match=what):
        import_settings(text)


def test_nothing_leaves_its_comment() -> None:
    found = imported(allow=["Read(./a # b)", 'Read(./a": x)'], deny=["Read(./x)"])
    text = as_manifest(found, "a", "set\ntings: {evil: 1}")
    manifest = parse_manifest(text)
    assert len(manifest.allow) == 2
    assert manifest.run.command == ("python", "agent.py")
