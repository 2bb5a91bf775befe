"""Finds the commands inside a command: behind shells, wrappers, substitutions, `xargs` and `find -exec`.

Deny and ask rules look at every part that is found. This is an early refusal for honest mistakes and simple tricks; the
barrier is the sandbox, which masks what may not be read and judges what was changed. What can't be followed is opaque, and
an opaque command needs a person where a rule might have spoken about it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Final, TypeAlias

from ringfence.policy.shell_words import HERE_DOCUMENTS, REDIRECTIONS, Lexer, ShellWord, Token, Unreadable

Words: TypeAlias = tuple[str | None, ...]
"""Words of a part; None stands for any number of words that can't be known."""

_MAX_DEPTH: Final = 8
_MAX_PARTS: Final = 512
_MAX_CANDIDATES: Final = 16
_MAX_SCRIPT: Final = 64 << 10
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=", re.ASCII)
_SHELLS: Final = frozenset(("sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "rbash"))
# Their language is another one, so what they run is not followed.
_FOREIGN_SHELLS: Final = frozenset(("csh", "tcsh", "fish", "pwsh", "nu", "elvish", "xonsh"))
_LOADERS: Final = re.compile(r"ld(?:-linux.*|-musl.*)?\.so(?:\.\d+)?|ld-\d.*\.so")
_SHELL_VALUES: Final = frozenset(("--rcfile", "--init-file"))
_ASKS_ABOUT: Final = frozenset(("--version", "--help"))
# Wrappers run what follows their options, after so many words of their own.
_WRAPPERS: Final = {
    **dict.fromkeys(
        ("env", "nice", "nohup", "setsid", "stdbuf", "ionice", "time", "sudo", "doas", "command"), 0
    ),
    **dict.fromkeys(
        ("exec", "builtin", "busybox", "toybox", "unshare", "nsenter", "strace", "ltrace", "watch"), 0
    ),
    **dict.fromkeys(("prlimit", "pkexec", "systemd-run", "systemd-inhibit", "dbus-run-session"), 0),
    **dict.fromkeys(("fakeroot", "eatmydata", "setarch", "linux32", "linux64", "x86_64", "i386"), 0),
    **dict.fromkeys(("unbuffer", "rlwrap", "valgrind", "gdb", "numactl"), 0),
    **dict.fromkeys(("chpst", "start-stop-daemon", "cpulimit", "tini", "dumb-init"), 0),
    **dict.fromkeys(
        ("timeout", "chroot", "flock", "taskset", "chrt", "runuser", "su", "script", "setpriv", "gosu"), 1
    ),
}
_SCRIPT_OPTIONS: Final = frozenset(("su", "script", "flock", "runuser"))
_FIND_EXEC: Final = frozenset(("-exec", "-execdir", "-ok", "-okdir"))
_FIND_END: Final = frozenset((";", "+"))
_KEEP_POSITION: Final = frozenset(
    ("if", "then", "elif", "else", "while", "until", "do", "{", "!", "time", "fi", "done", "}")
)
_UNFOLLOWED: Final = frozenset(("case", "function", "select", "coproc"))
_PLACEHOLDER: Final = "{}"


class Reading:
    """What was found in one command.

    Attributes:
        parts: words of every command found, the whole command first.
        opaque: why something could not be followed; empty where all was read.
    """

    __slots__ = ("opaque", "parts")

    def __init__(self, argv: Sequence[str]) -> None:
        self.parts: list[Words] = []
        self.opaque = ""
        self._command(tuple(argv), 0)

    def _unreadable(self, why: str) -> None:
        self.opaque = self.opaque or why

    def _command(self, words: Words, depth: int) -> None:
        """Note one command, then look inside it."""
        while words and isinstance(words[0], str) and _ASSIGNMENT.match(words[0]):
            words = words[1:]
        if not words:
            return
        program = words[0]
        if program is None:
            self._unreadable("the name of a program is not written out")
            return
        if depth > _MAX_DEPTH or len(self.parts) >= _MAX_PARTS:
            self._unreadable("it is nested too deeply")
            return
        if any(char.isspace() for char in program):
            self._unreadable("the name of a program holds white space")
        name = posixpath.basename(program)
        for variant in dict.fromkeys((words, (name, *words[1:]), (name, *map(_normal, words[1:])))):
            self.parts.append(variant)
        self._inside(name, words[1:], depth + 1)

    def _inside(self, name: str, rest: Words, depth: int) -> None:
        if name in _SHELLS:
            self._shell(rest, depth)
        elif name == "find":
            self._find(rest, depth)
        elif name == "xargs":
            self._xargs(rest, depth)
        elif name in {"eval", "trap"}:
            script = rest if name == "eval" else rest[:1]
            if any(word is None for word in script):
                self._unreadable(f"`{name}` is given text that is not written out")
            self._script(" ".join(word for word in script if word is not None), depth)
        elif name in _FOREIGN_SHELLS and not _ASKS_ABOUT & set(rest):
            self._unreadable(f"`{name}` has a language of its own")
        elif name in {"alias", "parallel", "hash", "enable"} or (
            name in {"mapfile", "readarray"} and "-C" in rest
        ):
            self._unreadable(f"`{name}` can run programs under other names")
        elif name in _WRAPPERS or _LOADERS.fullmatch(name):
            self._wrapper(name, rest, depth)

    def _shell(self, rest: Words, depth: int) -> None:
        """A shell: the script after `-c`, or a file, which is not read here."""
        at, letters = 0, ""
        while at < len(rest):
            word = rest[at]
            if word is None:
                self._unreadable("a shell's options are not written out")
                return
            if not word.startswith(("-", "+")):
                break
            at += 1
            if word.startswith("--"):
                at += word in _SHELL_VALUES
            else:
                letters += word[1:]
                # `-o` and `-O` take a value, also at the end of a cluster such as `-euo`.
                at += word[-1] in "oO"
        if "c" in letters:
            if at < len(rest):
                if rest[at] is None:
                    self._unreadable("a shell is given a script that is not written out")
                self._script(rest[at] or "", depth)
        elif ("s" in letters or at >= len(rest)) and not _ASKS_ABOUT & set(rest):
            self._unreadable("a shell reads its commands from its input")

    def _find(self, rest: Words, depth: int) -> None:
        at = 0
        while at < len(rest):
            word = rest[at]
            at += 1
            if word is None:
                self._unreadable("the expression of `find` is not written out")
            if word not in _FIND_EXEC:
                continue
            command: list[str | None] = []
            while at < len(rest) and rest[at] not in _FIND_END:
                command.append(rest[at])
                at += 1
            self._command(_fill(command, _PLACEHOLDER), depth)

    def _xargs(self, rest: Words, depth: int) -> None:
        placeholder = _PLACEHOLDER
        for at, word in enumerate(rest):
            if word is not None and word.startswith("-I"):
                placeholder = word[2:] or (rest[at + 1] if at + 1 < len(rest) else None) or _PLACEHOLDER
        for command in self._candidates(rest, 0):
            self._command((*_fill(command, placeholder), None), depth)

    def _wrapper(self, name: str, rest: Words, depth: int) -> None:
        if name == "command" and rest[:1] in {("-v",), ("-V",)}:
            return
        for at, word in enumerate(rest[:-1]):
            short = word is not None and word.startswith("-") and not word.startswith("--")
            runs = name in _SCRIPT_OPTIONS and (
                word == "--command" or (short and word is not None and word.endswith("c"))
            )
            splits = name == "env" and (
                word in {"-S", "--split-string"} or (short and word is not None and word.endswith("S"))
            )
            if runs or splits:
                following = rest[at + 1]
                if following is None:
                    self._unreadable(f"`{name}` is given text that is not written out")
                self._script(following or "", depth)
        if name == "env":
            for word in rest:
                if (
                    word is not None
                    and word.startswith(("-S", "--split-string="))
                    and word not in {"-S", "--split-string"}
                ):
                    self._script(word.removeprefix("--split-string=").removeprefix("-S"), depth)
        for command in self._candidates(rest, _WRAPPERS.get(name, 0)):
            self._command(command, depth)
            if name == "watch":
                self._script(" ".join(word for word in command if word is not None), depth)

    def _candidates(self, rest: Words, own: int) -> list[Words]:
        """Where the wrapped command may begin. A word after an option may be its value or the command: both are tried."""
        found: list[Words] = []
        after_option = False
        for at, word in enumerate(rest):
            if word is None:
                self._unreadable("the command behind a wrapper is not written out")
                break
            if word.startswith("-") and word != "-":
                after_option = word != "--"
                continue
            if _ASSIGNMENT.match(word):
                continue
            found.append(rest[at:])
            if len(found) > _MAX_CANDIDATES:
                self._unreadable("a wrapper has too many options")
                break
            if not after_option:
                if own == 0:
                    break
                own -= 1
            after_option = False
        return found

    def _script(self, script: str, depth: int) -> None:
        """Read a shell script and note its commands."""
        if depth > _MAX_DEPTH or len(script) > _MAX_SCRIPT:
            self._unreadable("a script is nested too deeply or too long")
            return
        try:
            self._statements(list(Lexer(script).tokens()), depth)
        except Unreadable as error:
            self._unreadable(str(error))

    def _statements(self, tokens: Sequence[Token], depth: int) -> None:
        words: list[str | None] = []
        at = 0
        while at < len(tokens):
            item = tokens[at]
            at += 1
            if isinstance(item, ShellWord):
                for script in item.scripts:
                    self._script(script, depth + 1)
                at = self._word(item, words, tokens, at, depth)
            elif item in HERE_DOCUMENTS:
                self._unreadable("a script holds a here-document")
            elif item in REDIRECTIONS:
                at = self._redirection(tokens, at, depth)
            else:
                if item == "(" and words:
                    self._unreadable("a script defines a function")
                self._command(tuple(words), depth)
                words = []
        self._command(tuple(words), depth)

    def _redirection(self, tokens: Sequence[Token], at: int, depth: int) -> int:
        target = tokens[at] if at < len(tokens) else None
        if not isinstance(target, ShellWord):
            return at
        for script in target.scripts:
            self._script(script, depth + 1)
        return at + 1

    def _word(
        self, item: ShellWord, words: list[str | None], tokens: Sequence[Token], at: int, depth: int
    ) -> int:
        """Take one word of a statement; gives the place to go on from."""
        text = item.text
        if not words and not item.quoted and text is not None:
            if text in _KEEP_POSITION:
                return at
            if text in _UNFOLLOWED:
                self._unreadable(f"`{text}` in a script is not followed")
            if text == "[[":
                return self._skip(tokens, at, ("]]",), depth)
            if text == "for":
                return self._skip(tokens, at, ("\n", ";"), depth)
        if words or not _ASSIGNMENT.match(item.prefix):
            words.append(text)
        return at

    def _skip(self, tokens: Sequence[Token], at: int, ends: Sequence[str], depth: int) -> int:
        """Pass over words that are no command, but read what is run to make them."""
        while at < len(tokens):
            item = tokens[at]
            at += 1
            if isinstance(item, ShellWord):
                for script in item.scripts:
                    self._script(script, depth + 1)
            if (item.text if isinstance(item, ShellWord) else item) in ends:
                break
        return at


def _normal(word: str | None) -> str | None:
    """A path in the spelling that rules are likely to use."""
    return posixpath.normpath(word) if word is not None and "/" in word else word


def _fill(words: Sequence[str | None], placeholder: str) -> Words:
    """Words where those that hold a placeholder are unknown."""
    return tuple(None if word is not None and placeholder in word else word for word in words)
