"""Commands about agents: ps, show, pause, resume, start, kill."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import click
from ringfence.console import render
from ringfence.console.documents import items, record, records
from ringfence.console.durations import count, parse_time, seconds, span
from ringfence.console.errors import ExitCode
from ringfence.console.render import Column
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe

commands = Commands()

_APPROVAL = re.compile(r"\bapproval (a\d+)", re.ASCII)
_STEP = re.compile(r"\bstep (\d+)", re.ASCII)
_PS = (
    Column(title="ID", flex=True, kept=True),
    Column(title="NAME", flex=True, spare=True, echo=True),
    Column(title="STATE"),
    Column(title="PROCESS", spare=True),
    Column(title="STEPS", right=True),
    Column(title="TOKENS", right=True, spare=True),
    Column(title="USD", right=True, spare=True),
    Column(title="AGE", right=True),
    Column(title="WAITING FOR", flex=True),
)


@commands.add("ps", "ringfence ps --all", "ringfence ps --json | jq -r '.[].id'")
@click.option("--all", "everything", is_flag=True, help="Also agents that ended.")
def ps(session: Session, everything: bool) -> int:
    """List agents: state, steps, tokens, cost, age, what they wait for."""
    agents = records(session.client().call("List", all=everything), "agents")
    if session.as_json:
        render.emit(agents)
    elif agents:
        render.table(_PS, [_ps_row(agent) for agent in agents])
    else:
        render.note(
            "no agents; start one with: ringfence submit MANIFEST"
            if everything
            else "no live agents; see those that ended with: ringfence ps --all"
        )
    return ExitCode.OK


@commands.add("show", "ringfence show invoice-bot", "ringfence show invoice-bot --json | jq .grants")
@click.argument("agent")
def show(session: Session, agent: str) -> int:
    """Show one agent: rules, grants, budgets left, checkpoint, sandbox."""
    document = session.client().call("Show", agent=agent)
    if session.as_json:
        render.emit(document)
    else:
        _show(document)
        advice = next_step(document)
        if advice:
            render.note(advice)
    return ExitCode.OK


@commands.add("pause", "ringfence pause invoice-bot")
@click.argument("agent")
def pause(session: Session, agent: str) -> int:
    """Freeze the agent's process; `resume` goes on where it stood."""
    return _act(session, "Pause", agent)


@commands.add("resume", "ringfence resume invoice-bot")
@click.argument("agent")
def resume(session: Session, agent: str) -> int:
    """Let a paused agent go on."""
    return _act(session, "Resume", agent)


@commands.add("start", "ringfence start invoice-bot")
@click.argument("agent")
def start(session: Session, agent: str) -> int:
    """Start an agent again: after failed, killed or a rollback.

    It continues: calls already answered return their recorded outcome without running again.
    """
    return _act(session, "Start", agent)


@commands.add("kill", "ringfence kill invoice-bot", "ringfence kill invoice-bot --only")
@click.argument("agent")
@click.option("--only", is_flag=True, help="Leave the agents that it spawned alone.")
def kill(session: Session, agent: str, only: bool) -> int:
    """End the agent and all that it spawned; returns when they are gone."""
    return _act(session, "Kill", agent, only=only)


def _act(session: Session, method: str, agent: str, **more: Any) -> int:
    document = session.client().call(method, agent=agent, **more)
    if session.as_json:
        render.emit(document)
    else:
        state = safe(document.get("state", ""))
        render.say(f"{safe(document.get('name') or document.get('id') or agent)}: {render.coloured(state)}")
        for below in records(document, "descendants"):
            render.say(f"{safe(below['id'])}: {render.coloured(safe(below['state']))}")
    return ExitCode.OK


def _ps_row(agent: Mapping[str, Any]) -> Sequence[str]:
    return (
        safe(agent["id"]),
        safe(agent.get("name", "")),
        safe(agent.get("state", "")),
        safe(agent.get("process", "")),
        count(agent.get("steps") or 0),
        count(agent.get("tokens") or 0),
        f"{agent.get('cost_usd') or 0:.2f}",
        span(agent.get("age_ms") or 0),
        safe(seconds(agent.get("waiting_for") or "")),
    )


def _show(document: Mapping[str, Any]) -> None:
    sandbox = record(document, "sandbox")
    render.facts(
        [
            ("id", document.get("id")),
            ("name", document.get("name")),
            ("state", document.get("state")),
            ("process", document.get("process")),
            ("waiting for", seconds(document.get("waiting_for") or "")),
            ("error", document.get("error")),
            ("exit code", document.get("exit_code")),
            ("ended", seconds(document.get("ended_at") or "") or None),
            ("restarts", document.get("restarts")),
            ("parent", document.get("parent")),
            ("children", ", ".join(child["id"] for child in records(document, "children")) or None),
            ("thread", document.get("thread")),
            ("branch", document.get("branch")),
            ("steps", document.get("steps")),
            ("age", span(document["age_ms"]) if document.get("age_ms") is not None else None),
            ("workspace", document.get("workspace")),
            ("manifest", _manifest_line(document.get("manifest"))),
            ("sandbox", sandbox.get("backend")),
            *[
                ("unavailable", f"{item.get('name')}: {item.get('reason')}")
                for item in records(document, "unavailable")
            ],
            ("checkpoint", _checkpoint_line(record(document, "checkpoint"))),
        ]
    )
    _divergence(record(document, "divergence"))
    for stray in records(document, "strays"):
        _stray(stray)
    _rules(records(document, "rules"))
    _grants(records(document, "grants"))
    _budgets(records(document, "budgets"))
    _walls(records(sandbox, "walls"))


def _divergence(found: Mapping[str, Any]) -> None:
    """What a program did otherwise than recorded, and the ways on."""
    if not found:
        return
    render.say(f"\nstep {found.get('step')} differs from what is recorded:")
    for line in items(found, "diff"):
        render.say(f"  {safe(line)}")
    for choice in records(found, "choices"):
        render.say(f"{safe(choice['do'])}:\n  {safe(choice['command'])}")


def _stray(found: Mapping[str, Any]) -> None:
    """A new call while recorded ones were left, and what it differs in."""
    step, was = found.get("step"), found.get("recorded_step")
    this = f"step {step}" if step else f"a call of {safe(found['action'])}"
    render.say(
        f"\n{this} is not on record, while {found.get('left')} recorded calls had not been asked for again;"
    )
    differences = records(found, "differences")
    if not differences:
        render.say(f"the first of them is step {was}, {safe(found['recorded_action'])}")
        return
    render.say(f"it differs from step {was} here; what varies by itself can stand in `restart.ignore`:")
    for one in differences:
        render.say(f"  at {safe(one['at'] or '/')}")
        for name, mark in (("recorded", "-"), ("made", "+")):
            if name in one:
                render.say(f"    {mark} {safe(one[name])}")
    if more := found.get("more"):
        render.say(f"  … {more} more")


def next_step(agent: Mapping[str, Any]) -> str | None:
    """What a person can do about an agent that does not go on by itself; None where it does."""
    name, state = agent.get("id"), agent.get("state")
    waits = str(agent.get("waiting_for") or "")
    approval, step = _APPROVAL.search(waits), _STEP.search(waits)
    if state == "unknown" and step:
        return f"look at the target, then settle: ringfence resolve {name} {step[1]} --as done (or not-done)"
    if state == "parked" and approval:
        return f"decide: ringfence approvals show {approval[1]}"
    if state == "parked" and "budget" in waits:
        return f"see what is spent: ringfence budget {name}; raise it with: ringfence budget {name} set NAME VALUE"
    if state in ("failed", "killed"):
        return f"what it said: ringfence logs {name} --stderr; again: ringfence start {name}"
    if state == "paused":
        return f"go on: ringfence {'start' if agent.get('process') == 'none' else 'resume'} {name}"
    return None


def _manifest_line(manifest: object) -> str:
    """One line about the manifest, which may be its text or facts about it."""
    if isinstance(manifest, Mapping):
        facts = cast("Mapping[str, Any]", manifest)
        return ", ".join(
            f"{key} {value}"
            for key, value in facts.items()
            if isinstance(value, str | int) and "\n" not in str(value)
        )
    text = str(manifest or "")
    return f"{len(text.splitlines())} lines; see it with --json" if "\n" in text else text


def _checkpoint_line(checkpoint: Mapping[str, Any]) -> str:
    if not checkpoint:
        return "none"
    return f"step {checkpoint.get('step')}, schema {checkpoint.get('schema_version')}"


def print_rules(rules: Sequence[Mapping[str, Any]]) -> None:
    """Print rules in force as a table."""
    render.table(
        (
            Column(title="RULE"),
            Column(title="VERDICT"),
            Column(title="TEXT", flex=True),
            Column(title="FROM", flex=True),
        ),
        [[*(safe(rule.get(key, "")) for key in ("id", "verdict", "text")), _origin(rule)] for rule in rules],
    )


def _origin(rule: Mapping[str, Any]) -> str:
    line = rule.get("line")
    return safe(rule.get("origin", "")) + (f", line {line}" if line else "")


def _rules(rules: Sequence[Mapping[str, Any]]) -> None:
    if rules:
        render.say()
        print_rules(rules)


def _grants(grants: Sequence[Mapping[str, Any]]) -> None:
    if not grants:
        return
    render.say()
    columns = (
        Column(title="GRANT"),
        Column(title="VERDICT"),
        Column(title="RULE", flex=True),
        Column(title="FROM", flex=True),
        Column(title="LEFT"),
        Column(title="STATE", flex=True),
    )
    render.table(columns, [_grant_row(grant) for grant in grants])


def _grant_row(grant: Mapping[str, Any]) -> Sequence[str]:
    if grant.get("revoked_at"):
        state = f"revoked {seconds(grant['revoked_at'])}"
    elif grant.get("uses_left") == 0:
        state = "used up"
    elif grant.get("expires_at"):
        over = parse_time(str(grant["expires_at"])) <= parse_time("0s")
        state = f"{'expired' if over else 'until'} {seconds(grant['expires_at'])}"
    else:
        state = "in force"
    left = "any" if grant.get("uses_left") is None else str(grant["uses_left"])
    return [
        safe(cell)
        for cell in (
            grant.get("id"),
            grant.get("verdict"),
            grant.get("rule"),
            grant.get("origin"),
            left,
            state,
        )
    ]


def _budgets(budgets: Sequence[Mapping[str, Any]]) -> None:
    if not budgets:
        return
    render.say()
    columns = (
        Column(title="BUDGET", flex=True),
        Column(title="KIND"),
        Column(title="LIMIT", right=True),
        Column(title="USED", right=True),
        Column(title="LEFT", right=True),
    )
    rows = [
        [safe(_plain(budget.get(key))) for key in ("name", "kind", "limit", "used", "left")]
        for budget in budgets
    ]
    render.table(columns, rows)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def _walls(walls: Sequence[Mapping[str, Any]]) -> None:
    if not walls:
        return
    render.say()
    columns = (
        Column(title="WALL"),
        Column(title="STATE"),
        Column(title="FORM"),
        Column(title="DETAIL", flex=True),
    )
    rows = [
        [
            safe(wall.get("name", "")),
            "ok" if wall.get("ok") else "missing",
            safe(wall.get("form") or ""),
            safe(wall.get("detail", "")),
        ]
        for wall in walls
    ]
    render.table(columns, rows)
