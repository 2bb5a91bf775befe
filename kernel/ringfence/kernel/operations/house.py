"""What operators do with the kernel itself."""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any

from ringfence.kernel.config import VERSION
from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.operations import pools
from ringfence.kernel.operations.kernel import Kernel, rfc3339
from ringfence.kernel.problems import Problem, bad_usage
from ringfence.kernel.resources import ResourceError, Resources, given_up
from ringfence.kernel.revocation import settle_affected
from ringfence.kernel.secrets import BadSecret, NoSuchSecret, SecretsError
from ringfence.policy.kernel_file import KernelFile
from ringfence.syscalls.llm_ledger import accounts

log = logging.getLogger(__name__)

_ENDED = frozenset({"done", "failed", "killed"})


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
        "a2a": None if out is None else out.a2a(),
    }


async def reload(kernel: Kernel, operator: str) -> dict[str, Any]:
    """Read the kernel file again; one reload at a time, so that the file that was read last is in force.

    Raises:
        Problem: it is wrong, or lacks a role of an agent that lives; the last good one stays in force, and `status` shows
            the error.
    """
    async with kernel.reloading:
        return await _reload(kernel, operator)


def _keeps_roles(kernel: Kernel, file: KernelFile) -> None:
    """Look whether agents that live have their roles.

    Raises:
        ResourceError: one hasn't.
    """
    lacking: dict[str, list[str]] = {}
    for thread in kernel.core.threads.values():
        for role in thread.manifest.roles:
            if thread.state not in _ENDED and role not in file.roles:
                lacking.setdefault(role, []).append(thread.id)
    if lacking:
        role, agents = next(iter(lacking.items()))
        raise ResourceError(
            f"the role `{role}` is gone, and {len(agents)} agent(s) have it, such as `{agents[0]}`; keep it (one that gives "
            "nothing is `{}`), or end them first"
        )


async def _reload(kernel: Kernel, operator: str) -> dict[str, Any]:
    old = kernel.ownership.resources
    try:
        new = Resources.load(old.path, kernel.secrets, await kernel.embed())
        _keeps_roles(kernel, new.file)
    except ResourceError as error:
        log.warning("the kernel file is not taken, and the last good one stays in force: %s", error)
        old.error = str(error)
        await kernel.core.operator_event("operator.reload", operator=operator, ok=False, error=str(error))
        raise bad_usage(f"{error}\nthe last good kernel file stays in force", "BadConfig") from error
    await kernel.core.pools.relimit(new.file.pools)
    kernel.ownership.resources = new
    kernel.ownership.backends.reconfigure()
    await kernel.ownership.servers.reconfigure()
    kernel.probed.clear()
    if kernel.outreach is not None:
        await kernel.outreach.apply()
    affected: list[dict[str, Any]] = []
    for thread in list(kernel.core.threads.values()):
        environment = thread.environment
        environment.http, environment.sql, environment.llm = new.http, new.sql, new.llm
        environment.objects = new.objects
        thread.pools = kernel.core.pools.member(thread.key)
        thread.budgets.relimit(new.file.ceilings.budgets, thread.budgets.overrides)
        # What the new file denies ends here too, though no epoch moved: the answer means that it is in force.
        report = await settle_affected(thread, await thread.refresh(None))
        affected += [{"agent": thread.id, **call} for call in report]
    await kernel.core.pools.upkeep.look()
    kernel.processes.turns.pump()
    lost = given_up(old.file, new.file)
    if lost:
        log.warning("ceilings that were in force are no longer: %s", "; ".join(lost))
    await kernel.core.operator_event(
        "operator.reload", operator=operator, ok=True, affected=affected, given_up=lost
    )
    return {
        "file": str(new.path) if new.path else None,
        "loaded_at": rfc3339(new.loaded_at),
        "resources": sorted([*new.http, *new.sql, *new.llm, *new.objects, *new.mcp, *new.a2a]),
        "unavailable": new.unavailable(),
        "affected": affected,
        "given_up": lost,
        "callback": None if kernel.outreach is None else kernel.outreach.callback(),
        "a2a": None if kernel.outreach is None else kernel.outreach.a2a(),
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
