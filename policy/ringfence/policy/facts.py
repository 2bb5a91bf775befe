"""Facts that the kernel recorded itself, as a condition is held against them. Nothing an agent says is a fact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

MISSING: Final = object()
"""What stands where an argument has no such field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The newest read of one resource by a thread.

    Attributes:
        action: how it was read, such as `fs.read`.
        resource: canonical.
        step: when, in the thread's own numbers.
        age_s: seconds since the read began.
        changed: how it is known to have changed since, for people; empty: it has not, or only its age can be known.
    """

    action: str
    resource: str
    step: int
    age_s: float
    changed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a thread has from those whom the operator trusts.

    Attributes:
        input: what an operator submitted it with, or the one at the head of its family.
        values: of fields that resources vouch for, folded as `hearsay.folded` does.
        named: those among them that have a name, by it.
    """

    input: str = ""
    values: frozenset[str] = frozenset()
    named: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one question. A field that is None can't be known now: a condition on it counts as matched.

    Attributes:
        tainted: what tainted the thread, for people; empty: nothing did.
        reads: what the thread read, the newest read of each resource.
        environment: label of the resource; empty: it has none.
        created: whether this thread itself made the resource; of rows, every one that is changed.
        created_later: whether that is found out, and asked about once more, before the call has any effect.
        now: an aware time.
        arguments: the call's arguments as JSON values; `json` is a body that is JSON, read.
        shares: of each total with a limit the part that is used or held, from 0.
        shared: the same of budgets that others have or share, by whose it is and the total.
        told: what the thread has from those whom the operator trusts.
    """

    tainted: str | None = None
    reads: tuple[Read, ...] | None = None
    environment: str | None = None
    created: bool | None = None
    created_later: bool = False
    now: datetime | None = None
    arguments: object = None
    shares: Mapping[str, float] | None = None
    shared: Mapping[tuple[str, str], float] | None = None
    told: Told | None = None


NOTHING_KNOWN: Final = Facts()
"""Every condition counts as matched."""


def field_of(arguments: object, pointer: str) -> object:
    """The value at a JSON pointer, `MISSING` where there is none."""
    value = arguments
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = _of_mapping(value, key)  # pyright: ignore[reportUnknownArgumentType] - of whatever an agent sent
        elif isinstance(value, list) and key.isascii() and key.isdigit():
            value = _of_list(value, int(key))  # pyright: ignore[reportUnknownArgumentType] - the same
        else:
            return MISSING
    return value


def _of_mapping(value: Mapping[str, object], key: str) -> object:
    return value.get(key, MISSING)


def _of_list(value: list[object], index: int) -> object:
    return value[index] if index < len(value) else MISSING
