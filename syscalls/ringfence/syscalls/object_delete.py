"""`object.delete`: remove an object of a declared resource."""

from __future__ import annotations

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Rerun
from ringfence.syscalls.drivers.protocol import ABSENT, Stat
from ringfence.syscalls.errors import NoSuchResource
from ringfence.syscalls.object_common import GONE, Target, change, keep, plan_object, recover_change, within
from ringfence.syscalls.object_put import refuse_other


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which object."""

    object: str = ""
    if_version: str = ""


class Result(msgspec.Struct, frozen=True):
    """What was removed."""

    size_bytes: int = 0
    version: str = ""


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the resource.

    Raises:
        InvalidRequest: no object's name.
        NoSuchResource: no such resource.
    """
    return plan_object("object.delete", arguments.object, env)


async def run(call: Call, arguments: Arguments) -> Result:
    """Remove behind a rollback point. Errors as of `object.put`; there is no such object: `NoSuchResource`."""
    target: Target = call.plan.data
    if await within(call, target, target.driver.describe(target.key)) is None:
        raise NoSuchResource(f"there is no object `{target.name}`")
    before = await keep(call, target, GONE)
    refuse_other(target, before, arguments.if_version)
    if before.stat is None:
        raise NoSuchResource(f"there is no object `{target.name}`")

    async def remove(expect: str) -> str:
        await target.driver.remove(target.key, expect)
        return ABSENT

    await change(call, target, before, remove, _gone)
    return Result(size_bytes=before.stat.size, version=before.stat.version)


async def _gone(now: Stat | None) -> bool:
    return now is None


async def recover(call: Call, arguments: Arguments) -> Result | Rerun:
    """Say what became of a removal that a crash cut off."""
    found = await recover_change(call, plan(arguments, call.env).data, _gone)
    if isinstance(found, Rerun):
        return found
    _, before = found
    return (
        Result() if before.stat is None else Result(size_bytes=before.stat.size, version=before.stat.version)
    )
