"""`a2a.card`: read the card of a declared agent elsewhere, as it was taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
from ringfence.syscalls import a2a_common as common
from ringfence.syscalls.a2a_common import Target
from ringfence.syscalls.base import Plan, Question
from ringfence.syscalls.redaction import redactor_for

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env
    from ringfence.syscalls.declared import A2aResource


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whose."""

    peer: str = ""


class Result(msgspec.Struct, frozen=True):
    """What it says of itself."""

    name: str
    description: str
    skills: list[Any]
    changed: bool


class _Said(msgspec.Struct):
    name: str = ""
    description: str = ""
    skills: list[Any] = []


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the agent.

    Raises:
        NoSuchResource: no such agent, or it is unavailable.
    """
    resource = common.declared(arguments.peer, env)
    return Plan(
        resource=resource.name,
        questions=(Question(action="a2a.card", resource=resource.name),),
        data=Target(resource=resource),
    )


async def run(call: Call, arguments: Arguments) -> Result:
    """Look at it.

    Raises:
        CallFailed: the agent can't be reached, or shows no card.
    """
    del arguments
    resource: A2aResource = call.plan.data.resource
    await call.check_live()
    card = await call.env.cards.look(resource.name)
    common.taint(call, resource)
    hide = redactor_for(call.env, resource.secrets)
    try:
        said = msgspec.json.decode(hide.body(card.taken), type=_Said) if card.taken else _Said()
    except msgspec.DecodeError:
        said = _Said()
    skills = [one for one in said.skills if _named(resource, one)]
    return Result(name=said.name, description=said.description, skills=skills, changed=card.changed)


def _named(resource: A2aResource, skill: Any) -> bool:
    if not isinstance(skill, dict):
        return False
    return not resource.skills or cast("dict[str, Any]", skill).get("id") in resource.skills
