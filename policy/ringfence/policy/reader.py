"""Reads typed values from a strict tree and collects what is wrong, so that a person sees all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from ringfence.policy.actions import check_action
from ringfence.policy.canonical import check_text
from ringfence.policy.problems import ManifestError, PatternError, Problem
from ringfence.policy.rules import Label, Rule, Rules, read_rule
from ringfence.policy.strict_yaml import Items, Node, Scalar, Table, kind, parse_yaml
from ringfence.policy.types import Verdict
from ringfence.policy.units import Rate, parse_count, parse_duration, parse_rate, parse_size

T = TypeVar("T")
API_VERSION: Final = "ringfence/v1"
MAX_RULES: Final = 1000
_MAX_VALUE: Final = 1 << 50

Fields = dict[str, tuple[Scalar, Node]]


class Numbers:
    """Numbers the rules of one origin: `r1`, `r2` and so on."""

    def __init__(self, origin: str, prefix: str) -> None:
        self.origin: Final = origin
        self._prefix: Final = prefix
        self._count = 0

    def next(self) -> str:
        """The next id."""
        self._count += 1
        return f"{self._prefix}{self._count}"


class Reader:
    """One reading of one file."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.later: list[Problem] = []

    def unsupported(self, node: Node, what: str, fix: str) -> None:
        """Note something that is well-formed and can't be enforced by this release."""
        message = f"{what} is not supported in this release"
        self.later.append(Problem(line=node.line, column=node.column, message=message, fix=fix))

    def wrong(self, node: Node, message: str, fix: str = "") -> None:
        """Note a problem at a node."""
        self.problems.append(Problem(line=node.line, column=node.column, message=message, fix=fix))

    def finish(self) -> None:
        """End the reading.

        Raises:
            ManifestError: if any problem was noted. It names what comes later too, so that nobody mends a file in two rounds.
        """
        if self.problems:
            raise ManifestError([*self.problems, *self.later], self.source)

    def mapping(self, node: Node, what: str, keys: Sequence[str]) -> Fields:
        """A mapping with known keys only; empty on a problem."""
        if not isinstance(node, Table):
            self.wrong(node, f"`{what}` is {kind(node)}", f"write a mapping with: {', '.join(keys)}")
            return {}
        fields: Fields = {}
        for key, value in node.entries:
            if key.text not in keys:
                near = _nearest(key.text, keys)
                self.wrong(key, f"unknown key `{key.text}` in {what}", f"known here: {', '.join(keys)}{near}")
            else:
                fields[key.text] = (key, value)
        return fields

    def free_mapping(self, node: Node, what: str) -> list[tuple[Scalar, Node]]:
        """A mapping whose keys are the author's; empty on a problem."""
        if not isinstance(node, Table):
            self.wrong(node, f"`{what}` is {kind(node)}", "write a mapping")
            return []
        return node.entries

    def items(self, node: Node, what: str) -> list[Node]:
        """A list; empty on a problem."""
        if not isinstance(node, Items):
            self.wrong(node, f"`{what}` is {kind(node)}", "write a list")
            return []
        return node.items

    def text(self, node: Node, what: str, *, empty: bool = False) -> str | None:
        """A text without control characters."""
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            self.wrong(
                node, f"`{what}` is {kind(node)}", "write text, in quotes if it looks like something else"
            )
            return None
        return self._checked(node, what, empty=empty)

    def action(self, node: Node, what: str) -> str:
        """An action or a pattern of actions; empty where it is none."""
        action = self.text(node, what)
        if action is None:
            return ""
        try:
            check_action(action)
        except PatternError as error:
            self.wrong(node, error.message, error.fix)
            return ""
        return action

    def loose_text(self, node: Node, what: str) -> str | None:
        """A text, where a number or a truth value counts as it is written."""
        if not isinstance(node, Scalar) or node.value is None:
            self.wrong(node, f"`{what}` is {kind(node)}", 'write text; `""` if it has to be empty')
            return None
        return self._checked(node, what, empty=True)

    def _checked(self, node: Scalar, what: str, *, empty: bool) -> str | None:
        try:
            check_text(node.text, "text")
        except PatternError as error:
            self.wrong(node, f"`{what}`: {error.message}", error.fix)
            return None
        if not node.text and not empty:
            self.wrong(node, f"`{what}` is empty", "write something")
            return None
        return node.text

    def choice(self, node: Node, what: str, choices: Sequence[str], default: str) -> str:
        """One of several words; the default on a problem."""
        if isinstance(node, Scalar) and node.text in choices:
            return node.text
        shown = f"`{node.text}`" if isinstance(node, Scalar) else kind(node)
        self.wrong(node, f"`{what}` is {shown}", f"write one of: {', '.join(choices)}")
        return default

    def flag(self, node: Node, what: str) -> bool:
        """A truth value; False on a problem."""
        if isinstance(node, Scalar) and isinstance(node.value, bool):
            return node.value
        self._number_problem(node, what, "write `true` or `false`")
        return False

    def integer(self, node: Node, what: str, low: int, high: int, default: int) -> int:
        """A whole number in bounds; the default on a problem."""
        if isinstance(node, Scalar) and type(node.value) is int and low <= node.value <= high:
            return node.value
        self._number_problem(node, what, f"write a whole number from {low} to {high}")
        return default

    def number(self, node: Node, what: str, low: float, high: float, default: float) -> float:
        """A number in bounds; the default on a problem."""
        if isinstance(node, Scalar) and type(node.value) in {int, float} and low <= float(node.text) <= high:
            return float(node.text)
        self._number_problem(node, what, f"write a number from {low:.12g} to {high:.12g}")
        return default

    def size(self, node: Node, what: str, low: int, default: int) -> int:
        """Bytes, such as `256Mi`."""
        value = self._unit(node, parse_size)
        if value is not None and low <= value <= _MAX_VALUE:
            return value
        self._number_problem(node, what, f"write a size such as `256Mi` or `1Gi`, at least {low} bytes")
        return default

    def duration(self, node: Node, what: str, default: float) -> float:
        """Seconds, such as `30s`, `15m`, `2h`; more than zero."""
        value = self._unit(node, parse_duration)
        if value:
            return value
        self._number_problem(node, what, "write a duration such as `30s`, `15m` or `2h`")
        return default

    def count(self, node: Node, what: str, default: float) -> float:
        """A number, such as `10000`, `200k` or `5.00`."""
        value = self._unit(node, parse_count)
        if value is not None:
            return value
        self._number_problem(node, what, "write a number such as `10000`, `200k` or `5.00`")
        return default

    def rate(self, node: Node, what: str) -> Rate | None:
        """A rate, such as `10/s`."""
        value = self._unit(node, parse_rate)
        if value is None:
            self._number_problem(node, what, "write a rate such as `10/s`, `60/m` or `5/h`")
        return value

    def _unit(self, node: Node, parse: Callable[[str], T | None]) -> T | None:
        return parse(node.text) if isinstance(node, Scalar) else None

    def _number_problem(self, node: Node, what: str, fix: str) -> None:
        shown = f"`{node.text}`" if isinstance(node, Scalar) and node.text else kind(node)
        self.wrong(node, f"`{what}` is {shown}", fix)

    def rules(self, node: Node, what: str, verdict: Verdict, numbers: Numbers) -> tuple[Rule, ...]:
        """A list of rules; those with a problem are left out."""
        found: list[Rule] = []
        items = self.items(node, what)
        if len(items) > MAX_RULES:
            self.wrong(
                node, f"`{what}` has {len(items)} rules", f"at most {MAX_RULES} are accepted; use `**`"
            )
            return ()
        for item in items:
            label = Label(id=numbers.next(), verdict=verdict, origin=numbers.origin)
            key, value = self._rule_parts(item)
            rule = None if key is None else read_rule(key, value, label, self.problems)
            if rule is not None:
                found.append(rule)
        return tuple(found)

    def rule_lists(self, fields: Fields, what: str, numbers: Numbers) -> Rules:
        """The lists `allow`, `ask` and `deny` of a section, numbered in this order."""
        found = {
            verdict: self.rules(fields[verdict.value][1], f"{what}.{verdict}", verdict, numbers)
            if verdict.value in fields
            else ()
            for verdict in (Verdict.ALLOW, Verdict.ASK, Verdict.DENY)
        }
        return Rules(allow=found[Verdict.ALLOW], ask=found[Verdict.ASK], deny=found[Verdict.DENY])

    def _rule_parts(self, item: Node) -> tuple[Scalar | None, Node | None]:
        if isinstance(item, Scalar) and isinstance(item.value, str) and item.text:
            if ":" in item.text:
                self.wrong(
                    item,
                    f"the rule `{item.text}` is text",
                    "take away the quotes around it, or add a space after `:`",
                )
                return None, None
            return item, None
        if isinstance(item, Table) and len(item.entries) == 1:
            return item.entries[0]
        if isinstance(item, Table) and item.entries:
            self.wrong(item.entries[1][0], "a rule has one action", "begin each rule with its own `-`")
        else:
            self.wrong(item, f"a rule is {kind(item)}", 'write `- ACTION: "PATTERN"`')
        return None, None


def _nearest(word: str, keys: Sequence[str]) -> str:
    """A hint where one key differs in its case or its separators only."""
    folded = word.replace("-", "_").lower()
    same = [key for key in keys if key.lower() == folded]
    return f"; did you mean `{same[0]}`?" if same else ""


def header(reader: Reader, text: str, wanted: str, keys: Sequence[str]) -> Fields:
    """Read a file's outermost mapping and check `apiVersion` and `kind`.

    Raises:
        ManifestError: it is no YAML, or not a mapping.
    """
    root = parse_yaml(text, reader.source)
    fields = reader.mapping(root, "the file", ("apiVersion", "kind", *keys))
    if not isinstance(root, Table):
        reader.finish()
    for name, value in (("apiVersion", API_VERSION), ("kind", wanted)):
        if name not in fields:
            reader.wrong(root, f"`{name}` is missing", f"add `{name}: {value}`")
        else:
            reader.choice(fields[name][1], name, (value,), value)
    for name in keys:
        if name not in fields:
            reader.wrong(root, f"`{name}` is missing", f"add `{name}:`")
    return fields
