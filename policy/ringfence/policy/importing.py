"""Turns permission settings that people already have, lists of `Tool(spec)`, into the rules of a manifest.

INVARIANT: never wider. An allow becomes a rule that says the same or less; a deny or ask one that says the same or more.
What can't be said that way is left out of an allow, made wider in a deny or ask, and named in a comment either way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from ringfence.policy.canonical import check_text
from ringfence.policy.coverage import covers
from ringfence.policy.importing_tools import TOOLS, Said, mcp
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.problems import ManifestError, PatternError, Problem
from ringfence.policy.rules import Rule, parse_rule, render
from ringfence.policy.types import Verdict

_ENTRY: Final = re.compile(r"([A-Za-z][A-Za-z0-9_*-]{0,127})(?:\((.*)\))?", re.ASCII | re.DOTALL)
_LISTS: Final = (Verdict.ALLOW, Verdict.ASK, Verdict.DENY)
_MAX: Final = 1000
_KNOWN_KEYS: Final = frozenset(("allow", "ask", "deny"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What became of an entry beside its rules, for people."""

    verdict: str
    entry: str
    text: str


@dataclass(slots=True, kw_only=True)
class Imported:
    """Rules by verdict, each with the entry that it comes from, and what people have to know."""

    rules: dict[Verdict, list[tuple[Rule, str]]] = field(
        default_factory=lambda: {verdict: list[tuple[Rule, str]]() for verdict in _LISTS}
    )
    notes: list[Note] = field(default_factory=list[Note])

    def texts(self, verdict: Verdict) -> list[str]:
        """Rules as texts."""
        return [rule.text for rule, _ in self.rules[verdict]]


def import_settings(text: str, source: str = "settings") -> Imported:
    """Read settings: a JSON object with `permissions`, or with the lists themselves.

    Raises:
        ManifestError: it is no JSON, or an entry is no `Tool` or `Tool(spec)`.
    """
    found = Imported()
    lists = _lists(text, source, found)
    problems: list[Problem] = []
    for verdict in _LISTS:
        for nr, entry in enumerate(lists[verdict], 1):
            _entry(found, verdict, nr, entry, problems)
    if problems:
        raise ManifestError(problems, source)
    _drop_denied(found)
    return found


def _wrong(source: str, message: str, fix: str, line: int = 1, column: int = 1) -> ManifestError:
    return ManifestError([Problem(line=line, column=column, message=message, fix=fix)], source)


def _document(text: str, source: str) -> Mapping[str, object]:
    try:
        document: object = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        fix = "write settings as JSON without comments"
        raise _wrong(source, f"it is no JSON: {error.msg.lower()}", fix, error.lineno, error.colno) from error
    except (ValueError, RecursionError) as error:
        raise _wrong(source, f"it can't be read: {error}", "write each key once") from error
    if not isinstance(document, Mapping):
        raise _wrong(source, "it is no JSON object", 'write `{"permissions": {"allow": ["Read(./src/**)"]}}`')
    return cast("Mapping[str, object]", document)


def _lists(text: str, source: str, found: Imported) -> dict[Verdict, list[Any]]:
    settings = _document(text, source)
    permissions: object = settings.get("permissions", settings)
    if not isinstance(permissions, Mapping):
        raise _wrong(source, "`permissions` is no object", 'write `{"allow": [], "ask": [], "deny": []}`')
    given = cast("Mapping[str, object]", permissions)
    if not any(key in given for key in _KNOWN_KEYS):
        fix = 'write `{"permissions": {"allow": []}}`'
        raise _wrong(source, "it has no list `allow`, `ask` or `deny`", fix)
    lists: dict[Verdict, list[Any]] = {}
    for verdict in _LISTS:
        value: object = given.get(verdict.value, [])
        if not isinstance(value, list) or len(cast("list[Any]", value)) > _MAX:
            text = f"`{verdict}` is no list of at most {_MAX} entries"
            raise _wrong(source, text, 'write `["Read(./src/**)"]`')
        lists[verdict] = cast("list[Any]", value)
    for key in given:
        if key not in _KNOWN_KEYS and (given is not settings or key in _SETTINGS):
            found.notes.append(Note(verdict="", entry=key, text=_SETTINGS.get(key, "has no counterpart")))
    return lists


_SETTINGS: Final = {
    "defaultMode": "is not taken over: what nothing allows is denied",
    "additionalDirectories": "are not taken over: an agent sees its workspace alone",
    "disableBypassPermissionsMode": "is always so: nothing passes by the rules",
}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the key `{twice[:80]}` stands there twice")
    return dict(pairs)


def _entry(found: Imported, verdict: Verdict, nr: int, entry: Any, problems: list[Problem]) -> None:
    wrong = _no_entry(entry)
    if wrong:
        message = f"entry {nr} of `{verdict}` {wrong}"
        problems.append(Problem(line=1, column=1, message=message, fix="write `Tool` or `Tool(spec)`"))
        return
    parts = _ENTRY.fullmatch(entry.strip())
    assert parts is not None  # noqa: S101 - looked at above
    said = _said(parts[1], (parts[2] or "").strip(), verdict)
    for note in said.notes:
        found.notes.append(Note(verdict=verdict.value, entry=entry, text=note))
    for action, patterns in said.rules:
        for pattern in patterns:
            _add(found, verdict, entry, action, pattern)


def _no_entry(entry: Any) -> str:
    """What is wrong with an entry; empty: nothing."""
    if not isinstance(entry, str):
        return "is no text"
    try:
        check_text(entry, "entry")
    except PatternError as error:
        return f"can't be read: {error.message}"
    return "" if _ENTRY.fullmatch(entry.strip()) else f"is `{entry[:80]}`"


def _add(found: Imported, verdict: Verdict, entry: str, action: str, pattern: str) -> None:
    rule = _rule(action, pattern, verdict)
    if rule is None:
        text = f"`{pattern}` can't be said for `{action}`"
        if verdict is not Verdict.ALLOW:
            every = "*" if action.startswith(("exec", "spawn", "mcp")) else "**"
            rule, text = _rule(action, every, verdict), f"{text}, so all of `{action}` is meant"
        found.notes.append(Note(verdict=verdict.value, entry=entry, text=text))
    if rule is not None and rule.text not in found.texts(verdict):
        found.rules[verdict].append((rule, entry))


def _said(tool: str, spec: str, verdict: Verdict) -> Said:
    if tool.startswith("mcp__"):
        return mcp(tool, spec, verdict)
    reader = TOOLS.get(tool)
    if reader is None:
        gone = "no such tool exists here" if verdict is Verdict.DENY else "has no counterpart"
        return Said(notes=(gone,))
    return reader(spec, verdict)


def _rule(action: str, pattern: str, verdict: Verdict) -> Rule | None:
    try:
        return parse_rule(render(action, (pattern,)), verdict)
    except (ManifestError, PatternError):
        return None


def _drop_denied(found: Imported) -> None:
    """Leave out what can never have a say: a manifest takes no such rule."""
    denies = [rule for rule, _ in found.rules[Verdict.DENY]]
    for verdict in (Verdict.ALLOW, Verdict.ASK):
        kept: list[tuple[Rule, str]] = []
        for rule, entry in found.rules[verdict]:
            deny = next((deny for deny in denies if covers(deny, rule)), None)
            if deny is None:
                kept.append((rule, entry))
                continue
            text = f"`{rule.text}` is left out: `{deny.text}` denies all of it"
            found.notes.append(Note(verdict=verdict.value, entry=entry, text=text))
        found.rules[verdict] = kept


def as_manifest(found: Imported, name: str, source: str) -> str:
    """The whole manifest as text, with a comment for all that is not said by a rule.

    Raises:
        ManifestError: the name is none.
    """
    lines = [
        f"# From {_comment(source)}. Write what to run, and read each rule before you use it.",
        "# A command's changes are judged as fs.write and fs.delete: allow those for what commands are to write.",
        "apiVersion: ringfence/v1",
        "kind: Agent",
        f"metadata: {{name: {json.dumps(name)}}}",
        "spec:",
        "  run: {command: [python, agent.py]}",
        "  permissions:",
    ]
    for verdict in _LISTS:
        rules = found.rules[verdict]
        lines.append(f"    {verdict}:" if rules else f"    {verdict}: []")
        lines += [f"      - {rule.text}  # {_comment(entry)}" for rule, entry in rules]
    if found.notes:
        lines.append("  # Not said by a rule, or not as it was:")
        lines += [f"  #   {_noted(note)}" for note in found.notes]
    text = "\n".join(lines) + "\n"
    parse_manifest(text, "imported")
    return text


def _noted(note: Note) -> str:
    head = f"{note.verdict} " if note.verdict else ""
    return f"{head}{_comment(note.entry)}: {_comment(note.text)}"


def _comment(text: str) -> str:
    """One line that nothing can leave."""
    return "".join(char if char.isprintable() else " " for char in text)[:300]


def documents(notes: Sequence[Note]) -> list[dict[str, str]]:
    """Notes as scripts read them."""
    return [{"list": note.verdict, "entry": note.entry, "note": note.text} for note in notes]
