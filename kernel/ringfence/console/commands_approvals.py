"""Commands about parked calls: approvals ls, show, approve, deny."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import as_record, items, record, records, source_line
from ringfence.console.durations import parse_duration_ms, seconds, span
from ringfence.console.errors import ConsoleError, ExitCode, os_error_text
from ringfence.console.render import Column
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

commands = Commands()

ARGUMENT_BYTES_MAX = 4 << 20

_INBOX = (
    Column(title="ID"),
    Column(title="AGENT", flex=True),
    Column(title="STEP", right=True),
    Column(title="ACTION"),
    Column(title="STATE"),
    Column(title="AGE", right=True),
    Column(title="RESOURCE", flex=True),
)


@commands.add("ls", "ringfence approvals ls", "ringfence approvals ls --all --agent invoice-bot")
@click.option("--all", "everything", is_flag=True, help="Decided ones too.")
@click.option("--agent", default="", metavar="AGENT", help="Only those of this agent.")
def list_approvals(session: Session, everything: bool, agent: str) -> int:
    """List the calls that wait for a person, oldest first."""
    found = records(session.client().call("Approvals", all=everything, agent=agent), "approvals")
    if session.as_json:
        render.emit(found)
        return ExitCode.OK
    rows = [
        (
            safe(a["id"]),
            safe(a["agent"]),
            str(a["step"]),
            safe(a["action"]),
            safe(a["state"]) + (f" {_counted(a)}" if a["state"] == "pending" else ""),
            span(a["age_ms"]),
            safe(record(a, "detail").get("question") or a["resource"]),
        )
        for a in found
    ]
    if rows:
        render.table(_INBOX, rows)
        if render.to_terminal() and any(a["state"] == "pending" for a in found):
            render.note("look at one: ringfence approvals show ID; then approve ID, or deny ID --reason TEXT")
    else:
        render.note("nothing waits for a person")
    return ExitCode.OK


@commands.add("show", "ringfence approvals show a7")
@click.argument("id", metavar="ID")
def show(session: Session, id: str) -> int:  # noqa: A002 - as the contract names it
    """Show one with its exact arguments, and a diff where there is one."""
    shown = session.client().call("ApprovalShow", id=id)
    if session.as_json:
        render.emit(shown)
        return ExitCode.OK
    detail = record(shown, "detail")
    render.facts(
        (
            ("approval", shown["id"]),
            ("state", shown["state"]),
            ("agent", f"{shown['agent']} ({shown['name']})"),
            ("step", shown["step"]),
            ("action", shown["action"]),
            ("resource", shown["resource"]),
            ("effect", shown["effect"]),
            ("asked by", "; ".join(map(str, items(shown, "why")))),
            ("question", detail.get("question")),
            ("touches", detail.get("touches")),
            *(("because", because) for because in items(detail, "because")),
            *((str(one.get("pointer")), _content(one)) for one in records(detail, "pointed")),
            ("undo", detail.get("undo")),
            ("tainted", detail.get("tainted")),
            *((f"from step {s.get('step')}", source_line(s)) for s in records(detail, "provenance")),
            ("approved by", _approving(shown)),
            ("not by", shown.get("not_by")),
            *(("said before", _said(vote)) for vote in records(shown, "votes") if vote.get("voided_by")),
            ("age", span(shown["age_ms"])),
            ("expires", seconds(shown["expires_at"] or "")),
            ("decided by", shown["decided_by"]),
            ("decided at", shown["decided_at"]),
            ("reason", shown["reason"]),
            ("holds until", shown.get("good_until")),
        )
    )
    given = shown["arguments"] if shown["edited"] is None else shown["edited"]
    title = "arguments" if shown["edited"] is None else "edited arguments"
    _print_block(title, to_json(shown.get("readable") or given, indent=2))
    if shown.get("proposed") is not None:
        readable = shown.get("proposed_readable") or shown["proposed"]
        _print_block("approved are these arguments instead", to_json(readable, indent=2))
    _print_detail(detail, as_record(given))
    if shown["state"] == "pending":
        seconding = f" --digest {shown['digest']}" if shown.get("proposed") is not None else ""
        render.note(
            f"decide: ringfence approvals approve {shown['id']}{seconding}, or deny {shown['id']} --reason TEXT"
        )
    return ExitCode.OK


def _content(one: Mapping[str, Any]) -> str:
    """What a pointer named when it was asked: that alone is sent."""
    version = f", version {one['version']}" if one.get("version") else ""
    return f"{one.get('size_bytes')} bytes{version}, {one.get('media_type')}, SHA-256 {one.get('sha256')}"


def _counted(shown: Mapping[str, Any]) -> str:
    """How many of several people have approved; empty where one is enough."""
    people = int(shown.get("people") or 1)
    return f"{len(items(shown, 'approved_by'))}/{people}" if people > 1 else ""


def _approving(shown: Mapping[str, Any]) -> str | None:
    """Who has approved, where several have to."""
    if not _counted(shown):
        return None
    names = ", ".join(str(name) for name in items(shown, "approved_by")) or "nobody"
    return f"{names}; {shown['people']} people have to"


def _said(vote: Mapping[str, Any]) -> str:
    return f"{vote.get('by')} approved other arguments, void since {vote.get('voided_by')} approved others"


def _print_block(title: str, text: str) -> None:
    render.say(f"{title}:")
    # Nothing is dropped: what can't be seen is shown as an escape, for a person decides by what stands here.
    render.say("\n".join(f"  {safe(line)}" for line in text.split("\n")))


def _print_detail(detail: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    changes = [
        f"{c['kind']:<8} {safe(c['path'])}" + (f" -> {safe(c['target'])}" if c.get("target") else "")
        for c in records(detail, "changes")
    ]
    listed = changes or [safe(path) for path in items(detail, "paths")]
    if listed:
        more = int(detail.get("touches") or 0) - len(listed)
        _print_block("touches", "\n".join([*listed, *([f"and {more} more"] if more > 0 else [])]))
    # What a program's own question came with is among the arguments already.
    if detail.get("details") is not None and detail["details"] != arguments.get("details"):
        _print_block("details", to_json(detail["details"], indent=2))
    if detail.get("diff"):
        _print_block("diff", str(detail["diff"]))


@commands.add(
    "approve",
    "ringfence approvals approve a7",
    "ringfence approvals approve a7 --edit arguments.json",
    'ringfence approvals approve a8 --reason "yes, but only for March"',
    "ringfence approvals approve a9 --for 2h",
    "ringfence approvals approve a7 --digest 5d41402abc4b2a76b9719d911017c592ae41e4649b934ca495991b7852b85500",
)
@click.argument("id", metavar="ID")
@click.option("--edit", metavar="FILE|-", help="Run it with these arguments instead, a JSON object.")
@click.option(
    "--digest", default="", metavar="HEX", help="Only if these are the arguments, as `show` names them."
)
@click.option("--reason", default="", metavar="TEXT", help="Kept with it; the answer to a question.")
@click.option(
    "--for", "lasts", metavar="DURATION", help="The same call of this agent asks nobody for so long."
)
def approve(
    session: Session,
    id: str,  # noqa: A002 - as the contract names it
    edit: str | None,
    digest: str,
    reason: str,
    lasts: str | None,
) -> int:
    """Let a parked call run, once.

    It is decided again by the policy in force: a deny wins, and a rule that did not ask before asks anew. Where several
    people are needed, it runs when the last of them approves the same arguments.
    """
    arguments = b"" if edit is None else _edited(edit)
    for_ms = 0 if lasts is None else _lasting(lasts)
    document = session.client().call(
        "Approve", id=id, arguments=arguments, reason=reason, for_ms=for_ms, digest=digest
    )
    if session.as_json:
        render.emit(document)
        return ExitCode.OK
    voided = ", ".join(str(name) for name in items(document, "voided"))
    if voided:
        render.note(f"void now, as it was for other arguments: what {safe(voided)} approved")
    if document["state"] == "pending":
        missing = int(document["people"]) - len(items(document, "approved_by"))
        waits = "one more person has to" if missing == 1 else f"{missing} more people have to"
        names = ", ".join(str(name) for name in items(document, "approved_by"))
        render.say(f"{safe(document['id'])}: approved by {safe(names)}; {waits}, and nothing runs yet")
    else:
        render.say(
            f"{safe(document['id'])}: approved; step {document['step']} of {safe(document['agent'])} runs"
        )
    return ExitCode.OK


@commands.add("deny", 'ringfence approvals deny a7 --reason "not on a Friday"')
@click.argument("id", metavar="ID")
@click.option("--reason", required=True, metavar="TEXT", help="Why; the agent is told.")
def deny(session: Session, id: str, reason: str) -> int:  # noqa: A002 - as the contract names it
    """Refuse a parked call."""
    document = session.client().call("Deny", id=id, reason=reason)
    if session.as_json:
        render.emit(document)
    else:
        render.say(f"{safe(document['id'])}: denied; {safe(document['agent'])} is told")
    return ExitCode.OK


@commands.add("end", 'ringfence approvals end a9 --reason "the import is done"')
@click.argument("id", metavar="ID")
@click.option("--reason", default="", metavar="TEXT", help="Kept in the audit.")
def end(session: Session, id: str, reason: str) -> int:  # noqa: A002 - as the contract names it
    """End an approval that holds for longer than once."""
    document = session.client().call("ApprovalEnd", id=id, reason=reason)
    if session.as_json:
        render.emit(document)
    else:
        render.say(f"{safe(document['id'])}: holds for no further call of {safe(document['agent'])}")
    return ExitCode.OK


def _lasting(text: str) -> int:
    try:
        found = parse_duration_ms(text)
    except ValueError as error:
        raise ConsoleError(str(error), ExitCode.USAGE) from None
    if found == 0:
        raise ConsoleError(f"`--for {text}` is over at once; give a longer duration", ExitCode.USAGE)
    return found


def _edited(source: str) -> bytes:
    try:
        if source == "-":
            raw = sys.stdin.buffer.read(ARGUMENT_BYTES_MAX + 1)
        else:
            with Path(source).open("rb") as file:
                raw = file.read(ARGUMENT_BYTES_MAX + 1)
    except OSError as error:
        text = f"`{source}` can't be read: {os_error_text(error)}; check the path"
        raise ConsoleError(text, ExitCode.USAGE) from None
    try:
        good = isinstance(json.loads(raw), dict)
    except ValueError:
        good = False
    if not good or len(raw) > ARGUMENT_BYTES_MAX:
        text = f"`{source}` holds no JSON object of at most {ARGUMENT_BYTES_MAX >> 20} MiB; start from `ringfence approvals show ID --json`"
        raise ConsoleError(text, ExitCode.USAGE)
    return raw
