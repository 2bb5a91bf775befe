"""Finds the commands inside a command: behind shells, wrappers, substitutions, `xargs` and `find -exec`.

Deny and ask rules look at every part that is found. This is an early refusal for honest mistakes and simple tricks; the
barrier is the sandbox, which masks what may not be read and judges what was changed. What can't be followed is opaque, and
an opaque command needs a person where a rule might have spoken about it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Final

from ringfence.policy import shell_places as places
from ringfence.policy import shell_wrappers as known
from ringfence.policy.shell_evaluating import EVALUATED, SPELLED, evaluator, hints, runs_another
from ringfence.policy.shell_words import (
    CASE_ENDS,
    DUPLICATING,
    ENDS_TO_DASH,
    HERE_DOCUMENTS,
    KEEP_POSITION,
    KEYWORDS,
    REDIRECTIONS,
    REPEATS,
    UNFOLLOWED,
    HereText,
    Lexer,
    ShellWord,
    Token,
    Unreadable,
    Words,
    fill,
    is_input,
    normal,
)

_MAX_DEPTH: Final = 8
_MAX_PARTS: Final = 512
_MAX_CANDIDATES: Final = 16
_MAX_SCRIPT: Final = 64 << 10
# Of all commands and scripts in one together: nothing else waits for a reading without end.
_MAX_WORDS: Final = 1 << 17
_MAX_READ: Final = 1 << 19
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=", re.ASCII)
_PLACEHOLDER: Final = "{}"


class Reading:
    """What was found in one command.

    Attributes:
        parts: words of every command found, the whole command first.
        touches: files that redirections open.
        anywhere: what redirections may do to any file, since where they lead is not written out: `fs.read`, `fs.write`.
        opaque: why something could not be followed; empty where all was read.
    """

    __slots__ = ("_chars", "_hints", "_modes", "_places", "_words", "anywhere", "opaque", "parts", "touches")

    def __init__(self, argv: Sequence[str]) -> None:
        self.parts: list[Words] = []
        self.touches: list[places.Touch] = []
        self.anywhere: set[str] = set()
        self.opaque = ""
        self._places: places.Places = places.Places()
        self._modes: list[places.Mode] = []  # what redirections to relative paths are for, in their order
        self._words = self._chars = 0
        self._hints: set[str] = set()
        self._command(tuple(argv), 0)
        if self._hints == {EVALUATED, SPELLED}:
            self._unreadable("text that spells a command may be evaluated")

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
        # The command itself is looked at however long it is.
        self._words += len(words) if self.parts else 0
        if depth > _MAX_DEPTH or len(self.parts) >= _MAX_PARTS or self._words > _MAX_WORDS:
            self._unreadable("it is nested too deeply")
            return
        if any(char.isspace() for char in program):
            self._unreadable("the name of a program holds white space")
        name = posixpath.basename(program)
        for variant in dict.fromkeys((words, (name, *words[1:]), (name, *map(normal, words[1:])))):
            self.parts.append(variant)
        self._inside(name, words[1:], depth + 1)

    def _inside(self, name: str, rest: Words, depth: int) -> None:
        self._hints |= {EVALUATED} if evaluator(name, rest) else set()
        followed = {"find": self._find, "xargs": self._xargs} | dict.fromkeys(known.SHELLS, self._shell)
        if name in followed:
            followed[name](rest, depth)
        elif name in {"eval", "trap"}:
            script = rest if name == "eval" else rest[:1]
            if any(word is None for word in script):
                self._unreadable(f"`{name}` is given text that is not written out")
            self._script(" ".join(word for word in script if word is not None), depth, apart=False)
        elif name in {".", "source"}:
            if any(is_input(word) for word in rest[:1]):
                self._unreadable("a script reads its commands from its input")
        elif name in known.FOREIGN_SHELLS and not known.ASKS_ABOUT & set(rest):
            self._unreadable(f"`{name}` has a language of its own")
        elif runs_another(name, rest):
            self._unreadable(f"`{name}` can run programs under other names")
        elif name in known.WRAPPERS or known.LOADERS.fullmatch(name):
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
                at += word in known.SHELL_VALUES
            else:
                letters += word[1:]
                # `-o` and `-O` take a value, also at the end of a cluster such as `-euo`.
                at += word[-1] in "oO"
        if "c" in letters:
            if at < len(rest):
                if rest[at] is None:
                    self._unreadable("a shell is given a script that is not written out")
                self._script(rest[at] or "", depth)
        elif ("s" in letters or at >= len(rest) or is_input(rest[at])) and not known.ASKS_ABOUT & set(rest):
            self._unreadable("a shell reads its commands from its input")

    def _find(self, rest: Words, depth: int) -> None:
        at = 0
        while at < len(rest):
            word = rest[at]
            at += 1
            if word is None:
                self._unreadable("the expression of `find` is not written out")
            if word not in known.FIND_EXEC:
                continue
            command: list[str | None] = []
            while at < len(rest) and rest[at] not in known.FIND_END:
                command.append(rest[at])
                at += 1
            here = self._places
            self._places = here.apart(anywhere=word in {"-execdir", "-okdir"})
            self._command(fill(command, _PLACEHOLDER), depth)
            self._places = here

    def _xargs(self, rest: Words, depth: int) -> None:
        placeholder = _PLACEHOLDER
        for at, word in enumerate(rest):
            if word is not None and word.startswith("-I"):
                placeholder = word[2:] or (rest[at + 1] if at + 1 < len(rest) else None) or _PLACEHOLDER
        for command in self._candidates(rest, 0):
            self._command((*fill(command, placeholder), None), depth)

    def _wrapper(self, name: str, rest: Words, depth: int) -> None:
        if name == "command" and rest[:1] in {("-v",), ("-V",)}:
            return
        moved = name in known.ELSEWHERE or (
            name == "env" and any(word is None or word.startswith(known.CHDIR) for word in rest)
        )
        here = self._places
        self._places = here.apart(anywhere=moved)
        for at, word in enumerate(rest[:-1]):
            short = word is not None and word.startswith("-") and not word.startswith("--")
            runs = name in known.SCRIPT_OPTIONS and (
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
        for command in self._candidates(rest, known.WRAPPERS.get(name, 0)):
            self._command(command, depth)
            if name == "watch":
                self._script(" ".join(word for word in command if word is not None), depth)
        self._places = here

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

    def _script(self, script: str, depth: int, *, apart: bool = True) -> None:
        """Read a shell script and note its commands; `apart`: a process of its own runs it."""
        self._chars += len(script)
        if depth > _MAX_DEPTH or len(script) > _MAX_SCRIPT or self._chars > _MAX_READ:
            self._unreadable("a script is nested too deeply or too long")
            return
        here = self._places
        if apart:
            self._places = here.apart()
        try:
            tokens = list(Lexer(script).tokens())
            self._hints |= hints(script, tokens)
            self._statements(tokens, depth)
        except Unreadable as error:
            self._unreadable(str(error))
        self._places = here

    def _statements(self, tokens: Sequence[Token], depth: int) -> None:
        words: list[str | None] = []
        around: list[places.Places] = []  # those of what is around each subshell that is open
        at = cases = 0
        begun = cut = (
            False  # whether a word that comes now is no keyword any more, and whether some shells ended the command
        )
        while at < len(tokens):
            item = tokens[at]
            at += 1
            if isinstance(item, HereText):
                self._scripts(item.scripts, depth)
            elif isinstance(item, ShellWord):
                self._scripts(item.scripts, depth)
                keyword = not words and not item.quoted and item.text in KEYWORDS
                self._ambiguous_word(item, keyword=keyword, begun=begun, cut=cut)
                cases += keyword and item.text == "case"
                at = self._word(item, words, tokens, at, depth)
                begun = begun or not keyword
            elif item in HERE_DOCUMENTS or item in REDIRECTIONS:
                cut = cut or item in ENDS_TO_DASH
                if item in ENDS_TO_DASH and words and (words[0] is None or words[0] in places.MOVERS):
                    self._unreadable(f"`{item}` ends a command to some shells")
                at = self._redirection(item, tokens, at, depth)
                begun = True
            elif item == "(" and len(words) == 1 and tokens[at : at + 1] == [")"]:
                # A function. Its body is read here, and what it is called with is unknown in it.
                self._places.repeats(len(self._modes))
                words, at, begun, cut = [], at + 1, False, False
            else:
                self._operator(words, item, around, depth)
                words, begun, cut = [], False, False
                if cases and item in CASE_ENDS:
                    at = self._patterns(tokens, at, depth)
        self._end(words, "", depth)

    def _operator(
        self, words: Sequence[str | None], item: str, around: list[places.Places], depth: int
    ) -> None:
        """A command ends, and with it a subshell may; or one begins."""
        if item == "(" and not words:
            around.append(self._places)
            self._places = self._places.within()
            return
        if item == "(":
            self._unreadable("a bracket in a script is not followed")
        self._end(words, item, depth)
        if item == ")" and around:
            self._places = around.pop()

    def _ambiguous_word(self, item: ShellWord, *, keyword: bool, begun: bool, cut: bool) -> None:
        """Give up where shells read what a word is in different ways."""
        if item.piped:
            self._unreadable("`<(…)` and `>(…)` are not followed")
        if cut:
            self._unreadable("`&>` in the middle of a command ends it to some shells")
        if keyword and begun:
            self._unreadable(f"`{item.text}` behind a redirection or an assignment is no keyword")

    def _end(self, words: Sequence[str | None], operator: str, depth: int) -> None:
        self._command(tuple(words), depth)
        again = self._places.moves(words)
        if again is not None:
            for mode in self._modes[again:]:
                self.anywhere |= set(places.ACTIONS[mode])
        self._places.ends(operator)

    def _scripts(self, scripts: Sequence[str], depth: int) -> None:
        for script in scripts:
            self._script(script, depth + 1)

    def _redirection(self, operator: str, tokens: Sequence[Token], at: int, depth: int) -> int:
        target = tokens[at] if at < len(tokens) else None
        if not isinstance(target, ShellWord):
            return at
        self._scripts(target.scripts, depth)
        mode = places.MODES.get(operator)
        if mode is None or (target.text is not None and places.duplicates(operator, target.text)):
            return at + 1
        # Bash takes quotes behind `>&` away in a way of its own.
        unknown = target.text is None or target.tilde or (operator in DUPLICATING and target.quoted)
        found = None if unknown else self._places.touched(mode, target.text or "")
        if not (target.text or "").startswith("/"):
            self._modes.append(mode)
        if found is None:
            self.anywhere |= set(places.ACTIONS[mode])
        elif places.too_many(self.touches):
            self._unreadable("it redirects too often")
        else:
            self.touches.extend(found)
        return at + 1

    def _word(
        self, item: ShellWord, words: list[str | None], tokens: Sequence[Token], at: int, depth: int
    ) -> int:
        """Take one word of a statement; gives the place to go on from."""
        text = item.text
        if not words and not item.quoted and text is not None:
            if text in REPEATS:
                self._places.repeats(len(self._modes))
            if text in KEEP_POSITION:
                return at
            if text in UNFOLLOWED:
                self._unreadable(f"`{text}` in a script is not followed")
            if text == "[[":
                return self._skip(tokens, at, ("]]",), depth)
            if text in {"for", "select"}:
                return self._skip(tokens, at, ("\n", ";"), depth)
            if text == "function":
                # Its name; brackets behind it, if any, are a subshell's that runs nothing.
                return at + 1
            if text == "case":
                return self._patterns(tokens, self._skip(tokens, at, ("in",), depth), depth)
        if words or not _ASSIGNMENT.match(item.prefix):
            words.append(text)
        return at

    def _patterns(self, tokens: Sequence[Token], at: int, depth: int) -> int:
        """Pass over the patterns of one branch of a `case`, or stop at its end."""
        while at < len(tokens) and tokens[at] in {"\n", "("}:
            at += 1
        first = tokens[at] if at < len(tokens) else None
        if isinstance(first, ShellWord) and first.text == "esac" and not first.quoted:
            return at
        return self._skip(tokens, at, (")",), depth)

    def _skip(self, tokens: Sequence[Token], at: int, ends: Sequence[str], depth: int) -> int:
        """Pass over words that are no command, but read what is run to make them."""
        while at < len(tokens):
            item = tokens[at]
            at += 1
            if isinstance(item, HereText):
                self._scripts(item.scripts, depth)
                continue
            if isinstance(item, ShellWord):
                self._scripts(item.scripts, depth)
            if (item.text if isinstance(item, ShellWord) else item) in ends:
                break
        return at


def redirections(argv: Sequence[str], cwd: str, root: str) -> list[tuple[str, str]]:
    """The files below a root that the shell scripts in a command open by redirections, as pairs of action and path.

    Args:
        argv: words of the command.
        cwd: absolute directory in which it begins.
        root: of the workspace.
    """
    return places.opened(Reading(argv).touches, cwd, root)
