"""The actions that a rule can name: the rows of the table, and those that this protocol keeps a place for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from ringfence.policy.problems import PatternError
from ringfence.v1 import options_pb2, syscalls_pb2

_PLANNED: Final = ("llm.embed",)
"""Rows of the design that have no method yet; manifests may name them already."""

_KINDS: Final = {
    "fs": "path",
    "http": "url",
    "sql": "table",
    "state": "key",
    "memory": "key",
    "claim": "key",
    "object": "key",
    "exec": "command",
    "llm": "name",
    "messages": "name",
    "tasks": "name",
    "artifacts": "name",
    "spawn": "name",
    "mcp": "name",
    "a2a": "name",
}
_MCP_LABELS: Final = 3
_UNNAMED: Final = frozenset(
    ("mcp.call", "mcp.tools", "mcp.resources", "mcp.read", "mcp.prompts", "mcp.prompt", "mcp.complete")
)
"""Rows that no rule names: what they ask is about the tools, resources and prompts of servers."""

RESOURCE: Final = "@resource"
"""In place of a tool's name: a resource of the server, as in `mcp.SERVER.@resource`. No tool has such a name that a rule could say."""

PROMPT: Final = "@prompt"
"""The same of a prompt."""

OF_SERVERS: Final[Mapping[str, str]] = {
    "mcp.call": "",
    "mcp.read": RESOURCE,
    "mcp.prompt": PROMPT,
    "mcp.complete": PROMPT,
}
"""Rows that count as an action of their server, and what that has in place of a tool's name; empty: the tool's own."""

OWN_ACTIONS: Final = frozenset(
    (
        "now",
        "random",
        "sleep",
        "checkpoint.save",
        "ask",
        "workspace.commit",
        "mcp.tools",
        "mcp.resources",
        "mcp.prompts",
    )
)
"""Allowed without a rule, since they touch nothing but the agent's own thread, or show what rules let it do. A deny or ask rule takes
them away."""

# A right to do the key is a right to do the values, and a deny of the key denies them: they are the same door.
_SAME_DOOR: Final = {
    "fs.read": ("fs.list", "fs.stat", "fs.search"),
    "fs.write": ("fs.append",),
    "http.get": ("http.head",),
    "object.get": ("object.list",),
    "claim.take": ("claim.renew", "claim.release"),
}
# Moving something away reads it, removes it and writes it elsewhere: a deny of any of these denies the move too.
_DENIED_WITH: Final = {"fs.move": ("fs.read", "fs.write", "fs.delete")}


def _rows(effect: int | None = None) -> frozenset[str]:
    """Actions of the table, of those with one effect."""
    service = syscalls_pb2.DESCRIPTOR.services_by_name["SyscallService"]
    rows = [method.GetOptions().Extensions[options_pb2.row] for method in service.methods]
    return frozenset(row.action for row in rows if row.action and effect in (None, row.effect))


ROWS: Final = _rows()
"""Actions that this kernel has a row for."""

CHANGING: Final = ROWS - _rows(options_pb2.EFFECT_READ)
"""Those of them whose calls change something, here or elsewhere."""

KNOWN_ACTIONS: Final = (ROWS | frozenset(_PLANNED)) - _UNNAMED
"""Actions that a rule may name, besides `mcp.SERVER.TOOL`."""


def kind_of(action: str) -> str:
    """The kind of resource of an action or action pattern; `any` for a lone `*`, `none` where there is no resource."""
    return "any" if action == "*" else _KINDS.get(action.partition(".")[0], "none")


def row_of(action: str) -> str:
    """The row that an action is made by: of a server's tool or resource one that no rule names, else the action itself."""
    labels = action.split(".", _MCP_LABELS - 1)
    if labels[0] != "mcp" or len(labels) < _MCP_LABELS or "*" in action:
        return action
    return next((row for row, stands in OF_SERVERS.items() if stands == labels[-1]), "mcp.call")


def check_action(pattern: str) -> None:
    """Refuse an action pattern that can match no action.

    Raises:
        PatternError: an unknown action, or a `*` at a place where it has no meaning.
    """
    labels = pattern.split(".")
    if any("*" in label and label != "*" for label in labels):
        raise PatternError(f"`{pattern}` is no action", "`*` stands for a whole part, as in `fs.*`")
    if labels[0] == "mcp":
        # Names of tools may have dots of their own, so what follows the server is all of one.
        if not all(labels) or pattern == "mcp":
            raise PatternError(
                f"unknown action `{pattern}`", "write `mcp.SERVER.TOOL`, `mcp.SERVER.*` or `mcp.*`"
            )
        if len(labels) < _MCP_LABELS and labels[-1] != "*":
            raise PatternError(f"unknown action `{pattern}`", f"write `{pattern}.*` for all its tools")
        return
    if not any(match_action(pattern, action) for action in KNOWN_ACTIONS):
        family = sorted(action for action in KNOWN_ACTIONS if action.partition(".")[0] == labels[0])
        known = family or sorted({action.partition(".")[0] for action in KNOWN_ACTIONS})
        raise PatternError(f"unknown action `{pattern}`", f"known here: {', '.join(known)}")


@lru_cache(maxsize=8192)
def match_action(pattern: str, action: str) -> bool:
    """Whether an action pattern names an action: part by part, where a last `*` stands for one part or more."""
    if pattern in {"*", action}:
        return True
    wanted, given = pattern.split("."), action.split(".")
    if len(given) < len(wanted) or (len(given) > len(wanted) and wanted[-1] != "*"):
        return False
    return all(part in {"*", text} for part, text in zip(wanted, given, strict=False))


@lru_cache(maxsize=8192)
def applies(pattern: str, action: str, *, forbids: bool) -> bool:
    """Whether a rule on an action pattern speaks about an action, itself or as the same door.

    Args:
        pattern: the rule's action pattern.
        action: the action asked about.
        forbids: whether the rule denies or asks.
    """
    if match_action(pattern, action):
        return True
    if any(action in doors and match_action(pattern, main) for main, doors in _SAME_DOOR.items()):
        return True
    return forbids and any(match_action(pattern, other) for other in _DENIED_WITH.get(action, ()))
