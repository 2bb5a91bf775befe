"""Reads `ringfence.yaml`, the operator's file: resources, ceilings, roles and sandbox. As strict as the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ringfence.policy import resources as declarations
from ringfence.policy import sections
from ringfence.policy.coverage import never_matching
from ringfence.policy.manifest_types import Budgets, SandboxSpec
from ringfence.policy.problems import ManifestError, Problem
from ringfence.policy.reader import Fields, Numbers, Reader, header
from ringfence.policy.resources import Auth, EffectDecl, ResourceDecl, SecretRef, read_resource
from ringfence.policy.rules import Rule, Rules
from ringfence.policy.strict_yaml import Node

__all__ = [
    "Auth",
    "Ceilings",
    "EffectDecl",
    "KernelFile",
    "ManifestError",
    "ResourceDecl",
    "SecretRef",
    "parse_kernel_file",
]

KEYS: Final = {
    "": ("apiVersion", "kind", "spec"),
    "spec": ("resources", "ceilings", "roles", "sandbox"),
    "ceilings": ("deny", "ask", "budgets"),
    "role": ("allow", "ask", "deny"),
    "sandbox": sections.KEYS["sandbox"],
    "budgets": sections.KEYS["budgets"],
    **declarations.KEYS,
}
"""All keys of the kernel file, by the mapping they stand in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What no agent gets, whatever its manifest says."""

    deny: tuple[Rule, ...] = ()
    ask: tuple[Rule, ...] = ()
    budgets: Budgets = field(default_factory=Budgets)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, as `AgentPolicy` takes them."""
        return (*self.deny, *self.ask)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFile:
    """The operator's file. Parsed, checked, immutable."""

    resources: Mapping[str, ResourceDecl] = field(default_factory=dict[str, ResourceDecl])
    ceilings: Ceilings = field(default_factory=Ceilings)
    roles: Mapping[str, Rules] = field(default_factory=dict[str, Rules])
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    later: tuple[Problem, ...] = ()

    def unsupported(self) -> list[Problem]:
        """What is well-formed but can't be enforced by this release."""
        return list(self.later)


def parse_kernel_file(text: str, source: str = "ringfence.yaml") -> KernelFile:
    """Read the operator's file.

    Args:
        text: the file's text.
        source: the file's name, for its problems.

    Raises:
        ManifestError: with every problem found, in the order of the file.
    """
    reader = Reader(source)
    fields = header(reader, text, "Kernel", ("spec",))
    spec: Fields = reader.mapping(fields["spec"][1], "spec", KEYS["spec"]) if "spec" in fields else {}
    nodes = {key: value for key, (_, value) in spec.items()}
    resources: dict[str, ResourceDecl] = {}
    for key, node in (
        reader.free_mapping(nodes["resources"], "spec.resources") if "resources" in nodes else ()
    ):
        if (resource := read_resource(reader, key, node)) is not None:
            resources[key.text] = resource
    roles: dict[str, Rules] = {}
    for key, node in reader.free_mapping(nodes["roles"], "spec.roles") if "roles" in nodes else ():
        if name := sections.read_name(reader, key, "spec.roles"):
            roles[name] = _role(reader, name, node)
    result = KernelFile(
        resources=resources,
        ceilings=_ceilings(reader, nodes["ceilings"]) if "ceilings" in nodes else Ceilings(),
        roles=roles,
        sandbox=sections.read_sandbox(reader, nodes["sandbox"]) if "sandbox" in nodes else SandboxSpec(),
        later=tuple(sorted(reader.later)),
    )
    reader.finish()
    return result


def _ceilings(reader: Reader, node: Node) -> Ceilings:
    fields = reader.mapping(node, "spec.ceilings", KEYS["ceilings"])
    rules = reader.rule_lists(fields, "spec.ceilings", Numbers("ceilings", "c"))
    budgets = (
        sections.read_budgets(reader, fields["budgets"][1], "spec.ceilings.budgets")
        if "budgets" in fields
        else Budgets()
    )
    return Ceilings(deny=rules.deny, ask=rules.ask, budgets=budgets)


def _role(reader: Reader, name: str, node: Node) -> Rules:
    fields = reader.mapping(node, f"spec.roles.{name}", KEYS["role"])
    rules = reader.rule_lists(fields, f"spec.roles.{name}", Numbers(f"role {name}", f"{name}."))
    reader.problems.extend(never_matching(rules))
    return rules
