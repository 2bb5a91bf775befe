"""The command that archives old steps and lets go what nobody keeps."""

from __future__ import annotations

from typing import Any

import click
from ringfence.console import render
from ringfence.console.documents import items, records
from ringfence.console.durations import asked_ms, plural, size
from ringfence.console.errors import ExitCode
from ringfence.console.progress import Progress
from ringfence.console.render import Column
from ringfence.console.session import Commands, Session

commands = Commands()

_AGENTS = (
    Column(title="AGENT"),
    Column(title="BEHIND", right=True),
    Column(title="ARCHIVED", right=True),
    Column(title="KEPT", right=True),
    Column(title="PRUNED FILES", right=True),
    Column(title="FREED", right=True),
)


@commands.add(
    "prune",
    "ringfence prune --dry-run",
    "ringfence prune",
    "ringfence prune invoice-bot --older-than 30d",
)
@click.argument("agent", default="")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option(
    "--older-than", metavar="DURATION", help="For journals, messages and logs, in place of the kernel file's."
)
def prune(session: Session, agent: str, dry_run: bool, older_than: str | None) -> int:
    """Archive old steps, and let go what nobody keeps.

    The kernel does the same by itself every hour. Steps go that lie behind a checkpoint and that no rollback,
    branch or person needs any more; `steps`, `audit` and `audit verify` find them in the archive.
    """
    fields: dict[str, Any] = {"agent": agent, "dry_run": dry_run}
    if older_than is not None:
        fields["older_than_ms"] = asked_ms(older_than)
    with Progress("pruning", shown=not session.as_json):
        document = session.client().call("Prune", **fields)
    if session.as_json:
        render.emit(document)
        return ExitCode.OK
    found = records(document, "agents")
    if found:
        render.table(
            _AGENTS,
            [
                [
                    one["agent"],
                    str(one["behind_step"] or "-"),
                    str(one["archived_rows"]),
                    str(one["kept_rows"]),
                    str(one["pruned_files"]),
                    size(one["freed_bytes"]),
                ]
                for one in found
            ],
        )
    verb = "would go" if dry_run else "gone"
    removed, messages = items(document, "removed"), document.get("messages") or 0
    logs = size(document.get("logs_bytes") or 0)
    bytes_of = size(document.get("artifact_bytes") or 0)
    render.say(
        f"{verb}: {plural(len(removed), 'agent')}, {plural(messages, 'message')}, {logs} of output, {bytes_of} of artifacts"
    )
    for one in records(document, "skipped"):
        render.say(f"skipped {one['agent'] or 'the artifacts'}: {one['reason']}")
    return ExitCode.OK
