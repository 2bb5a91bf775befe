"""A program that a sandbox host runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from ringfence.sandbox.remote import wire
from ringfence.sandbox.remote.calls import Calls, Place
from ringfence.sandbox.types import Exit, SandboxLostError

_LAST_OUTPUT_S = 5.0


class RemoteProgram:
    """A running program, or one that ran.

    Args:
        calls: the session it belongs to.
        number: of the order that started it.
        place: what the session knows of it.
        identity: for people.
        forms: of its walls, as the host found them.
        pumps: carry its output.
    """

    def __init__(
        self,
        calls: Calls,
        number: int,
        place: Place,
        identity: Mapping[str, str | int],
        forms: Mapping[str, str],
        pumps: Sequence[asyncio.Task[None]],
    ) -> None:
        self._calls = calls
        self._number = number
        self._place = place
        self._identity = identity
        self._forms = forms
        self._pumps = pumps

    @property
    def identity(self) -> Mapping[str, str | int]:
        """`{"host": …, "id": …}`: the name of the host's certificate, and what its log calls the program."""
        return self._identity

    @property
    def forms(self) -> Mapping[str, str]:
        """In which form each wall that has several stands around this program."""
        return self._forms

    async def wait(self) -> Exit:
        """Wait for the end of the whole tree, and for its output as long as someone takes it.

        A host that is lost ends its programs: `ExitReason.KILLED`.
        """
        ended = await asyncio.shield(self._place.ended)
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=_LAST_OUTPUT_S)
        return ended

    async def kill(self) -> None:
        """End the whole tree, frozen or not; returns when nothing of it is left, or the host is lost for longer than its lease."""
        with contextlib.suppress(SandboxLostError):
            await self._act("kill")
        await asyncio.shield(self._place.ended)

    async def pause(self) -> None:
        """Freeze every process of the tree.

        Raises:
            SandboxError: a process can't be frozen; it runs on.
        """
        await self._act("pause")

    async def resume(self) -> None:
        """Thaw it.

        Raises:
            SandboxError: the host refuses.
        """
        await self._act("resume")

    async def _act(self, what: str) -> None:
        if self._place.ended.done():
            return
        try:
            await self._calls.order(wire.Act(program=self._number, what=what))
        except SandboxLostError:
            if not self._place.ended.done():
                raise
