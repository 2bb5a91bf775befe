"""Reads an agent's manifest: strict, all problems at once, each with its place and its remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ringfence.policy import sections, serving, when
from ringfence.policy.coverage import never_matching
from ringfence.policy.manifest_types import Approvals, Budgets, Manifest, Restart, Run, SandboxSpec
from ringfence.policy.problems import ManifestError, Problem
from ringfence.policy.reader import Fields, Numbers, Reader, header
from ringfence.policy.rules import Rule, Rules, parse_rule, rule_for, same_rule, select_rules
from ringfence.policy.strict_yaml import Node
from ringfence.policy.units import Rate

__all__ = [
    "Manifest",
    "ManifestError",
    "Problem",
    "Rate",
    "Rule",
    "parse_manifest",
    "parse_rule",
    "rule_for",
    "same_rule",
    "select_rules",
]

KEYS: Final = {
    "": ("apiVersion", "kind", "metadata", "spec"),
    "spec": (
        "run",
        "sandbox",
        "permissions",
        "delegates",
        "serve",
        "environment",
        "when",
        "budgets",
        "approvals",
        "restart",
        "schedule",
        "priority",
    ),
    "permissions": ("roles", "allow", "ask", "deny"),
    **sections.KEYS,
    **when.KEYS,
    **{name: keys for name, keys in serving.KEYS.items() if name not in {"a2a", "client"}},
}
"""All keys of a manifest, by the mapping they stand in."""


def parse_manifest(text: str, source: str = "manifest") -> Manifest:
    """Read a manifest.

    Args:
        text: the file's text.
        source: the file's name, for its problems.

    Raises:
        ManifestError: with every problem found, in the order of the file.
    """
    reader = Reader(source)
    fields = header(reader, text, "Agent", ("metadata", "spec"))
    name, labels = sections.read_metadata(reader, fields["metadata"][1] if "metadata" in fields else None)
    spec: Fields = reader.mapping(fields["spec"][1], "spec", KEYS["spec"]) if "spec" in fields else {}
    nodes = {key: value for key, (_, value) in spec.items()}
    run = Run(command=())
    if "run" in nodes:
        run = sections.read_run(reader, nodes["run"])
    elif "spec" in fields:
        reader.wrong(fields["spec"][0], "`spec.run` is missing", "add `run: {command: [PROGRAM]}`")
    rules, roles = _permissions(reader, nodes.get("permissions"))
    budgets = sections.read_budgets(reader, nodes["budgets"]) if "budgets" in nodes else Budgets()
    if budgets.context_on_overflow == "page":
        rules = replace(rules, allow=(*rules.allow, replace(_READ_AGAIN, line=spec["budgets"][0].line)))
    manifest = Manifest(
        name=name,
        labels=labels,
        run=run,
        rules=rules,
        roles=roles,
        sandbox=sections.read_sandbox(reader, nodes["sandbox"]) if "sandbox" in nodes else SandboxSpec(),
        delegates=sections.read_names(reader, nodes["delegates"], "spec.delegates")
        if "delegates" in nodes
        else (),
        serve=serving.read_serve(reader, nodes["serve"]) if "serve" in nodes else None,
        environment=sections.read_name(reader, nodes["environment"], "spec.environment")
        if "environment" in nodes
        else "",
        when=when.read_when(reader, nodes["when"], "spec.when", Numbers("manifest", "w"))
        if "when" in nodes
        else (),
        budgets=budgets,
        approvals=sections.read_approvals(reader, nodes["approvals"])
        if "approvals" in nodes
        else Approvals(),
        restart=sections.read_restart(reader, nodes["restart"]) if "restart" in nodes else Restart(),
        schedule=sections.read_schedule(reader, nodes["schedule"]) if "schedule" in nodes else None,
        priority=_priority(reader, nodes.get("priority")),
        later=tuple(sorted(reader.later)),
    )
    _check_direct(reader, spec, manifest)
    reader.finish()
    return manifest


def _check_direct(reader: Reader, spec: Fields, manifest: Manifest) -> None:
    """What a program's own workspace and its own resume demand of each other."""
    direct, own = manifest.sandbox.workspace == "direct", manifest.restart.resume == "own"
    if own and not direct:
        what = "`resume: own` is for programs that keep what they need in a workspace of their own"
        fix = "add `sandbox: {workspace: direct}`, or leave it out: the program is resumed by replay"
        reader.wrong(spec["restart"][0], what, fix)
    if own and manifest.restart.ignore:
        what = "`ignore` is for programs that are resumed by replay, and with `resume: own` nothing is answered from the record"
        reader.wrong(spec["restart"][0], what, "leave out one of the two")
    if direct and not own and manifest.schedule is not None:
        what = "a `direct` program that is resumed by replay begins each time on the workspace as submitted, so it has one run"
        reader.wrong(spec["schedule"][0], what, "add `restart: {resume: own}`")


_READ_AGAIN: Final = parse_rule('artifacts.get: "paged.*"', rule_id="page", origin="manifest")
"""What `on_overflow: page` allows: an agent reads again what the kernel took out of its own prompts."""


def _priority(reader: Reader, node: Node | None) -> str:
    return "normal" if node is None else reader.choice(node, "spec.priority", sections.PRIORITIES, "normal")


def _permissions(reader: Reader, node: Node | None) -> tuple[Rules, tuple[str, ...]]:
    if node is None:
        return Rules(), ()
    fields = reader.mapping(node, "spec.permissions", KEYS["permissions"])
    roles = (
        sections.read_names(reader, fields["roles"][1], "spec.permissions.roles") if "roles" in fields else ()
    )
    rules = reader.rule_lists(fields, "spec.permissions", Numbers("manifest", "r"))
    reader.problems.extend(never_matching(rules))
    return rules, roles
