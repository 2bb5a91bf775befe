"""`a2a.send`: send a message to a declared agent elsewhere, once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from ringfence.syscalls import a2a_common as common
from ringfence.syscalls import words
from ringfence.syscalls.a2a_common import Result, Target
from ringfence.syscalls.base import Plan, Question
from ringfence.syscalls.errors import CallFailed, InvalidRequest, NoSuchResource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.syscalls.base import Call, Env
    from ringfence.syscalls.declared import A2aResource
    from ringfence.syscalls.mcp_common import Definition

__all__ = ["Arguments", "Result", "locate", "plan", "room", "run"]

room = common.room


_SKILLS_SHOWN = 20


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """To whom, what, and what it belongs to."""

    peer: str = ""
    text: str = ""
    json: Any = None
    task: str = ""
    context: str = ""
    skill: str = ""


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the agent.

    Raises:
        InvalidRequest: nothing is said, what is no id, or a skill that may not be named.
        NoSuchResource: no such agent, or it is unavailable.
    """
    resource = common.declared(arguments.peer, env)
    if not arguments.text and arguments.json is None:
        raise InvalidRequest("the message is empty; write `text` or `json`")
    common.check_id(arguments.task, "task", needed=False)
    common.check_id(arguments.context, "context", needed=False)
    if resource.skills and not arguments.task and arguments.skill not in resource.skills:
        known = ", ".join(f"`{one}`" for one in resource.skills)
        raise InvalidRequest(
            f"`{arguments.skill[:80]}` is no skill that `{resource.name}` is declared for; name one of: {known}"
        )
    return _plan(resource, None)


def _plan(resource: A2aResource, card: Definition | None) -> Plan:
    return Plan(
        resource=resource.name,
        questions=(Question(action="a2a.send", resource=resource.name),),
        idempotent=resource.repeat,
        data=Target(resource=resource, card=card),
    )


async def locate(arguments: Arguments, env: Env) -> Plan | None:
    """Look at the agent's card. Nothing is asked of it for whoever may not write to it.

    Raises:
        NoSuchResource: its card has no such skill.
        CallFailed: it can't be reached, or shows no card.
    """
    planned = plan(arguments, env)
    if not env.may(planned.questions[0]):
        return None
    resource: A2aResource = planned.data.resource
    card = await env.cards.look(resource.name)
    if arguments.skill:
        client = await common.client_module()
        known = client.skills_of(card.offered or card.taken)
        if arguments.skill not in known:
            shown = ", ".join(f"`{words.shown(one, 80)}`" for one in known[:_SKILLS_SHOWN]) or "none"
            raise NoSuchResource(
                f"`{resource.name}` has no skill `{words.shown(arguments.skill, 80)}`; it has: {shown}"
            )
    fresh = _plan(resource, card)
    return (
        msgspec.structs.replace(fresh, doubt=env.cards.doubt(resource.name, card)) if card.changed else fresh
    )


async def run(call: Call, arguments: Arguments) -> Result:
    """Send it once. Its id is the call's effect id: the same however often it is made.

    Raises:
        CallFailed: nothing was sent, the agent answered with an error, or sending it again does nothing twice; `sent` says which.
        OutcomeUnknown: it may have arrived, and the agent is not known to recognise it.
    """
    target: Target = call.plan.data
    if target.card is None:
        # INVARIANT: nobody is written to before its card was held against what was taken.
        raise CallFailed(
            "the right to this call was given while it was decided; nothing was sent, make the call again",
            sent="no",
        )
    message = _message(call, arguments)
    await call.failpoint("before_effect")
    answer = await common.exchange(
        call, target.card.offered or target.card.taken, lambda peer: peer.send(message)
    )
    await call.failpoint("after_effect")
    return answer


def _message(call: Call, arguments: Arguments) -> Mapping[str, Any]:
    parts = [{"text": arguments.text}] if arguments.text else []
    said: dict[str, Any] = {"messageId": call.effect_id, "role": "ROLE_USER", "parts": parts}
    if arguments.json is not None:
        said["parts"] = [*parts, {"data": arguments.json}]
    if arguments.task:
        said["taskId"] = arguments.task
    if arguments.context:
        said["contextId"] = arguments.context
    if arguments.skill:
        said["metadata"] = {"skillId": arguments.skill}
    return said
