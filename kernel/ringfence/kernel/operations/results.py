"""The result that an operator gives for a call which nobody saw end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast, get_args, get_origin

import msgspec
from ringfence.kernel.problems import bad_usage, conflict
from ringfence.syscalls.base import Recovery
from ringfence.syscalls.codec import encode_result
from ringfence.syscalls.errors import Internal
from ringfence.syscalls.table import Row


def settled_result(table: Mapping[str, Row], action: str, text: str) -> Any:
    """What the agent gets for a call that an operator says was done.

    Args:
        table: the syscalls.
        action: the call's.
        text: the operator's JSON object; keys it leaves out, or all where it is empty, get neutral values.

    Raises:
        Problem: the syscall is gone, or it never returns such a result; the message says what it returns.
    """
    row = table.get(action)
    if row is None:
        raise conflict(
            f"this release has no syscall `{action}`, so the agent could not take its result; roll back to before the step, or use the release that made it"
        )
    shape = ", ".join(f"{field.name}: {_name(field.type)}" for field in msgspec.structs.fields(row.result))
    fitting = (
        f"`{action}` returns {{{shape}}}; give an object with some of these keys, or leave `--result` out"
    )
    try:
        parsed: Any = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise bad_usage(f"`--result` is not JSON: {str(error).lower()}; {fitting}", "BadResult") from None
    if not isinstance(parsed, dict):
        raise bad_usage(f"`--result` is not a JSON object; {fitting}", "BadResult")
    given = cast("dict[str, Any]", parsed)
    unknown = sorted(given.keys() - {field.name for field in msgspec.structs.fields(row.result)})
    if unknown:
        raise bad_usage(f"`--result` has the key `{unknown[0]}`; {fitting}", "BadResult")
    try:
        result = msgspec.json.decode(json.dumps({**_neutral(row), **given}), type=row.result)
        return json.loads(encode_result(row, result))
    except (ValueError, Internal) as error:
        raise bad_usage(f"`--result` does not fit: {str(error).lower()}; {fitting}", "BadResult") from None


def _neutral(row: Row) -> dict[str, Any]:
    """Values for the keys that a result must have. Calls that only read are never unknown, so theirs need none."""
    if row.action.startswith("http."):
        return {"status": 200, "headers": {"ringfence-resolved": "done"}, "body": ""}
    return {
        field.name: _neutral_of(field.type)
        for field in msgspec.structs.fields(row.result)
        if field.required and row.recovery is not Recovery.REPEAT
    }


def _neutral_of(kind: Any) -> Any:
    if kind is Any or type(None) in get_args(kind):
        return None
    return "" if kind is bytes else (get_origin(kind) or kind)()


def _name(kind: Any) -> str:
    names = {
        int: "integer",
        str: "text",
        bytes: "base64",
        bool: "true or false",
        float: "number",
        list: "array",
    }
    return names.get(get_origin(kind) or kind, "object")
