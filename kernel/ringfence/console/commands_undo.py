"""Commands that undo and settle: points, rollback, diff, resolve."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click
from ringfence.console import render
from ringfence.console.commands_diff import show_diff
from ringfence.console.commands_undo_all import roll_back_all
from ringfence.console.documents import as_record, items, records
from ringfence.console.durations import asked_bytes, asked_ms, plural, size, utc
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.progress import Progress
from ringfence.console.render import Column
from ringfence.console.session import Commands, Session
from ringfence.console.text import pad, safe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

commands = Commands()

_COVERS_SHOWN = 12
_ACTION_COLUMNS = 7

_POINTS = (
    Column(title="POINT"),
    Column(title="STEP", right=True),
    Column(title="KIND", spare=True),
    Column(title="SIZE", right=True),
    Column(title="VERIFIED"),
    Column(title="AT (UTC)"),
    Column(title="COVERS", flex=True),
)


class _RollbackOptions(TypedDict):
    everything: bool
    to: str
    preview: bool
    path: str
    start: bool
    skip_unreachable: bool
    yes: bool


@commands.add(
    "points",
    "ringfence points invoice-bot",
    "ringfence points verify",
    "ringfence points verify invoice-bot",
    "ringfence points prune invoice-bot --keep 20",
    "ringfence points prune invoice-bot --older-than 30d",
    "ringfence points prune invoice-bot --size 2Gi",
)
@click.argument("words", nargs=-1, required=True, metavar="AGENT | verify [AGENT] | prune AGENT")
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="With `prune`: how many stay.")
@click.option("--older-than", metavar="DURATION", help="With `prune`: those taken longer ago go.")
@click.option(
    "--size", "most", metavar="SIZE", help="With `prune`: how much the newest may take, such as 2Gi."
)
def points(
    session: Session, words: tuple[str, ...], keep: int | None, older_than: str | None, most: str | None
) -> int:
    """List rollback points, read them back, or remove the oldest.

    `verify` reads every point back, of one agent or of all; exit 1 when one can't be verified. `prune`
    removes points from the oldest on; what stays is enough to go back to any point that stays.
    """
    verb = "".join(words[:1]) if words[:1] in (("verify",), ("prune",)) else ""
    names = list(words[1:] if verb else words)
    if len(names) > 1 or (verb == "prune" and not names):
        raise ConsoleError("`points` takes one agent; see `ringfence points --help`", ExitCode.USAGE)
    if verb == "prune":
        return _prune(session, names[0], keep, older_than, most)
    if keep is not None or older_than is not None or most is not None:
        raise ConsoleError(
            "`--keep`, `--older-than` and `--size` go with `ringfence points prune AGENT`", ExitCode.USAGE
        )
    if not verb:
        found = _points(session, names[0], verify=False)
        _print_points(session, found)
        return ExitCode.OK
    return _verify(session, names)


def _verify(session: Session, names: Sequence[str]) -> int:
    agents = names or [agent["id"] for agent in records(session.client().call("List", all=True), "agents")]
    found: list[dict[str, Any]] = []
    with Progress("verifying", shown=not session.as_json) as progress:
        for number, agent in enumerate(agents, 1):
            progress.now(f"verifying points of {agent}, {number} of {plural(len(agents), 'agent')}")
            found += [{**point, "agent": agent} for point in _points(session, agent, verify=True)]
    _print_points(session, found)
    if not session.as_json:
        _print_damage(found)
    bad = [f"{point['agent']}/{point['id']}" for point in found if not point.get("verified")]
    if bad:
        raise ConsoleError(
            f"{len(bad)} of {plural(len(found), 'point')} can't be read back: {', '.join(bad[:10])}; "
            "no rollback can go through them, bring their files back from a copy of the data directory"
        )
    return ExitCode.OK


def _print_damage(found: Sequence[Mapping[str, Any]]) -> None:
    for point in found:
        for one in records(point, "damage"):
            place = "in the shared store" if one.get("where") == "store" else "here"
            what = safe(one.get("path") or "all of it")
            render.say(
                f"{safe(point['agent'])}/{safe(point['id'])}, step {safe(point['step'])}: {what}: {safe(one.get('why'))} ({place})"
            )
            render.say(f"    lost: {safe(one.get('lost'))}")


def _prune(session: Session, agent: str, keep: int | None, older_than: str | None, most: str | None) -> int:
    fields: dict[str, Any] = {"agent": agent}
    if keep is not None:
        fields["keep"] = keep
    if older_than is not None:
        fields["older_than_ms"] = asked_ms(older_than)
    if most is not None:
        fields["size_bytes"] = asked_bytes(most)
    with Progress("pruning", shown=not session.as_json):
        document = session.client().call("PrunePoints", **fields)
    if session.as_json:
        render.emit(document)
        return ExitCode.OK
    pruned = items(document, "pruned")
    freed, kept = size(document.get("freed_bytes") or 0), document.get("kept") or 0
    render.say(f"pruned {plural(len(pruned), 'point')}, {freed} freed; {kept} stay")
    return ExitCode.OK


@commands.add(
    "rollback",
    "ringfence rollback invoice-bot --to p17 --preview",
    "ringfence rollback invoice-bot --to 17 --path data --yes",
    "ringfence rollback invoice-bot --to 2026-01-31T08:00:00Z --start",
    "ringfence rollback --all --to 2026-01-31T08:00:00Z --preview",
)
@click.argument("agent", required=False, default="", metavar="AGENT")
@click.option("--all", "everything", is_flag=True, help="Every agent that did something after TIME.")
@click.option(
    "--to",
    required=True,
    metavar="POINT|STEP|TIME",
    help="Back to where: a point, a step, or a time with its zone, such as 2026-01-31T08:00:00Z.",
)
@click.option("--preview", is_flag=True, help="List every change and what can't be undone; do nothing.")
@click.option("--path", default="", metavar="P", help="Only this path of the workspace.")
@click.option("--start", is_flag=True, help="Start the agent afterwards; else it is left paused.")
@click.option(
    "--skip-unreachable", is_flag=True, help="With `--all`: leave out agents that can't be had here."
)
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
def rollback(session: Session, agent: str, **options: Unpack[_RollbackOptions]) -> int:
    """Put workspace, kernel state and reversible targets back.

    On a terminal the changes are shown first and you are asked. A point from just before is kept, so it
    can be rolled back in turn. What others changed since is left alone and listed; then the exit code is 5.
    """
    if bool(agent) == options["everything"]:
        raise ConsoleError("give an agent, or `--all` for every one", ExitCode.USAGE)
    if options["everything"]:
        if options["path"]:
            raise ConsoleError("`--all` takes no `--path`; roll the agents back one by one", ExitCode.USAGE)
        return roll_back_all(
            session,
            options["to"],
            preview=options["preview"],
            start=options["start"],
            skip_unreachable=options["skip_unreachable"],
            yes=options["yes"],
            show=functools.partial(_print_rollback, session),
        )
    if options["skip_unreachable"]:
        raise ConsoleError("`--skip-unreachable` goes with `--all`", ExitCode.USAGE)
    client = session.client()
    fields = {"agent": agent, "to": options["to"], "path": options["path"]}
    if options["preview"]:
        with Progress("comparing", shown=not session.as_json):
            document = client.call("Rollback", preview=True, **fields)
        _print_rollback(session, document)
        return ExitCode.OK
    if session.on_terminal and not options["yes"] and not session.as_json:
        with Progress("comparing"):
            preview = client.call("Rollback", preview=True, **fields)
        _print_rollback(session, preview)
        if not click.confirm("Roll back?", default=False):
            raise ConsoleError("nothing was rolled back; give `--yes` to roll back without a question")
    with Progress("rolling back", shown=not session.as_json):
        document = client.call("Rollback", preview=False, start=options["start"], **fields)
    _print_rollback(session, document)
    conflicts = items(document, "conflicts")
    if conflicts:
        raise ConsoleError(
            f"{plural(len(conflicts), 'change')} of others left as found; pull what matters, "
            "undo it there, and roll back again with `--path`",
            ExitCode.CONFLICT,
        )
    if not session.as_json and document.get("state") == "paused":
        undo = (
            f"; undo this: ringfence rollback {agent} --to {document['point']}"
            if document.get("point")
            else ""
        )
        render.note(f"go on: ringfence start {agent}{undo}")
    return ExitCode.OK


@commands.add(
    "diff",
    "ringfence diff invoice-bot",
    "ringfence diff invoice-bot --from p3 --to p17",
    "ringfence diff invoice-bot --from 9 --to p12",
)
@click.argument("agent")
@click.option(
    "--from", "start", default="", metavar="WHERE", help="A point, a step or a time. Default: the beginning."
)
@click.option("--to", "end", default="", metavar="WHERE", help="The same. Default: now.")
def diff(session: Session, agent: str, start: str, end: str) -> int:
    """Show what differs between two steps, also of different branches.

    Files, rows of databases that the agent wrote, and its keys of the shared state. A point is the moment
    just before its step.
    """
    with Progress("comparing", shown=not session.as_json):
        document = session.client().call("Diff", **{"agent": agent, "from": start, "to": end})
    show_diff(session, document)
    return ExitCode.OK


@commands.add(
    "resolve",
    "ringfence resolve invoice-bot 17 --as not-done",
    "ringfence resolve invoice-bot 17 --as done --result '{\"status\": 200}'",
)
@click.argument("agent")
@click.argument("step", type=click.IntRange(min=0))
@click.option(
    "--as",
    "outcome",
    required=True,
    type=click.Choice(["done", "not-done"]),
    help="Whether the effect happened.",
)
@click.option(
    "--result", default="", metavar="JSON", help="What the agent gets as the call's result, with `done`."
)
def resolve(session: Session, agent: str, step: int, outcome: str, result: str) -> int:
    """Settle a call whose outcome is unknown after a crash.

    `done`: it happened, and the agent gets the result, whose keys are checked against what the call returns;
    those left out get neutral values. `not-done`: it didn't, and the call runs again.
    """
    if result and outcome != "done":
        raise ConsoleError(
            "`--result` goes with `--as done`; a call that did not happen has none", ExitCode.USAGE
        )
    if result:
        try:
            json.loads(result)
        except ValueError as error:
            raise ConsoleError(
                f"`--result` is not JSON: {str(error).lower()}; write an object, such as '{{\"status\": 200}}'",
                ExitCode.USAGE,
            ) from None
    document = session.client().call("Resolve", agent=agent, step=step, outcome=outcome, result=result)
    if session.as_json:
        render.emit(document)
    else:
        render.say(f"step {safe(document.get('step', step))}: {safe(document.get('outcome', outcome))}")
    return ExitCode.OK


def _points(session: Session, agent: str, *, verify: bool) -> list[dict[str, Any]]:
    return records(session.client().call("Points", agent=agent, verify=verify), "points")


def _print_points(session: Session, found: Sequence[Mapping[str, Any]]) -> None:
    if session.as_json:
        render.emit(found)
    elif found and "agent" in found[0]:
        columns = (Column(title="AGENT", flex=True), *_POINTS)
        render.table(columns, [[safe(point["agent"]), *_point_row(point)] for point in found])
    elif found:
        render.table(_POINTS, [_point_row(point) for point in found])
    else:
        render.note("no rollback points")


def _point_row(point: Mapping[str, Any]) -> list[str]:
    covers = point.get("covers")
    if isinstance(covers, str):
        text = covers
    else:
        names = [str(item) for item in items(point, "covers")]
        more = len(names) - _COVERS_SHOWN
        text = ", ".join(names[:_COVERS_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return [
        safe(point.get("id", "")),
        safe(point.get("step", "")),
        safe(point.get("kind", "")),
        size(point.get("size_bytes") or 0),
        "yes" if point.get("verified") else "no",
        utc(point.get("at")),
        safe(text),
    ]


def _print_rollback(session: Session, document: Mapping[str, Any]) -> None:
    if session.as_json:
        render.emit(document)
        return
    preview = document.get("preview")
    changes = records(document, "changes")
    verb = "would go" if preview else "went"
    render.say(f"{verb} back to step {safe(document.get('to_step', '?'))}: {plural(len(changes), 'change')}")
    for change in changes:
        words = [
            render.coloured(pad(safe(change.get("action", "")), _ACTION_COLUMNS)),
            safe(change.get("kind", "")),
            safe(change.get("target", "")),
        ]
        detail = safe(change.get("detail") or "")
        render.say("  " + "  ".join(words) + (f"  ({detail})" if detail else ""))
    _section(
        "left alone, because others changed it since or it could not be taken back",
        items(document, "conflicts"),
    )
    _section("can't be undone", items(document, "not_undoable"))
    _section("also", items(document, "others"))
    if not preview:
        point = document.get("point")
        render.facts(
            [
                ("point from just before", point),
                ("branch", document.get("branch")),
                ("state", document.get("state")),
            ]
        )


def _section(title: str, items: Sequence[object]) -> None:
    if not items:
        return
    render.say(f"{title}:")
    for item in items:
        render.say("  " + _item(item))


def _item(item: object) -> str:
    facts = as_record(item)
    if not facts:
        return safe(item)
    if "target" in facts and "reason" in facts:
        return f"{safe(facts.get('kind'))}  {safe(facts['target'])}: {safe(facts['reason'])}"
    return "  ".join(f"{key} {safe(value)}" for key, value in facts.items() if value not in (None, ""))
