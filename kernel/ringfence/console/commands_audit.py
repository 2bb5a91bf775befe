"""`audit`: the evidence, its export, and the check of its chains."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from ringfence.console import render
from ringfence.console.documents import as_record
from ringfence.console.durations import parse_time, plural, utc
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.outputs import STANDARD_OUTPUT, whole_file
from ringfence.console.progress import Progress
from ringfence.console.render import Column, RunningTable
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

commands = Commands()

_WIDE_COLUMNS = 100
_DAY_IN_YEAR = len("2026-")
_AUDIT = (
    Column(title="STEP", right=True, minimum=4),
    Column(title="KIND", minimum=8),
    Column(title="ACTION", minimum=14),
    Column(title="VERDICT", minimum=7),
    Column(title="OUTCOME", minimum=9),
    Column(title="RESOURCE", flex=True),
)


@commands.add(
    "audit",
    "ringfence audit invoice-bot --since 1h",
    "ringfence audit --export evidence.jsonl",
    "ringfence audit verify",
    "ringfence audit verify evidence.jsonl",
)
@click.argument("words", nargs=-1, metavar="[AGENT | verify [FILE]]")
@click.option("--since", metavar="TIME", help="Only later records: RFC 3339, or how long ago, such as 1h.")
@click.option(
    "--export",
    "export",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write them to a file; `-` is standard output.",
)
def audit(session: Session, words: tuple[str, ...], since: str | None, export: Path | None) -> int:
    """Show the evidence, or check its chains and anchors.

    `verify FILE` checks an exported file and needs no kernel. A broken chain: exit 1, its first bad record.
    """
    if words[:1] == ("verify",):
        if since or export:
            raise ConsoleError(
                "`audit verify` checks whole chains; leave out `--since` and `--export`", ExitCode.USAGE
            )
        return _verify(session, words[1:])
    if len(words) > 1:
        raise ConsoleError(
            "`audit` takes one agent, or `verify [FILE]`; see `ringfence audit --help`", ExitCode.USAGE
        )
    try:
        moment = parse_time(since) if since else ""
    except ValueError as error:
        raise ConsoleError(str(error), ExitCode.USAGE) from None
    documents = session.client().documents("Audit", agent=words[0] if words else "", since=moment)
    if export is not None:
        return _export(session, documents, export)
    if session.as_json:
        render.emit_array(documents)
        return ExitCode.OK
    narrow = render.to_terminal() and render.columns_available() < _WIDE_COLUMNS
    time = Column(title="UTC", minimum=14) if narrow else Column(title="TIME (UTC)", minimum=19)
    table = RunningTable((time, *_AUDIT))
    for document in documents:
        table.add(_row(document, narrow=narrow))
    table.start()
    return ExitCode.OK


def _verify(session: Session, files: tuple[str, ...]) -> int:
    if len(files) > 1:
        raise ConsoleError("`audit verify` takes one file; see `ringfence audit --help`", ExitCode.USAGE)
    with Progress("verifying", shown=not session.as_json):
        report = _verify_file(Path(files[0])) if files else session.client().call("AuditVerify")
    if session.as_json:
        render.emit(report)
        return ExitCode.OK if report.get("ok") is True else ExitCode.UNWELL
    counted = ", ".join(
        plural(report[f"{noun}s"], noun)
        for noun in ("row", "chain", "anchor")
        if report.get(f"{noun}s") is not None
    )
    # Anything but a plain yes is a no.
    if report.get("ok") is True:
        render.say(f"ok: {counted}")
        return ExitCode.OK
    raise ConsoleError(
        f"the audit chain is broken: {_bad_record(report.get('first_bad'))}; checked {counted}; "
        "keep the database, the anchor file and this message, and compare them with your copies elsewhere"
    )


def _verify_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConsoleError(
            f"`{path}` is not a file; export one with: ringfence audit --export FILE", ExitCode.USAGE
        )
    audit_module = import_module("ringfence.kernel.journal.audit")
    report = cast("dict[str, Any]", audit_module.verify_file(path))
    if not report.get("rows") and report.get("ok") is True:
        # Nothing contradicts an empty file, but it is no evidence either.
        return {**report, "ok": False, "first_bad": "the file holds no records"}
    return report


def _export(session: Session, documents: Iterable[Mapping[str, Any]], target: Path) -> int:
    """Write records as JSON lines. The file appears when it is whole, and only its owner may read it."""
    rows = 0
    with (
        Progress("exporting", unit="records", shown=not session.as_json) as progress,
        whole_file(target) as file,
    ):
        for document in documents:
            file.write(to_json(document).encode() + b"\n")
            rows += 1
            progress.add()
    if target == STANDARD_OUTPUT:
        return ExitCode.OK
    target = target.absolute()
    if session.as_json:
        render.emit({"file": str(target), "rows": rows})
    else:
        render.say(f"{plural(rows, 'record')} in {safe(target)}")
    return ExitCode.OK


def _row(document: Mapping[str, Any], *, narrow: bool) -> list[str]:
    return [
        safe(utc(document.get("time"))[_DAY_IN_YEAR if narrow else 0 :]),
        safe(document.get("step") or ""),
        safe(document.get("kind", "")),
        safe(document.get("action", "")),
        safe(document.get("verdict") or "-"),
        safe(document.get("outcome") or "-"),
        safe(document.get("resource") or ""),
    ]


def _bad_record(first_bad: object) -> str:
    """Where the chain breaks, and why."""
    facts = as_record(first_bad)
    if not facts:
        return str(first_bad or "the kernel does not say where")
    chain, pos, why = facts.get("chain"), facts.get("pos"), facts.get("why") or "the kernel does not say why"
    if not pos:
        return f"{why}"
    whose = f"kernel {-chain}" if isinstance(chain, int) and chain < 0 else f"chain {chain}"
    return f"{whose}, record {pos}: {why}"
