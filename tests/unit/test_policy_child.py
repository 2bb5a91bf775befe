"""A written manifest is read as exactly what it was made from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.policy.child import write_manifest
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.problems import ManifestError

words = st.text(
    st.sampled_from([chr(code) for code in range(0x20, 0x7F)] + list("éß漢😀")), min_size=1, max_size=20
)


@settings(deadline=None)
@given(
    st.lists(words, min_size=1, max_size=4),
    st.dictionaries(st.from_regex(r"[A-Z]{1,5}", fullmatch=True), words),
)
def test_what_is_written_is_what_is_read(command: list[str], env: dict[str, str]) -> None:
    text = write_manifest("child", {}, {"run": {"command": command, "env": env}})
    manifest = parse_manifest(text)
    assert list(manifest.run.command) == command
    assert dict(manifest.run.env) == env
    assert (manifest.rules.allow, manifest.delegates, manifest.roles) == ((), (), ())


def test_rules_are_written_in_either_form() -> None:
    permissions: dict[str, Any] = {
        "roles": ["worker"],
        "allow": ['fs.read: "/workspace/**"', {"sql.read": {"database": "crm", "tables": ["a"]}}, "now"],
        "ask": ["exec.run: git push *"],
        "deny": [{"fs.*": "/workspace/.env"}],
    }
    text = write_manifest("child", {"team": "a: b"}, {"run": {"command": ["x"]}, "permissions": permissions})
    manifest = parse_manifest(text)
    assert [rule.text for rule in manifest.rules] == [
        'fs.read: "/workspace/**"',
        "sql.read: {database: crm, tables: [a]}",
        "now",
        'exec.run: "git push *"',
        'fs.*: "/workspace/.env"',
    ]
    assert manifest.roles == ("worker",)
    assert dict(manifest.labels) == {"team": "a: b"}


@pytest.mark.parametrize("rule", ["nonsense", "fs.read: x\n- fs.*: y", "", "fs.fly: /workspace/a"])
def test_what_is_no_rule_is_refused_by_name(rule: str) -> None:
    with pytest.raises(ManifestError):
        write_manifest("child", {}, {"run": {"command": ["x"]}, "permissions": {"allow": [rule]}})
