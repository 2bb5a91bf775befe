"""Every example in the reference of both files is accepted, and every form of a rule in it too."""

from __future__ import annotations

import re
from pathlib import Path

from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.manifest import KEYS, parse_manifest, parse_rule

TEXT = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text(encoding="utf-8")


def test_both_examples_are_accepted_and_supported() -> None:
    manifest, conditions, pools, kernel_file, kept, vouches, undo = re.findall(
        r"```yaml\n(.*?)```", TEXT, re.DOTALL
    )
    assert parse_manifest(manifest).unsupported() == []
    spec = manifest.partition("  when:")[0] + "".join(f"  {line}\n" for line in conditions.splitlines())
    assert len(parse_manifest(spec).when) == 9
    assert set(parse_kernel_file(kernel_file).roles) == {"reader", "clerk"}
    head = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n"
    assert set(parse_kernel_file(head + pools).pools) == {"fleet", "team=billing", "env=prod,team=billing"}
    retention = parse_kernel_file(head + kept).retention
    assert retention.of({"team": "finance"}).journal_s == 365 * 86400
    assert (retention.of({}).journal_s, retention.of({}).journal_steps) == (30 * 86400, 1000)
    mail = parse_kernel_file(f"{head}  resources:\n{vouches}").resources["mail"]
    answer = {
        "messages": [{"folder": "sent", "to": ["ann@a.test"]}, {"folder": "in", "to": ["eve@evil.test"]}],
        "files": [
            {"owner": "me@example.com", "shared_with": {"bob@a.test": "r"}},
            {"owner": "eve@evil.test", "shared_with": {"eve@evil.test": "rw"}},
        ],
    }
    said = [part for one in mail.vouches for part in one.said]
    assert [(part.name, list(part.words(answer))) for part in said] == [
        ("", []),
        ("written-to", ["ann@a.test"]),
        ("shared-with", ["bob@a.test"]),
    ]
    declared = parse_kernel_file(f"{head}  resources:\n{undo}").resources
    drive, bank = declared["drive"].undo, declared["bank"].undo
    assert [one.keep and one.keep.parts for one in drive] == [
        ("", "path", ""),
        ("/files/", "/file/name", ""),
        ("", "path", ""),
        None,
    ]
    assert [one.compensate and one.compensate.parts for one in (drive[3], bank[0])] == [
        ("", "location", ""),
        ("/refunds",),
    ]


def test_the_forms_of_rules_are_accepted() -> None:
    rules = TEXT.partition("## Rules")[2].partition("## Patterns")[0]
    forms = re.findall(r"^\|[^|]*\|[^|]*\| `([a-z.*A-Z@]+(?:: [^`]*)?)`", rules, re.MULTILINE)
    assert len(forms) == 18
    for form in forms:
        assert parse_rule(form).text


def test_every_key_of_a_manifest_is_explained() -> None:
    for keys in KEYS.values():
        for key in keys:
            assert re.search(rf"\b{key}\b", TEXT), key
