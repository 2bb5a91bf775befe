"""Who hears what a call brings while it runs, before it is recorded."""

from __future__ import annotations

from typing import Protocol


class Hearing(Protocol):
    """Takes parts of a model's reply as they come. What ends a reply is none of them: that comes from the record."""

    def part(self, data: bytes, kind: str) -> None:
        """Take the next part: the data of an event of the host's, and its kind. Never waits."""
        ...

    def spoil(self) -> None:
        """Hear that no more comes, since what follows may not be shown before it is whole."""
        ...


class Hears(Protocol):
    """The part of a call that knows who hears it."""

    @property
    def hearing(self) -> Hearing | None:
        """None: nobody does before it is recorded."""
        ...
