"""Carries recorded rollbacks to their end: those that were just begun, and those that a crash or a target cut short.

Agents that go back together are finished as one. All of them are held, one plan is made for all that is left, and then each
part is carried out: a plan that was made while another one's part was being put back would take that for work of others.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringfence.kernel import descent
from ringfence.kernel.core import Core
from ringfence.kernel.handover import Handover
from ringfence.kernel.journal.types import AgentKey, StoredRow
from ringfence.kernel.problems import conflict
from ringfence.kernel.replay import OPERATOR_LANE
from ringfence.kernel.rollback_atoms import drop_voided, merged, rewind
from ringfence.kernel.rollback_begin import Beginning, goes_back
from ringfence.kernel.rollback_cuts import Cut, done_since, is_rollback
from ringfence.kernel.rollback_plan import Member, Plans, Undo
from ringfence.kernel.rollback_restore import Restoring
from ringfence.kernel.thread import FINAL_STATES, Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One agent's part in a rollback that is done.

    Attributes:
        undo: what was done.
        facts: where it led: `point`, `branch` and `step`.
        path: the only path that went back; None: everything.
    """

    undo: Undo
    facts: dict[str, Any]
    path: str | None


@contextlib.asynccontextmanager
async def held(threads: Iterable[Thread]) -> AsyncGenerator[None]:
    """Hold the operation of several agents."""
    async with contextlib.AsyncExitStack() as stack:
        # INVARIANT: always in this order, so that two of these never wait for each other.
        for thread in sorted(set(threads), key=lambda one: one.key):
            await stack.enter_async_context(thread.operation)
        yield


class Finishing:
    """Finishes rollbacks of this kernel's agents."""

    def __init__(
        self, core: Core, beginning: Beginning, restoring: Restoring, plans: Plans, handover: Handover
    ) -> None:
        self._core = core
        self._handover = handover
        self._beginning = beginning
        self._restoring = restoring
        self._plans = plans

    async def finish(self, thread: Thread) -> dict[AgentKey, Finished]:
        """Carry a rollback of an agent to its end, if one is begun, with all agents that go back with it.

        Nobody's operation may be the caller's: all of them are held here.

        Returns:
            What was done now, of each agent; nothing where no rollback was begun, or all that lacked was to say that it is done.

        Raises:
            Problem: a part can't be carried out now, or is another kernel's to carry out; what is left is done when it is run again.
        """
        while True:
            begun = await self._begun(thread)
            if begun is None and not goes_back(thread):
                return {}
            cuts = {} if begun is None else await self._cuts(thread, begun)
            away = await self._away(cuts)
            if away:
                await self._refuse_led_elsewhere(cuts)
                await self._handover.gather(list(cuts))
            try:
                members = await self._members(cuts)
                async with held([thread, *(member.thread for member in members)]):
                    again = await self._begun(thread)
                    if begun is None and again is None:
                        await self._rest([thread], set())  # it was said, and never recorded
                        return {}
                    if begun is not None and again is not None and again.step == begun.step:
                        return await self._finish(thread, begun, members)
            finally:
                if away:
                    await self._handover.let_go(list(cuts))

    async def _cuts(self, thread: Thread, begun: StoredRow) -> dict[AgentKey, Cut]:
        """All that go back together, and where to; an agent that is there no more is left out."""
        group = _group_of(begun)
        if group is not None and "members" not in group:
            head = await self._core.store.rollback_intent(AgentKey(group["head"]), group["id"])
            group = None if head is None else _group_of(head)
        listed: list[dict[str, int]] = (group or {}).get("members") or []
        cuts = {
            AgentKey(one["key"]): Cut(step=one["cut"], parent=one["parent"], seen=one["seen"])
            for one in listed
        }
        return cuts or {thread.key: _cut_of(begun)}

    async def _away(self, cuts: Mapping[AgentKey, Cut]) -> bool:
        """Whether an agent is another kernel's without which the others can't be finished."""
        store = self._core.store
        records = [await store.agent_by_key(key) for key in cuts if key not in self._core.threads]
        if all(record is None or record.owner == self._core.kernel for record in records):
            return False
        for key, cut in cuts.items():
            last = [row for row, _ in await store.unfinished(key) if is_rollback(row)]
            if last:
                return True
            branches = await store.branches(key)
            if max(record.branch for record in branches) <= cut.seen:
                return True  # its part has not begun
        # Every part is on record as done: each kernel has its own agents rest.
        return False

    async def _refuse_led_elsewhere(self, cuts: Mapping[AgentKey, Cut]) -> None:
        """Leave it to the kernel that has the first agent, so that no two of them wait for each other's.

        Raises:
            Problem: another living kernel finishes it.
        """
        found = [await self._core.store.agent_by_key(key) for key in cuts]
        records = [record for record in found if record is not None]
        lead = next((record for record in records if record.state not in FINAL_STATES), records[0])
        if lead.key in self._core.threads or lead.owner == self._core.kernel:
            return
        for kernel in await self._core.store.kernels():
            if kernel.key == lead.owner and kernel.alive and kernel.fence > 0:
                raise conflict(f"kernel {kernel.id} finishes it, which has `{lead.id}`")

    async def _members(self, cuts: Mapping[AgentKey, Cut]) -> list[Member]:
        members: list[Member] = []
        for key, cut in cuts.items():
            thread = await self._thread(key)
            if thread is not None:
                members.append(Member(thread=thread, cut=cut))
        return members

    async def _begun(self, thread: Thread) -> StoredRow | None:
        """The intent of a rollback that is not at its end: it has no outcome, or the agent does not rest after it."""
        intent = await self.open_intent(thread)
        if intent is not None:
            thread.going_back = True
            return intent
        return await self._core.store.rollback_intent(thread.key, "") if goes_back(thread) else None

    async def open_intent(self, thread: Thread) -> StoredRow | None:
        """The intent of a rollback of an agent that has no outcome.

        Raises:
            Unavailable: the database is away.
        """
        for intent, _ in await self._core.store.unfinished(thread.key):
            if is_rollback(intent):
                return intent
        return None

    async def _finish(
        self, thread: Thread, begun: StoredRow, members: Sequence[Member]
    ) -> dict[AgentKey, Finished]:
        arguments, group = _arguments(begun), _group_of(begun)
        if group is not None:
            await self._complete(members, group, arguments["operator"])
        steps: dict[AgentKey, int] = {}
        for member in members:
            intent = await self.open_intent(member.thread)
            if intent is not None and _same(_group_of(intent), group):
                steps[member.thread.key], member.thread.going_back = intent.step, True
        if steps:
            return await self.carry_out(members, steps, arguments["path"], group)
        # Their ends are recorded, and not that they rest. An older one that was followed by work says nothing of now.
        mine = [
            member
            for member in members
            if (newest := await self._core.store.rollback_intent(member.thread.key, "")) is not None
            and group is not None
            and _same(_group_of(newest), group)
            and await self._is_last(member.thread, newest.step)
        ]
        doomed: set[str] = set()
        if group is not None:
            await self._settle_messages(mine, [Undo(cut=member.cut.step) for member in mine], group["id"])
        for member in mine:
            rows = await done_since(self._core.store, member.thread, member.cut.step)
            doomed |= {one["id"] for one in await descent.children_of(self._core, member.thread, rows)}
        await self._rest([thread, *(member.thread for member in mine)], doomed)
        return {}

    async def carry_out(
        self,
        members: Sequence[Member],
        steps: Mapping[AgentKey, int],
        path: str | None,
        group: dict[str, Any] | None,
        undos: Sequence[Undo] | None = None,
    ) -> dict[AgentKey, Finished]:
        """Do what is recorded and not done, and let the agents rest. Their operations are the caller's.

        Args:
            members: all that go back together, also those whose part is done.
            steps: of the rollbacks that are not done.
            path: the only path that goes back; None: everything.
            group: what their intents say of it; None: it is one agent alone.
            undos: the plan; None: one is made.

        Raises:
            Problem: as for `finish`.
        """
        planned = await self._plans.plan_all(members, path) if undos is None else undos
        doomed = {other["id"] for undo in planned for other in undo.others if other["kind"] == "child"}
        ids = {member.thread.id for member in members} if group is not None else set[str]()
        done: dict[AgentKey, Finished] = {}
        for member, undo in zip(members, planned, strict=True):
            step = steps.get(member.thread.key)
            if step is not None:
                facts = await self._restoring.carry_out(member.thread, undo, step, path, member.cut, ids)
                done[member.thread.key] = Finished(undo=undo, facts=facts, path=path)
        if group is not None:
            await self._settle_messages(members, planned, group["id"])
        await self._rest([member.thread for member in members], doomed)
        return done

    async def _rest(self, threads: Iterable[Thread], doomed: set[str]) -> None:
        """Leave those that went back where a rollback leaves them: for an operator, or ended where it undoes their birth."""
        for thread in dict.fromkeys(threads):
            if thread.state == "killed":
                thread.going_back = False  # by an operator between two tries: it stays so
            elif goes_back(thread):
                await self._restoring.follow(thread)
                await self._restoring.rest(thread, ended=thread.id in doomed)

    async def _is_last(self, thread: Thread, step: int) -> bool:
        """Whether an agent has made no call since a step."""
        since = await done_since(self._core.store, thread, step)
        return all(row.lane == OPERATOR_LANE for row in since)

    # -- several together -----------------------------------------------------------------------------------------

    async def _complete(self, members: Sequence[Member], group: dict[str, Any], operator: str) -> None:
        """Record the intents that a kernel which died in between had not come to: of several agents all go back, or none."""
        short = {"id": group["id"], "head": group["head"]}
        for member in members:
            known = await self._core.store.rollback_intent(member.thread.key, group["id"])
            if known is None and member.thread.branch == member.cut.seen:
                await self._beginning.still(member.thread, member.cut)
                await self._beginning.announce(member.thread)
                await self._beginning.intent(member.thread, member.cut, None, operator, short)

    async def _thread(self, key: AgentKey) -> Thread | None:
        """An agent of this kernel; None: it is removed, or another kernel's whose part is done."""
        thread = self._core.threads.get(key)
        if thread is not None:
            return thread
        record = await self._core.store.agent_by_key(key)
        if record is not None and record.owner == self._core.kernel and self._core.adopt is not None:
            return await self._core.adopt(record)
        return None

    async def _settle_messages(self, members: Sequence[Member], undos: Sequence[Undo], group: str) -> None:
        """Void what one of them sent and another has given back since."""
        for member, undo in zip(members, undos, strict=True):
            thread = member.thread
            intent = await self._core.store.rollback_intent(thread.key, group)
            # INVARIANT: never of one that has gone on: what it did since would go too.
            if intent is not None and await self._is_last(thread, intent.step):
                again = await rewind(self._core, thread, member.cut, dry=False)
                undo.moved = merged(undo.moved, again)
        drop_voided(undo.moved for undo in undos)


def _arguments(intent: StoredRow) -> dict[str, Any]:
    return json.loads(intent.body)["arguments"]


def _group_of(intent: StoredRow) -> dict[str, Any] | None:
    return _arguments(intent).get("group")


def _same(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    return (one or {}).get("id") == (other or {}).get("id")


def _cut_of(intent: StoredRow) -> Cut:
    arguments = _arguments(intent)
    return Cut(step=int(arguments["cut"]), parent=int(arguments["parent"]), seen=intent.branch)
