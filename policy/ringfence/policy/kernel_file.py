"""Reads `ringfence.yaml`, the operator's file: resources, ceilings, roles and sandbox. As strict as the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ringfence.policy import approving, engines, keeping, outreach, pools, scheduling, sections, serving, when
from ringfence.policy import resources as declarations
from ringfence.policy.approving import People
from ringfence.policy.conditions import Condition, Environment
from ringfence.policy.coverage import never_matching
from ringfence.policy.engines import DockerSpec, RemoteSpec
from ringfence.policy.keeping import RetentionPolicy
from ringfence.policy.manifest_types import Budgets, Manifest, SandboxSpec
from ringfence.policy.outreach import CallbackDecl, WebhookDecl
from ringfence.policy.pools import Pool
from ringfence.policy.problems import ManifestError, Problem
from ringfence.policy.reader import Fields, Numbers, Reader, header
from ringfence.policy.resources import Auth, EffectDecl, ResourceDecl, SecretRef, read_resource
from ringfence.policy.rules import Rule, Rules
from ringfence.policy.scheduling import SlotLimits
from ringfence.policy.serving import A2aDecl
from ringfence.policy.strict_yaml import Node
from ringfence.policy.types import Verdict

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
    "spec": (
        "resources",
        "ceilings",
        "roles",
        "untaint",
        "sandbox",
        "scheduler",
        "budgets",
        "webhooks",
        "callback",
        "a2a",
        "retention",
    ),
    "ceilings": ("deny", "ask", "when", "budgets", "approvals"),
    "ceilings.approvals": approving.KEYS,
    "role": ("roles", "environment", "allow", "ask", "deny", "when"),
    "sandbox": (*(key for key in sections.KEYS["sandbox"] if key != "doors"), "docker", "remote"),
    "docker": engines.KEYS,
    "remote": engines.REMOTE_KEYS,
    "scheduler": scheduling.KEYS,
    "budgets": sections.KEYS["budgets"],
    "pool": pools.KEYS,
    **when.KEYS,
    **outreach.KEYS,
    **{name: keys for name, keys in serving.KEYS.items() if name in {"a2a", "client"}},
    **keeping.KEYS,
    **declarations.KEYS,
}
"""All keys of the kernel file, by the mapping they stand in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What no agent gets, whatever its manifest says; and how many people have to approve at least."""

    deny: tuple[Rule, ...] = ()
    ask: tuple[Rule, ...] = ()
    when: tuple[Condition, ...] = ()
    budgets: Budgets = field(default_factory=Budgets)
    people: People = field(default_factory=People)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, as `AgentPolicy` takes them."""
        return (*self.deny, *self.ask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a manifest takes with `permissions.roles`.

    Attributes:
        roles: those that it takes itself.
        environment: the only one whose resources whoever has it may use; empty: any.
        rules: its own.
        when: its own conditions.
    """

    roles: tuple[str, ...] = ()
    environment: str = ""
    rules: Rules = field(default_factory=Rules)
    when: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFile:
    """The operator's file. Parsed, checked, immutable.

    Attributes:
        roles: rules of each role with those of the roles that it takes.
        declared_roles: roles as they were written.
        untaint: calls that end the taint of the thread that makes them.
        pools: budgets of many agents together, by their selectors.
        webhooks: who is told of what happens, by name.
        callback: where people's own systems decide approvals; None: nowhere.
        a2a: where clients give tasks to agents; None: nowhere.
        scheduler: how many agents live at once.
        retention: what is kept, and how long.
    """

    resources: Mapping[str, ResourceDecl] = field(default_factory=dict[str, ResourceDecl])
    ceilings: Ceilings = field(default_factory=Ceilings)
    roles: Mapping[str, Rules] = field(default_factory=dict[str, Rules])
    declared_roles: Mapping[str, Role] = field(default_factory=dict[str, Role])
    untaint: tuple[Rule, ...] = ()
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    docker: DockerSpec = field(default_factory=DockerSpec)
    remote: RemoteSpec = field(default_factory=RemoteSpec)
    pools: Mapping[str, Pool] = field(default_factory=dict[str, Pool])
    webhooks: Mapping[str, WebhookDecl] = field(default_factory=dict[str, WebhookDecl])
    callback: CallbackDecl | None = None
    a2a: A2aDecl | None = None
    scheduler: SlotLimits = field(default_factory=SlotLimits)
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
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
    declared = _roles(reader, nodes["roles"]) if "roles" in nodes else {}
    untaint = Numbers("kernel file", "u")
    result = KernelFile(
        resources=resources,
        ceilings=_ceilings(reader, nodes["ceilings"]) if "ceilings" in nodes else Ceilings(),
        roles={name: _with_inherited(name, declared) for name in declared},
        declared_roles=declared,
        untaint=reader.rules(nodes["untaint"], "spec.untaint", Verdict.ALLOW, untaint)
        if "untaint" in nodes
        else (),
        sandbox=_sandbox(reader, nodes["sandbox"]) if "sandbox" in nodes else SandboxSpec(),
        docker=engines.read_docker(reader, nodes["sandbox"]) if "sandbox" in nodes else DockerSpec(),
        remote=engines.read_remote(reader, nodes["sandbox"]) if "sandbox" in nodes else RemoteSpec(),
        pools=pools.read_pools(reader, nodes["budgets"], "spec.budgets") if "budgets" in nodes else {},
        webhooks=outreach.read_webhooks(reader, nodes["webhooks"]) if "webhooks" in nodes else {},
        callback=outreach.read_callback(reader, nodes["callback"]) if "callback" in nodes else None,
        a2a=serving.read_a2a(reader, nodes["a2a"]) if "a2a" in nodes else None,
        scheduler=scheduling.read_scheduler(reader, nodes["scheduler"])
        if "scheduler" in nodes
        else SlotLimits(),
        retention=keeping.read_retention(reader, nodes["retention"])
        if "retention" in nodes
        else RetentionPolicy(),
        later=tuple(sorted(reader.later)),
    )
    reader.finish()
    return result


def _sandbox(reader: Reader, node: Node) -> SandboxSpec:
    return sections.read_sandbox(reader, node, keys=KEYS["sandbox"])


def _ceilings(reader: Reader, node: Node) -> Ceilings:
    fields = reader.mapping(node, "spec.ceilings", KEYS["ceilings"])
    rules = reader.rule_lists(fields, "spec.ceilings", Numbers("ceilings", "c"))
    budgets = (
        sections.read_budgets(reader, fields["budgets"][1], "spec.ceilings.budgets")
        if "budgets" in fields
        else Budgets()
    )
    found: tuple[Condition, ...] = ()
    if "when" in fields:
        found = when.read_when(reader, fields["when"][1], "spec.ceilings.when", Numbers("ceilings", "cw"))
    people = approving.read_ceiling(reader, fields["approvals"][1]) if "approvals" in fields else People()
    return Ceilings(deny=rules.deny, ask=rules.ask, when=found, budgets=budgets, people=people)


def _roles(reader: Reader, node: Node) -> dict[str, Role]:
    """Roles as they are written, without those that can't be read."""
    places: dict[str, Node] = {}
    roles: dict[str, Role] = {}
    for key, value in reader.free_mapping(node, "spec.roles"):
        if name := sections.read_name(reader, key, "spec.roles"):
            places[name] = key
            roles[name] = _role(reader, name, value)
    for name, role in list(roles.items()):
        unknown = [other for other in role.roles if other not in roles]
        if unknown:
            known = ", ".join(roles)
            reader.wrong(
                places[name], f"the role `{name}` takes `{unknown[0]}`, which is none", f"known here: {known}"
            )
            roles[name] = replace(role, roles=tuple(other for other in role.roles if other in roles))
    for name in roles:
        if name in lineage_of(name, roles)[1:]:
            reader.wrong(
                places[name], f"the role `{name}` takes itself", "take one of the roles out of the circle"
            )
            return {name: replace(role, roles=()) for name, role in roles.items()}
    return roles


def lineage_of(name: str, roles: Mapping[str, Role]) -> tuple[str, ...]:
    """A role and all that it takes, itself or through others; the role itself first, and again where it takes itself."""
    found = [name]
    waiting = list(roles[name].roles)
    while waiting:
        other = waiting.pop(0)
        if other not in found[1:]:
            found.append(other)
            waiting += roles[other].roles
    return tuple(found)


def _with_inherited(name: str, roles: Mapping[str, Role]) -> Rules:
    parts = [roles[other].rules for other in lineage_of(name, roles)]
    return Rules(
        allow=tuple(rule for part in parts for rule in part.allow),
        ask=tuple(rule for part in parts for rule in part.ask),
        deny=tuple(rule for part in parts for rule in part.deny),
    )


def _role(reader: Reader, name: str, node: Node) -> Role:
    what = f"spec.roles.{name}"
    fields = reader.mapping(node, what, KEYS["role"])
    rules = reader.rule_lists(fields, what, Numbers(f"role {name}", f"{name}."))
    reader.problems.extend(never_matching(rules))
    found: tuple[Condition, ...] = ()
    if "when" in fields:
        found = when.read_when(
            reader, fields["when"][1], f"{what}.when", Numbers(f"role {name}", f"{name}.w")
        )
    return Role(
        roles=sections.read_names(reader, fields["roles"][1], f"{what}.roles") if "roles" in fields else (),
        environment=sections.read_name(reader, fields["environment"][1], f"{what}.environment")
        if "environment" in fields
        else "",
        rules=rules,
        when=found,
    )


def conditions_of(manifest: Manifest, file: KernelFile) -> tuple[Condition, ...]:
    """All conditions that hold for an agent: the ceilings', its own, its roles', and what its environments pin it to."""
    found = [*file.ceilings.when, *manifest.when]
    pins = [("pin", manifest.environment, "manifest", 0)]
    taken = dict.fromkeys(
        other
        for role in manifest.roles
        if role in file.declared_roles
        for other in lineage_of(role, file.declared_roles)
    )
    for name in taken:
        role = file.declared_roles[name]
        found += role.when
        pins.append((f"{name}.pin", role.environment, f"role {name}", 0))
    for label, environment, origin, line in pins:
        if environment:
            found += pinned(label, environment, origin, line)
    return tuple(found)


def pinned(label: str, environment: str, origin: str, line: int) -> list[Condition]:
    """What keeps an agent from resources of other environments; those without an environment stay."""
    return [
        Condition(
            id=f"{label}-{family}",
            action=f"{family}.*",
            tests=(Environment(names=(environment,), other=True),),
            text=f"environment: {environment}",
            origin=origin,
            line=line,
        )
        for family in when.DECLARED
    ]
