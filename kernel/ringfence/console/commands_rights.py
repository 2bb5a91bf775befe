"""Commands that change what an agent may do while it runs: grant, revoke."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import records
from ringfence.console.durations import asked_ms, span
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.render import Column
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe
from ringfence.policy.problems import ManifestError

if TYPE_CHECKING:
    from collections.abc import Mapping

commands = Commands()


@commands.add(
    "grant",
    "ringfence grant invoice-bot 'fs.write: \"/workspace/out/**\"' --expires 1h",
    "ringfence grant invoice-bot 'sql.read: {database: crm, tables: [invoices]}' --uses 3",
    "ringfence grant invoice-bot 'http.post: \"https://pay.example.com/**\"' --deny",
)
@click.argument("agent")
@click.argument("rule")
@click.option(
    "--expires", metavar="DURATION", help="How long it lasts, such as 1h. Default: until it is revoked."
)
@click.option(
    "--uses", type=click.IntRange(min=1), metavar="N", help="How often it may be used. Default: any number."
)
@click.option("--deny", is_flag=True, help="Deny it instead, whatever permits it.")
def grant(session: Session, agent: str, rule: str, expires: str | None, uses: int | None, deny: bool) -> int:
    """Add a permission while the agent runs, or a deny; prints its id.

    A deny and the operator's ceilings win. A deny holds on every kernel when this returns, until its id is revoked.
    """
    if deny and uses:
        raise ConsoleError("a deny isn't used up; leave `--uses` out", ExitCode.USAGE)
    _check_rule(rule, "deny" if deny else "allow")
    expires_ms = asked_ms(expires) if expires is not None else 0
    if expires is not None and expires_ms == 0:
        raise ConsoleError(f"`--expires {expires}` is over at once; give a longer duration", ExitCode.USAGE)
    document = session.client().call(
        "Grant", agent=agent, rule=rule, expires_ms=expires_ms, uses=uses or 0, deny=deny
    )
    if session.as_json:
        render.emit(document)
    else:
        render.say(safe(document["id"]))
    return ExitCode.OK


@commands.add(
    "revoke",
    "ringfence revoke invoice-bot g7",
    "ringfence revoke invoice-bot 'fs.write: \"/workspace/out/**\"'",
    "ringfence revoke invoice-bot --all --purge",
)
@click.argument("agent")
@click.argument("rule_or_grant", metavar="[RULE|GRANT]", default="")
@click.option("--all", "everything", is_flag=True, help="Every permission.")
@click.option("--purge", is_flag=True, help="Also withhold results already recorded.")
def revoke(session: Session, agent: str, rule_or_grant: str, everything: bool, purge: bool) -> int:
    """Take a permission away; returns when no later call can use it.

    Calls in flight that used it have been cancelled by then, or are reported with what became of them.
    """
    if everything == bool(rule_or_grant):
        raise ConsoleError(
            "name one rule or grant, or give `--all`; see: ringfence show AGENT", ExitCode.USAGE
        )
    document = session.client().call(
        "Revoke", agent=agent, rule_or_grant=rule_or_grant, all=everything, purge=purge
    )
    if session.as_json:
        render.emit(document)
    else:
        _show_revoked(document)
    return ExitCode.OK


def _check_rule(rule: str, verdict: str) -> None:
    from ringfence.policy.manifest import parse_rule  # noqa: PLC0415 - takes longer than most commands do altogether

    try:
        parse_rule(rule, verdict)
    except ManifestError as error:
        raise ConsoleError(str(error), ExitCode.USAGE) from None


def _show_revoked(document: Mapping[str, Any]) -> None:
    for item in records(document, "revoked"):
        render.say(f"revoked {safe(item.get('id', ''))}  {safe(item.get('rule', ''))}".rstrip())
    affected = records(document, "affected")
    if affected:
        render.say()
        columns = (
            Column(title="STEP", right=True),
            Column(title="ACTION"),
            Column(title="FATE"),
            Column(title="RESOURCE", flex=True),
        )
        render.table(
            columns,
            [
                [safe(call.get(key, "")) for key in ("step", "action", "fate", "resource")]
                for call in affected
            ],
        )
    elapsed = document.get("elapsed_ms")
    took = f" after {span(elapsed)}" if elapsed is not None else ""
    render.say(f"in force{took}: no later call can use it (epoch {safe(document.get('epoch', '?'))})")
