"""Where the redirections of a shell script lead: files that it opens by itself, whatever its commands do.

A relative path begins where the script is by then. `cd DIR &&` leads on from there for the rest of its list; afterwards, and
wherever a `cd` may have failed or not been reached, both places count. A subshell's own moves end with its bracket. What can't be
told is said, so that it is asked.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ringfence.policy.shell_words import DUPLICATING

Mode: TypeAlias = Literal["read", "write", "both"]
MODES: Final[dict[str, Mode]] = {
    "<": "read",
    "<&": "read",
    "<>": "both",
    ">": "write",
    ">>": "write",
    ">|": "write",
    ">&": "write",
    "&>": "write",
    "&>>": "write",
}
_PREFIXES: Final = frozenset(("command", "builtin"))
_LEAVES: Final = frozenset(("pushd", "popd", ".", "source"))
_CHANGES: Final = frozenset(("cd", "chdir"))
MOVERS: Final = _PREFIXES | _LEAVES | {"cd"}
_MAX_PLACES: Final = 16
_MAX_TOUCHES: Final = 256
UNKNOWN: Final = "where a redirection leads is not written out"
ACTIONS: Final[dict[Mode, tuple[str, ...]]] = {
    "read": ("fs.read",),
    "write": ("fs.write",),
    "both": ("fs.read", "fs.write"),
}


@dataclass(frozen=True, slots=True)
class Touch:
    """A file that a redirection opens.

    Attributes:
        mode: what for.
        path: absolute, or relative to where the command begins.
    """

    mode: Mode
    path: str


class Places:
    """The directories that a script may be in, relative to where its command begins. None among them: anywhere."""

    __slots__ = ("_before", "_now", "_since")

    def __init__(self, now: frozenset[str | None] = frozenset(("",)), since: int | None = None) -> None:
        self._now = now
        self._before = now
        self._since = since

    def apart(self, *, anywhere: bool = False) -> Places:
        """Those of a process that begins here, and whose own moves end with it."""
        return Places(frozenset((None,)) if anywhere else self._now)

    def within(self) -> Places:
        """Those of a subshell that begins here: as `apart`, but what the script has defined is known in it."""
        return Places(self._now, self._since)

    def repeats(self, seen: int) -> None:
        """A loop or a function begins: what follows may run again after a later `cd`.

        Args:
            seen: how many relative redirections came before.
        """
        if self._since is None:
            self._since = seen

    def ends(self, operator: str) -> None:
        """A command ends in an operator. Only behind `&&` it is sure that it did what it said."""
        if operator != "&&":
            self._now |= self._before
            self._before = self._now

    def moves(self, words: Sequence[str | None]) -> int | None:
        """A command of the script itself may have led it elsewhere.

        Returns:
            From which relative redirection on they may run again there, as they are in a loop or a function; None: none does.
        """
        while words and words[0] in _PREFIXES:
            words = words[1:]
        name = words[0] if words else ""
        if name not in _LEAVES | _CHANGES:
            return None
        if name in _LEAVES:
            self._now |= {None}
        else:
            operands = [word for word in words[1:] if word is None or word == "-" or not word.startswith("-")]
            target = operands[0] if len(operands) == 1 else None
            if target is None or target.startswith(("~", "-")) or self._since is not None:
                self._now |= {None}
            else:
                led = {None if place is None else _joined(place, target) for place in self._now}
                self._now = frozenset({_joined("", target)} if target.startswith("/") else led)
        if len(self._now) > _MAX_PLACES:
            self._now = frozenset((None,))
        return self._since

    def touched(self, mode: Mode, path: str) -> list[Touch] | None:
        """What a redirection to a path opens; None: it can't be told."""
        if path.startswith("/"):
            # Names below /proc lead to files by another name.
            return None if posixpath.normpath(path).startswith("/proc/") else [Touch(mode, path)]
        found = [Touch(mode, _joined(place, path)) for place in self._now if place is not None]
        return None if len(found) < len(self._now) else found


def _joined(place: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(place, path))


def duplicates(operator: str, target: str) -> bool:
    """Whether a redirection names a descriptor and no file."""
    return operator in DUPLICATING and (target == "-" or target.removesuffix("-").isdigit())


def too_many(touches: Sequence[Touch]) -> bool:
    """Whether a command redirects more often than is followed."""
    return len(touches) > _MAX_TOUCHES


def opened(touches: Sequence[Touch], cwd: str, root: str) -> list[tuple[str, str]]:
    """What touches are as calls on files: pairs of action and absolute path, each once.

    What lies outside the root is left out: nothing that a command leaves there is kept, and no rule speaks of it.

    Args:
        touches: from a command.
        cwd: absolute directory in which it begins.
        root: of the workspace.
    """
    found: dict[tuple[str, str], None] = {}
    for touch in touches:
        path = _joined(cwd, touch.path)
        if path == root or path.startswith(root + "/"):
            found.update(dict.fromkeys((action, path) for action in ACTIONS[touch.mode]))
    return list(found)
