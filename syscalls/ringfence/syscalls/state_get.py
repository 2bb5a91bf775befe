"""`state.get`: read one key of the shared state with its version."""

from __future__ import annotations

from typing import Any

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Question
from ringfence.syscalls.state_common import check_key


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The key."""

    key: str = ""


class Result(msgspec.Struct, frozen=True):
    """The value and its version; version 0 where the key never existed."""

    found: bool
    value: Any
    version: int


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check the key.

    Raises:
        InvalidRequest: it is no key.
    """
    del env
    key = check_key(arguments.key)
    return Plan(resource=key, questions=(Question(action="state.get", resource=key),))


async def run(call: Call, arguments: Arguments) -> Result:
    """Read the key."""
    found = await call.env.state.get(arguments.key)
    if found.tainted_by:
        call.taint(f"the state key `{arguments.key}`, which `{found.tainted_by}` wrote while it was tainted")
    if found.value is None:
        return Result(found=False, value=None, version=found.version)
    return Result(found=True, value=msgspec.json.decode(found.value), version=found.version)
