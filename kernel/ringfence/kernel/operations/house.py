"""What operators do with the kernel itself."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from ringfence.kernel.config import VERSION
from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.operations import pools
from ringfence.kernel.operations.kernel import Kernel, rfc3339
from ringfence.kernel.problems import Problem, bad_usage
from ringfence.kernel.resources import ResourceError, Resources
from ringfence.kernel.revocation import settle_affected
from ringfence.kernel.secrets import BadSecret, NoSuchSecret, SecretsError
from ringfence.syscalls.llm_ledger import accounts


async def status(kernel: Kernel) -> dict[str, Any]:
    """The kernel's health."""
    resources = kernel.ownership.resources
    out, told = kernel.outreach, []
    try:
        await kernel.core.store.ping()
        database, counts = "ok", Counter(r.state for r in await kernel.core.store.agents(True))
        told = [] if out is None else await out.webhooks()
    except Unavailable:
        database, counts = "away", Counter(t.state for t in kernel.core.threads.values())
    return {
        "pid": os.getpid(),
        "version": VERSION,
        "data": str(kernel.layout.data),
        "listen": kernel.listen,
        "store": None if kernel.ownership.homes is None else kernel.ownership.homes.depot.place,
        "kernel": int(kernel.core.kernel),
        "database": {
            "embedded": kernel.settings.dsn is None,
            "version": kernel.database_version,
            "state": database,
        },
        "agents": dict(counts),
        "config": {
            "file": str(resources.path) if resources.path else None,
            "loaded_at": rfc3339(resources.loaded_at),
            "error": resources.error or None,
            "unavailable": resources.unavailable(),
        },
        "models": [
            {
                "resource": one.resource,
                "model": one.model,
                "tokenizer": one.tokenizer,
                "calls": one.calls,
                "counted_tokens": one.counted,
                "actual_tokens": one.actual,
                "ratio": None if one.ratio is None else round(one.ratio, 4),
                "worst": None if one.worst is None else round(one.worst, 4),
                "factor": round(one.factor, 4),
            }
            for one in accounts()
        ],
        "pools": [] if database == "away" else await pools.views(kernel, kernel.core.pools.declared.values()),
        "scheduler": kernel.processes.turns.view(),
        "telemetry": {
            "traces": kernel.telemetry.traces,
            "metrics": kernel.telemetry.metrics,
            "problems": list(kernel.telemetry.problems),
        },
        "webhooks": told,
        "callback": None if out is None else out.callback(),
    }


async def reload(kernel: Kernel, operator: str) -> dict[str, Any]:
    """Read the kernel file again.

    Raises:
        Problem: it is wrong; the last good one stays in force, and `status` shows the error.
    """
    old = kernel.ownership.resources
    try:
        new = Resources.load(old.path, kernel.secrets, await kernel.embed())
    except ResourceError as error:
        old.error = str(error)
        await kernel.core.operator_event("operator.reload", operator=operator, ok=False, error=str(error))
        raise bad_usage(f"{error}\nthe last good kernel file stays in force", "BadConfig") from error
    await kernel.core.pools.relimit(new.file.pools)
    kernel.ownership.resources = new
    kernel.ownership.backends.reconfigure()
    kernel.probed.clear()
    if kernel.outreach is not None:
        await kernel.outreach.apply()
    affected: list[dict[str, Any]] = []
    for thread in list(kernel.core.threads.values()):
        environment = thread.environment
        environment.http, environment.sql, environment.llm = new.http, new.sql, new.llm
        thread.pools = kernel.core.pools.member(thread.key)
        thread.budgets.relimit(new.file.ceilings.budgets, thread.budgets.overrides)
        # What the new file denies ends here too, though no epoch moved: the answer means that it is in force.
        report = await settle_affected(thread, await thread.refresh(None))
        affected += [{"agent": thread.id, **call} for call in report]
    await kernel.core.pools.upkeep.look()
    kernel.processes.turns.pump()
    await kernel.core.operator_event("operator.reload", operator=operator, ok=True, affected=affected)
    return {
        "file": str(new.path) if new.path else None,
        "loaded_at": rfc3339(new.loaded_at),
        "resources": sorted([*new.http, *new.sql, *new.llm]),
        "unavailable": new.unavailable(),
        "affected": affected,
    }


async def shutdown(kernel: Kernel, drain_ms: int, operator: str) -> dict[str, Any]:
    """Begin the stop in order; the answer comes before it ends."""
    await kernel.core.operator_event("operator.down", operator=operator, drain_ms=drain_ms)
    kernel.stop(drain_ms / 1000)
    return {"pid": os.getpid(), "state": "stopping"}


async def secret_set(kernel: Kernel, name: str, value: bytes, operator: str) -> dict[str, Any]:
    """Keep a secret. Resources that name it use it from the next call on."""
    try:
        kernel.secrets.set(name, value)
    except SecretsError as error:
        raise _secret_problem(error) from error
    resources = kernel.ownership.resources.fill(name, kernel.secrets)
    await kernel.core.operator_event("operator.secret_set", name, operator=operator, resources=resources)
    return {"name": name, "resources": resources}


async def secret_remove(kernel: Kernel, name: str, operator: str) -> dict[str, Any]:
    """Forget a secret. Resources that name it are unavailable from the next call on."""
    try:
        kernel.secrets.remove(name)
    except SecretsError as error:
        raise _secret_problem(error) from error
    resources = kernel.ownership.resources.fill(name, kernel.secrets)
    await kernel.core.operator_event("operator.secret_remove", name, operator=operator, resources=resources)
    return {"name": name, "resources": resources}


def secret_list(kernel: Kernel) -> dict[str, Any]:
    """Names alone."""
    try:
        return {"secrets": kernel.secrets.list()}
    except SecretsError as error:
        raise _secret_problem(error) from error


def _secret_problem(error: SecretsError) -> Problem:
    """A name or value that is wrong is the operator's; a directory that can't be used is the host's."""
    if isinstance(error, BadSecret):
        return bad_usage(str(error), "BadSecret")
    if isinstance(error, NoSuchSecret):
        return Problem(str(error), exit_code=4, reason="NoSuchSecret")
    return Problem(str(error), exit_code=1, reason="SecretsError")
