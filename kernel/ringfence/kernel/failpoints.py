"""Named places where fault tests stop the kernel, so that it can be killed from outside right there.

Off unless `RINGFENCE_FAILPOINTS` names a directory. A call that reaches the failpoint `http.post:after_effect` looks
for a file of that name there; if it exists, the call adds its agent to `http.post:after_effect.hit` beside it and waits
until the file is gone or the kernel is killed.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

_POLL_S = 0.005


class Failpoints:
    """The failpoints of this process."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @classmethod
    def from_environment(cls) -> Failpoints:
        """Read `RINGFENCE_FAILPOINTS`."""
        name = os.environ.get("RINGFENCE_FAILPOINTS")
        return cls(Path(name) if name else None)

    @property
    def enabled(self) -> bool:
        """Whether any failpoint may stop this process."""
        return self._directory is not None

    def armed(self, action: str) -> bool:
        """Whether a call of this action may be stopped now."""
        return self._directory is not None and any(self._directory.glob(f"{action}:*"))

    async def reach(self, name: str, who: str = "") -> None:
        """Stop here while a file of this name exists; leaves a line with `who` in its `.hit` file."""
        if self._directory is None:
            return
        armed = self._directory / name
        if not armed.exists():
            return
        hit = self._directory / f"{name}.hit"
        with hit.open("a", encoding="utf-8") as file:
            file.write(f"{who}\n")
        while armed.exists():  # noqa: ASYNC110 - a test's file is the only signal that survives kill -9
            await asyncio.sleep(_POLL_S)
