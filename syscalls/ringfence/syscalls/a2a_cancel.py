"""`a2a.cancel`: say that nothing more is wanted of a task that a declared agent elsewhere was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from ringfence.syscalls import a2a_common as common
from ringfence.syscalls.a2a_common import Result

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env, Plan

__all__ = ["Arguments", "Result", "plan", "room", "run"]

room = common.room


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whose task, and which."""

    peer: str = ""
    task: str = ""


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the agent. To cancel twice does nothing twice.

    Raises:
        InvalidRequest: no id of a task.
        NoSuchResource: no such agent, or it is unavailable.
    """
    return common.about_task("a2a.cancel", arguments.peer, arguments.task, env)


async def run(call: Call, arguments: Arguments) -> Result:
    """Say so once.

    Raises:
        CallFailed: it has no such task, it has ended, or it can't be reached; `sent` says what arrived.
    """
    card = await call.env.cards.taken(call.plan.data.resource.name)
    await call.failpoint("before_effect")
    found = await common.exchange(call, card.taken, lambda peer: peer.cancel(arguments.task))
    await call.failpoint("after_effect")
    return found
