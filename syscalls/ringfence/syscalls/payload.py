"""What a call carries, in bytes: the JSON of its arguments and of its result, with binary content as long as it is."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from ringfence.syscalls.hearing import Hears

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL_BYTES: Final = 4 << 10
"""Largest result of a row whose body says nothing else."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """How large the answer of a call may be, in bytes as `content_bytes` counts them.

    Attributes:
        most: the largest that it can have.
        least: what there has to be room for; a call that can do with less room than `most` gets what is left.
    """

    most: int
    least: int


SMALL: Final = Room(most=SMALL_BYTES, least=SMALL_BYTES)


class Carries(Hears, Protocol):
    """What a body knows of the bytes that its call carries."""

    @property
    def answer_max(self) -> int | None:
        """Bytes that the answer may have, as `payload` counts them; None: nobody counts them."""
        ...

    def receiving(self, size: int) -> None:
        """Say how much of an answer has come from outside so far, where bytes are counted."""
        ...

    async def afford(self, size: int) -> None:
        """See to it that an answer of so many bytes is reserved, where bytes are counted.

        Raises:
            BudgetExhausted: there are not so many left.
        """
        ...


def exactly(size: int) -> Room:
    """Room for an answer that can't be had in a smaller one."""
    return Room(most=size, least=size)


def content_bytes(value: msgspec.Struct, encoded: int) -> int:
    """Bytes of arguments or of a result.

    Args:
        value: the body's `Arguments` or `Result`.
        encoded: length of its JSON, which holds binary content in base64.
    """
    for name in _binary(type(value)):
        size = len(getattr(value, name))
        encoded -= 4 * ((size + 2) // 3) - size
    return encoded


def result_bytes(result: msgspec.Struct) -> int:
    """Bytes of a result that is not encoded yet."""
    return content_bytes(result, len(msgspec.json.encode(result)))


@cache
def _binary(kind: type[msgspec.Struct]) -> Sequence[str]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type is bytes)
