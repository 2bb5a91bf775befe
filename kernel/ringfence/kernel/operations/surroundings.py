"""What an agent works with, as its layer `environment` shows it."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from ringfence.kernel.config import VERSION
from ringfence.kernel.operations.agents import show
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.thread import Thread
from ringfence.syscalls.table import Row

Seen = tuple[str, int, Mapping[str, Any]]
"""A call: its action and step, and what a model said of itself."""


async def environment_items(kernel: Kernel, thread: Thread, calls: Sequence[Seen]) -> list[dict[str, Any]]:
    """The kernel, the program, its sandbox, models and tools that it used, resources, and the rights in force.

    Raises:
        Unavailable: the database is away.
    """
    shown = await show(kernel, thread.id)
    sandbox: dict[str, Any] = {
        name: shown["sandbox"][name] for name in ("backend", "walls", "require", "mounts")
    }
    items: list[dict[str, Any]] = [
        {
            "kind": "kernel",
            "version": VERSION,
            "python": platform.python_version(),
            "protocol": "ringfence.v1",
        },
        {
            "kind": "program",
            "command": list(thread.manifest.run.command),
            "manifest_version": shown["manifest"]["version"],
            "manifest": shown["manifest"]["text"],
        },
        {"kind": "sandbox", **sandbox},
        *_models(calls),
        *_tools(kernel.core.table, calls),
        *_resources(thread),
    ]
    items += [{"kind": "rule", **rule} for rule in shown["rules"]]
    items += [{"kind": "grant", **grant} for grant in shown["grants"] if grant["revoked_at"] is None]
    items += [{"kind": "budget", **budget} for budget in shown["budgets"]]
    return items


def _models(calls: Sequence[Seen]) -> list[dict[str, Any]]:
    """Models by the name that was asked for and the host, with every version that answered to it."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for _, step, said in calls:
        if not said:
            continue
        name, resource = str(said.get("asked")), str(said.get("resource", ""))
        item = found.setdefault(
            (name, resource),
            {
                "kind": "model",
                "model": name,
                "resource": resource,
                "versions": [],
                "tokenizer": None,
                "calls": 0,
                "first_step": step,
            },
        )
        if said.get("model") not in (None, *item["versions"]):
            item["versions"].append(said["model"])
        item.update(
            tokenizer=said.get("tokenizer", item["tokenizer"]), calls=item["calls"] + 1, last_step=step
        )
    return list(found.values())


def _tools(table: Mapping[str, Row], calls: Sequence[Seen]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for action, step, _ in calls:
        item = found.setdefault(
            action,
            {
                "kind": "tool",
                "action": action,
                "version": tool_version(table.get(action)),
                "calls": 0,
                "first_step": step,
            },
        )
        item.update(calls=item["calls"] + 1, last_step=step)
    return [found[action] for action in sorted(found)]


def tool_version(row: Row | None) -> str | None:
    """What names the form of a tool: a hash over its messages and facts in this release; None: this release has none such."""
    if row is None:
        return None
    digest = hashlib.sha256(f"{row.action} {row.effect.name} {row.recovery.name}".encode())
    for message in (row.request, row.response):
        for one in message.fields:
            digest.update(f"\n{message.name}.{one.name} {one.number} {one.type} {one.is_repeated}".encode())
    return digest.hexdigest()[:16]


def _resources(thread: Thread) -> list[dict[str, Any]]:
    """Declared resources by name and kind; where they lead, and what opens them, is the operator's."""
    environment = thread.environment
    kinds = (
        ("http", environment.http),
        ("sql", environment.sql),
        ("llm", environment.llm),
        ("object", environment.objects),
        ("mcp", environment.mcp),
        ("a2a", environment.a2a),
    )
    return [
        {
            "kind": "resource",
            "name": name,
            "type": kind,
            "untrusted": one.untrusted,
            "unavailable": one.unavailable or None,
        }
        for kind, resources in kinds
        for name, one in sorted(resources.items())
    ]
