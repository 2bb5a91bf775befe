"""Text that spells a command, and what evaluates text: together they run what no word of a script names.

`x='a[$(rm f)]'; echo $((x))` is one assignment and one `echo`, and runs `rm`: bash evaluates the values of variables in arithmetic, and in
several builtins and expansions. Neither half is rare by itself, so only both in one command count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from ringfence.policy.shell_words import HereText, ShellWord, Token, Words

SPELLED: Final = "spelled"
EVALUATED: Final = "evaluated"
_SPELLS: Final = re.compile(r"\$\(|`")
_EVALUATES: Final = re.compile(
    r"\(\(|\[\[|\$\[|\$\{!|@[A-Za-z]\}|\$\{[A-Za-z_0-9]+(?:\[|:[^-=+?])|\b(?:PS[0-4]|PROMPT_COMMAND|BASH_ENV|ENV)=",
    re.ASCII,
)
_ALWAYS: Final = frozenset(
    ("let", "compgen", "complete", "declare", "typeset", "local", "read", "unset", "mapfile", "readarray")
)
_GIT_RUNS: Final = frozenset(("bisect", "foreach", "filter-branch"))
_RUNNERS: Final = frozenset(
    ("alias", "parallel", "hash", "enable", "capsh", "sg", "newgrp", "coresched", "expect", "tclsh")
)
_WITH_VARIABLE: Final = frozenset(("test", "[", "printf", "wait"))


def hints(script: str, tokens: Iterable[Token]) -> set[str]:
    """Which halves a script has: a substitution in a word or a here-document that it doesn't run itself, and what evaluates the text of variables."""
    found = {EVALUATED} if _EVALUATES.search(script) else set[str]()
    for token in tokens:
        if isinstance(token, HereText):
            text = script
        elif isinstance(token, ShellWord):
            text = token.prefix if token.text is None else token.text
        else:
            continue
        if _SPELLS.search(text):
            found.add(SPELLED)
    return found


def evaluator(name: str, rest: Words) -> bool:
    """Whether a command is a builtin that takes names of variables, and evaluates what is in their brackets."""
    return name in _ALWAYS or (name in _WITH_VARIABLE and (None in rest or bool(set(rest) & {"-v", "-p"})))


def runs_another(name: str, rest: Sequence[str | None]) -> bool:
    """Whether a program runs what its words say in a way that is not followed."""
    if name in {"mapfile", "readarray"}:
        return "-C" in rest
    if name == "git":
        # `-x` is of `rebase` what `exec` is; of `clean` it is something else.
        rebases = "rebase" in rest and any(word and word.startswith(("-x", "--exec")) for word in rest)
        return (
            rebases or bool(_GIT_RUNS & set(rest)) or any(word and word.startswith("alias.") for word in rest)
        )
    return name in _RUNNERS and bool(rest)
