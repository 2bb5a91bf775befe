"""What manifests of the examples let nobody write: what git runs or obeys wherever the repository is pulled to."""

from __future__ import annotations

from pathlib import Path

import pytest
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.types import Request, Verdict

EXAMPLES = Path(__file__).parents[2] / "examples"
OBEYED = [
    *["hooks", "hooks/post-commit", "config", "config.worktree", "commondir", "modules/a/config"],
    *["../a/.git", "../a/.git/config", "../a/b/.git/hooks/post-commit"],
]
COMMITTED = [
    "index",
    "HEAD",
    "COMMIT_EDITMSG",
    "objects/ab/cd",
    "refs/heads/main",
    "logs/HEAD",
    "../.gitignore",
    "../a/b.py",
]


@pytest.mark.parametrize("name", ["claude-code", "codex"])
@pytest.mark.parametrize("file", ["manifest.yaml", "with-tools.yaml"])
def test_coders_commit_and_leave_nothing_that_git_obeys(name: str, file: str) -> None:
    rules = parse_manifest((EXAMPLES / name / file).read_text(), file).rules
    policy = AgentPolicy("a", [(f"g{n}", rule) for n, rule in enumerate(rules.allow)], rules.deny)

    def verdict(action: str, path: str) -> Verdict:
        where = Path("/workspace/.git", path) if not path.startswith("../") else Path("/workspace", path[3:])
        return policy.decide(Request(principal="a", action=action, resource=str(where))).verdict

    assert {path for path in OBEYED if verdict("fs.write", path) is not Verdict.DENY} == set()
    assert {path for path in COMMITTED if verdict("fs.write", path) is not Verdict.ALLOW} == set()
    # A `.git` that is moved away could come back as a link to a directory under another name.
    assert verdict("fs.delete", "config") is Verdict.DENY
