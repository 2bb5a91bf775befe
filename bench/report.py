"""What a measurement found, and how people read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure that is to be reached.

    Attributes:
        name: what it is.
        got: what was measured.
        wanted: the bound.
        at_least: whether the bound is a lower one.
    """

    name: str
    got: float
    wanted: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.got >= self.wanted if self.at_least else self.got <= self.wanted

    def line(self) -> str:
        """For the table."""
        sign = "≥" if self.at_least else "≤"
        return f"{'met   ' if self.met else 'MISSED'} {self.name}: {number(self.got)} ({sign} {number(self.wanted)})"


@dataclass(slots=True, kw_only=True)
class Section:
    """One measurement.

    Attributes:
        name: as `--only` takes it.
        title: what was measured, and against what.
        rows: figures by column; all rows have the same columns.
        targets: what the figures are held against. They depend on the machine and fail nothing.
        checks: facts that have to hold on every machine; one that does not fails the run.
        notes: what the reader has to know.
    """

    name: str
    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    checks: dict[str, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "name": self.name,
            "title": self.title,
            "rows": self.rows,
            "targets": [
                {"name": t.name, "got": t.got, "wanted": t.wanted, "at_least": t.at_least, "met": t.met}
                for t in self.targets
            ],
            "checks": self.checks,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
        }

    def text(self) -> str:
        """For people."""
        lines = [f"{self.name}: {self.title}", *_table(self.rows)]
        lines += [f"  {target.line()}" for target in self.targets]
        lines += [f"  {'ok    ' if ok else 'FAILED'} {what}" for what, ok in self.checks.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def number(value: float) -> str:
    """A figure with as many digits as it deserves."""
    if isinstance(value, int) or value == 0:
        return f"{value:,}".replace(",", " ")
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else number(value)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    columns = list(rows[0])
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[at]) for line in cells)) for at, column in enumerate(columns)]
    left = [isinstance(rows[0].get(column), str) for column in columns]

    def render(line: Sequence[str]) -> str:
        parts = (
            text.ljust(width) if to_left else text.rjust(width)
            for text, width, to_left in zip(line, widths, left, strict=True)
        )
        return ("  " + "  ".join(parts)).rstrip()

    return [render(columns), *(render(line) for line in cells)]
