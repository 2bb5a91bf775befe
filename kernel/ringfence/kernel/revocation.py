"""Makes a moved policy epoch true for calls that are already under way.

INVARIANT: when `apply_epoch` returns, no call of the agent can start an effect under a right that the epoch took away;
what had started before is finished, or is in the report.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ringfence.kernel.core import Core
from ringfence.kernel.flight import Flight
from ringfence.kernel.resting import denied
from ringfence.kernel.rights import Rights
from ringfence.kernel.thread import Thread
from ringfence.policy.types import Verdict
from ringfence.syscalls.errors import SyscallError

SETTLE_S = 3.0
"""How long a call that has begun its effect may take to finish before it is reported as still under way."""


async def apply_epoch(core: Core, thread: Thread, epoch: int) -> list[dict[str, Any]]:
    """Take over the rights of `epoch`, cancel what they no longer allow, and acknowledge.

    Returns:
        Affected calls: `step`, `action`, `resource`, `fate` (`cancelled`, `finished` or `under way`).
    """
    work = thread.epoch_work.get(epoch)
    if work is None:
        work = asyncio.create_task(_apply(core, thread, epoch))
        thread.epoch_work[epoch] = work
        for old in [e for e in thread.epoch_work if e < epoch - 16]:
            del thread.epoch_work[old]
    return await asyncio.shield(work)


async def _apply(core: Core, thread: Thread, epoch: int) -> list[dict[str, Any]]:
    try:
        report = await settle_affected(thread, await thread.refresh(epoch))
        await core.store.ack_epoch(thread.key, epoch, {"affected": report})
    except BaseException:
        # Asked again, it is done again.
        thread.epoch_work.pop(epoch, None)
        raise
    return report


async def settle_affected(thread: Thread, rights: Rights) -> list[dict[str, Any]]:
    """Cancel or await the calls under way that `rights` no longer allow; gives the report of `apply_epoch`."""
    affected: list[tuple[Flight, SyscallError]] = []
    for flight in list(thread.flights.values()):
        if flight.judgement is None or not flight.questions:
            continue
        judgement = rights.judge(tuple(flight.questions), flight.effect.name, flight.used)
        if flight.waits_for is not None and judgement.verdict is not Verdict.DENY:
            if flight.look is not None:
                flight.look.set()  # it decides again by itself whether it still has to wait, and for what
        elif not flight.permits(judgement):
            affected.append((flight, flight.revoked(judgement)))
    # All at once: none of them runs on while another one is waited for.
    report = list(await asyncio.gather(*(_settle(flight, error) for flight, error in affected)))
    if thread.let_go:
        report += (refused := denied(thread, rights))
        if refused and thread.on_rest is not None:
            thread.on_rest(thread, False)
    return report


async def _settle(flight: Flight, error: SyscallError) -> dict[str, Any]:
    fate = await cancel(flight, error)
    return {"step": flight.step, "action": flight.row.action, "resource": flight.plan.resource, "fate": fate}


async def cancel(flight: Flight, error: SyscallError, settle_s: float = SETTLE_S) -> str:
    """Cancel a call that has not begun its effect, else wait a little for its end.

    Returns:
        `cancelled`, `finished` or `under way`.
    """
    answer = flight.answer
    if flight.effect_started and flight.row.waits:
        # A try that finds nothing ends the call instead of waiting on.
        flight.fate = error
    # INVARIANT: a call that records its end is left alone: its task goes on to send the reply, and a program that
    # never gets one waits for ever.
    if not (answer.done() or flight.effect_started or flight.ending):
        flight.fate = error
        if flight.task is not None:
            flight.task.cancel()
    done, _ = await asyncio.wait([answer], timeout=settle_s)
    if flight.effect_started:
        return "finished" if done else "under way"
    return "finished" if done and answer.result().failure is None else "cancelled"
