"""Removes agents that ended: their files, their mailbox, and what they kept. The journal's rows are evidence and stay."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from ringfence.kernel.descent import state_of
from ringfence.kernel.journal.types import AgentKey, AgentRecord, Entry, JournalError, Phase, Row
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.problems import Problem, conflict, not_here
from ringfence.kernel.revocation import cancel
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.syscalls.base import Work
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import Killed, SyscallError

log = logging.getLogger(__name__)


async def remove(kernel: Kernel, name: str, operator: str) -> dict[str, Any]:
    """Forget what may be forgotten of an agent. One whose removal was cut short is removed to the end.

    Raises:
        Problem: no such agent, it has not ended, or its files are another kernel's.
    """
    record = await kernel.record(name, removed=True)
    forgotten: dict[str, int] = {}
    if await kernel.core.store.removed_at(record.key) is None:
        forgotten = await _forget(kernel, record, operator)
    freed = await asyncio.to_thread(_remove_files, kernel, record.key, record.id)
    return {"id": record.id, "name": record.name, "forgotten": forgotten, "freed_bytes": freed}


async def _forget(kernel: Kernel, record: AgentRecord, operator: str) -> dict[str, int]:
    core = kernel.core
    home = kernel.layout.agent(record.id)
    thread = await kernel.thread(record.id) if home.is_dir() else None
    if thread is not None:
        state, key, operation = thread.state, thread.key, thread.operation
    else:
        # A copy that was cut short has no files yet; anybody may end it that no living kernel owns.
        state, key, operation = record.state, record.key, asyncio.Lock()
        if not await core.store.take_agent(record.key, core.kernel):
            raise not_here(record.id)
        await core.journal.adopt(record.key)
    async with operation:
        if thread is not None:
            state = thread.state
        if state not in FINAL_STATES:
            raise conflict(
                f"`{record.id}` is {state}; only what has ended can be removed: ringfence kill {record.id}"
            )
        if lives := [
            kin.child for kin in await core.store.descendants(key) if await _lives(kernel, kin.child)
        ]:
            raise conflict(
                f"{len(lives)} agents that `{record.id}` spawned have not ended, and their rights are bounded by its: "
                f"ringfence kill {record.id}"
            )
        if thread is not None:
            await _end_calls(thread)
        done = await core.append(_entry(key, record.id, operator))
        # INVARIANT: from here on nobody finds it: what is left of the removal can be done again by its id.
        core.threads.pop(key, None)
        core.journal.forget(key)
    await core.operator_event("operator.rm", record.id, operator=operator, **done)
    await core.failpoints.reach("rm:before_files", record.id)
    return done


async def _lives(kernel: Kernel, key: AgentKey) -> bool:
    record = await kernel.core.store.agent_by_key(key)
    return record is not None and state_of(kernel.core, record) not in FINAL_STATES


async def _end_calls(thread: Thread) -> None:
    """End the calls that outlived their program, above all those that wait for a person."""
    reason = Killed("the operator removed the agent")
    await asyncio.gather(*(cancel(flight, reason) for flight in list(thread.flights.values())))
    for step, flight in sorted(thread.flights.items()):
        raise conflict(
            f"step {step} of `{thread.id}`, {flight.row.action}, is still under way; nothing was removed: try again when it is over"
        )


async def discard(kernel: Kernel, record: AgentRecord, why: str) -> None:
    """Leave nothing to see of a copy that failed: its records stay, for the journal is append-only."""
    core = kernel.core
    with contextlib.suppress(JournalError, SyscallError, Problem):
        await core.append(_entry(record.key, record.id, "the kernel"))
        core.journal.forget(record.key)
    await asyncio.to_thread(_remove_files, kernel, record.key, record.id)
    await asyncio.to_thread(shutil.rmtree, kernel.layout.origin(record.id), ignore_errors=True)
    log.info("%s was not finished: %s", record.id, why)


def _entry(key: AgentKey, agent: str, operator: str) -> Entry:
    row = Row(
        chain=key,
        phase=Phase.EVENT,
        action="agent.removed",
        resource=agent,
        started_us=time.time_ns() // 1000,
    )

    def finish(done: dict[str, int] | None) -> bytes:
        if done is None:
            raise conflict(
                f"`{agent}` was removed or started meanwhile, or has children that have not ended; see: ringfence tree"
            )
        return canonical_json({"operator": operator, "forgotten": done})

    return Entry(row=row, atomic=Work(statement="agent_remove", values={"by": operator}), finish=finish)


def _remove_files(kernel: Kernel, key: AgentKey, agent: str) -> int:
    freed = 0
    if kernel.ownership.homes is not None:
        kernel.ownership.homes.forget(agent)
    for path in (kernel.layout.points(agent), kernel.layout.socket_dir(key), kernel.layout.agent(agent)):
        freed += _size(path)
        # The home goes last: its id is what a removal that was cut short is found by.
        if path.is_dir():
            shutil.rmtree(path)
    return freed


def _size(path: Path) -> int:
    return sum(
        os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118 - file names may be undecodable
        for place, _, names in os.walk(path)
        for name in names
    )
