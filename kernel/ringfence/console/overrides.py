"""`submit --set path=value`: changes single values of a manifest's text before it is checked."""

from __future__ import annotations

import io
import re
from collections.abc import MutableMapping, MutableSequence, Sequence
from typing import Any, cast

from ringfence.console.errors import ConsoleError, ExitCode
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

_STEP = re.compile(r'"([^"]+)"|([^."]+)')
_LINE_WIDTH = 4096


def apply_overrides(text: str, overrides: Sequence[str]) -> str:
    """Set values in a manifest.

    Args:
        text: the manifest; its comments, quotes and order stay.
        overrides: each `path=value`. A path is keys and list positions with dots between, such as
            `spec.run.env.REGION` or `spec.run.command.0`; a key that has a dot stands in quotes, as in
            `spec.budgets.rate."http.get"`. A value is YAML.

    Raises:
        ConsoleError: a path or value can't be read, or the path leads through something that has no keys.
    """
    if not overrides:
        return text
    yaml = _yaml()
    try:
        document = yaml.load(text)
    except YAMLError:
        # The manifest's own check explains what is wrong with it better, with line and column.
        return text
    if not isinstance(document, MutableMapping):
        return text
    for override in overrides:
        path, equals, value = override.partition("=")
        if not equals:
            raise _bad(override, "write it as `path=value`")
        _set(document, _steps(path, override), _value(value, override), override)
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _yaml() -> Any:
    """Make a reader and writer that keeps comments and quotes, and makes no objects of any kind."""
    yaml: Any = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = _LINE_WIDTH
    return yaml


def _steps(path: str, override: str) -> list[str]:
    steps: list[str] = []
    position = 0
    while True:
        match = _STEP.match(path, position)
        if match is None:
            raise _bad(override, "a path is keys with dots between, such as `spec.run.env.REGION`")
        steps.append(match.group(1) or match.group(2))
        position = match.end()
        if position == len(path):
            return steps
        if path[position] != ".":
            raise _bad(override, "a quoted key ends at a dot or at `=`")
        position += 1


def _value(value: str, override: str) -> Any:
    if not value:
        return ""
    try:
        return _yaml().load(value)
    except YAMLError:
        raise _bad(
            override, "the value is not YAML; put quotes around text with special characters"
        ) from None


def _set(document: Any, steps: Sequence[str], value: Any, override: str) -> None:
    node = document
    for step in steps[:-1]:
        inner = _get(node, step, override)
        if inner is None:
            inner = {}
            _put(node, step, inner, override)
            inner = _get(node, step, override)
        node = inner
    _put(node, steps[-1], value, override)


def _get(node: Any, step: str, override: str) -> Any:
    if isinstance(node, MutableMapping):
        return cast("MutableMapping[str, Any]", node).get(step)
    items = _items(node, step, override)
    return items[_position(items, step, override)]


def _put(node: Any, step: str, value: Any, override: str) -> None:
    if isinstance(node, MutableMapping):
        cast("MutableMapping[str, Any]", node)[step] = value
        return
    items = _items(node, step, override)
    if step == str(len(items)):
        items.append(value)
    else:
        items[_position(items, step, override)] = value


def _items(node: Any, step: str, override: str) -> MutableSequence[Any]:
    if isinstance(node, MutableSequence):
        return cast("MutableSequence[Any]", node)
    raise _bad(override, f"`{step}` lies below a plain value, which has no keys")


def _position(items: MutableSequence[Any], step: str, override: str) -> int:
    if step.isdecimal() and int(step) < len(items):
        return int(step)
    raise _bad(override, f"`{step}` is no position of a list with {len(items)} items, counted from 0")


def _bad(override: str, why: str) -> ConsoleError:
    return ConsoleError(f"`--set {override}`: {why}", ExitCode.USAGE)
