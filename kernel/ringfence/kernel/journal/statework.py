"""Versioned changes of the shared state, worked out in memory while their rows are locked. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringfence.kernel.journal.types import Moved, StateConflict, Unheld
from ringfence.syscalls.base import StateChange, StateDone


class Held(NamedTuple):
    """A locked key as it is now. Version 0: it never existed. Not live: it has no value."""

    key: str
    version: int
    live: bool
    agent: str
    step: int


class Claimed(NamedTuple):
    """A locked work claim as it is now. Not live: it was released, has run out, or its agent has ended."""

    key: str
    fence: int
    live: bool
    agent: str
    step: int


class Version(NamedTuple):
    """One version to write."""

    key: str
    version: int
    value: bytes | None
    agent: str
    step: int


@dataclass(slots=True)
class StateWork:
    """The changes of one transaction over locked keys.

    INVARIANT: `_held` is what the table holds once `changed` is written, so a change sees the ones before it.
    """

    changed: list[Version] = field(default_factory=list[Version])
    _held: dict[str, Held] = field(default_factory=dict[str, Held])
    _before: list[Held] = field(default_factory=list[Held])
    _claims: dict[str, Claimed] = field(default_factory=dict[str, Claimed])

    def load(self, rows: list[Held]) -> None:
        """Take the locked rows."""
        for row in rows:
            self._held[row.key] = row

    def load_claims(self, rows: list[Claimed]) -> None:
        """Take the locked claims."""
        for row in rows:
            self._claims[row.key] = row

    def held(self) -> dict[str, Held]:
        """Every key that was loaded, as it is with the changes so far."""
        return self._held

    def current(self, key: str) -> Held:
        """Say how a key stands, with the changes so far."""
        return self._held.get(key) or Held(key, 0, False, "", 0)

    def put(self, key: str, value: bytes | None, agent: str, step: int) -> int:
        """Write a key, or delete it with None; returns its version. Deleting nothing changes nothing."""
        now = self.current(key)
        if value is None and not now.live:
            return now.version
        version = now.version + 1
        self._before.append(now)
        self._held[key] = Held(key, version, value is not None, agent, step)
        self.changed.append(Version(key, version, value, agent, step))
        return version

    def apply(self, change: StateChange, agent: str, step: int) -> StateDone:
        """Do one change, all of it or nothing.

        Raises:
            StateConflict: a key it read is no longer at the version it read, or a claim it rests on is lost.
        """
        moved: dict[str, Moved] = {}
        for key, version in change.reads.items():
            now = self.current(key)
            if now.version != version:
                moved[key] = Moved(now.version, now.agent, now.step, version)
        lost = self._lost(change, agent)
        if moved or lost:
            raise StateConflict(moved, lost)
        versions: dict[str, int] = {}
        previous: dict[str, int] = {}
        # A key both put and deleted ends deleted: puts come first.
        for key, value in (*change.puts.items(), *((key, None) for key in change.deletes)):
            now = self.current(key)
            previous.setdefault(key, now.version if now.live else 0)
            versions[key] = self.put(key, value, agent, step)
        return StateDone(versions=versions, previous=previous)

    def _lost(self, change: StateChange, agent: str) -> dict[str, Unheld]:
        lost: dict[str, Unheld] = {}
        for key, fence in change.claims.items():
            now = self._claims.get(key) or Claimed(key, 0, False, "", 0)
            if not (now.live and now.agent == agent and now.fence == fence):
                lost[key] = Unheld(now.fence, now.agent if now.live else "", now.step, fence)
        return lost

    def mark(self) -> int:
        """Name this moment for `undo`."""
        return len(self.changed)

    def undo(self, mark: int) -> None:
        """Take back every change since `mark`."""
        for now in reversed(self._before[mark:]):
            self._held[now.key] = now
        del self.changed[mark:], self._before[mark:]

    def newest(self) -> list[Version]:
        """The newest version of each changed key."""
        return list({version.key: version for version in self.changed}.values())

    def history(self) -> dict[str, list[Any]]:
        """Every new version, as the columns of `state.record`."""
        return _columns(self.changed)

    def latest(self) -> dict[str, list[Any]]:
        """The newest version of each changed key, as the columns of `state.advance`."""
        return _columns(self.newest())


def keys_of(change: StateChange) -> set[str]:
    """All keys that a change reads or writes."""
    return {*change.reads, *change.puts, *change.deletes}


def _columns(versions: list[Version]) -> dict[str, list[Any]]:
    return {
        "keys": [v.key for v in versions],
        "versions": [v.version for v in versions],
        "values": [v.value for v in versions],
        "agents": [v.agent for v in versions],
        "steps": [v.step for v in versions],
    }
