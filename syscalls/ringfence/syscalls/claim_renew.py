"""`claim.renew`: hold a claim longer, in one transaction with the outcome."""

from __future__ import annotations

from typing import Any

import msgspec
from ringfence.syscalls.base import Env, Plan, Work
from ringfence.syscalls.claim_common import check_fence, check_ttl, moment, plan_of
from ringfence.syscalls.errors import Conflict


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The claim with its fence, and for how long from now on in milliseconds."""

    key: str = ""
    fence: int = 0
    ttl_ms: int = 0


class Result(msgspec.Struct, frozen=True):
    """Until when it is held, by the database's clock."""

    until: str


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check key, fence and time.

    Raises:
        InvalidRequest: one of them is none.
    """
    del env
    check_fence(arguments.fence)
    check_ttl(arguments.ttl_ms)
    return plan_of("claim.renew", arguments.key)


def transaction(arguments: Arguments) -> Work:
    """What to commit."""
    return Work(
        statement="claim_renew",
        values={"key": arguments.key, "fence": arguments.fence, "ttl_ms": arguments.ttl_ms},
        claim=arguments.key,
    )


def finish(arguments: Arguments, done: dict[str, Any]) -> Result:
    """What the agent gets once it is committed.

    Raises:
        Conflict: the claim is lost; nothing is committed.
    """
    if "until_us" not in done:
        by = (
            f"{done['by']} took it at step {done['step']} with fence {done['fence']}"
            if done["by"]
            else "nobody holds it now"
        )
        raise Conflict(
            f"the claim on `{arguments.key}` with fence {arguments.fence} is lost: {by}; take it again, "
            "then look at what was done meanwhile",
            keys=arguments.key,
            agent=done["by"] or "",
            step=str(done["step"]),
        )
    return Result(until=moment(done["until_us"]))
