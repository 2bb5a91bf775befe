"""Bounds what a statement can make out of nothing: functions whose result is as large as a number says.

A planner computes what depends on constants alone, at once and in memory, before any limit on rows or bytes can tell. So
the sizes of such functions have to stand in the statement, where they can be read, and be small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ringfence.syscalls.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.syscalls.sql_lexer import Lexed, Token

SIZE_MAX: Final = 1_000_000
"""Largest size of `lpad` and `rpad`, and largest product of all counts of `repeat` in a statement."""

_SIZED: Final = frozenset({"repeat", "lpad", "rpad"})
_REFUSED: Final = frozenset({"array_fill"})


def refuse_growth(lexed: Lexed, parameters: Sequence[Any]) -> None:
    """Refuse sizes that are too large, or that can't be read from the statement.

    Args:
        lexed: the statement.
        parameters: its parameters.

    Raises:
        InvalidRequest: it has one.
    """
    product = 1
    for at, token in enumerate(lexed.tokens[:-1]):
        following = lexed.tokens[at + 1]
        if not token.is_name or following.kind != "punct" or following.value != "(":
            continue
        name = token.value
        if name in _REFUSED:
            raise InvalidRequest(
                f"the function `{name}` is refused: its result can be of any size; write the array out"
            )
        if name not in _SIZED:
            continue
        arguments = _arguments(lexed.tokens, at + 1)
        size = _number(arguments[1], parameters) if len(arguments) > 1 else None
        if size is None:
            raise InvalidRequest(
                f"`{name}` takes its size as a plain number or parameter here, at most {SIZE_MAX}; write it so"
            )
        # What `repeat` makes can be repeated again, at any distance; padding cuts to its size.
        product = product * max(size, 1) if name == "repeat" else product
        if max(product, size) > SIZE_MAX:
            raise InvalidRequest(f"`{name}` makes a text of more than {SIZE_MAX} parts here; ask for less")


def _arguments(tokens: Sequence[Token], opened: int) -> list[list[Token]]:
    """The tokens of each argument behind an opening parenthesis."""
    inside = tokens[opened].depth + 1
    found: list[list[Token]] = [[]]
    for token in tokens[opened + 1 :]:
        if token.depth < inside:
            break
        if token.depth == inside and token.kind == "punct" and token.value == ",":
            found.append([])
        else:
            found[-1].append(token)
    return found


def _number(tokens: Sequence[Token], parameters: Sequence[Any]) -> int | None:
    """The whole number that an argument is; None: it is something else."""
    if len(tokens) != 1:
        return None
    (token,) = tokens
    if token.kind == "param":
        text = str(parameters[int(token.value[1:]) - 1])
    elif token.kind == "number":
        text = token.value
    else:
        return None
    return int(text) if text.isascii() and text.isdigit() else None
