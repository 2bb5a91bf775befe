"""Other agents that have read what a rollback undoes: they are listed, and told by a message.

Looked for are reads that answered with an undone version of a key, reads of a table after rows of it were written, memories of
a shared space, and messages that were received. What a reader made of it is its own affair: nothing of it is undone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.descent import state_of
from ringfence.kernel.journal.types import AgentKey, Entry, Phase, Row, StateVersion, StoredRow
from ringfence.kernel.mailboxes import woken_by
from ringfence.kernel.rollback_atoms import TAKEN
from ringfence.kernel.thread import FINAL_STATES
from ringfence.syscalls import messages_send
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import SyscallError
from ringfence.syscalls.sql_common import Table

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.rollback_plan import Member, Undo
    from ringfence.kernel.thread import Thread

READS_MAX: Final = 10_000
"""Reads that are looked at for one rollback; later ones are not listed."""

SHOWN_MAX: Final = 16
"""Things that are named of one reader."""

SENDER: Final = "kernel:rollback"


class _Undone:
    """What is undone, and by whose rollback."""

    def __init__(
        self, members: Sequence[Member], undos: Sequence[Undo], changed: Mapping[str, Sequence[StateVersion]]
    ) -> None:
        place = {member.thread.id: number for number, member in enumerate(members)}
        self.versions = {
            (v.key, v.version): place[v.agent] for versions in changed.values() for v in versions
        }
        self.entries = {
            one.target: number
            for number, undo in enumerate(undos)
            for one in undo.moved
            if one.kind == "memory" and one.action == "hide" and one.detail != "own"
        }
        self.tables: dict[str, tuple[int, int]] = {}
        for number, member in enumerate(members):
            for at, record in member.records:
                for change in record.get("changes", ()):
                    name = Table(change["schema"], change["table"]).resource(str(record["resource"]))
                    self.tables[name] = (min(at, self.tables.get(name, (at, number))[0]), number)
        begun = [row.started_us for member in members for row in member.rows if row.effect != "READ"]
        self.since_us = min(begun, default=0)

    def read_by(self, row: StoredRow) -> list[tuple[int, str]]:
        """What of it a call has read: whose, and a few words."""
        body: dict[str, Any] = json.loads(row.body)
        result: dict[str, Any] = body.get("result") or {}
        if row.action == "state.get":
            seen = [(row.resource, int(result.get("version", 0)))]
            return self._versions(seen)
        if row.action == "state.transaction":
            arguments: dict[str, Any] = body.get("arguments") or {}
            reads: dict[str, int] = arguments.get("reads") or {}
            return self._versions(list(reads.items()))
        if row.action == "memory.search":
            ids = [str(entry.get("id")) for entry in result.get("entries") or ()]
            return [(self.entries[one], f"memory {one}") for one in ids if one in self.entries]
        return [
            (number, f"table {name}")
            for name, (at, number) in self.tables.items()
            if row.started_us >= at and name in row.resource.split(", ")
        ]

    def _versions(self, seen: Sequence[tuple[str, int]]) -> list[tuple[int, str]]:
        return [
            (self.versions[one], f"state {one[0]} version {one[1]}") for one in seen if one in self.versions
        ]


async def add_readers(
    core: Core,
    members: Sequence[Member],
    undos: Sequence[Undo],
    changed: Mapping[str, Sequence[StateVersion]],
) -> None:
    """List those that read what is undone, with what is undone.

    Raises:
        Unavailable: the database is away.
    """
    undone = _Undone(members, undos, changed)
    found: dict[tuple[int, str], tuple[int, dict[str, None]]] = {}
    if undone.versions or undone.entries or undone.tables:
        values = (list(changed), [member.thread.key for member in members], undone.since_us, READS_MAX)
        for row in await core.store.reads_since(*values):
            for number, what in undone.read_by(row):
                reader = await core.store.agent_by_key(AgentKey(row.chain))
                if reader is not None:
                    found.setdefault((number, reader.id), (row.step, {}))[1][what] = None
    for number, undo in enumerate(undos):
        for one in undo.moved:
            if one.kind == "message" and one.action == TAKEN:
                key = (number, one.detail.removeprefix("to "))
                found.setdefault(key, (0, {}))[1][f"message {one.target}"] = None
    for (number, reader_id), (step, things) in sorted(found.items()):
        record = await core.store.agent(reader_id)
        ended = record is None or state_of(core, record) in FINAL_STATES
        names = list(things)
        more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
        undos[number].others.append(
            {
                "kind": "reader",
                "id": reader_id,
                "step": step,
                "action": "ended" if ended else "told",
                "detail": ", ".join(names[:SHOWN_MAX]) + more,
            }
        )


async def tell(core: Core, thread: Thread, step: int, cut: int, others: Sequence[dict[str, Any]]) -> None:
    """Send each that read it a message. One that takes none is passed over: it is listed all the same.

    A kernel that dies in the middle tells again: the message names the rollback's step.

    Raises:
        JournalError: the database is away.
    """
    for other in others:
        if other["kind"] != "reader" or other["action"] != "told":
            continue
        said = {
            "rolled_back": {"agent": thread.id, "step": step, "to_step": cut},
            "read": other["detail"].split(", "),
        }
        work = messages_send.work(str(other["id"]), None, said, SENDER)
        work = replace(work, values={**work.values, "sender_name": SENDER})
        woken: list[tuple[int, int | None]] = []

        def finish(
            done: dict[str, Any], to: str = str(other["id"]), woken: list[Any] = woken, said: Any = said
        ) -> bytes:
            sent = messages_send.check(to, done)
            woken[:] = woken_by(sent)
            return canonical_json({"message": f"m{sent['message']}", "to": sent["to"], "json": said})

        row = Row(
            chain=-core.kernel,
            phase=Phase.EVENT,
            action="rollback.told",
            resource=str(other["id"]),
            started_us=time.time_ns() // 1000,
        )
        try:
            await core.append(Entry(row=row, atomic=work, finish=finish))
        except SyscallError:
            other["action"] = "listed"
            continue
        for key, owner in woken:
            core.mailboxes.announce(AgentKey(key), owner)
