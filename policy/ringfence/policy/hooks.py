"""`callback.hooks` of the kernel file: who may put messages from outside into which agents' mailboxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ringfence.policy import sections
from ringfence.policy.matcher import compile_name
from ringfence.policy.problems import PatternError
from ringfence.policy.reader import Reader
from ringfence.policy.resources import SecretRef, read_secret
from ringfence.policy.strict_yaml import Node, Table
from ringfence.policy.units import Rate

KEYS: Final = ("key", "agents", "labels", "rate")
HOOKS_MAX: Final = 64
RATE: Final = Rate(count=60, per_s=60.0)
"""How many messages a hook takes where it says nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookDecl:
    """Who may put messages into mailboxes.

    Attributes:
        name: unique; its messages are from `hook:NAME`.
        key: secret that signs them.
        agents: patterns of names; empty: any.
        labels: all that an agent has to carry.
        rate: how many it takes.
    """

    name: str
    key: SecretRef
    agents: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    rate: Rate = RATE

    def reaches(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether an agent of this name and with these labels may get its messages."""
        if any(labels.get(key) != value for key, value in self.labels.items()):
            return False
        return not self.agents or any(compile_name(text).segment.matches(name) for text in self.agents)


def read_hooks(reader: Reader, node: Node, section: str = "spec.callback.hooks") -> Mapping[str, HookDecl]:
    """The section `callback.hooks`, or another one that names who reaches which agents."""
    found: dict[str, HookDecl] = {}
    entries = reader.free_mapping(node, section)
    if len(entries) > HOOKS_MAX:
        kind = section.rpartition(".")[2]
        reader.wrong(node, f"there are {len(entries)} {kind}", f"at most {HOOKS_MAX} are heard")
    for key, value in entries:
        if name := sections.read_name(reader, key, section):
            found[name] = _hook(reader, name, value, f"{section}.{name}")
    return found


def _hook(reader: Reader, name: str, node: Node, what: str) -> HookDecl:
    fields = reader.mapping(node, what, KEYS)
    if "key" not in fields and isinstance(node, Table):
        reader.wrong(node, f"`{what}` has no `key`", "add `key: {secret: NAME}`")
    if not {"agents", "labels"} & fields.keys() and isinstance(node, Table):
        text = f"`{what}` names neither `agents` nor `labels`, so it would reach every agent"
        reader.wrong(node, text, 'add `agents: ["NAME"]`, or `agents: ["*"]` for all')
    agents: list[str] = []
    listed = reader.items(fields["agents"][1], f"{what}.agents") if "agents" in fields else []
    for item in listed:
        text = reader.text(item, f"{what}.agents")
        try:
            agents.append(compile_name(text).text if text else "")
        except PatternError as error:
            reader.wrong(item, f"`{text}`: {error.message}", error.fix)
    if "agents" in fields and not listed:
        reader.wrong(fields["agents"][1], f"`{what}.agents` is empty", f"name one, or leave `{name}` out")
    labels: dict[str, str] = {}
    for key, value in (
        reader.free_mapping(fields["labels"][1], f"{what}.labels") if "labels" in fields else ()
    ):
        labels[key.text] = reader.loose_text(value, f"{what}.labels.{key.text}") or ""
    if "labels" in fields and not labels:
        reader.wrong(fields["labels"][1], f"`{what}.labels` is empty", "write `labels: {team: billing}`")
    rate = reader.rate(fields["rate"][1], f"{what}.rate") if "rate" in fields else None
    key = read_secret(reader, fields["key"][1], f"{what}.key") if "key" in fields else SecretRef(secret="")
    return HookDecl(name=name, key=key, agents=tuple(agents), labels=labels, rate=rate or RATE)
