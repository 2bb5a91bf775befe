"""Commands about policy: lint, show, can-i, explain, learn, import, schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

import click
from ringfence.console import render
from ringfence.console.commands_agents import print_rules
from ringfence.console.commands_submit import read_text
from ringfence.console.documents import as_record, items, records, source_line
from ringfence.console.durations import plural
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe
from ringfence.policy.problems import ManifestError, Problem

commands = Commands()

_KIND = re.compile(r"^kind:\s*[\"']?(\w+)", re.MULTILINE)
_EXIT_BY_VERDICT = {"allow": ExitCode.OK, "deny": ExitCode.DENIED, "ask": ExitCode.CONFLICT}


@commands.add("lint", "ringfence policy lint agent.yaml", "ringfence policy lint ringfence.yaml --json")
@click.argument("file", type=click.Path(allow_dash=True))
@click.option("--against", type=click.Path(), help="The kernel file that a manifest is to run under.")
@click.option("--strict", is_flag=True, help="Exit 1 on warnings too.")
def lint(session: Session, file: str, against: str | None, strict: bool) -> int:
    """Check a manifest or a kernel file; needs no kernel.

    Unknown or duplicate keys, unknown actions and rules that can never match are errors with line and column. Warned of is
    what says nothing, is too wide, or guards less than it looks like.
    """
    source = "manifest" if file == "-" else file
    text = read_text(file, "file")
    found = _KIND.search(text)
    kind = "Kernel" if found is not None and found.group(1) == "Kernel" else "Agent"
    warnings: list[Problem] = []
    try:
        warnings = _checked(kind, text, source, against)
        failure = None
    except ManifestError as error:
        failure = error
    if session.as_json:
        problems = [] if failure is None else _documents(failure.problems)
        document = {"file": source, "kind": kind, "ok": failure is None, "problems": problems}
        render.emit({**document, "warnings": _documents(warnings)})
    elif failure is not None:
        raise ConsoleError(str(failure), ExitCode.USAGE)
    else:
        for warning in warnings:
            render.say(safe(warning.render(source).replace(": ", ": warning: ", 1)))
        warned = f", {plural(len(warnings), 'warning')}" if warnings else ""
        render.say(f"{safe(source)}: ok{warned}")
    if failure is not None:
        return ExitCode.USAGE
    return ExitCode.UNWELL if strict and warnings else ExitCode.OK


@commands.add("show", "ringfence policy show invoice-bot")
@click.argument("agent")
def show(session: Session, agent: str) -> int:
    """Show the rules in force for an agent, and the operator's ceilings over them."""
    document = session.client().call("PolicyShow", agent=agent)
    if session.as_json:
        render.emit(document)
        return ExitCode.OK
    print_rules(records(document, "rules"))
    conditions = records(document, "conditions")
    if conditions:
        render.say()
        render.say("conditions: they narrow what the rules say")
        print_rules(conditions)
    if document.get("tainted"):
        render.say()
        render.say(f"tainted: by {safe(document['tainted'])}")
    ceilings = items(document, "ceilings")
    if ceilings:
        render.say()
        render.say("ceilings: no agent gets more, whatever its manifest says")
        print_rules([as_record(rule) or {"text": rule} for rule in ceilings])
    return ExitCode.OK


@commands.add(
    "can-i",
    "ringfence policy can-i invoice-bot fs.write /workspace/out/report.md",
    "ringfence policy can-i invoice-bot exec.run 'git status'",
)
@click.argument("agent")
@click.argument("action")
@click.argument("resource", default="")
def can_i(session: Session, agent: str, action: str, resource: str) -> int:
    """Ask what a call would get, without acting: exit 0 allowed, 3 denied, 5 would ask."""
    document = session.client().call("PolicyCanI", agent=agent, action=action, resource=resource)
    verdict = str(document.get("verdict"))
    if session.as_json:
        render.emit(document)
    else:
        render.say(
            f"{render.coloured(safe(verdict))}: {safe(document.get('reason') or document.get('rule') or '')}"
        )
    # Whatever isn't plainly allowed must not look so to a script.
    return _EXIT_BY_VERDICT.get(verdict, ExitCode.DENIED)


@commands.add("explain", "ringfence policy explain invoice-bot 17")
@click.argument("agent")
@click.argument("step", type=click.IntRange(min=0))
def explain(session: Session, agent: str, step: int) -> int:
    """Say why a step got its verdict."""
    document = session.client().call("PolicyExplain", agent=agent, step=step)
    if session.as_json:
        render.emit(document)
        return ExitCode.OK
    rules = records(document, "rules")
    grants = items(document, "grants")
    render.facts(
        [
            *(
                (key, document.get(key))
                for key in ("step", "action", "resource", "verdict", "outcome", "reason")
            ),
            *(("because", because) for because in items(document, "because")),
            *_fact_lines(as_record(document.get("facts"))),
            ("grants", ", ".join(_grant_name(grant) for grant in grants)),
            ("epoch", document.get("epoch")),
            ("policy", document.get("policy_version")),
        ]
    )
    if rules:
        render.say()
        print_rules(rules)
    return ExitCode.OK


@commands.add("learn", "ringfence policy learn invoice-bot", "ringfence policy learn invoice-bot --denied")
@click.argument("agent")
@click.option("--denied", is_flag=True, help="Show what was denied too, as comments.")
def learn(session: Session, agent: str, denied: bool) -> int:
    """Write the smallest rules for what an agent did.

    They are a manifest's `permissions:`, read from the journal: all that was allowed is allowed, and what was asked
    about is asked about. From three neighbours on one pattern stands for all beside them, unless it would
    allow something that was denied. Read them before you use them.
    """
    document = session.client().call("PolicyLearn", agent=agent, denied=denied)
    if session.as_json:
        render.emit(document)
        return ExitCode.OK
    for line in str(document.get("yaml") or "").splitlines():
        render.say(safe(line))
    for used in records(document, "uncovered"):
        render.note(f"no rule can name {safe(used.get('action', ''))} on {safe(used.get('resource', ''))}")
    return ExitCode.OK


def _fact_lines(known: Mapping[str, object]) -> list[tuple[str, object]]:
    """What was known when the step was decided, and where its arguments come from."""
    lines: list[tuple[str, object]] = []
    tainted = as_record(known.get("tainted"))
    if tainted:
        lines.append(("tainted", f"by {tainted.get('by')}, at step {tainted.get('step')}"))
    for key, said in (("taints", "reads untrusted"), ("untaints", "ends the taint by rule")):
        if known.get(key):
            lines.append((said, known.get(key)))
    sources = records(known, "provenance")
    return [*lines, *((f"from step {source.get('step')}", source_line(source)) for source in sources)]


@commands.add(
    "import",
    "ringfence policy import settings.json",
    "ringfence policy import settings.json --name helper",
)
@click.argument("file", type=click.Path(allow_dash=True))
@click.option("--name", default="imported", help="The agent's name in the manifest.")
def import_rules(session: Session, file: str, name: str) -> int:
    """Write a manifest from permission settings: JSON with lists of `Tool(spec)` under allow, ask and deny.

    The manifest never allows more than the settings did. What can't be said by a rule stands in it as a comment. Needs no
    kernel.
    """
    from ringfence.policy.importing import as_manifest, documents, import_settings  # noqa: PLC0415 - takes longer than most commands do altogether

    source = "settings" if file == "-" else file
    try:
        found = import_settings(read_text(file, "file"), source)
        text = as_manifest(found, name, source)
    except ManifestError as error:
        raise ConsoleError(str(error), ExitCode.USAGE) from None
    if session.as_json:
        rules = {verdict.value: found.texts(verdict) for verdict in found.rules}
        render.emit({"file": source, **rules, "notes": documents(found.notes), "yaml": text})
        return ExitCode.OK
    for line in text.splitlines():
        render.say(safe(line))
    return ExitCode.OK


@commands.add("schema", "ringfence policy schema manifest")
@click.argument("kind", type=click.Choice(["manifest", "kernel"]))
def schema(session: Session, kind: str) -> int:
    """Print the JSON Schema of a file, for editors; needs no kernel."""
    del session
    from ringfence.policy.schema import kernel_schema, manifest_schema  # noqa: PLC0415 - takes longer than most commands do altogether

    made = manifest_schema() if kind == "manifest" else kernel_schema()
    render.say(json.dumps(made, indent=2))
    return ExitCode.OK


def _grant_name(grant: object) -> str:
    return str(as_record(grant).get("id", grant))


def _checked(kind: str, text: str, source: str, against: str | None) -> list[Problem]:
    """The warnings about a file.

    Raises:
        ManifestError: it is wrong.
    """
    from ringfence.policy.kernel_file import parse_kernel_file  # noqa: PLC0415 - takes longer than most commands do altogether
    from ringfence.policy.lint import lint_kernel_file, lint_manifest  # noqa: PLC0415 - the same
    from ringfence.policy.manifest import parse_manifest  # noqa: PLC0415 - the same

    if kind == "Kernel":
        return lint_kernel_file(parse_kernel_file(text, source))
    manifest = parse_manifest(text, source)
    # What a kernel of this release would refuse at submit is no less wrong here.
    unsupported = manifest.unsupported()
    if unsupported:
        raise ManifestError(unsupported, source)
    file = None if against is None else parse_kernel_file(read_text(against, "kernel file"), against)
    return lint_manifest(manifest, file)


def _documents(problems: Iterable[Problem]) -> list[dict[str, object]]:
    keys = ("line", "column", "message", "fix")
    return [{key: getattr(problem, key) for key in keys} for problem in problems]
