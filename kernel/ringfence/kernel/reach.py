"""Where the files of agents are that other kernels of this database have, and whether they can be had from there.

Files of one agent lie in one data directory. Another kernel of the same host and user reaches it; elsewhere only the store that
all nodes share does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ringfence.kernel.config import Layout
from ringfence.kernel.core import Core
from ringfence.kernel.homes import own_home
from ringfence.kernel.journal.types import AgentRecord, KernelKey, KernelRecord
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.problems import Problem, StoreAway, conflict
from ringfence.kernel.thread import Thread
from ringfence.sandbox.depot import DepotError
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.sandbox.workspace import WorkspaceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an agent's files are to be had.

    Attributes:
        beside: the data directory of another kernel of this host; None: this kernel's own, or the shared store.
        stored: whether they have to be brought from the shared store.
        lender: the living kernel of `beside`; None: it is dead.
    """

    beside: Layout | None = None
    stored: bool = False
    lender: KernelKey | None = None


class Locks:
    """Data directories of dead kernels, held so that no kernel starts on one while agents of it are worked on."""

    def __init__(self) -> None:
        self._held: dict[Path, TextIO] = {}

    def take(self, layout: Layout) -> bool:
        """Hold a directory; False: a process has it, whether it answers or not.

        INVARIANT: what holds it is that process itself: the lock ends with it and not before.
        """
        if layout.data in self._held:
            return True
        file = layout.lock_file.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._held[layout.data] = file
        return True

    def free(self, layout: Layout) -> bool:
        """Whether no process has a directory."""
        if layout.data in self._held:
            return True
        taken = self.take(layout)
        if taken:
            self.release(layout)
        return taken

    def release(self, layout: Layout) -> None:
        """Let kernels start there again."""
        file = self._held.pop(layout.data, None)
        if file is not None:
            file.close()


class Reach:
    """The files of agents, as far as this kernel reaches them."""

    def __init__(self, core: Core, ownership: Ownership) -> None:
        self._core = core
        self._ownership = ownership
        self._layout = ownership.layout
        self.locks = Locks()

    async def place_of(self, record: AgentRecord) -> Place:
        """Where an agent's files are to be had.

        Raises:
            Problem: nowhere from here, or their kernel neither answers nor ends.
            Unavailable: the database is away.
        """
        if record.key in self._core.threads:
            return Place()
        kernels = await self._core.store.kernels()
        alive = {kernel.key for kernel in kernels if kernel.alive and kernel.fence > 0}
        kept = await self._core.store.home_of(record.key)
        own = await asyncio.to_thread((self._layout.agent(record.id) / "live").is_dir)
        if kept and not (own and kept == own_home(self._layout)):
            if self._ownership.homes is None:
                raise conflict(
                    f"`{record.id}` has its files in a shared store, which this kernel was started without (`--store`)"
                )
            return Place(stored=True)
        if own:
            return Place()
        beside = await asyncio.to_thread(self._beside, record, kernels)
        lender = next((k.key for k in kernels if k.key in alive and Path(k.data_dir) == beside.data), None)
        if lender is None and not await asyncio.to_thread(self.locks.free, beside):
            raise silent(record.id, beside)
        return Place(beside=beside, lender=lender)

    def _beside(self, record: AgentRecord, kernels: Sequence[KernelRecord]) -> Layout:
        """The data directory of this host that has an agent's files."""
        me = next(kernel for kernel in kernels if kernel.key == self._core.kernel)
        owner = next((kernel for kernel in kernels if kernel.key == record.owner), None)
        here = [kernel for kernel in kernels if kernel.host == me.host and kernel.data_dir != me.data_dir]
        last = [kernel.data_dir for kernel in here if owner is not None and kernel.key == owner.key]
        for some in (last, [kernel.data_dir for kernel in here]):
            found = [Path(one) for one in dict.fromkeys(some) if _is_ours(Path(one), record.id)]
            if len(found) > 1:
                both = " and ".join(f"`{one}`" for one in found)
                raise conflict(
                    f"`{record.id}` has files in {both}; move the one away that is no kernel's any more"
                )
            if found:
                return Layout(data=found[0], run=found[0] / "run")
        where = "nobody knows where" if owner is None else f"on host `{owner.host}`, in `{owner.data_dir}`"
        raise conflict(f"`{record.id}` can't be reached from this kernel: its files are {where}")

    async def glance(self, record: AgentRecord, place: Place, scratch: Path) -> Thread:
        """A thread of an agent that is another kernel's, to plan with: nothing is done by it, and nothing of it is changed.

        Args:
            record: the agent.
            place: where its files are.
            scratch: an empty directory for what has to be brought to look at it; the caller's to remove.

        Raises:
            Problem: its files can't be read.
            Unavailable: the database is away.
        """
        beside, homes = place.beside, self._ownership.homes
        if place.stored and homes is not None:
            beside = Layout(data=scratch, run=scratch)
            try:
                await asyncio.to_thread(homes.bring, record, beside)
            except DepotError as error:
                raise StoreAway(str(error)) from error
            except (SnapshotError, WorkspaceError, OSError) as error:
                raise conflict(
                    f"the files of `{record.id}` can't be brought from the shared store: {error}"
                ) from error
        return await self._ownership.glance(record, beside)


class Scratch:
    """Directories for what is brought to be looked at."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._made: list[Path] = []

    def make(self) -> Path:
        """An empty one."""
        made = Path(tempfile.mkdtemp(prefix=".look-", dir=self._layout.data))
        self._made.append(made)
        return made

    def remove(self) -> None:
        """Remove all of them."""
        for made in self._made:
            shutil.rmtree(made, ignore_errors=True)


def silent(agent: str, beside: Layout) -> Problem:
    """The kernel that has an agent neither renews its lease nor ends."""
    pid = ""
    with contextlib.suppress(OSError, ValueError):
        pid = f" (pid {beside.lock_file.read_text(encoding='ascii').strip()})"
    return conflict(
        f"`{agent}` belongs to the kernel{pid} on `{beside.data}`, which has stopped answering and still runs: continue it or end it"
    )


def _is_ours(data: Path, agent: str) -> bool:
    """Whether a directory has an agent's files, and is of this kernel's user."""
    try:
        return (data / "agents" / agent / "live").is_dir() and data.stat().st_uid == os.geteuid()
    except OSError:
        return False
