"""What a host has for one kernel: its files, a place for its sandboxes, and users to run them as."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

from ringfence.sandbox.overlay_apply import discard
from ringfence.sandbox.remote.mirror import Draft, Mirror, Mirrors, remove
from ringfence.sandbox.remote.store import Store
from ringfence.sandbox.types import Sandbox, SandboxError


class Uids:
    """Users of this host that agents run as, one each.

    Args:
        first: of the range; None: this process can't change its user, agents run as it does.
        count: how many there are.
    """

    def __init__(self, first: int | None, count: int) -> None:
        self._first = first
        self._free = set(range(count))
        self._taken: dict[tuple[str, str], int] = {}

    def of(self, kernel: str, agent: str) -> int | None:
        """The uid of an agent, the same until it is given back.

        Raises:
            SandboxError: all are taken.
        """
        if self._first is None:
            return None
        key = (kernel, agent)
        if key not in self._taken:
            if not self._free:
                raise SandboxError(
                    "the sandbox host has no user left for one more agent; give it more `--uids`"
                )
            self._taken[key] = min(self._free)
            self._free.remove(self._taken[key])
        return self._first + self._taken[key]

    def give_back(self, kernel: str, agent: str) -> None:
        """An agent has nothing here any more."""
        if (slot := self._taken.pop((kernel, agent), None)) is not None:
            self._free.add(slot)


def mapped(first: int, count: int, text: str | None = None) -> bool:
    """Whether this process's user namespace knows these uids, as `/proc/self/uid_map` says."""
    text = Path("/proc/self/uid_map").read_text(encoding="ascii") if text is None else text
    for line in text.splitlines():
        inside, _, size = map(int, line.split())
        if inside <= first and first + count <= inside + size:
            return True
    return False


@dataclass(slots=True, kw_only=True, eq=False)
class Lodging:
    """What one kernel has here.

    Attributes:
        kernel: name of its certificate.
        owner: its data directory.
        root: directory for all of it.
        sandbox: runs the sandboxes.
        uids: of the whole host.
        cache_bytes: what the store keeps at most.
        file_bytes_max: the largest single file.
    """

    kernel: str
    owner: str
    root: Path
    sandbox: Sandbox
    uids: Uids
    cache_bytes: int
    file_bytes_max: int = 1 << 40
    store: Store = field(init=False)
    mirrors: Mirrors = field(init=False)
    _offers: int = 0

    def __post_init__(self) -> None:
        """Make the directories; what an earlier host left in them is removed, but for stored content."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("run", "scratch"):
            with contextlib.suppress(FileNotFoundError):
                discard(self.root / name)
            (self.root / name).mkdir(mode=0o700)
        self.store = Store(self.root / "content", self.cache_bytes)
        self.mirrors = Mirrors(self.root / "trees", self.store, self._uid_of, self._released)

    def label(self, agent: str) -> str:
        """How the records of the native backend call an agent."""
        return agent

    def sockets(self, call: int) -> Path:
        """Directory of a program's socket."""
        return self.root / "run" / str(call)

    def scratch(self, call: int) -> Path:
        """Scratch directory of a command."""
        return self.root / "scratch" / str(call)

    async def build(self, draft: Draft) -> Mirror:
        """Make a tree, and forget what is too much.

        Raises:
            WireError: it has no top.
            SandboxError: no user is left for its agent.
            OSError: there is no room.
        """
        plan = self.mirrors.claim(draft)
        await asyncio.to_thread(self.mirrors.make, plan)
        await self._remove(self.mirrors.settle(plan))
        return plan.tree

    @contextlib.asynccontextmanager
    async def offering(self) -> AsyncGenerator[None]:
        """While a tree is described and made: stored content stays, and what is too much goes after the last one."""
        self._offers += 1
        try:
            yield
        finally:
            self._offers -= 1
            if self._offers == 0:
                await asyncio.to_thread(self.store.prune)

    async def clear(self) -> None:
        """Remove everything but stored content; nothing of it is in use."""
        await self._remove(self.mirrors.clear())

    async def _remove(self, trees: list[Mirror]) -> None:
        for tree in trees:
            await asyncio.to_thread(remove, tree.path)

    def _uid_of(self, agent: str) -> int | None:
        return self.uids.of(f"{self.kernel}/{self.owner}", agent)

    def _released(self, agent: str) -> None:
        self.uids.give_back(f"{self.kernel}/{self.owner}", agent)
