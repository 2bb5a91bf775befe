"""A storm in which the host's clock is set as well: hours and years, ahead and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from support.instants import Storm
from support.matrix import Ground, ground

HOUR, YEAR = 3600.0, 365 * 86400.0
JUMPS = (HOUR, -HOUR, 400.0, -5.0, YEAR, -YEAR, 0.0)
"""Where the clock is set, in seconds off the database's."""
SKEWED = Path(__file__).parent / "skewed"


class ClockStorm(Storm):
    """Every other strike sets the kernel's clock, in place of killing anybody."""

    def __init__(
        self, ground: Ground, seed: int, offset: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(ground, seed, say)
        self.offset = offset
        self.jumps = 0

    def strike(self, victim: str) -> None:
        by = JUMPS[self.jumps % len(JUMPS)]
        self.jumps += 1
        fresh = self.offset.with_suffix(".new")
        fresh.write_text(str(by))
        fresh.replace(self.offset)
        # The kernel itself says what time it has: else nothing was tried.
        row = next(row for row in self.ask("List", all=True)["agents"] if row["id"] in self.live.values())
        self.drift(row["age_ms"] / 1000, by)
        if self.jumps % 2 == 0:
            super().strike(victim)

    def drift(self, age_s: float, by: float) -> None:
        """An agent that was submitted under a right clock is as old as the clock is off."""
        if self.jumps == 1 and not by - 5 < age_s < by + 300:
            self.result.stuck.append(
                f"the kernel's clock was not set: an agent is {age_s} s old, not about {by}"
            )


@contextlib.contextmanager
def clock_storm(seed: int, say: Callable[[str], None] = lambda _: None) -> Iterator[ClockStorm]:
    """A kernel whose clock can be set, and nobody else's."""
    from support.scenes import short_directory

    with short_directory() as directory:
        offset = directory / "offset"
        offset.touch()
        env = {"PYTHONPATH": str(SKEWED), "SKEWED_BY": str(offset)}
        with ground(env=env) as made:
            yield ClockStorm(made, seed, offset, say)
