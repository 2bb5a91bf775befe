"""Commands that copy, move and forget agents: fork, export, import, rm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import records
from ringfence.console.durations import plural, size
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.outputs import STANDARD_OUTPUT, whole_file
from ringfence.console.progress import Progress
from ringfence.console.render import Column
from ringfence.console.session import Commands, Session
from ringfence.console.text import SafeDecoder, safe

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


@commands.add(
    "export",
    "ringfence export invoice-bot --to invoice-bot.rfx",
    "ringfence export invoice-bot --layer task -o task.json",
)
@click.argument("agent")
@click.option(
    "--to",
    "-o",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write; `-` is standard output, which is where a layer goes by default.",
)
@click.option(
    "--layer", metavar="NAME", help="Only this layer of its state, as JSON; `ringfence layers` lists them."
)
def export(session: Session, agent: str, target: Path | None, layer: str | None) -> int:
    """Write an agent into one file, or a layer of its state as JSON.

    Its journal with all hashes, workspace, rollback points, checkpoints, memories, artifacts, mailbox and grants
    are in it, sealed with the key of this kernel's anchors. Secrets are not. A running agent is held still for as
    long as its picture is taken. The file appears when it is whole, and only you may read it.
    """
    if layer is not None:
        return _export_layer(session, agent, layer, target or STANDARD_OUTPUT)
    if target is None:
        raise ConsoleError(
            "say where to: `--to FILE`, or `--layer NAME` for a part of its state", ExitCode.USAGE
        )
    if target == STANDARD_OUTPUT and render.to_terminal():
        raise ConsoleError("an agent is no text for a terminal; redirect it, or name a file", ExitCode.USAGE)
    written = 0
    with Progress("exporting", shown=not session.as_json) as progress, whole_file(target) as file:
        for part in progress.counted(session.client().chunks("Export", agent=agent)):
            written += file.write(part)
    if target == STANDARD_OUTPUT:
        return ExitCode.OK
    if session.as_json:
        render.emit({"file": str(target.absolute()), "size_bytes": written})
    else:
        render.say(f"{size(written)} in {safe(target)}")
    return ExitCode.OK


def _export_layer(session: Session, agent: str, layer: str, target: Path) -> int:
    """Write a layer: to a terminal nothing that it would obey."""
    chunks = session.client().chunks("ExportLayer", agent=agent, layer=layer)
    if target == STANDARD_OUTPUT and render.to_terminal():
        decoder = SafeDecoder()
        for chunk in chunks:
            click.echo(decoder.feed(chunk), nl=False)
        click.echo(decoder.feed(b"", final=True), nl=False)
        return ExitCode.OK
    written = 0
    with Progress("exporting", shown=not session.as_json) as progress, whole_file(target) as file:
        for part in progress.counted(chunks):
            written += file.write(part)
    if target == STANDARD_OUTPUT:
        return ExitCode.OK
    if session.as_json:
        render.emit({"file": str(target.absolute()), "size_bytes": written, "layer": layer})
    else:
        render.say(f"{size(written)} in {safe(target)}")
    return ExitCode.OK


_LAYERS = (
    Column(title="LAYER", minimum=11),
    Column(title="ITEMS", right=True, minimum=5),
    Column(title="SIZE", right=True, minimum=8),
    Column(title="WHAT", flex=True),
)


@commands.add("layers", "ringfence layers invoice-bot")
@click.argument("agent")
def layers(session: Session, agent: str) -> int:
    """List the layers of an agent's state, with their sizes.

    They are memory, task, results, artifacts and environment; `ringfence export AGENT --layer NAME` writes one.
    """
    document = session.client().call("Layers", agent=agent)
    if session.as_json:
        render.emit(document)
        return ExitCode.OK
    rows = [
        [
            str(one.get("layer")),
            f"{one.get('items'):,}",
            size(one.get("size_bytes") or 0),
            str(one.get("about")),
        ]
        for one in records(document, "layers")
    ]
    render.table(_LAYERS, rows)
    return ExitCode.OK


@commands.add(
    "import",
    "ringfence import invoice-bot.rfx",
    "ringfence import invoice-bot.rfx --name moved --signed-by key.pub",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", default="", metavar="N", help="Its name here. Default: the one that it has.")
@click.option(
    "--signed-by",
    type=click.Path(path_type=Path),
    metavar="KEY.pub",
    help="Take it only if this key sealed it: `anchor/key.pub` of the other kernel's data directory.",
)
def import_(session: Session, file: Path, name: str, signed_by: Path | None) -> int:
    """Take over an agent that another kernel exported.

    All of the file is verified before anything is stored: a changed one is refused with the first bad record, exit 1.
    The agent keeps its grants under this kernel's ceilings, and is left paused; `start` continues by replay.
    """
    try:
        key = "" if signed_by is None else signed_by.read_text(encoding="ascii")
        with (
            file.open("rb") as source,
            Progress("sending", total=file.stat().st_size, shown=not session.as_json) as progress,
        ):
            parts = progress.counted(iter(lambda: source.read(1 << 20), b""))
            document = session.client().take_in({"name": name, "public_key": key}, parts)
    except (OSError, UnicodeDecodeError) as error:
        what = error.filename if isinstance(error, OSError) else signed_by
        reason = (
            (error.strerror or str(error)).lower() if isinstance(error, OSError) else "it is no key in PEM"
        )
        raise ConsoleError(f"can't read `{what}`: {reason}; check the path", ExitCode.USAGE) from None
    if session.as_json:
        render.emit(document)
    else:
        render.facts(
            [(key, document.get(key)) for key in ("id", "name", "state", "source", "records", "origin")]
        )
    return ExitCode.OK
