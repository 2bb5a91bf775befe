"""Places among arguments that conditions name, held against the arguments that calls have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from google.protobuf.descriptor import FieldDescriptor
from ringfence.policy.actions import ROWS, applies
from ringfence.policy.conditions import Amount, Created, Test
from ringfence.policy.hearsay import Hearsay, folded
from ringfence.policy.when import MADE
from ringfence.v1 import options_pb2, syscalls_pb2

_BODY: Final = "json"
_SHOWN: Final = 4
_ALWAYS: Final = "so the condition always matches"
_NEVER: Final = "so the condition can never hold"
_NUMBERS: Final = frozenset(
    {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_DOUBLE}
)


@lru_cache(maxsize=1)
def _arguments() -> dict[str, dict[str, str]]:
    """Of each action its arguments by name: `text`, `bytes`, `number`, or `tree` for what has parts."""
    service = syscalls_pb2.DESCRIPTOR.services_by_name["SyscallService"]
    found: dict[str, dict[str, str]] = {}
    for method in service.methods:
        action = method.GetOptions().Extensions[options_pb2.row].action
        if action:
            found[action] = {field.name: _kind(field) for field in method.input_type.fields}
    return found


def _kind(field: FieldDescriptor) -> str:
    if field.is_repeated or field.message_type is not None:
        return "tree"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return "bytes"
    return "number" if field.cpp_type in _NUMBERS else "text"


def misplaced(action: str, test: Test) -> Iterator[tuple[str, str]]:
    """What is wrong with the places that a test names among the arguments of an action, each with how to mend it."""
    if isinstance(test, Created):
        yield from _of_no_maker(action)
    elif isinstance(test, Hearsay | Amount):
        yield from _of_no_argument(action, test)


def _of_no_argument(action: str, test: Hearsay | Amount) -> Iterator[tuple[str, str]]:
    spoken = {one: _arguments()[one] for one in sorted(ROWS) if applies(action, one, forbids=True)}
    if not spoken:
        return
    for pointer in test.fields if isinstance(test, Hearsay) else (test.field,):
        # What isn't there is no hearsay, and no number that could be small enough.
        missing = _NEVER if isinstance(test, Hearsay) else _ALWAYS
        first, *deeper = pointer.split("/")[1:]
        first = folded(first) if isinstance(test, Hearsay) else first
        kinds = {kind for held in spoken.values() for kind in _kinds_at(held, first)}
        without = [one for one, held in spoken.items() if not _kinds_at(held, first)]
        if not kinds and first == _BODY:
            yield f"no call of `{action}` sends a body, {_ALWAYS}", "name an argument of it"
        elif not kinds:
            known = sorted({f"/{name}" for held in spoken.values() for name in held})
            yield (
                f"no call of `{action}` has an argument `/{first}`, {missing}",
                f"it has: {', '.join(known)}",
            )
        elif first == _BODY and without:
            named = ", ".join(f"`{one}`" for one in without)
            yield (
                f"calls of {named} send no body, so there the condition always matches",
                "name the actions that send one",
            )
        elif kinds == {"bytes"}:
            yield f"`/{first}` is bytes, as base64, {_ALWAYS}", "look into a body with `/json/...`"
        elif deeper and "tree" not in kinds:
            yield f"`/{first}` has no parts, and `{pointer}` names one, {missing}", f"write `/{first}`"
        elif isinstance(test, Amount) and not deeper and not kinds & {"number", "tree"}:
            yield f"`/{first}` is no number, {_ALWAYS}", "name one that is"


def _of_no_maker(action: str) -> Iterator[tuple[str, str]]:
    """Actions whose resources have no maker that is known."""
    spoken = sorted(one for one in ROWS if applies(action, one, forbids=True))
    known = [one for one in spoken if one in MADE or one.partition(".")[0] in MADE]
    unknown = [one for one in spoken if one not in known]
    if known and unknown:
        named = ", ".join(f"`{one}`" for one in unknown[:_SHOWN])
        text = f"who made it isn't known for {named}, so there the condition always matches"
        yield text, f"name the actions: {', '.join(known[:_SHOWN])}"


def _kinds_at(arguments: dict[str, str], name: str) -> set[str]:
    """What may stand at a name among the arguments; a body is looked into under a name of its own."""
    if name == _BODY and "body" in arguments:
        return {"tree"}
    return {arguments[name]} if name in arguments else set()
