"""What policy is asked and what it answers. No I/O anywhere in this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias


class Verdict(StrEnum):
    """The answer of policy. Deny beats ask beats allow."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


Resource: TypeAlias = str | tuple[str, ...]
"""What an action is done to, already canonical: a path `/workspace/a`, a URL, `database/table` (or `database/schema.table`),
a state key, or for exec.run the words of the command as a tuple. The empty string where a row has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question to policy.

    Attributes:
        principal: agent id.
        action: row name, such as `fs.read`.
        resource: canonical resource.
        effect: `READ`, `WRITE`, `DESTROY` or `EXTERNAL`.
        context: `facts`: what the kernel recorded itself (`policy.facts.Facts`). Without it, every condition matches.
    """

    principal: str
    action: str
    resource: Resource
    effect: str = "READ"
    context: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One answer.

    Attributes:
        verdict: allow, ask or deny.
        rules: ids of the rules that made it so, most decisive first; empty where nothing matched.
        grants: ids of the grants used, empty on a deny.
        reason: one line for people, which names the rule's text or says that nothing allows it.
        asks: ids of all that has to be approved where conditions ask too; empty: the first of `rules` stands for it.
        facts: what conditions found, one line for each.
        stale: whether nothing but the age of what was read is in the way.
    """

    verdict: Verdict
    rules: tuple[str, ...] = ()
    grants: tuple[str, ...] = ()
    reason: str = ""
    asks: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    stale: bool = False
