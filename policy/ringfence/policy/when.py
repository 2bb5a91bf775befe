"""Reads conditions on facts: `when` of a manifest, a role or the ceilings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import time
from typing import Final

from ringfence.policy.actions import KNOWN_ACTIONS, kind_of, match_action
from ringfence.policy.conditions import (
    DAYS,
    FAMILY,
    SIBLINGS,
    Amount,
    Condition,
    Created,
    Environment,
    Hours,
    Share,
    Tainted,
    Test,
)
from ringfence.policy.hearsay import SOURCES, VOUCHER, Hearsay
from ringfence.policy.pools import selector
from ringfence.policy.problems import PatternError
from ringfence.policy.reader import Fields, Numbers, Reader
from ringfence.policy.rules import Rule, compile_rule_pattern
from ringfence.policy.schedule import zone as find_zone
from ringfence.policy.strict_yaml import Items, Node, Scalar
from ringfence.policy.types import Verdict
from ringfence.policy.units import TOTALS, parse_amount

KEYS: Final = {
    "when": ("action", "resource", "if", "then", "require"),
    "if": ("tainted", "environment", "created", "hours", "outside", "amount", "budget", "hearsay"),
    "hours": ("from", "to", "days", "timezone"),
    "amount": ("field", "over"),
    "share": ("total", "over", "of"),
    "hearsay": ("fields", "vouched_by", "names"),
    "require": ("fresh", "of"),
}
"""Keys of each mapping."""

FACTS: Final = ("tainted",)
"""Facts that `if` takes as one word."""

READS: Final = frozenset(
    (
        *("fs.read", "fs.list", "fs.stat", "fs.search", "http.get", "http.head", "sql.read"),
        *("state.get", "memory.search", "artifacts.get", "messages.receive", "object.get", "object.list"),
    )
)
"""Actions that read something whose age and version is known."""

DECLARED: Final = ("http", "sql", "llm", "object", "mcp", "a2a")
"""Families of actions whose resources have an environment."""

MADE: Final = ("fs", "state", "sql.write")
"""Families of actions whose resources a thread can have made, so that the kernel knows it."""

_CLOCK: Final = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]", re.ASCII)
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,2}", re.ASCII)
_PERCENT: Final = re.compile(r"([0-9]{1,2})(\.[0-9]{1,3})?%", re.ASCII)
_POINTER: Final = re.compile(r"(/([^~/]|~[01])*){1,16}")
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_MAX: Final = 256
_FORM: Final = "write `{action: A, if: tainted, then: ask}`"


def read_when(reader: Reader, node: Node, what: str, numbers: Numbers) -> tuple[Condition, ...]:
    """Read a list of conditions; those with a problem are left out."""
    items = reader.items(node, what)
    if len(items) > _MAX:
        reader.wrong(node, f"`{what}` has {len(items)} conditions", f"at most {_MAX} are accepted")
        return ()
    found = [_condition(reader, item, what, numbers) for item in items]
    return tuple(item for item in found if item is not None)


def _condition(reader: Reader, node: Node, what: str, numbers: Numbers) -> Condition | None:
    before = len(reader.problems)
    fields = reader.mapping(node, what, KEYS["when"])
    nodes = {key: value for key, (_, value) in fields.items()}
    label = numbers.next()
    if "action" not in nodes:
        reader.wrong(node, "a condition has no `action`", "add `action: ACTION`")
    action = reader.action(nodes["action"], f"{what}.action") if "action" in nodes else ""
    patterns = _patterns(reader, nodes["resource"], f"{what}.resource", action) if "resource" in nodes else ()
    tests: tuple[Test, ...] = ()
    then = Verdict.DENY
    if "if" in nodes:
        tests = _tests(reader, nodes["if"], f"{what}.if", action)
    if "then" in nodes:
        then = Verdict(reader.choice(nodes["then"], f"{what}.then", ("ask", "deny"), "deny"))
    fresh: float | None = None
    of: tuple[Rule, ...] = ()
    if "require" in nodes:
        fresh, of = _require(reader, nodes["require"], f"{what}.require", label)
    if ("if" in nodes) != ("then" in nodes) or ("if" in nodes) == ("require" in nodes):
        reader.wrong(node, "a condition has either `if` and `then`, or `require`", _FORM)
    if len(reader.problems) > before:
        return None
    return Condition(
        id=label,
        action=action,
        patterns=patterns,
        tests=tests,
        then=then,
        fresh_s=fresh,
        of=of,
        text=_text(action, patterns, tests, then, fresh, of),
        origin=numbers.origin,
        line=node.line,
        column=node.column,
    )


def _text(
    action: str,
    patterns: Sequence[str],
    tests: Sequence[Test],
    then: Verdict,
    fresh: float | None,
    of: Sequence[Rule],
) -> str:
    shown = action if action != "*" else '"*"'
    where = f", resource: [{', '.join(patterns)}]" if patterns else ""
    if fresh is not None:
        named = f", of: [{', '.join(rule.text for rule in of)}]" if of else ""
        return f"{{action: {shown}{where}, require: {{fresh: {fresh:.12g}s{named}}}}}"
    asks = "tainted" if tests == (Tainted(),) else f"{{{', '.join(test.text for test in tests)}}}"
    return f"{{action: {shown}{where}, if: {asks}, then: {then}}}"


def _patterns(reader: Reader, node: Node, what: str, action: str) -> tuple[str, ...]:
    """One pattern or a list of them, as in a rule on the action."""
    if not action:
        return ()
    if kind_of(action) in {"any", "none"}:
        reader.wrong(node, f"`{action}` has no resource to name", "leave `resource` out, or name one action")
        return ()
    patterns: list[str] = []
    for item in node.items if isinstance(node, Items) else [node]:
        text = reader.text(item, what)
        if text is None:
            continue
        try:
            patterns.append(compile_rule_pattern(action, text, Verdict.DENY))
        except PatternError as error:
            reader.wrong(item, error.message, error.fix)
    if isinstance(node, Items) and not node.items:
        reader.wrong(node, f"`{what}` names nothing, so the condition can never match", "leave it out")
    return tuple(dict.fromkeys(patterns))


def _tests(reader: Reader, node: Node, what: str, action: str) -> tuple[Test, ...]:
    if isinstance(node, Scalar):
        return (Tainted(),) if reader.choice(node, what, FACTS, "") else ()
    tests: list[Test] = []
    fields = reader.mapping(node, what, KEYS["if"])
    if not fields and not isinstance(node, Scalar):
        reader.wrong(node, f"`{what}` asks about nothing", _FORM)
    for key, (_, value) in fields.items():
        test = _READERS[key](reader, value, f"{what}.{key}")
        if test is not None:
            tests.append(test)
        if key == "environment":
            _only(reader, value, action, DECLARED, "have an environment")
        if key == "created":
            _only(reader, value, action, MADE, "are known by who made them")
    return tuple(tests)


def _only(reader: Reader, node: Node, action: str, families: Sequence[str], what: str) -> None:
    """Refuse a test that can't hold, or always would, for it is about other actions."""
    found = {known for known in KNOWN_ACTIONS if action and match_action(action, known)}
    meant = found | {known.partition(".")[0] for known in (*found, action)}
    if action and not meant.intersection(families):
        shown = ", ".join(f"`{name}`" if "." in name else f"`{name}.*`" for name in families)
        reader.wrong(node, f"only resources of {shown} {what}, not those of `{action}`", "name one of these")


def _tainted(reader: Reader, node: Node, what: str) -> Test | None:
    if reader.flag(node, what):
        return Tainted()
    if isinstance(node, Scalar) and node.value is False:
        reader.wrong(
            node, f"`{what}` can't be `false`", "a condition narrows: write what is to be asked or denied"
        )
    return None


def _environment(reader: Reader, node: Node, what: str) -> Test | None:
    names: list[str] = []
    for item in node.items if isinstance(node, Items) else [node]:
        name = reader.text(item, what)
        if name is not None and _NAME.fullmatch(name) is None:
            reader.wrong(item, f"`{name}` is no environment", "write a word such as `prod`")
        elif name:
            names.append(name)
    if isinstance(node, Items) and not node.items:
        reader.wrong(node, f"`{what}` names none, so it can never hold", "write a word such as `prod`")
    return Environment(names=tuple(names)) if names else None


def _created(reader: Reader, node: Node, what: str) -> Test | None:
    return Created(made=reader.flag(node, what))


def _hours(reader: Reader, node: Node, what: str) -> Test | None:
    fields = reader.mapping(node, what, KEYS["hours"])
    begin, end = (_clock(reader, node, fields, key, what) for key in ("from", "to"))
    zone = reader.text(fields["timezone"][1], f"{what}.timezone") if "timezone" in fields else None
    if "timezone" not in fields:
        reader.wrong(node, f"`{what}` has no `timezone`", "write one such as `Europe/Berlin` or `UTC`")
    elif zone is not None and (_ZONE.fullmatch(zone) is None or find_zone(zone) is None):
        reader.wrong(fields["timezone"][1], f"`{zone}` is no time zone", "write one such as `Europe/Berlin`")
    days = frozenset(range(len(DAYS)))
    if "days" in fields:
        named = reader.items(fields["days"][1], f"{what}.days")
        days = frozenset(DAYS.index(reader.choice(item, f"{what}.days", DAYS, "mon")) for item in named)
        if not days:
            reader.wrong(fields["days"][1], f"`{what}.days` names no day", "leave it out for every day")
    if begin is None or end is None or zone is None:
        return None
    if begin == end:
        reader.wrong(node, f"`{what}` ends when it begins", "leave it out, or write another time")
        return None
    return Hours(inside=what.endswith(".hours"), begin=begin, end=end, days=days, timezone=zone)


def _clock(reader: Reader, node: Node, fields: Fields, key: str, what: str) -> time | None:
    if key not in fields:
        reader.wrong(node, f"`{what}` has no `{key}`", 'write `{from: "08:00", to: "18:00", timezone: UTC}`')
        return None
    text = reader.text(fields[key][1], f"{what}.{key}")
    if text is None:
        return None
    if _CLOCK.fullmatch(text) is None:
        reader.wrong(fields[key][1], f"`{text}` is no time of a day", 'write one such as `"08:00"`')
        return None
    return time.fromisoformat(text)


def _amount(reader: Reader, node: Node, what: str) -> Test | None:
    fields = reader.mapping(node, what, KEYS["amount"])
    if len(fields) < len(KEYS["amount"]):
        reader.wrong(node, f"`{what}` needs `field` and `over`", "write `{field: /json/amount, over: 100}`")
        return None
    pointer = reader.text(fields["field"][1], f"{what}.field")
    if pointer is not None and _POINTER.fullmatch(pointer) is None:
        reader.wrong(fields["field"][1], f"`{pointer}` is no place among arguments", "write `/json/amount`")
    value = fields["over"][1]
    over = parse_amount(value.text) if isinstance(value, Scalar) else None
    if over is None:
        reader.wrong(value, f"`{what}.over` is no number", "write one such as `100` or `2.50`")
    return None if pointer is None or over is None else Amount(field=pointer, over=over)


def _budget(reader: Reader, node: Node, what: str) -> Test | None:
    fields = reader.mapping(node, what, KEYS["share"])
    if "total" not in fields or "over" not in fields:
        reader.wrong(node, f"`{what}` needs `total` and `over`", "write `{total: usd, over: 80%}`")
        return None
    total = reader.choice(fields["total"][1], f"{what}.total", TOTALS, "")
    value = fields["over"][1]
    share = _share(value.text) if isinstance(value, Scalar) else None
    if share is None:
        reader.wrong(value, f"`{what}.over` is no part of a budget below 100 %", "write one such as `80%`")
    of = _whose(reader, fields["of"][1], f"{what}.of") if "of" in fields else ""
    return None if share is None or not total else Share(total=total, over=share, of=of)


def _whose(reader: Reader, node: Node, what: str) -> str:
    text = reader.text(node, what) or ""
    if text in ("", FAMILY, SIBLINGS):
        return text
    try:
        return selector(text)[0]
    except PatternError:
        fix = f"write `{FAMILY}`, `{SIBLINGS}`, `fleet` or a label such as `team=billing`"
        reader.wrong(node, f"`{text}` is nobody's budget", fix)
        return ""


def _share(text: str) -> float | None:
    found = _PERCENT.fullmatch(text)
    return None if found is None else float(found[1] + (found[2] or "")) / 100


def _texts(reader: Reader, fields: Fields, key: str, what: str) -> tuple[str, ...]:
    listed = reader.items(fields[key][1], f"{what}.{key}") if key in fields else []
    return tuple(filter(None, (reader.text(item, f"{what}.{key}") for item in listed)))


def _hearsay(reader: Reader, node: Node, what: str) -> Test | None:
    vouched_by, names = SOURCES, ()
    place = node
    if not isinstance(node, Items | Scalar):
        fields = reader.mapping(node, what, KEYS["hearsay"])
        if "fields" not in fields:
            reader.wrong(node, f"`{what}` names no `fields`", "write `{hearsay: /json/to}`")
            return None
        place = fields["fields"][1]
        if "vouched_by" in fields:
            listed = reader.items(fields["vouched_by"][1], f"{what}.vouched_by")
            vouched_by = _vouchers(reader, listed, f"{what}.vouched_by")
            if not listed:
                reader.wrong(node, f"`{what}.vouched_by` names nobody", "write `[input]`")
        names = _texts(reader, fields, "names", what)
    pointers: list[str] = []
    for item in place.items if isinstance(place, Items) else [place]:
        pointer = reader.text(item, what)
        if pointer is not None and _POINTER.fullmatch(pointer) is None:
            reader.wrong(item, f"`{pointer}` is no place among arguments", "write `/json/to`")
        elif pointer is not None:
            pointers.append(pointer)
    if isinstance(place, Items) and not place.items:
        reader.wrong(place, f"`{what}` names no field, so it can never hold", "write `/json/to`")
    if not pointers or not vouched_by:
        return None
    return Hearsay(fields=tuple(pointers), vouched_by=vouched_by, names=names)


def _vouchers(reader: Reader, listed: Sequence[Node], what: str) -> tuple[str, ...]:
    """The sources in their own order, then names, each once."""
    given: list[str] = []
    for item in listed:
        text = reader.text(item, what)
        if text is not None and VOUCHER.fullmatch(text) is None:
            reader.wrong(
                item, f"`{what}` names `{text}`", f"write of: {', '.join(SOURCES)}, a name under `as`"
            )
        elif text is not None:
            given.append(text)
    return tuple(dict.fromkeys((*(one for one in SOURCES if one in given), *given)))


_READERS: Final[dict[str, Callable[[Reader, Node, str], Test | None]]] = {
    "tainted": _tainted,
    "environment": _environment,
    "created": _created,
    "hours": _hours,
    "outside": _hours,
    "amount": _amount,
    "budget": _budget,
    "hearsay": _hearsay,
}


def _require(reader: Reader, node: Node, what: str, label: str) -> tuple[float | None, tuple[Rule, ...]]:
    fields = reader.mapping(node, what, KEYS["require"])
    if "fresh" not in fields:
        reader.wrong(node, "`require` demands nothing", "write `require: {fresh: 15m}`")
        return None, ()
    fresh = reader.duration(fields["fresh"][1], f"{what}.fresh", 1.0)
    if "of" not in fields:
        return fresh, ()
    place = fields["of"][1]
    numbers = Numbers("manifest", f"{label}.")
    of = reader.rules(place, f"{what}.of", Verdict.ALLOW, numbers)
    if isinstance(place, Items) and not place.items:
        reader.wrong(place, f"`{what}.of` names nothing", "leave it out for all that was read")
    for rule in of:
        if not any(match_action(rule.action_pattern, read) for read in READS):
            reader.wrong(
                place, f"`{rule.action_pattern}` reads nothing", f"name one of: {', '.join(sorted(READS))}"
            )
    return fresh, of
