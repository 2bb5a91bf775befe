"""`claim.release`: give a claim back, in one transaction with the outcome."""

from __future__ import annotations

from typing import Any

import msgspec
from ringfence.syscalls.base import Env, Plan, Work
from ringfence.syscalls.claim_common import check_fence, plan_of


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The claim with its fence."""

    key: str = ""
    fence: int = 0


class Result(msgspec.Struct, frozen=True):
    """Whether it was still this agent's."""

    released: bool


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check key and fence.

    Raises:
        InvalidRequest: one of them is none.
    """
    del env
    check_fence(arguments.fence)
    return plan_of("claim.release", arguments.key)


def transaction(arguments: Arguments) -> Work:
    """What to commit."""
    return Work(
        statement="claim_release",
        values={"key": arguments.key, "fence": arguments.fence},
        claim=arguments.key,
    )


def finish(arguments: Arguments, done: dict[str, Any]) -> Result:
    """What the agent gets once it is committed."""
    del arguments
    return Result(released=done["released"])
