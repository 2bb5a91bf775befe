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
        context: facts that the kernel recorded itself.
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
    """

    verdict: Verdict
    rules: tuple[str, ...] = ()
    grants: tuple[str, ...] = ()
    reason: str = ""
