"""What operators do with an agent's budgets: look, raise, lower."""

from __future__ import annotations

import dataclasses
from typing import Any

from ringfence.kernel.budgets import limits_of, plain
from ringfence.kernel.carrying import counted
from ringfence.kernel.operations import pools
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.problems import Problem, bad_usage
from ringfence.kernel.rates import covers
from ringfence.kernel.thread import Thread
from ringfence.policy.actions import check_action
from ringfence.policy.manifest_types import Budgets as Limits
from ringfence.policy.problems import PatternError
from ringfence.policy.units import TOTALS, Rate, parse_rate, parse_total
from ringfence.sandbox.types import SandboxError

BACK = "manifest"
"""Value that goes back to what the manifest says."""


async def budget(kernel: Kernel, name: str, limit: str, value: str, operator: str) -> dict[str, Any]:
    """Show an agent's budgets, or set one limit first and wake what waited for it.

    Raises:
        Problem: no such limit, a value that is none, or more than the operator's ceilings allow.
    """
    thread = await kernel.thread(name)
    if limit or value:
        wanted = _parse(limit, value)
        _check_ceiling(kernel.ownership.resources.file.ceilings.budgets, limit, wanted)
        await _set(kernel, thread, limit, wanted, operator)
    return {
        **_document(kernel, thread),
        "pools": await pools.views(kernel, pools.of(thread), everywhere=True),
    }


def _document(kernel: Kernel, thread: Thread) -> dict[str, Any]:
    budgets = thread.budgets
    return {
        "id": thread.id,
        "state": thread.state,
        "process": kernel.processes.process_state(thread),
        "waiting_for": thread.waiting_for or None,
        "on_exhausted": thread.manifest.budgets.on_exhausted,
        "budgets": [dataclasses.asdict(view) for view in budgets.view()],
        "used": {name: used for name, used in budgets.spent.items() if name != "bytes" or counted(thread)},
        "context_max_tokens": budgets.context_max_tokens,
    }


def _parse(limit: str, value: str) -> float | Rate | None:
    """A total's amount, a rate, or None for the manifest's own."""
    if not limit or not value:
        raise bad_usage("name a limit and its value, such as `tokens 500k` or `http.get 20/s`")
    if limit in TOTALS:
        if value == BACK:
            return None
        amount = parse_total(limit, value)
        if amount is None:
            example = {"usd": "5.00", "bytes": "10MiB"}.get(limit, "10000` or `200k")
            raise bad_usage(f"`{value}` is no amount of `{limit}`; write one such as `{example}`")
        return amount
    try:
        check_action(limit)
    except PatternError as error:
        known = ", ".join(TOTALS)
        raise bad_usage(
            f"`{limit}` is neither a total ({known}) nor an action with a rate: {error.message}"
        ) from None
    rate = parse_rate(value)
    if rate is None and value != BACK:
        raise bad_usage(f"`{value}` is no rate; write one such as `20/s` or `60/m`")
    return rate


def _check_ceiling(above: Limits, limit: str, wanted: float | Rate | None) -> None:
    """Refuse what is above the operator's ceilings.

    Raises:
        Problem: it is; nothing was changed.
    """
    if isinstance(wanted, Rate):
        for pattern, rate in above.rate.items():
            if covers(pattern, limit) and wanted.count / wanted.per_s > rate.count / rate.per_s:
                raise _above(f"rate.{pattern}", f"{rate.count} in {plain(rate.per_s)} s")
    elif wanted is not None and wanted > above.total.get(limit, wanted):
        raise _above(f"total.{limit}", plain(above.total[limit]))


def _above(key: str, ceiling: str) -> Problem:
    text = (
        f"the ceiling for all agents is {ceiling}, so nothing was changed; "
        f"raise `ceilings.budgets.{key}` in the kernel file and run `ringfence reload` first"
    )
    return Problem(text, exit_code=3, reason="AboveCeiling")


async def _set(
    kernel: Kernel, thread: Thread, limit: str, wanted: float | Rate | None, operator: str
) -> None:
    store, kind = kernel.core.store, "total" if limit in TOTALS else "rate"
    if wanted is None:
        await store.unset_budget(thread.key, limit, kind)
    elif isinstance(wanted, Rate):
        await store.set_budget(thread.key, limit, kind, wanted.count, wanted.per_s, operator)
    else:
        await store.set_budget(thread.key, limit, kind, wanted, None, operator)
    facts = {"limit": limit, "value": _plain(wanted), "operator": operator}
    await kernel.core.event(thread.key, "budget.set", thread.id, **facts)
    await kernel.core.operator_event("operator.budget", thread.id, **facts)
    ceilings = kernel.ownership.resources.file.ceilings.budgets
    thread.budgets.relimit(ceilings, limits_of(await store.budgets(thread.key)))
    await wake_parked(kernel, thread)


def _plain(wanted: float | Rate | None) -> str:
    if wanted is None:
        return BACK
    return f"{wanted.count} in {plain(wanted.per_s)} s" if isinstance(wanted, Rate) else plain(wanted)


async def wake_parked(kernel: Kernel, thread: Thread) -> None:
    """Start an agent again that was parked for a total which has room now.

    Raises:
        Problem: its sandbox can't be had.
    """
    async with thread.operation:
        waits = [name for name in TOTALS if thread.waiting_for == f"budget `{name}`"]
        if thread.state != "parked" or thread.program is not None or not waits:
            return
        if not thread.budgets.has_room(waits[0]):
            return
        try:
            await kernel.processes.start(thread)
        except SandboxError as error:
            text = f"the limit is set, but `{thread.id}` can't start: {error}"
            raise Problem(text, exit_code=1, reason="SandboxError") from error
