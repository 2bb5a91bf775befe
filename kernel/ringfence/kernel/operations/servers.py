"""MCP servers as operators see them: what is declared, which definitions of tools and prompts were taken, and taking another one."""

from __future__ import annotations

import json
from typing import Any

from ringfence.kernel.journal.store_approvals import CHANNEL_APPROVAL
from ringfence.kernel.journal.store_mcp import McpToolRecord
from ringfence.kernel.operations.kernel import Kernel, rfc3339
from ringfence.kernel.outreach_mcp import OPERATOR
from ringfence.kernel.outreach_mcp_definitions import difference
from ringfence.kernel.problems import Problem, conflict
from ringfence.policy.actions import PROMPT
from ringfence.policy.lookalikes import unmasked
from ringfence.syscalls.declared import McpResource
from ringfence.syscalls.errors import SyscallError
from ringfence.syscalls.mcp_common import PROMPT_KEPT, action_of, declared_tool, effect_of, sayable
from ringfence.syscalls.redaction import redactor_of


async def listing(kernel: Kernel) -> dict[str, Any]:
    """Every declared server, with how many tools it has and how many of them changed."""
    kept = await kernel.core.store.mcp_tools()
    return {
        "servers": [
            {
                "name": name,
                "transport": "stdio" if one.command else "http",
                "trusted": not one.untrusted,
                "unavailable": one.unavailable or None,
                "tools": sum(tool.server == name and not tool.tool.startswith(PROMPT_KEPT) for tool in kept),
                "changed": sum(tool.server == name and bool(tool.offered_hash) for tool in kept),
            }
            for name, one in sorted(kernel.ownership.resources.mcp.items())
        ]
    }


async def tools(kernel: Kernel, server: str, tool: str, *, look: bool, operator: str) -> dict[str, Any]:
    """The tools of a server, or one of them, with the definitions that were taken.

    Args:
        kernel: this one.
        server: its name.
        tool: which one; empty: all.
        look: ask the server first.
        operator: who asks.

    Raises:
        Problem: no such server or tool, or it can't be asked.
    """
    resource = _declared(kernel, server)
    present: frozenset[str] | None = None
    if look:
        if resource.unavailable:
            raise Problem(
                f"`{server}` is unavailable: {resource.unavailable}", exit_code=1, reason="Unavailable"
            )
        try:
            seen = await kernel.ownership.servers.look(OPERATOR, server)
            prompts = await kernel.ownership.servers.look(OPERATOR, server, "prompts")
            present = frozenset(seen) | {one.tool for one in prompts.values()}
        except SyscallError as error:
            raise Problem(error.message, exit_code=1, reason=error.reason) from error
        await kernel.core.operator_event("operator.mcp_look", server, operator=operator, tools=len(present))
    kept = await kernel.core.store.mcp_tools(server)
    shown = [one for one in kept if not tool or one.tool == tool]
    if tool and not shown:
        raise Problem(
            f"`{server}` has no tool `{tool}` that was seen; look with: ringfence mcp tools {server} --look",
            exit_code=4,
            reason="NoSuchTool",
        )
    hide = redactor_of(resource.secrets)
    return {
        "server": server,
        "tools": [_view(resource, one, present, hide.text) for one in shown],
    }


def _declared(kernel: Kernel, server: str) -> McpResource:
    resource = kernel.ownership.resources.mcp.get(server)
    if resource is None:
        known = ", ".join(f"`{name}`" for name in sorted(kernel.ownership.resources.mcp)) or "none"
        raise Problem(
            f"no MCP server `{server[:80]}` is declared; declared: {known}",
            exit_code=4,
            reason="NoSuchServer",
        )
    return resource


def _view(
    resource: McpResource, one: McpToolRecord, present: frozenset[str] | None, hide: Any
) -> dict[str, Any]:
    texts = tuple(text.encode() for text in (one.taken, one.offered) if text)
    prompt = one.tool.startswith(PROMPT_KEPT)
    name = PROMPT if prompt else one.tool
    return {
        "tool": one.tool,
        "action": action_of(one.server, name) if prompt or sayable(name) else None,
        "effect": "READ" if prompt else effect_of(declared_tool(resource, one.tool), texts).name,
        "definition": _json(one.taken, hide),
        "hash": one.taken_hash,
        "taken_at": rfc3339(one.taken_at),
        "taken_by": one.taken_by or None,
        "offered": _json(one.offered, hide),
        "offered_hash": one.offered_hash or None,
        "offered_at": rfc3339(one.offered_at),
        "diff": unmasked(hide(difference(one.taken, one.offered))) if one.offered else None,
        "present": None if present is None else one.tool in present,
    }


def _json(text: str, hide: Any) -> Any:
    return json.loads(hide(text)) if text else None


async def accept(kernel: Kernel, server: str, tool: str, wanted: str, operator: str) -> dict[str, Any]:
    """Take the definition that a server offers now; calls that waited for it go on as rules say.

    Args:
        kernel: this one.
        server: its name.
        tool: which one.
        wanted: hash of the definition that the operator has seen; empty: the one that is offered.
        operator: who takes it.

    Raises:
        Problem: it offers no other one, or not this one, or the kernel file names the only one that is taken.
    """
    resource = _declared(kernel, server)
    declared = None if tool.startswith(PROMPT_KEPT) else declared_tool(resource, tool)
    one = next((one for one in await kernel.core.store.mcp_tools(server) if one.tool == tool), None)
    if one is None or not one.offered_hash:
        raise Problem(
            f"`{server}` offers no other definition of `{tool}`; see: ringfence mcp tools {server}",
            exit_code=4,
            reason="NoSuchTool",
        )
    if declared is not None and declared.definition:
        raise conflict(
            f"the kernel file says which definition of `{tool}` is taken; write `definition: {one.offered_hash}` there and reload"
        )
    if wanted and wanted != one.offered_hash:
        raise conflict(
            f"`{server}` offers {one.offered_hash} by now; look at it: ringfence mcp tools {server} {tool}"
        )
    # INVARIANT: on record before it counts.
    await kernel.core.operator_event(
        "operator.mcp_accept",
        f"{server}.{tool}",
        operator=operator,
        taken=one.taken_hash,
        offered=one.offered_hash,
    )
    taken = await kernel.core.store.accept_mcp_tool(server, tool, one.offered_hash, operator)
    if taken is None:
        raise conflict(f"`{server}` offers another definition of `{tool}` by now; look at it again")
    kernel.core.approvals.notice(None)
    await kernel.core.store.notify(CHANNEL_APPROVAL, "")
    return {
        "server": server,
        "tool": tool,
        "hash": taken.taken_hash,
        "before": one.taken_hash,
        "by": operator,
    }
