"""Commands that copy, move and forget agents: fork, rm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import records
from ringfence.console.durations import plural, size
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Mapping

commands = Commands()


@commands.add(
    "fork",
    "ringfence fork invoice-bot --at 17",
    "ringfence fork invoice-bot --at p17 --name second-try --start",
)
@click.argument("agent")
@click.option(
    "--at",
    required=True,
    metavar="STEP",
    help="The last step that the new agent has; or a point, such as p17.",
)
@click.option(
    "--name", default="", metavar="N", help="Name of the new agent. Default: the first one's with `-fork`."
)
@click.option("--start", is_flag=True, help="Start it; else it is left paused.")
def fork(session: Session, agent: str, at: str, name: str, start: bool) -> int:
    """Make a new agent that continues from a step of another.

    The first is untouched. The new one inherits its journal up to the step, the rights in force now, what was
    spent, and what left the system: a payment that the first one made is recognised, not made again. Its
    workspace is a copy, put back to the step. Shared state and SQL targets stay as they are.
    """
    document = session.client().call("Fork", agent=agent, at=at, name=name, start=start)
    if session.as_json:
        render.emit(document)
    else:
        _print_fork(document)
    conflicts = records(document, "conflicts")
    if conflicts:
        raise ConsoleError(
            f"{plural(len(conflicts), 'path')} of the copy are as they are now, not as at the step, because others changed "
            f"them since: {', '.join(str(c.get('target')) for c in conflicts[:5])}; look at them before you start it",
            ExitCode.CONFLICT,
        )
    return ExitCode.OK


def _print_fork(document: Mapping[str, Any]) -> None:
    render.facts(
        [
            ("id", document.get("id")),
            ("from", f"{document.get('source')} at step {document.get('at_step')}"),
            ("state", document.get("state")),
        ]
    )
    shared = records(document, "shared")
    if shared:
        render.say("done by the first one after that step, and still so:")
    for row in shared:
        words = [
            f"step {row.get('step')}",
            row.get("action", ""),
            row.get("resource", ""),
            row.get("effect", ""),
        ]
        render.say("  " + "  ".join(safe(word) for word in words))


@commands.add("rm", "ringfence rm invoice-bot")
@click.argument("agent")
def remove(session: Session, agent: str) -> int:
    """Forget an agent that has ended.

    Its workspace, rollback points, logs, checkpoints, memories and artifacts go, its open approvals are closed and
    its mailbox is emptied. The journal's rows are evidence and stay: `ringfence audit ID` shows them.
    """
    document = session.client().call("Remove", agent=agent)
    if session.as_json:
        render.emit(document)
    else:
        render.say(
            f"removed {safe(document.get('id', agent))}: {size(document.get('freed_bytes') or 0)} freed"
        )
    return ExitCode.OK
