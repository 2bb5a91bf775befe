"""What the demo says: scenes as they happen, then a table of facts."""

from __future__ import annotations

import itertools
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringfence.console import render
from ringfence.console.text import pad, safe

_WIDTH = 118
_WIDTH_MIN = 72
_SHARES = (0.3, 0.38, 0.32)
"""Of the table's width: fact, what was checked, figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One checked claim.

    Attributes:
        scene: number of the scene it belongs to.
        fact: the claim.
        checked: how it was checked.
        figure: what was measured or counted.
        ok: whether it holds.
    """

    scene: int
    fact: str
    checked: str
    figure: str
    ok: bool

    def document(self) -> dict[str, Any]:
        """As `--json` shows it."""
        return {
            "scene": self.scene,
            "fact": self.fact,
            "checked": self.checked,
            "figure": self.figure,
            "ok": self.ok,
        }


class Narrator:
    """Tells the story and keeps the facts. With `as_json` it tells nothing until the end."""

    def __init__(self, *, as_json: bool) -> None:
        self.facts: list[Fact] = []
        self.figures: dict[str, Any] = {}
        self._as_json = as_json
        self._scene = 0
        self._started = time.monotonic()

    def scene(self, title: str) -> None:
        """Begin a scene."""
        self._scene += 1
        if not self._as_json:
            seconds = time.monotonic() - self._started
            render.say(f"\n{self._scene}. {title}  [{seconds:.1f} s]")

    def say(self, text: str) -> None:
        """Tell what happens."""
        if not self._as_json:
            render.say(f"   {safe(text)}")

    def command(self, words: str) -> None:
        """Show a command as a user would type it."""
        if not self._as_json:
            render.say(f"   $ {safe(words)}")

    def fact(self, fact: str, checked: str, figure: str, ok: bool) -> None:
        """Note a checked claim."""
        self.facts.append(Fact(scene=self._scene, fact=fact, checked=checked, figure=figure, ok=ok))
        if not self._as_json:
            mark = render.coloured("ok") if ok else render.coloured("FAILED", "failed")
            render.say(f"   {mark}: {safe(fact)}: {safe(figure)}")

    @property
    def ok(self) -> bool:
        """Whether there are facts and all hold."""
        return bool(self.facts) and all(fact.ok for fact in self.facts)

    def finish(self, trouble: str, environment: Mapping[str, Any]) -> None:
        """Print the table, or the document.

        Args:
            trouble: what ended the story early; empty when it came to its end.
            environment: what it ran on.
        """
        seconds = round(time.monotonic() - self._started, 1)
        ok = self.ok and not trouble
        if self._as_json:
            render.emit(
                {
                    "ok": ok,
                    "seconds": seconds,
                    "error": trouble or None,
                    "environment": dict(environment),
                    "figures": self.figures,
                    "facts": [fact.document() for fact in self.facts],
                }
            )
            return
        render.say()
        for line in self._table():
            render.say(line)
        held = sum(fact.ok for fact in self.facts)
        render.say()
        render.say(f"{held} of {len(self.facts)} facts hold; {seconds:.0f} s")

    def _table(self) -> Iterator[str]:
        """The facts as a table whose cells are wrapped, so that it can be read on any terminal and in any log."""
        available = render.columns_available() if render.to_terminal() else _WIDTH
        room = max(_WIDTH_MIN, min(available, _WIDTH)) - len("  " * 3) - len("ok")
        widths = [int(room * share) for share in _SHARES]
        yield _line(("fact", "what was checked", "figure"), widths, "ok")
        yield "  ".join("-" * width for width in (*widths, 2))
        for fact in self.facts:
            cells = [
                textwrap.wrap(safe(text), width, break_on_hyphens=False) or [""]
                for text, width in zip((fact.fact, fact.checked, fact.figure), widths, strict=True)
            ]
            for number, row in enumerate(itertools.zip_longest(*cells, fillvalue="")):
                mark = render.coloured("ok") if fact.ok else render.coloured("NO", "failed")
                yield _line(row, widths, "" if number else mark)


def _line(cells: Sequence[str], widths: Sequence[int], mark: str) -> str:
    padded = (pad(cell, width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join((*padded, mark)).rstrip()
