"""Puts answers on standard output: JSON for scripts, plain columns for pipes, fitted ones for terminals."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from ringfence.console.text import pad, safe, shorten, to_json, width

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_GAP = "  "
_FLEX_COLUMNS_MIN = 8
_RUNNING_COLUMNS_MIN = 1
_SAYS_NOTHING = frozenset({"", "-", "0", "0.0", "0.00"})
_COLOURS = {
    "running": "green",
    "done": "green",
    "ok": "green",
    "allow": "green",
    "live": "green",
    "waiting": "yellow",
    "parked": "yellow",
    "paused": "yellow",
    "unknown": "yellow",
    "ask": "yellow",
    "weaker": "yellow",
    "refused": "yellow",
    "cancelled": "yellow",
    "frozen": "yellow",
    "failed": "red",
    "killed": "red",
    "error": "red",
    "deny": "red",
    "denied": "red",
    "missing": "red",
    "create": "green",
    "created": "green",
    "remove": "red",
    "removed": "red",
    "modify": "yellow",
    "modified": "yellow",
    "away": "red",
    "restore": "green",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        title: its heading.
        right: numbers, aligned to the right.
        flex: may be cut to fit a terminal.
        minimum: least width, for tables that are printed a row at a time.
        kept: cut only when no other column can give more.
        spare: may be left out on a terminal that is too narrow; first where it says nothing in any row.
        echo: says nothing where the row's first cell begins with it, as an agent's id does with its name.
    """

    title: str
    right: bool = False
    flex: bool = False
    minimum: int = 0
    kept: bool = False
    spare: bool = False
    echo: bool = False


def to_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def columns_available() -> int:
    """Width of the terminal."""
    return shutil.get_terminal_size((80, 24)).columns


def coloured(text: str, word: str | None = None) -> str:
    """Colour a word by its meaning, such as `denied`, on a terminal that wants colours."""
    colour = _COLOURS.get((word or text).strip())
    plain = not to_terminal() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if colour is None or plain else click.style(text, fg=colour)


def say(line: str = "") -> None:
    """Print a line that is already safe."""
    click.echo(line)


def note(message: str) -> None:
    """Print a remark for people on standard error, where it is in no script's way."""
    click.echo(safe(message), err=True)


def emit(document: Any) -> None:
    """Print one JSON document."""
    click.echo(to_json(document, indent=2))


def emit_array(documents: Iterable[Mapping[str, Any]]) -> None:
    """Print a JSON array an element at a time, whatever its length; nothing before the first answer."""
    separator = "["
    for document in documents:
        click.echo(separator + "\n " + to_json(document), nl=False)
        separator = ","
    click.echo("[]" if separator == "[" else "\n]")


def emit_lines(documents: Iterable[Mapping[str, Any]]) -> None:
    """Print JSON documents, one a line, each at once."""
    for document in documents:
        click.echo(to_json(document))


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. On a terminal flexible columns are cut to fit; in a pipe nothing is."""
    for line in table_lines(columns, rows, columns_available() if to_terminal() else None):
        say(line)


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], available: int | None) -> list[str]:
    """The lines of a table, its headings first.

    Args:
        columns: from left to right.
        rows: cells that are already safe.
        available: columns of the terminal that it has to fit into; None: nothing is cut.
    """
    widths = [
        max([column.minimum, len(column.title), *(width(row[index]) for row in rows)])
        for index, column in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    fitted = available is not None
    if available is not None:
        shown = _shown(columns, widths, rows, available)
        columns, widths = [columns[i] for i in shown], [widths[i] for i in shown]
        _fit(columns, widths, available)
    lines = [_line(columns, widths, [column.title for column in columns], fitted=fitted, heading=True)]
    return lines + [_line(columns, widths, [row[i] for i in shown], fitted=fitted) for row in rows]


class RunningTable:
    """A table whose rows come one by one: widths are fixed, and the last column takes what is left."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._widths = [max(column.minimum, len(column.title)) for column in columns]
        self._started = False

    def add(self, row: Sequence[str]) -> None:
        """Print a row, before the first one the headings."""
        self.start()
        widths = list(self._widths)
        if to_terminal():
            # A cell may be wider than was guessed: the last column has what this row leaves.
            cells = zip(row[:-1], widths[:-1], strict=True)
            widths[-1] = self._left([max(width(cell), least) for cell, least in cells])
        say(_line(self._columns, widths, row, fitted=to_terminal()))

    def start(self) -> None:
        """Print the headings unless they are there."""
        if self._started:
            return
        self._started = True
        if to_terminal():
            self._widths[-1] = self._left(self._widths[:-1])
        titles = [column.title for column in self._columns]
        say(_line(self._columns, self._widths, titles, fitted=to_terminal(), heading=True))

    def _left(self, used: Sequence[int]) -> int:
        return max(_RUNNING_COLUMNS_MIN, columns_available() - sum(used) - len(_GAP) * len(used))


def facts(pairs: Iterable[tuple[str, object]]) -> None:
    """Print names and values under each other. Values None and empty are left out."""
    shown = [
        (name, safe(value)) for name, value in pairs if value is not None and value not in ("", [], {}, ())
    ]
    column = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        say(f"{pad(name, column)}{_GAP}{coloured(value)}")


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _shown(
    columns: Sequence[Column], widths: Sequence[int], rows: Sequence[Sequence[str]], available: int
) -> list[int]:
    """Say which columns are shown: spare ones go as long as it is too much, those that say nothing first."""
    shown = list(range(len(columns)))
    if _total(widths) <= available:
        return shown

    def says_nothing(index: int) -> bool:
        echo = columns[index].echo
        return all(row[index] in _SAYS_NOTHING or (echo and row[0].startswith(row[index])) for row in rows)

    shown = [i for i in shown if not (columns[i].spare and says_nothing(i))]
    least = [
        min(wide, _FLEX_COLUMNS_MIN) if column.flex else wide
        for column, wide in zip(columns, widths, strict=True)
    ]
    for index in reversed([i for i in shown if columns[i].spare]):
        if _total([least[i] for i in shown]) <= available:
            break
        shown.remove(index)
    return shown


def _fit(columns: Sequence[Column], widths: list[int], available: int) -> None:
    over = _total(widths) - available
    while over > 0:
        flexible = [i for i, column in enumerate(columns) if column.flex and widths[i] > _FLEX_COLUMNS_MIN]
        if not flexible:
            return
        widest = max(flexible, key=lambda i: (not columns[i].kept, widths[i]))
        widths[widest] -= 1
        over -= 1


def _line(
    columns: Sequence[Column],
    widths: Sequence[int],
    row: Sequence[str],
    *,
    fitted: bool,
    heading: bool = False,
) -> str:
    cells: list[str] = []
    for index, (column, columns_wide, cell) in enumerate(zip(columns, widths, row, strict=True)):
        text = shorten(cell, columns_wide) if fitted and column.flex else cell
        last = index == len(columns) - 1
        padded = text if last and not column.right else pad(text, columns_wide, right=column.right)
        cells.append(padded if heading else coloured(padded, text))
    return _GAP.join(cells).rstrip()
