"""Single rules that allow more, or guard less, than they look like."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from ringfence.policy.actions import applies
from ringfence.policy.glob import MANY, Many, Segment
from ringfence.policy.lookalikes import unmasked
from ringfence.policy.matcher import CommandPattern
from ringfence.policy.patterns import AnyPattern, NamePattern, TablePattern, TreePattern, UrlPattern
from ringfence.policy.problems import Problem
from ringfence.policy.rules import Rule, Rules
from ringfence.policy.types import Verdict

_ACE: Final = re.compile(r"\bxn--([a-z0-9-]+)", re.ASCII)
_RUNNERS: Final = frozenset(
    (
        *(
            "sh",
            "bash",
            "dash",
            "ash",
            "zsh",
            "ksh",
            "fish",
            "env",
            "xargs",
            "timeout",
            "nice",
            "nohup",
            "sudo",
        ),
        *("su", "doas", "ssh", "watch", "strace", "gdb", "eval", "find", "parallel", "busybox", "setsid"),
        *("python", "python3", "node", "deno", "bun", "perl", "ruby", "php", "lua", "awk", "gawk", "tclsh"),
        *(
            "java",
            "go",
            "cargo",
            "npm",
            "npx",
            "yarn",
            "pnpm",
            "pip",
            "pip3",
            "uv",
            "uvx",
            "make",
            "cmake",
            "ninja",
        ),
        *(
            "docker",
            "podman",
            "kubectl",
            "git",
            "vim",
            "vi",
            "emacs",
            "less",
            "man",
            "tar",
            "rsync",
            "sed",
            "psql",
        ),
    )
)
"""Programs that run others, or code that their arguments hold."""

_LATE_RUNNERS: Final = {
    **dict.fromkeys(("find",), "`-exec` and `-delete`"),
    **dict.fromkeys(("tar", "gtar", "bsdtar"), "`--to-command` and `--checkpoint-action`"),
    **dict.fromkeys(("sed", "gsed"), "`-i` and an `e` in a further script"),
    **dict.fromkeys(("rsync", "scp"), "another program to connect by"),
    **dict.fromkeys(("sort",), "`--compress-program` and `-o`"),
    **dict.fromkeys(
        ("env", "xargs", "timeout", "nice", "nohup", "setsid", "sudo", "watch", "busybox"), "a program"
    ),
}
"""Programs of which further words may run others or write, whatever stands before them."""

_HTTP_READS: Final = ("http.get", "http.head")
_HOST_LABELS: Final = 2
"""From so many fixed labels at its end on a host belongs to somebody."""


def _at(rule: Rule, message: str, fix: str = "") -> Problem:
    return Problem(line=rule.line, column=rule.column, message=message, fix=fix)


def too_wide(rule: Rule) -> Iterator[Problem]:
    """An allow rule that lets through more than one would write on purpose."""
    for pattern in rule.compiled():
        if rule.action_pattern == "*":
            yield _at(rule, f"`{rule.text}` allows every action on everything", "name actions and resources")
        elif isinstance(pattern, CommandPattern):
            yield from _wide_command(rule, pattern)
        elif isinstance(pattern, UrlPattern):
            yield from _wide_url(rule, pattern)
        elif isinstance(pattern, AnyPattern) and rule.kind == "url":
            yield _at(
                rule, f"`{rule.text}` allows every URL of every declared resource", "name hosts and paths"
            )
        elif isinstance(pattern, TablePattern):
            yield from _wide_table(rule, pattern)
        elif isinstance(pattern, TreePattern) and _of_state(rule) and pattern.pieces == (MANY,):
            yield _at(
                rule, f"`{rule.text}` reaches the keys of every agent", "name a prefix, such as `jobs/**`"
            )
        elif isinstance(pattern, NamePattern) and pattern.segment.parts == ("", ""):
            yield from _wide_name(rule)


def _of_state(rule: Rule) -> bool:
    return rule.action_pattern.startswith("state.")


def _wide_command(rule: Rule, pattern: CommandPattern) -> Iterator[Problem]:
    if len(pattern.words) == 0:
        yield _at(rule, f"`{rule.text}` allows every command", "name programs and their arguments")
        return
    program = pattern.words[0]
    if program.whole or len(program.parts) > 1:
        yield _at(rule, f"`{rule.text}` allows every program of that form", "write the program's name")
        return
    name = "".join(program.parts).rpartition("/")[2]
    free = pattern.rest or any(word.whole for word in pattern.words[1:])
    # `git status *` names what is done; `git *` also runs whatever a setting or an alias says.
    if name in _RUNNERS and free and (len(pattern.words) == 1 or pattern.words[1].parts[0].startswith("-")):
        text = f"`{rule.text}` allows any program: `{name}` runs what its arguments say"
        yield _at(rule, text, f"name the arguments, such as `{name} FILE`")
    elif pattern.rest and name in _LATE_RUNNERS:
        text = (
            f"`{rule.text}` allows more than it looks: further words of `{name}` may be {_LATE_RUNNERS[name]}"
        )
        yield _at(rule, text, "write all words, with `*` where one may differ")


def _wide_url(rule: Rule, pattern: UrlPattern) -> Iterator[Problem]:
    fixed = 0
    for label in reversed(pattern.labels):
        if isinstance(label, Many) or label.literal is None:
            break
        fixed += 1
    wild = fixed < len(pattern.labels)
    if wild and fixed < _HOST_LABELS:
        yield _at(
            rule, f"the host in `{rule.text}` can be anybody's", "end it in a domain, as `*.example.com`"
        )
    if rule.action_pattern == "http.*" and pattern.path == (MANY,):
        text = f"`{rule.text}` allows to write and delete everywhere on its host"
        yield _at(rule, text, "name verbs and paths, such as `http.get`")
    host = "" if isinstance(pattern.labels[0], Many) else pattern.labels[0].literal or ""
    local = host in {"127", "localhost"} or host.startswith("[")
    if pattern.scheme == "http" and not local:
        yield _at(rule, f"`{rule.text}` sends in the clear", "write `https://`")


def _wide_table(rule: Rule, pattern: TablePattern) -> Iterator[Problem]:
    if pattern.database.literal is None:
        yield _at(rule, f"`{rule.text}` reaches every database of that form", "name the database")
    elif pattern.tables == (MANY,) and not applies("sql.read", rule.action_pattern, forbids=False):
        yield _at(rule, f"`{rule.text}` allows to change every table", "name them under `tables`")


def _wide_name(rule: Rule) -> Iterator[Problem]:
    if rule.action_pattern == "messages.send":
        yield _at(rule, f"`{rule.text}` lets it write to every agent", "name the peers")
    elif rule.action_pattern in {"a2a.send", "a2a.*"}:
        yield _at(rule, f"`{rule.text}` lets it write to every declared agent elsewhere", "name the peers")
    elif rule.action_pattern.startswith("mcp.") and "*" in rule.action_pattern:
        yield _at(rule, f"`{rule.text}` allows all of them", "name what is to be allowed")


def disguised(rule: Rule) -> Iterator[Problem]:
    """A rule with letters of another script that look like ASCII ones, in a host's `xn--` labels too."""
    written = _ACE.sub(_spelled, rule.text)
    shown = unmasked(written)
    if shown != written:
        text = f"`{shown}` has letters that only look like ASCII ones, and is about nothing that is written in ASCII"
        yield _at(rule, text, "type them anew, unless they are meant")


def _spelled(label: re.Match[str]) -> str:
    try:
        return label[1].encode("ascii").decode("punycode")
    except UnicodeError:
        return label[0]


def lookalikes(rule: Rule) -> Iterator[Problem]:
    """A rule whose pattern says less than it looks like."""
    forbids = rule.verdict is not Verdict.ALLOW
    for pattern in rule.compiled():
        if isinstance(pattern, UrlPattern):
            first = pattern.labels[0]
            if (
                forbids
                and not isinstance(first, Many)
                and first.parts == ("", "")
                and len(pattern.labels) > 1
            ):
                host = pattern.text.partition("://")[2].partition("/")[0]
                text = f"`{host}` is one label before the rest: neither the bare host nor deeper ones"
                yield _at(rule, text, f"write `*{host}` for all of them")
            continue
        # Beside an ask that says too little, what nothing allows is denied all the same.
        if rule.verdict is not Verdict.DENY or not isinstance(pattern, TreePattern) or rule.kind != "path":
            continue
        last = pattern.pieces[-1]
        if isinstance(last, Many):
            continue
        if last.parts == ("", ""):
            text = f"`{pattern.text}` is one level: nothing deeper is meant by `{rule.text}`"
            yield _at(rule, text, f"write `{pattern.text}*`")
        elif last.literal is not None and "." not in last.literal and len(pattern.pieces) > 1:
            text = f"`{pattern.text}` is that path alone: if it is a directory, nothing in it is meant"
            yield _at(rule, text, f"write `{pattern.text}/**`")


def weak_denies(rules: Rules, every: Iterable[Rule]) -> Iterator[Problem]:
    """Deny and ask rules that something else leads around.

    Args:
        rules: of one file.
        every: all rules that hold beside them.
    """
    allows = [rule for rule in every if rule.verdict is Verdict.ALLOW]
    runs = next(
        (r for r in allows for p in r.compiled() if isinstance(p, CommandPattern) and _runs_any(p)), None
    )
    for rule in (*rules.deny, *rules.ask):
        if rule.kind == "command" and runs is not None:
            text = f"`{rule.text}` stops only those words: `{runs.text}` can do the same by another program"
            yield _at(rule, text, "guard what matters with rules on `fs.write`, `fs.delete` and `fs.read`")
        if rule.action_pattern == "fs.write" and rule.verdict is Verdict.DENY:
            deletes = next((a for a in allows if _lets_delete(a, rule)), None)
            shut = any(
                applies(d.action_pattern, "fs.delete", forbids=True) for d in rules.deny if d is not rule
            )
            if deletes is not None and not shut:
                text = f"`{rule.text}` leaves deleting to `{deletes.text}`"
                yield _at(rule, text, "write `fs.*`, or deny `fs.delete` too")


def other_cases(rules: Rules, every: Iterable[Rule]) -> Iterator[Problem]:
    """Deny and ask rules on URLs whose path is allowed in other letters: paths tell capitals from small letters.

    Args:
        rules: of one file.
        every: all rules that hold beside them.
    """
    allows = [rule for rule in every if rule.verdict is Verdict.ALLOW]
    for rule in (*rules.deny, *rules.ask):
        for pattern in rule.compiled():
            others = _in_other_case(pattern) if isinstance(pattern, UrlPattern) else []
            lets = next((a for a in allows if any(_lets(a, rule, other) for other in others)), None)
            if lets is not None:
                text = f"`{rule.text}` leaves the same path in other capitals to `{lets.text}`"
                yield _at(
                    rule, text, "where the server doesn't tell them apart, allow single paths instead of many"
                )


def _in_other_case(pattern: UrlPattern) -> list[UrlPattern]:
    """The pattern with one segment of its path in other capitals, for each that has letters."""
    found: list[UrlPattern] = []
    for at, piece in enumerate(pattern.path):
        if not isinstance(piece, Many):
            swapped = Segment(tuple(part.swapcase() if part.isascii() else part for part in piece.parts))
            found.append(replace(pattern, path=(*pattern.path[:at], swapped, *pattern.path[at + 1 :])))
    return [other for other in found if not pattern.covers(other)]


def _lets(allow: Rule, forbids: Rule, pattern: UrlPattern) -> bool:
    return any(one.covers(pattern) for one in allow.compiled()) and (
        applies(forbids.action_pattern, allow.action_pattern, forbids=True)
        or applies(allow.action_pattern, forbids.action_pattern, forbids=False)
    )


def _runs_any(pattern: CommandPattern) -> bool:
    if len(pattern.words) == 0:
        return True
    program = pattern.words[0]
    name = "" if len(program.parts) > 1 else "".join(program.parts).rpartition("/")[2]
    return pattern.rest and len(pattern.words) == 1 and (not name or name in _RUNNERS)


def _lets_delete(allow: Rule, deny: Rule) -> bool:
    if not applies(allow.action_pattern, "fs.delete", forbids=False):
        return False
    return any(mine.covers(theirs) for mine in allow.compiled() for theirs in deny.compiled())
