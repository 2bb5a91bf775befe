"""`top`: agents as they work, with what they do a second."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render, screen
from ringfence.console.documents import records
from ringfence.console.durations import count, parse_duration_ms, plural, seconds
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.rates import ORDERS, Rates, ordered, urgency
from ringfence.console.render import Column
from ringfence.console.session import Commands, Redial, Session
from ringfence.console.text import cut, safe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

commands = Commands()

_INTERVAL_MS_MIN = 100
_TEN = 10
_ANSWER_S = 10.0
_FIRST_S = 0.5
_QUIT = frozenset({"q", "Q", "\x04"})
_COLUMNS = (
    Column(title="ID", flex=True, kept=True),
    Column(title="NAME", flex=True, spare=True, echo=True),
    Column(title="STATE"),
    Column(title="CALLS", right=True),
    Column(title="CALLS/S", right=True),
    Column(title="TOKENS", right=True, spare=True),
    Column(title="TOK/S", right=True, spare=True),
    Column(title="USD", right=True, spare=True),
    Column(title="USD/H", right=True, spare=True),
    Column(title="WAITING FOR", flex=True),
)


@commands.add(
    "top",
    "ringfence top",
    "ringfence top --sort cost --interval 5s",
    "ringfence top --once",
    "ringfence top --json --interval 10s >> top.jsonl",
)
@click.option("--once", is_flag=True, help="Look once and end; rates are over one interval.")
@click.option("--interval", metavar="DURATION", help="Time between two looks; default: 1s.")
@click.option(
    "--sort", "by", type=click.Choice(list(ORDERS)), default="calls", help="What comes first; default: calls."
)
def top(session: Session, once: bool, interval: str | None, by: str) -> int:
    """Watch agents work: calls, tokens and cost as rates.

    On a terminal it goes on until `q` or Ctrl-C. Elsewhere it looks once; with --interval it goes on.
    """
    interval_s = _interval_s(interval)
    try:
        if session.as_json:
            documents = _documents(session, interval_s, by)
            if once or interval is None:
                render.emit(next(documents))
            else:
                render.emit_lines(documents)
        elif once or not screen.usable():
            _plain(
                session, interval_s, by, forever=not once and (interval is not None or render.to_terminal())
            )
        else:
            _live(session, interval_s, by)
    except KeyboardInterrupt:
        # The one way to end it everywhere is no failure.
        return ExitCode.OK
    return ExitCode.OK


def _interval_s(text: str | None) -> float:
    if text is None:
        return 1.0
    try:
        milliseconds = parse_duration_ms(text, bare_unit="s")
    except ValueError as error:
        raise ConsoleError(str(error), ExitCode.USAGE) from None
    if milliseconds < _INTERVAL_MS_MIN:
        raise ConsoleError(f"`--interval` is at least {_INTERVAL_MS_MIN}ms, not `{text}`", ExitCode.USAGE)
    return milliseconds / 1000


def _looks(session: Session, interval_s: float, by: str) -> Iterator[list[dict[str, Any]]]:
    """Agents with rates, for ever. The first look only serves the second one's rates."""
    client, rates = session.client(), Rates()
    rates.add(records(client.call("List"), "agents"), time.monotonic())
    while True:
        time.sleep(interval_s)
        yield ordered(rates.add(records(client.call("List"), "agents"), time.monotonic()), by)


def _documents(session: Session, interval_s: float, by: str) -> Iterator[dict[str, Any]]:
    for agents in _looks(session, interval_s, by):
        at = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        yield {"at": at, "interval_ms": round(interval_s * 1000), "agents": agents}


def _plain(session: Session, interval_s: float, by: str, *, forever: bool) -> None:
    """Tables below each other, where the cursor can't be moved or nobody looks."""
    for agents in _looks(session, interval_s, by):
        available = render.columns_available() if render.to_terminal() else None
        for line in frame(agents, available):
            render.say(line)
        if not forever:
            return
        render.say()


def _live(session: Session, interval_s: float, by: str) -> None:
    kernel, rates = Redial(session), Rates()
    session.context.call_on_close(kernel.close)
    # The first look is outside of the screen: a kernel that isn't there is an error as ever.
    agents = rates.add(records(kernel.call("List", _ANSWER_S), "agents"), time.monotonic())
    due, remark = time.monotonic() + min(interval_s, _FIRST_S), ""
    with screen.Screen() as terminal:
        while True:
            if time.monotonic() >= due:
                try:
                    agents = rates.add(records(kernel.call("List", _ANSWER_S), "agents"), time.monotonic())
                    remark = ""
                except ConsoleError as error:
                    # A kernel that is started again meanwhile is no reason to stop watching.
                    if error.code != ExitCode.UNREACHABLE:
                        raise
                    remark = remark or f"no kernel answers since {_clock()}; still trying"
                due = time.monotonic() + interval_s
            width, height = terminal.size
            terminal.draw(frame(ordered(agents, by), width, height=height, remark=remark))
            if terminal.wait(due - time.monotonic()) in _QUIT:
                return


def frame(
    agents: Sequence[Mapping[str, Any]], width: int | None, *, height: int | None = None, remark: str = ""
) -> list[str]:
    """What one look shows: a line of sums, and a table.

    Args:
        agents: with their rates, in order.
        width: columns of the terminal; None: nothing is cut.
        height: its lines; None: any number. Agents that don't fit are counted on the last line.
        remark: said instead of the sums' end.
    """
    head = [_sums(agents), *([f"! {safe(remark)}"] if remark else []), ""]
    room = len(agents) if height is None else max(1, height - len(head) - 1)
    shown, left = list(agents), 0
    if len(agents) > room:
        shown = list(agents[: max(1, room - 1)])
        left = len(agents) - len(shown)
    rows = [_row(agent) for agent in shown]
    lines = head if width is None else [cut(line, width) for line in head]
    lines += (
        render.table_lines(_COLUMNS, rows, width)
        if rows
        else ["no live agents; see those that ended with: ringfence ps --all"]
    )
    if left:
        lines.append(f"and {left} more; a higher window or `ringfence ps` shows them")
    return lines


def _sums(agents: Sequence[Mapping[str, Any]]) -> str:
    states = Counter(str(agent.get("state", "?")) for agent in agents)
    parts = [
        f"{number} {safe(state)}" for state, number in sorted(states.items(), key=lambda s: urgency(s[0]))
    ]
    total = {
        key: sum(float(agent.get(key) or 0) for agent in agents)
        for key in ("calls_per_s", "tokens_per_s", "usd_per_h")
    }
    sums = [plural(len(agents), "agent") + (f" ({', '.join(parts)})" if parts else "")]
    sums.append(f"{rate(total['calls_per_s'])} calls/s")
    if total["tokens_per_s"] or total["usd_per_h"]:
        sums += [f"{rate(total['tokens_per_s'])} tokens/s", f"{total['usd_per_h']:.2f} USD/h"]
    return f"{_clock()}  {', '.join(sums)}"


def _clock() -> str:
    return datetime.now(UTC).strftime("%H:%M:%SZ")


def _row(agent: Mapping[str, Any]) -> list[str]:
    usd_per_h = agent.get("usd_per_h")
    return [
        safe(agent.get("id", "")),
        safe(agent.get("name", "")),
        safe(agent.get("state", "")),
        count(agent.get("steps") or 0),
        rate(agent.get("calls_per_s")),
        count(agent.get("tokens") or 0),
        rate(agent.get("tokens_per_s")),
        f"{agent.get('cost_usd') or 0:.2f}",
        "-" if usd_per_h is None else f"{usd_per_h:.2f}",
        safe(seconds(agent.get("waiting_for") or "")),
    ]


def rate(value: float | None) -> str:
    """Write a rate briefly: `0`, `0.4`, `12`, `1.2k`; `-` for none."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.1f}" if value < _TEN else count(round(value))
