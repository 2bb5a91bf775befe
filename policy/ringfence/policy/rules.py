"""One line of policy: its form in a file, its canonical text, and its compiled patterns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ringfence.policy import strict_yaml
from ringfence.policy.actions import check_action, kind_of
from ringfence.policy.canonical import check_text
from ringfence.policy.matcher import NameSubject, Pattern, compile_pattern, literal_pattern
from ringfence.policy.problems import ManifestError, PatternError, Problem
from ringfence.policy.strict_yaml import Items, Node, Scalar, Table
from ringfence.policy.types import Resource, Verdict

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)
_SPLIT: Final = re.compile(
    r"""\s*(?:"([^"]*)"|'([^']*)'|([A-Za-z0-9_.*/@-]+))\s*(?::(.*))?""", re.ASCII | re.DOTALL
)
_LIST_KEYS: Final = {"llm": "models", "messages": "peers", "a2a": "peers", "spawn": "agents", "sql": "tables"}
_MAX_PATTERNS: Final = 256
_WORKSPACE_NAME: Final = NameSubject("workspace")
_Wrong: TypeAlias = Callable[[Node, str, str], "list[tuple[Node, str]]"]
_ALL: Final = "**"
_FORMS: Final = {
    "path": '"/workspace/out/**"',
    "url": '"https://api.example.com/v1/*"',
    "name": '"NAME"',
    "key": '"jobs/*"',
    "command": '"git status"',
    "table": "{database: NAME, tables: [NAME]}",
    "any": '"**"',
    "none": '"*"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        id: unique among the rules of one agent: `r1` in a manifest, `c1` in the ceilings, a grant's id.
        verdict: what it says.
        action_pattern: `fs.read`, `fs.*` or `*`.
        patterns: canonical patterns, any of which may match; of the kind that the action has.
        text: canonical one-line form; `parse_rule` reads it back to the same rule.
        origin: where it stands, for people: `manifest`, `ceilings`, `grant` or `role NAME`.
        line: where it stands in its file, from 1; 0 outside a file.
        column: the same.
    """

    id: str
    verdict: Verdict
    action_pattern: str
    patterns: tuple[str, ...]
    text: str
    origin: str = "manifest"
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)

    @property
    def kind(self) -> str:
        """Kind of resource that the patterns are of."""
        return kind_of(self.action_pattern)

    @property
    def resource_pattern(self) -> str:
        """The patterns as one text for people."""
        return ", ".join(self.patterns)

    def compiled(self) -> tuple[Pattern, ...]:
        """The patterns as objects that decide."""
        kind = self.kind
        return tuple(compile_pattern(kind, text) for text in self.patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules by verdict, each in the order of the file."""

    allow: tuple[Rule, ...] = ()
    ask: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()

    def __iter__(self) -> Iterator[Rule]:
        yield from (*self.allow, *self.ask, *self.deny)

    def __len__(self) -> int:
        return len(self.allow) + len(self.ask) + len(self.deny)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a rule is given besides its text: its id, its verdict and where it stands."""

    id: str
    verdict: Verdict
    origin: str = "manifest"


def same_rule(one: Rule, other: Rule) -> bool:
    """Whether two rules say the same about the same things, wherever they stand; the order of tables doesn't count."""
    return (
        one.verdict == other.verdict
        and one.action_pattern == other.action_pattern
        and set(one.patterns) == set(other.patterns)
    )


def select_rules(argument: str, rules: Iterable[Rule]) -> list[Rule]:
    """The rules that an argument of `revoke` names: a rule's id, a rule, or an action alone for all its rules.

    Raises:
        ManifestError: the argument is neither an id of these rules nor a rule.
    """
    rules = list(rules)
    if by_id := [rule for rule in rules if rule.id == argument]:
        return by_id
    found = _SPLIT.fullmatch(argument)
    if found is not None and found[4] is None:
        action = found[1] or found[2] or found[3] or ""
        try:
            check_action(action)
        except PatternError as error:
            raise _error(error, 1) from error
        return [rule for rule in rules if rule.action_pattern == action]
    return [rule for rule in rules if same_rule(rule, parse_rule(argument, rule.verdict))]


def rule_for(action: str, resource: Resource) -> str:
    """The text of the narrowest rule that allows one action on one resource, as `ringfence grant` takes it."""
    kind = kind_of(action)
    if kind in {"none", "any"} or not resource:
        return action if kind in {"none", "any"} else f'{action}: "**"'
    if kind == "table" and isinstance(resource, str):
        return render(action, (compile_pattern(kind, literal_pattern(kind, resource)).text,))
    return render(action, (literal_pattern(kind, resource),))


def render(action: str, patterns: Sequence[str]) -> str:
    """The canonical one-line form of a rule."""
    shown = action if action != "*" else '"*"'
    kind = kind_of(action)
    if kind == "none":
        return shown
    if kind == "table":
        return f"{shown}: {_render_tables(patterns)}"
    if len(patterns) == 1:
        return f"{shown}: {_quoted(patterns[0])}"
    key = _LIST_KEYS.get(action.partition(".")[0], "names")
    return f"{shown}: {{{key}: [{', '.join(map(_quoted, patterns))}]}}"


def _render_tables(patterns: Sequence[str]) -> str:
    database = patterns[0].partition("/")[0]
    tables = [pattern.partition("/")[2] for pattern in patterns]
    if tables == [_ALL]:
        return f"{{database: {_plain(database)}}}"
    return f"{{database: {_plain(database)}, tables: [{', '.join(map(_plain, tables))}]}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _plain(text: str) -> str:
    plain = _PLAIN.fullmatch(text) is not None and isinstance(strict_yaml.resolve(text), str)
    return text if plain else _quoted(text)


def _error(error: PatternError, column: int) -> ManifestError:
    return ManifestError([Problem(line=1, column=column, message=error.message, fix=error.fix)], "rule")


def parse_rule(
    text: str, verdict: str = Verdict.ALLOW, *, rule_id: str = "rule", origin: str = "grant"
) -> Rule:
    """Read one rule from a line, as `ringfence grant` takes it and as `Rule.text` has it.

    Accepted: `fs.write: "/workspace/out/**"`, `fs.write:/workspace/out/**`, `sql.read: {database: crm, tables: [a]}`.

    Raises:
        ManifestError: no rule, an unknown action, or a pattern that the grammar refuses.
    """
    found = _SPLIT.fullmatch(text)
    if found is None or "\n" in text:
        raise _error(
            PatternError(
                f"`{_short(text)}` is no rule",
                'write `ACTION: PATTERN`, such as `fs.write: "/workspace/out/**"`',
            ),
            1,
        )
    action = found[1] or found[2] or found[3] or ""
    key = Scalar(line=1, column=1, text=action, value=action)
    value: Node | None = None
    if found[4] is not None:
        raw = found[4].strip()
        at = found.start(4) + len(found[4]) - len(found[4].lstrip()) + 1
        if raw[:1] in {"{", '"', "'", "["}:
            value = _reparse(raw, at)
        else:
            value = Scalar(line=1, column=at, text=raw, value=raw)
    problems: list[Problem] = []
    rule = read_rule(key, value, Label(id=rule_id, verdict=Verdict(verdict), origin=origin), problems)
    if rule is None:
        raise ManifestError(problems, "rule")
    return rule


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."  # noqa: PLR2004


def _reparse(raw: str, at: int) -> Node:
    try:
        return strict_yaml.parse_yaml(raw, "rule")
    except ManifestError as error:
        moved = [
            Problem(line=1, column=item.column + at - 1, message=item.message, fix=item.fix)
            for item in error.problems
        ]
        raise ManifestError(moved, "rule") from error


def read_rule(key: Scalar, value: Node | None, label: Label, problems: list[Problem]) -> Rule | None:
    """Read a rule from its nodes; on a problem, add it and return None. `value` is None where there is no pattern."""
    before = len(problems)
    action = key.text
    try:
        check_action(action)
    except PatternError as error:
        problems.append(Problem(line=key.line, column=key.column, message=error.message, fix=error.fix))
        return None
    patterns: list[str] = []
    for place, text in _pattern_texts(key, value, problems):
        try:
            pattern = compile_rule_pattern(action, text, label.verdict)
        except PatternError as error:
            problems.append(
                Problem(line=place.line, column=place.column, message=error.message, fix=error.fix)
            )
            continue
        if pattern not in patterns:
            patterns.append(pattern)
    if len(problems) > before or not patterns:
        return None
    return Rule(
        id=label.id,
        verdict=label.verdict,
        action_pattern=action,
        patterns=tuple(patterns),
        text=render(action, patterns),
        origin=label.origin,
        line=key.line,
        column=key.column,
    )


def compile_rule_pattern(action: str, text: str, verdict: Verdict) -> str:
    """Check one pattern of a rule and give its canonical text.

    Raises:
        PatternError: the grammar refuses it, or it can never match.
    """
    kind = kind_of(action)
    check_text(text, "pattern")
    if kind in {"any", "none"}:
        if text not in {"*", _ALL}:
            what = "any action" if kind == "any" else f"`{action}`"
            raise PatternError(
                f"a rule on {what} can't name the resource `{text}`",
                'write `"**"`, or name the actions, such as `fs.*`'
                if kind == "any"
                else f"write `{action}` alone",
            )
        return _ALL
    pattern = compile_pattern(kind, text).text
    if kind == "path":
        _check_reachable(pattern, text)
    if kind == "url" and verdict is not Verdict.ALLOW and "?" in pattern:
        raise PatternError(
            f"a rule that says {verdict} can't depend on the query in `{text}`",
            "parameters can be ordered and encoded in many ways: name the path alone",
        )
    return pattern


def _check_reachable(pattern: str, text: str) -> None:
    first = pattern.split("/")[1] if pattern.startswith("/") else _ALL
    if first != _ALL and not compile_pattern("name", first).permits(_WORKSPACE_NAME):
        raise PatternError(
            f"`{text}` can never match: agents see only `/workspace`",
            "write `/workspace/...` or a relative path",
        )


def _pattern_texts(key: Scalar, value: Node | None, problems: list[Problem]) -> list[tuple[Node, str]]:
    """The patterns in a rule's value, each with its place."""
    kind = kind_of(key.text)

    def wrong(node: Node, message: str, fix: str) -> list[tuple[Node, str]]:
        problems.append(Problem(line=node.line, column=node.column, message=message, fix=fix))
        return []

    form = f"write `{key.text}: {_FORMS[kind]}`"
    if value is None or (isinstance(value, Scalar) and value.value is None):
        return (
            [(key, _ALL)] if kind == "none" else wrong(value or key, f"`{key.text}` needs a resource", form)
        )
    if isinstance(value, Scalar):
        if not isinstance(value.value, str):
            return wrong(
                value, f"`{value.text}` is {strict_yaml.kind(value)}, not a pattern", f"{form}, in quotes"
            )
        return [(value, value.text)]
    if isinstance(value, Items):
        return wrong(value, f"`{key.text}` takes one pattern, not a list", f"{form}, one rule for each")
    return _table_texts(value, wrong) if kind == "table" else _list_texts(key, value, form, wrong)


def _list_texts(key: Scalar, value: Table, form: str, wrong: _Wrong) -> list[tuple[Node, str]]:
    """The names in `{models: [...]}` and the like."""
    list_key = _LIST_KEYS.get(key.text.partition(".")[0], "names" if kind_of(key.text) == "name" else "")
    if not list_key:
        return wrong(value, f"`{key.text}` takes a pattern, not a mapping", form)
    texts: list[tuple[Node, str]] = []
    for name, node in value.entries:
        if name.text != list_key:
            wrong(name, f"unknown key `{name.text}`", f"known here: {list_key}")
        else:
            texts = _name_list(node, list_key, wrong)
    if not value.entries:
        wrong(value, f"`{key.text}` names nothing, so it can never match", f"add `{list_key}: [NAME]`")
    return texts


def _table_texts(value: Table, wrong: _Wrong) -> list[tuple[Node, str]]:
    database: Scalar | None = None
    tables: list[tuple[Node, str]] | None = None
    for name, node in value.entries:
        if name.text == "database" and isinstance(node, Scalar) and isinstance(node.value, str) and node.text:
            database = node
        elif name.text == "database":
            return wrong(node, "`database` has to be a name", "write a resource's name")
        elif name.text == "tables":
            tables = _name_list(node, "tables", wrong)
        else:
            wrong(name, f"unknown key `{name.text}`", "known here: database, tables")
    if database is None:
        return wrong(value, "the rule names no database", "add `database: NAME`")
    if "/" in database.text:
        return wrong(
            database,
            f"`{database.text}` is no database",
            "write a resource's name, and tables under `tables`",
        )
    if tables is None:
        return [(database, database.text)]
    return [(node, f"{database.text}/{text}") for node, text in tables]


def _name_list(node: Node, what: str, wrong: _Wrong) -> list[tuple[Node, str]]:
    if not isinstance(node, Items):
        return wrong(node, f"`{what}` has to be a list", f"write `{what}: [NAME]`")
    if not node.items or len(node.items) > _MAX_PATTERNS:
        return wrong(
            node,
            f"`{what}` has {len(node.items)} entries, so the rule can't be used",
            f"name 1 to {_MAX_PATTERNS}",
        )
    texts: list[tuple[Node, str]] = []
    for item in node.items:
        if isinstance(item, Scalar) and isinstance(item.value, str) and item.text:
            texts.append((item, item.text))
        else:
            wrong(
                item,
                f"an entry of `{what}` is {strict_yaml.kind(item)}",
                "write a name, in quotes if it is a number",
            )
    return texts
