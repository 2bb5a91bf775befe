"""Commands about declared MCP servers: ls, tools, accept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import record, records
from ringfence.console.errors import ExitCode
from ringfence.console.render import Column
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Mapping

commands = Commands()

_SERVERS = (
    Column(title="SERVER", flex=True),
    Column(title="OVER"),
    Column(title="TOOLS", right=True),
    Column(title="CHANGED", right=True),
    Column(title="TRUSTED"),
    Column(title="STATE", flex=True),
)
_TOOLS = (
    Column(title="TOOL", flex=True),
    Column(title="EFFECT"),
    Column(title="STATE"),
    Column(title="TAKEN BY"),
    Column(title="DESCRIPTION", flex=True),
)


@commands.add("ls", "ringfence mcp ls")
def list_servers(session: Session) -> int:
    """List the MCP servers of the kernel file."""
    found = records(session.client().call("McpServers"), "servers")
    if session.as_json:
        render.emit_array(found)
        return ExitCode.OK
    if not found:
        render.note("no MCP servers; the kernel file declares them as resources of the type `mcp`")
        return ExitCode.OK
    render.table(_SERVERS, [_server(row) for row in found])
    return ExitCode.OK


def _server(row: Mapping[str, Any]) -> list[str]:
    return [
        safe(row["name"]),
        row["transport"],
        str(row["tools"]),
        str(row["changed"] or "-"),
        "yes" if row["trusted"] else "no",
        safe(row["unavailable"] or "ok"),
    ]


@commands.add("tools", "ringfence mcp tools github --look", "ringfence mcp tools github create_issue")
@click.argument("server")
@click.argument("tool", required=False, default="")
@click.option("--look", is_flag=True, help="Ask the server first, and take what was never seen.")
def tools(session: Session, server: str, tool: str, look: bool) -> int:
    """List a server's tools as they were taken, or show one.

    With what its server offers instead by now.
    """
    document = session.client().call("McpTools", server=server, tool=tool, look=look)
    if session.as_json:
        render.emit(document)
        return ExitCode.OK
    found = records(document, "tools")
    if tool:
        _show(found[0])
        return ExitCode.OK
    if not found:
        render.note(f"no tool of {server} was seen yet; ask it: ringfence mcp tools {server} --look")
        return ExitCode.OK
    render.table(_TOOLS, [_tool(row) for row in found])
    if any(row["offered_hash"] for row in found):
        render.note(f"calls of changed tools wait; look: ringfence mcp tools {server} TOOL")
    return ExitCode.OK


def _state(row: Mapping[str, Any]) -> str:
    if row["offered_hash"]:
        return "changed"
    return "gone" if row["present"] is False else "ok"


def _tool(row: Mapping[str, Any]) -> list[str]:
    said = str(record(row, "definition").get("description") or "")
    first = next((line for line in said.splitlines() if line.strip()), "")
    return [safe(row["tool"]), row["effect"], _state(row), safe(row["taken_by"] or "first seen"), safe(first)]


def _show(row: Mapping[str, Any]) -> None:
    render.say(f"tool      {safe(row['tool'])}")
    render.say(f"action    {safe(row['action'] or 'none: no rule can say its name')}")
    render.say(f"effect    {row['effect']}")
    render.say(
        f"taken     {row['hash']} at {row['taken_at']} by {safe(row['taken_by'] or 'nobody: it was the first')}"
    )
    if row["offered_hash"]:
        render.say(f"offered   {row['offered_hash']} since {row['offered_at']}")
        render.say()
        for line in (row["diff"] or "").splitlines():
            render.say(safe(line))
    elif row["definition"] is not None:
        render.say()
        for line in render.to_json(row["definition"], indent=2).splitlines():
            render.say(safe(line))


@commands.add("accept", "ringfence mcp accept github create_issue")
@click.argument("server")
@click.argument("tool")
@click.option(
    "--hash", "wanted", default="", metavar="HASH", help="Only if this is the one that is offered now."
)
def accept(session: Session, server: str, tool: str, wanted: str) -> int:
    """Take the definition of a tool that its server offers now. Calls that waited for it go on as rules say."""
    document = session.client().call("McpAccept", server=server, tool=tool, hash=wanted)
    if session.as_json:
        render.emit(document)
    else:
        render.say(f"{safe(server)} {safe(tool)}: taken, {document['hash']}")
    return ExitCode.OK
