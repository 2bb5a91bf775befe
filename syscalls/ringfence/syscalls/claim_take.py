"""`claim.take`: claim a piece of work for a while, in one transaction with the outcome."""

from __future__ import annotations

from typing import Any

import msgspec
from ringfence.syscalls.base import Env, Plan, Work
from ringfence.syscalls.claim_common import check_ttl, moment, plan_of
from ringfence.syscalls.errors import Conflict


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is claimed, and for how long in milliseconds."""

    key: str = ""
    ttl_ms: int = 0


class Result(msgspec.Struct, frozen=True):
    """The claim's fence, and until when it is held, by the database's clock."""

    fence: int
    until: str


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check key and time.

    Raises:
        InvalidRequest: one of them is none.
    """
    del env
    check_ttl(arguments.ttl_ms)
    return plan_of("claim.take", arguments.key)


def transaction(arguments: Arguments) -> Work:
    """What to commit."""
    return Work(
        statement="claim_take",
        values={"key": arguments.key, "ttl_ms": arguments.ttl_ms},
        claim=arguments.key,
    )


def finish(arguments: Arguments, done: dict[str, Any]) -> Result:
    """What the agent gets once it is committed.

    Raises:
        Conflict: somebody holds it; nothing is committed.
    """
    if "fence" not in done:
        until = moment(done["until_us"])
        raise Conflict(
            f"`{arguments.key}` is claimed by {done['by']} since its step {done['step']}, until {until}; "
            "take another piece of work, or try again then",
            keys=arguments.key,
            agent=done["by"],
            step=str(done["step"]),
            lane=done["lane"],
            until=until,
        )
    return Result(fence=done["fence"], until=moment(done["until_us"]))
