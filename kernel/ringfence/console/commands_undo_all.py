"""`rollback --all`: every agent that did something after a time is put back to it, all of them as one."""

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
    from collections.abc import Callable, Mapping

    from ringfence.console.session import Session


def roll_back_all(
    session: Session,
    to: str,
    *,
    preview: bool,
    start: bool,
    skip_unreachable: bool,
    yes: bool,
    show: Callable[[dict[str, Any]], None],
) -> int:
    """Preview all agents of the database, ask, and roll back those that did something since.

    Args:
        session: the command's run.
        to: a time; points and steps are an agent's own.
        preview: do nothing.
        start: start each afterwards.
        skip_unreachable: leave out agents that can't be had, instead of refusing all.
        yes: don't ask.
        show: prints one answer for people.

    Raises:
        ConsoleError: `to` is no time, an agent could not be rolled back, or changes of others were left.
    """
    if "-" not in to or ":" not in to:
        text = f"`{to}` is no time; `--all` takes one with its zone, such as 2026-01-31T08:00:00Z"
        raise ConsoleError(text, ExitCode.USAGE)
    client = session.client()
    asks = session.on_terminal and not yes and not session.as_json
    if preview or asks:
        with Progress("comparing", shown=not session.as_json):
            found = client.call("RollbackAll", to=to, preview=True)
        _tell(session, found, show)
        if records(found, "skipped") and not preview and not skip_unreachable:
            text = "; ".join(
                (*_skipped(found), "nothing was rolled back: mend that, or give `--skip-unreachable`")
            )
            raise ConsoleError(text, ExitCode.CONFLICT)
        if preview or not records(found, "agents"):
            return _left_out(found)
        agents = plural(len(records(found, "agents")), "agent")
        if not click.confirm(f"Roll back {agents}?", default=False):
            raise ConsoleError("nothing was rolled back; give `--yes` to roll back without a question")
    with Progress("rolling back", shown=not session.as_json):
        done = client.call(
            "RollbackAll", to=to, preview=False, start=start, skip_unreachable=skip_unreachable
        )
    _tell(session, done, show)
    left = sum(len(items(document, "conflicts")) for document in records(done, "agents"))
    if left:
        text = f"{plural(left, 'change')} of others left as found; look at each agent with `ringfence diff`"
        raise ConsoleError("; ".join((text, *_skipped(done))), ExitCode.CONFLICT)
    return _left_out(done)


def _left_out(document: Mapping[str, Any]) -> int:
    """Agents that did something since and can't be had: that is no success.

    Raises:
        ConsoleError: there are some.
    """
    skipped = _skipped(document)
    if skipped:
        raise ConsoleError("; ".join(skipped))
    return ExitCode.OK


def _skipped(document: Mapping[str, Any]) -> list[str]:
    return [f"{one['agent']}: {one['reason']}" for one in records(document, "skipped")]


def _tell(session: Session, document: Mapping[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    agents = records(document, "agents")
    if session.as_json:
        render.emit(agents)
        return
    for one in agents:
        render.say(f"{safe(one.get('agent'))}:")
        show(one)
    if not agents:
        render.note("no agent did anything after that time")
