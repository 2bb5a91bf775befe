"""The command about families of agents: tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click
from ringfence.console import render
from ringfence.console.documents import records
from ringfence.console.errors import ExitCode
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe

commands = Commands()


@commands.add("tree", "ringfence tree", "ringfence tree invoice-bot --json")
@click.argument("agent", required=False, default="")
@click.option("--all", "everything", is_flag=True, help="Also trees in which every agent ended.")
def tree(session: Session, agent: str, everything: bool) -> int:
    """Show which agents were spawned by which.

    Without AGENT: every agent that was submitted, with all below it.
    """
    roots = records(session.client().call("Tree", agent=agent, all=everything), "agents")
    if session.as_json:
        render.emit(roots)
        return ExitCode.OK
    for root in roots:
        for line in _lines(root, "", ""):
            render.say(line)
    if not roots:
        render.note("no live agents; see those that ended with: ringfence tree --all")
    return ExitCode.OK


def _lines(node: Mapping[str, Any], head: str, indent: str) -> Iterator[str]:
    waits = f"  ({safe(node['waiting_for'])})" if node.get("waiting_for") else ""
    yield f"{head}{safe(node['id'])}  {render.coloured(safe(node['state']))}{waits}"
    children: list[Mapping[str, Any]] = list(node["children"])
    for child in children:
        last = child is children[-1]
        yield from _lines(child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "))
