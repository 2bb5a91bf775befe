"""Operations on other agents that a program starts. For both front ends; no I/O."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ringfence.agent import wire
from ringfence.agent.operations import Json, Operation, StrPath, b64

Section: TypeAlias = Mapping[str, Any]
"""A section of a manifest as plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """An agent that this program started."""

    id: str
    name: str


def spawn(
    name: str,
    command: Sequence[StrPath],
    *,
    workspace: StrPath,
    permissions: Section | None,
    roles: Sequence[str],
    delegates: Sequence[str],
    env: Mapping[str, str] | None,
    input: str | bytes,  # noqa: A002 - the call's own field is named so
    budgets: Section | None,
    sandbox: Section | None,
    approvals: Section | None,
    restart: Section | None,
    labels: Mapping[str, str] | None,
) -> Operation[Child]:
    """Start another agent."""
    arguments: Json = {"name": name, "command": [os.fspath(word) for word in command]}
    sections = {
        "permissions": permissions,
        "budgets": budgets,
        "sandbox": sandbox,
        "approvals": approvals,
        "restart": restart,
    }
    for key, section in sections.items():
        if section is not None:
            wire.check_plain(f"`{key}`", section)
            arguments[key] = section
    data = input.encode() if isinstance(input, str) else input
    more: Json = {
        "workspace": os.fspath(workspace),
        "roles": list(roles),
        "delegates": list(delegates),
        "env": dict(env or {}),
        "labels": dict(labels or {}),
        "input": b64(data) if data else "",
    }
    arguments |= {key: value for key, value in more.items() if value}
    return Operation("spawn", arguments, lambda r: Child(id=r["id"], name=r["name"]))
