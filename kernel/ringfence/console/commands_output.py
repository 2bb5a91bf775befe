"""Commands that bring out what an agent made: logs, steps, pull."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import record
from ringfence.console.durations import count, plural, size, span
from ringfence.console.errors import ExitCode
from ringfence.console.progress import Progress
from ringfence.console.render import Column, RunningTable
from ringfence.console.session import Commands, Session
from ringfence.console.text import SafeDecoder, safe
from ringfence.console.unpack import unpack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

commands = Commands()

_STEPS = (
    Column(title="STEP", right=True, minimum=5),
    Column(title="ACTION", minimum=17),
    Column(title="VERDICT", minimum=7),
    Column(title="OUTCOME", minimum=9),
    Column(title="TIME", right=True, minimum=6),
    Column(title="POINT", minimum=5),
    Column(title="RESOURCE", flex=True),
)


@commands.add("logs", "ringfence logs invoice-bot -f", "ringfence logs invoice-bot --stderr > errors.txt")
@click.argument("agent")
@click.option("--follow", "-f", is_flag=True, help="Go on until the agent ends.")
@click.option("--stderr", is_flag=True, help="Its standard error instead of its standard output.")
def logs(session: Session, agent: str, follow: bool, stderr: bool) -> int:
    """Print the agent's own output.

    On a terminal its control sequences are shown instead of obeyed; a pipe gets the bytes as they are.
    """
    chunks = session.client().chunks("Logs", agent=agent, follow=follow, stderr=stderr)
    if session.as_json:
        documents = _log_documents(chunks, "stderr" if stderr else "stdout")
        emit = render.emit_lines if follow else render.emit_array
        emit(documents)
    elif render.to_terminal():
        decoder = SafeDecoder()
        for chunk in chunks:
            click.echo(decoder.feed(chunk), nl=False)
        click.echo(decoder.feed(b"", final=True), nl=False)
    else:
        out = sys.stdout.buffer
        for chunk in chunks:
            out.write(chunk)
            out.flush()
    return ExitCode.OK


@commands.add("steps", "ringfence steps invoice-bot", "ringfence steps invoice-bot -f --json")
@click.argument("agent")
@click.option(
    "--follow", "-f", is_flag=True, help="Go on until the agent ends. With --json: one document a line."
)
def steps(session: Session, agent: str, follow: bool) -> int:
    """Show every call the agent made, with its verdict and outcome."""
    documents = session.client().documents("Steps", agent=agent, follow=follow)
    if session.as_json:
        emit = render.emit_lines if follow else render.emit_array
        emit(documents)
        return ExitCode.OK
    table = RunningTable(_STEPS)
    for document in documents:
        table.add(_step_row(document))
        if document.get("error"):
            render.say(f"       {safe(document['error'])}")
    table.start()
    return ExitCode.OK


@commands.add(
    "pull", "ringfence pull invoice-bot --to ./result", "ringfence pull invoice-bot out/report.md --to ."
)
@click.argument("agent")
@click.argument("path", default="")
@click.option(
    "--to", "target", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where it goes."
)
@click.option("--force", is_flag=True, help="Replace files that are there already.")
def pull(session: Session, agent: str, path: str, target: Path, force: bool) -> int:
    """Bring the workspace, or a part of it, home.

    Everything arrives or nothing. Links that lead out of DIR are left behind and named.
    """
    chunks = session.client().chunks("Pull", agent=agent, path=path)
    with Progress("pulling", shown=not session.as_json) as progress:
        pulled = unpack(progress.counted(chunks), target, force=force)
    for name, why in pulled.skipped:
        render.note(f"ringfence: left `{name}` behind: {why}")
    if session.as_json:
        skipped = [{"path": name, "reason": why} for name, why in pulled.skipped]
        document = {"to": str(target.absolute()), "files": pulled.files, "size_bytes": pulled.size_bytes}
        render.emit({**document, "skipped": skipped})
    else:
        render.say(f"{plural(pulled.files, 'file')}, {size(pulled.size_bytes)} in {safe(target)}")
    return ExitCode.OK


def _log_documents(chunks: Iterator[bytes], stream: str) -> Iterator[Mapping[str, Any]]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for chunk in chunks:
        text = decoder.decode(chunk)
        if text:
            yield {"stream": stream, "text": text}
    rest = decoder.decode(b"", True)
    if rest:
        yield {"stream": stream, "text": rest}


def _step_row(step: Mapping[str, Any]) -> list[str]:
    resource = safe(step.get("resource") or "")
    attempts, used = step.get("attempts") or 1, record(step, "used")
    marks = [
        mark
        for mark, there in (
            ("replayed", step.get("replayed")),
            (f"branch {step.get('branch')}", step.get("branch")),
            (f"{attempts} attempts", attempts > 1),
            (f"{count(int(used.get('tokens') or 0))} tokens", used.keys() & {"tokens", "usd"}),
            (f"carried {size(used.get('bytes') or 0)}", "bytes" in used),
        )
        if there
    ]
    duration = step.get("duration_ms")
    return [
        str(step.get("step", "")),
        safe(step.get("action", "")),
        safe(step.get("verdict") or "-"),
        safe(step.get("outcome") or "running"),
        "" if duration is None else span(duration),
        safe(step.get("rollback_point") or ""),
        f"{resource} ({', '.join(marks)})" if marks else resource,
    ]
