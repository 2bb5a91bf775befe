"""What shells complete beyond commands and options: names that the kernel knows, asked for when Tab is pressed.

A shell has no place for errors while somebody types, so whatever goes wrong completes nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from ringfence.console.documents import records
from ringfence.console.session import Session, session_of
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    Found = tuple[str, str]
    """A word and what it means."""
    Ask = Callable[[Session, Mapping[str, Any]], Iterable[Found]]
    """Asks the kernel for words; sees the parameters that stand before."""
_ANSWER_S = 1.0
_PLAIN = re.compile(r"[\w./:@%+,-]+")


class Known(click.types.StringParamType):
    """A text that may be anything, completed with what the kernel knows."""

    name = "text"

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Words that begin with what was typed; none where no kernel answers within a second."""
        del param
        try:
            found = list(self._ask(session_of(ctx), _given(ctx)))
        except Exception:  # noqa: BLE001 - a shell completes nothing then, whatever it was
            return []
        return [
            CompletionItem(word, help=safe(meaning))
            for word, meaning in found
            if word.startswith(incomplete) and _PLAIN.fullmatch(word)
        ]


def _given(ctx: click.Context) -> dict[str, Any]:
    """Parameters that stand before. An option without its value yet leaves arguments as they were typed."""
    known = {name: value for name, value in ctx.params.items() if value not in (None, "")}
    return {"agent": ctx.args[0], **known} if ctx.args else known


def agents(session: Session, given: Mapping[str, Any]) -> Iterator[Found]:
    """Names that one agent has, and ids."""
    del given
    found = _records(session, "List", "agents", all=True)
    names = [str(agent.get("name")) for agent in found]
    for agent, name in zip(found, names, strict=True):
        meaning = f"{agent.get('state')}"
        if name and names.count(name) == 1:
            yield name, meaning
        yield str(agent["id"]), f"{name}, {meaning}"


def live_agents(session: Session, given: Mapping[str, Any]) -> Iterator[Found]:
    """The same of agents that haven't ended."""
    ended = ("done", "failed", "killed")
    return (found for found in agents(session, given) if not found[1].endswith(ended))


def approvals(session: Session, given: Mapping[str, Any]) -> Iterator[Found]:
    """Ids of calls that wait for a person."""
    del given
    for waits in _records(session, "Approvals", "approvals"):
        yield str(waits["id"]), f"{waits.get('action')} {waits.get('resource')}"


def points(session: Session, given: Mapping[str, Any]) -> Iterator[Found]:
    """Rollback points of the agent that is named before."""
    for point in reversed(_records(session, "Points", "points", agent=given["agent"])):
        yield str(point["id"]), f"step {point.get('step')}, {point.get('at')}"


def grants(session: Session, given: Mapping[str, Any]) -> Iterator[Found]:
    """Grants of the agent that is named before, as far as they are in force."""
    document = session.client().call("Show", _ANSWER_S, agent=given["agent"])
    for grant in records(document, "grants"):
        if not grant.get("revoked_at"):
            yield str(grant["id"]), str(grant.get("rule"))


def schedules(session: Session, given: Mapping[str, Any]) -> Iterator[Found]:
    """Agents with a schedule."""
    del given
    for schedule in _records(session, "ScheduleList", "schedules"):
        yield str(schedule.get("name") or schedule["agent"]), f"next {schedule.get('next_at')}"


def secrets(session: Session, given: Mapping[str, Any]) -> Iterator[Found]:
    """Names of secrets."""
    del given
    for name in session.client().call("SecretList", _ANSWER_S).get("secrets", []):
        yield str(name), ""


def verbs_or_agents(*verbs: str) -> Ask:
    """Words of a command such as `points`, which takes a verb, an agent, or both."""

    def ask(session: Session, given: Mapping[str, Any]) -> Iterator[Found]:
        if not given.get("words"):
            yield from ((verb, "") for verb in verbs)
        yield from agents(session, given)

    return ask


_BY_PARAMETER: dict[tuple[str, str], Ask] = {
    ("points", "words"): verbs_or_agents("verify", "prune"),
    ("audit", "words"): verbs_or_agents("verify"),
    ("rollback", "to"): points,
    ("diff", "start"): points,
    ("diff", "end"): points,
    ("revoke", "rule_or_grant"): grants,
    ("rm", "name"): secrets,
    ("approve", "id"): approvals,
    ("deny", "id"): approvals,
    ("show", "id"): approvals,
}
_SCHEDULED = ("pause", "resume", "run")
_ONLY_LIVE = ("pause", "resume", "kill", "send")


def teach(group: click.Group) -> None:
    """Give parameters of all commands below a group what they complete to; own types of theirs stay."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            teach(command)
            continue
        for parameter in command.params:
            ask = _ask_of(command.name or "", parameter.name or "")
            if ask is not None and parameter.type is click.STRING:
                parameter.type = Known(ask)


def _ask_of(command: str, parameter: str) -> Ask | None:
    ask = _BY_PARAMETER.get((command, parameter))
    if ask is not None:
        return ask
    if parameter in ("agent", "agents"):
        return live_agents if command in _ONLY_LIVE else agents
    return schedules if parameter == "name" and command in _SCHEDULED else None


def _records(session: Session, method: str, key: str, **fields: Any) -> list[dict[str, Any]]:
    return records(session.client().call(method, _ANSWER_S, **fields), key)
