"""`rollback --all`: every agent that did something after a time is put back to it, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import items, records
from ringfence.console.durations import plural
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.progress import Progress
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ringfence.console.session import Session

_TOUCHED = ("changes", "conflicts", "not_undoable", "others")


def roll_back_all(
    session: Session,
    to: str,
    *,
    preview: bool,
    start: bool,
    yes: bool,
    show: Callable[[dict[str, Any]], None],
) -> int:
    """Preview all agents, ask, and roll back those that did something since.

    Args:
        session: the command's run.
        to: a time; points and steps are an agent's own.
        preview: do nothing.
        start: start each afterwards.
        yes: don't ask.
        show: prints one answer for people.

    Raises:
        ConsoleError: `to` is no time, an agent could not be rolled back, or changes of others were left.
    """
    if "-" not in to or ":" not in to:
        text = f"`{to}` is no time; `--all` takes one with its zone, such as 2026-01-31T08:00:00Z"
        raise ConsoleError(text, ExitCode.USAGE)
    found = _previews(session, to)
    asks = session.on_terminal and not yes and not session.as_json
    if preview or asks or not found:
        _tell(session, found, show)
    if preview or not found:
        return ExitCode.OK
    if asks and not click.confirm(f"Roll back {plural(len(found), 'agent')}?", default=False):
        raise ConsoleError("nothing was rolled back; give `--yes` to roll back without a question")
    done, failed = _carry_out(session, list(found), to, start=start)
    _tell(session, done, show)
    if failed:
        raise ConsoleError("; ".join(f"{agent}: {why}" for agent, why in failed.items()))
    left = sum(len(items(document, "conflicts")) for document in done.values())
    if left:
        text = f"{plural(left, 'change')} of others left as found; look at each agent with `ringfence diff`"
        raise ConsoleError(text, ExitCode.CONFLICT)
    return ExitCode.OK


def _previews(session: Session, to: str) -> dict[str, dict[str, Any]]:
    """What would be done, of the agents that did something since, the newest first."""
    client = session.client()
    agents = [str(agent["id"]) for agent in reversed(records(client.call("List", all=True), "agents"))]
    found: dict[str, dict[str, Any]] = {}
    with Progress("comparing", shown=not session.as_json):
        for agent in agents:
            document = client.call("Rollback", agent=agent, to=to, preview=True)
            if any(items(document, name) for name in _TOUCHED):
                found[agent] = document
    return found


def _carry_out(
    session: Session, agents: Sequence[str], to: str, *, start: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Roll back one after the other; gives what was done, and why where it could not be."""
    done: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with Progress("rolling back", shown=not session.as_json):
        for agent in agents:
            try:
                done[agent] = session.client().call(
                    "Rollback", agent=agent, to=to, preview=False, start=start
                )
            except ConsoleError as error:
                # The others are put back all the same: somebody is in a hurry.
                failed[agent] = str(error)
    return done, failed


def _tell(
    session: Session, documents: dict[str, dict[str, Any]], show: Callable[[dict[str, Any]], None]
) -> None:
    if session.as_json:
        render.emit([{"agent": agent, **document} for agent, document in documents.items()])
        return
    for agent, document in documents.items():
        render.say(f"{safe(agent)}:")
        show(document)
    if not documents:
        render.note("no agent did anything after that time")
