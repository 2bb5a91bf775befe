"""The language of `ringfence console`: short words, each of which is a command of the command line."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringfence.console.errors import ConsoleError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_APPROVAL = re.compile(r"a\d+", re.ASCII)
_NOT_HERE = frozenset({"console", "completion", "up", "demo"})
"""Commands that make no sense at a prompt."""
_DECIDE = frozenset({"approve", "deny"})

QUIT = "quit"
HELP = "help"


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """A short word.

    Attributes:
        usage: how it is typed.
        about: what it does.
        command: the words of the command line that it stands for.
        least: how many words have to follow.
    """

    usage: str
    about: str
    command: tuple[str, ...]
    least: int = 0


def _short(usage: str, about: str, *command: str, least: int = 0) -> Short:
    return Short(usage=usage, about=about, command=command, least=least)


SHORT: Mapping[str, Short] = {
    "ps": _short("ps [--all]", "agents and what they wait for", "ps"),
    "top": _short("top", "the same as they work, until q", "top"),
    "approvals": _short("approvals [--all]", "calls that wait for a person", "approvals", "ls"),
    "show": _short("show AGENT|ID", "an agent, or an approval such as a7", "show", least=1),
    "approve": _short("approve ID [ANSWER]", "let a parked call run", "approvals", "approve", least=1),
    "deny": _short("deny ID REASON", "refuse it; the agent is told why", "approvals", "deny", least=2),
    "steps": _short("steps AGENT [-f]", "what it did", "steps", least=1),
    "logs": _short("logs AGENT [-f]", "what it printed", "logs", least=1),
    "explain": _short("explain AGENT STEP", "why a step got its verdict", "policy", "explain", least=2),
    "pause": _short("pause AGENT", "freeze it", "pause", least=1),
    "resume": _short("resume AGENT", "let it go on", "resume", least=1),
    "kill": _short("kill AGENT", "end its process tree", "kill", least=1),
    "start": _short("start AGENT", "start it again", "start", least=1),
}


def split(line: str) -> list[str]:
    """Split a line as a shell does. What follows a `#` is a comment.

    Raises:
        ConsoleError: a quote is not closed.
    """
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        # An apostrophe in a reason is no quote to whoever types it.
        words = line.split()
        if words and words[0] in _DECIDE:
            return words
        raise ConsoleError(
            "a quote in this line is not closed; close it, or leave it out", ExitCode.USAGE
        ) from None


def translate(words: Sequence[str], known: Collection[str]) -> list[str]:
    """Make the words of a command line from those that were typed.

    Args:
        words: at least one.
        known: names of the command line's own commands.

    Raises:
        ConsoleError: no such word, or too little behind it.
    """
    if words[0] in ("ringfence", "rf") and len(words) > 1:
        return translate(words[1:], known)
    name, rest = words[0], words[1:]
    short = SHORT.get(name)
    if short is None:
        if name in _NOT_HERE:
            raise ConsoleError(
                f"`{name}` does not work inside the console; type it in a shell", ExitCode.USAGE
            )
        if name not in known:
            raise ConsoleError(f"`{name}` is no command; `help` lists them", ExitCode.USAGE)
        return list(words)
    if {"-h", "--help"} & set(rest):
        return [*short.command, "--help"]
    if len(rest) < short.least:
        raise ConsoleError(f"write `{short.usage}`", ExitCode.USAGE)
    if name == "show" and _APPROVAL.fullmatch(rest[0]):
        return ["approvals", "show", *rest]
    if name == "approvals" and rest and not rest[0].startswith("-"):
        return list(words)
    if name in _DECIDE and len(rest) > 1 and not rest[1].startswith("-"):
        # What is typed behind the id is the reason, unless options are given as on the command line.
        return [*short.command, rest[0], "--reason", " ".join(rest[1:])]
    return [*short.command, *rest]


def help_lines() -> list[str]:
    """What `help` shows."""
    rows = [(short.usage, short.about) for short in SHORT.values()]
    rows += [(HELP, "this list"), (QUIT, "leave; so do `exit` and Ctrl-D")]
    column = max(len(usage) for usage, _ in rows)
    lines = [f"  {usage:<{column}}  {about}" for usage, about in rows]
    return [*lines, "Every other command works here as in a shell, such as: rollback AGENT --to 3 --preview"]
