"""Command that shows an agent's budgets and changes a limit while it runs: budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import records
from ringfence.console.durations import size, span
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.render import Column
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

commands = Commands()
_SET_WORDS = 3


@commands.add(
    "budget",
    "ringfence budget",
    "ringfence budget invoice-bot",
    "ringfence budget invoice-bot set tokens 500k",
    "ringfence budget invoice-bot set http.get 20/s",
    "ringfence budget invoice-bot set usd manifest",
    "ringfence budget --label team=billing set usd 80",
    "ringfence budget --fleet set calls file",
)
@click.option(
    "--label",
    metavar="KEY=VALUE",
    help="The budget of all agents with this label; `k=v,k=v`: with all of them.",
)
@click.option("--fleet", is_flag=True, help="The budget of all agents together.")
@click.argument("words", nargs=-1, metavar="[AGENT] [set NAME VALUE]")
def budget(session: Session, words: tuple[str, ...], label: str | None, *, fleet: bool) -> int:
    """Show what is used and left; `set` changes a limit as it runs.

    Agents that were parked for it go on. Without an agent: the budgets that agents have together, as the kernel file
    declares them.

    NAME is calls, tokens, usd, bytes or destructive, or an action with a rate. VALUE `manifest` goes back to the manifest's, and
    `file` to the kernel file's.
    """
    if label is not None and fleet:
        raise ConsoleError("give `--label` or `--fleet`, not both", ExitCode.USAGE)
    pool = "fleet" if fleet else label or ""
    agent, change = ("", words) if pool or not words else (words[0], words[1:])
    if change and (len(change) != _SET_WORDS or change[0] != "set"):
        raise ConsoleError(
            f"`{' '.join(change)}` is no change; write `set NAME VALUE`, such as `set tokens 500k`",
            ExitCode.USAGE,
        )
    name, value = change[1:] if change else ("", "")
    document = session.client().call("Budget", agent=agent, name=name, value=value, pool=pool)
    if session.as_json:
        render.emit(document)
        return ExitCode.OK
    if agent:
        _print(document)
    pools = records(document, "pools")
    if pools:
        if agent:
            render.say()
        print_pools(pools)
    elif not agent:
        render.say("no budgets of many agents together; declare them in the kernel file under `spec.budgets`")
    return ExitCode.OK


def print_pools(pools: Sequence[Mapping[str, Any]]) -> None:
    """Budgets that agents have together."""
    columns = (
        Column(title="TOGETHER", flex=True),
        Column(title="BUDGET"),
        Column(title="LIMIT", right=True),
        Column(title="USED", right=True),
        Column(title="RESERVED", right=True, spare=True),
        Column(title="LEFT", right=True),
        Column(title="RESETS", spare=True),
        Column(title="FROM", spare=True),
    )
    rows = [
        (
            safe(pool.get("pool", "")),
            safe(pool.get("name", "")),
            _amount(pool, "limit") + (f" a {pool['period']}" if pool.get("period") else ""),
            _amount(pool, "used"),
            _amount(pool, "reserved") if pool.get("reserved") else "",
            _amount(pool, "left"),
            safe(pool.get("resets_at") or "never"),
            safe(pool.get("origin", "")),
        )
        for pool in pools
    ]
    render.table(columns, rows)


def _print(document: Mapping[str, Any]) -> None:
    waits = document.get("waiting_for")
    render.facts(
        [
            ("id", document.get("id")),
            ("state", document.get("state")),
            ("waiting for", waits),
            ("when spent", document.get("on_exhausted")),
            ("context", document.get("context_max_tokens")),
        ]
    )
    render.say()
    columns = (
        Column(title="BUDGET", flex=True),
        Column(title="LIMIT", right=True),
        Column(title="USED", right=True),
        Column(title="RESERVED", right=True, spare=True),
        Column(title="LEFT", right=True),
        Column(title="REFILLS", spare=True),
        Column(title="FROM", spare=True),
    )
    rows = [_row(budget) for budget in records(document, "budgets")]
    limited = {row[0] for row in rows}
    used: Mapping[str, float] = document.get("used") or {}
    rows += [[safe(n), "", number(v), "", "", "", ""] for n, v in sorted(used.items()) if n not in limited]
    render.table(columns, rows)


def _row(budget: Mapping[str, Any]) -> Sequence[str]:
    limit = _amount(budget, "limit")
    if budget.get("period_ms"):
        limit += f" in {span(budget['period_ms'])}"
    refill = budget.get("refill_ms")
    refills = "never" if refill is None else "now" if not refill else f"in {span(refill)}"
    return (
        safe(budget.get("name", "")),
        limit,
        _amount(budget, "used"),
        _amount(budget, "reserved") if budget.get("reserved") else "",
        _amount(budget, "left"),
        refills,
        safe(budget.get("origin", "")),
    )


def _amount(line: Mapping[str, Any], key: str) -> str:
    """A number of a budget's line, as a size where it is of bytes."""
    value = line.get(key)
    if line.get("name") == "bytes" and isinstance(value, int | float):
        return size(value)
    return number(value)


def number(value: object) -> str:
    """A number without what it does not need; nothing for none."""
    if not isinstance(value, int | float):
        return ""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6f}".rstrip("0")
