"""What calls on agents elsewhere have in common: who is declared, one exchange, and what comes of one that fails."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import msgspec
from ringfence.syscalls.base import Plan, Question
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import CallFailed, InvalidRequest, NoSuchResource
from ringfence.syscalls.mcp_common import ANSWER_BYTES_MAX, Definition, Lost, Refused, Sent
from ringfence.syscalls.payload import Room
from ringfence.syscalls.ratelimits import wait_of
from ringfence.syscalls.redaction import redactor_for
from ringfence.syscalls.refusals import afford_answer, outcome_unknown, refuse_unavailable
from ringfence.syscalls.upstream import upstream_of
from ringfence.syscalls.words import shown

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env
    from ringfence.syscalls.declared import A2aResource
    from ringfence.syscalls.errors import OutcomeUnknown, QuotaExceeded
    from ringfence.syscalls.upstream import Upstream

OVER: Final = frozenset({"completed", "failed", "canceled", "rejected"})
"""States of a task that has ended."""

RESTS: Final = OVER | {"input-required", "auth-required", ""}
"""States in which waiting for more is of no use."""

ID_CHARS_MAX: Final = 512
"""Longest id of a task or a context."""

_HTTP_REFUSED: Final = (*range(400, 500), 307, 308)
_ASK_LATER: Final = frozenset({429, 503})
_LEAST_BYTES: Final = 64 << 10


class Result(msgspec.Struct, frozen=True):
    """A task as it stands, or what was answered without one."""

    task: str
    context: str
    state: str
    message: Any
    artifacts: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Whom a call goes to, kept in `Plan.data`.

    Attributes:
        card: what was looked at before the call was judged; None: nothing was.
    """

    resource: A2aResource
    card: Definition | None = None


class Peer(Protocol):
    """One exchange with an agent elsewhere, which is one request."""

    async def send(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message."""
        ...

    async def get(self, task: str) -> Mapping[str, Any]:
        """Read a task."""
        ...

    async def cancel(self, task: str) -> Mapping[str, Any]:
        """End a task."""
        ...


class Asks(Protocol):
    """What is asked of an agent in one exchange."""

    def __call__(self, peer: Peer) -> Awaitable[Mapping[str, Any]]:
        """Ask it."""
        ...


def declared(name: str, env: Env) -> A2aResource:
    """The agent of that name.

    Raises:
        NoSuchResource: there is none, or it is unavailable.
    """
    resource = env.a2a.get(name)
    if resource is None:
        known = ", ".join(f"`{one}`" for one in sorted(env.a2a)) or "none"
        raise NoSuchResource(
            f"`{name[:80]}` is no declared A2A agent; declared: {known}; the operator can declare it in the kernel file"
        )
    refuse_unavailable(resource)
    return resource


def is_id(text: str, *, needed: bool) -> bool:
    """Whether a text may be the id of a task or a context; where none is needed it may be empty."""
    return (bool(text) or not needed) and len(text) <= ID_CHARS_MAX and text.isprintable()


def check_id(text: str, what: str, *, needed: bool) -> None:
    """Refuse what can be no id.

    Raises:
        InvalidRequest: it is none.
    """
    if not is_id(text, needed=needed):
        raise InvalidRequest(f"`{what}` is no id; write the one that a2a.send returned")


def about_task(action: str, peer: str, task: str, env: Env) -> Plan:
    """Plan a call about one task.

    Raises:
        InvalidRequest: no id of a task.
        NoSuchResource: no such agent.
    """
    resource = declared(peer, env)
    check_id(task, "task", needed=True)
    return Plan(
        resource=resource.name,
        questions=(Question(action=action, resource=resource.name),),
        data=Target(resource=resource),
    )


async def client_module() -> Any:
    """The module that knows the SDK, which takes long to import the first time.

    Raises:
        CallFailed: it is not installed.
    """
    try:
        return await asyncio.to_thread(importlib.import_module, "ringfence.syscalls.a2a_client")
    except ImportError as error:
        raise CallFailed(
            f"A2A can't be spoken: the operator installs what the kernel lacks ({error.name}): pip install 'ringfence[a2a]'; "
            "nothing was sent",
            sent="no",
        ) from None


def room(call: Call, arguments: Any) -> Room:
    """How large the answer may be."""
    del arguments
    return Room(most=ANSWER_BYTES_MAX, least=1 if _reads(call) else _LEAST_BYTES)


def _reads(call: Call) -> bool:
    return call.plan.questions[0].action == "a2a.get"


async def exchange(
    call: Call, card: bytes, asks: Asks, *, before: Callable[[], Awaitable[None]] | None = None
) -> Result:
    """Ask an agent once, in one request.

    Args:
        call: the call.
        card: of the agent, as it was taken or seen by whoever approved.
        asks: what.
        before: the last look before anything leaves; None: at the right to do so.

    Raises:
        CallFailed: nothing was sent, it answered with an error, or sending it again does nothing twice; `sent` says which.
        OutcomeUnknown: it may have arrived, and the agent is not known to recognise it.
        QuotaExceeded: it wants to be left alone.
    """
    resource = cast("A2aResource", call.plan.data.resource)
    client, upstream, sent = await client_module(), upstream_of(resource), Sent()
    timeout_s = min(resource.timeout_s, call.deadline_s)
    hide = redactor_for(call.env, resource.secrets)
    await upstream.wait(call)
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.reach(resource, card, sent, before or call.check_live) as peer,
        ):
            raw = await asks(peer)
    except TimeoutError:
        raise _failure(call, resource, sent, f"did not answer within {timeout_s:g} s") from None
    except Refused as error:
        # A refusal says something too.
        taint(call, resource)
        said = shown(hide.text(str(error)))
        raise _refused(resource, sent, upstream, f"refused: {said}", type(error.__cause__).__name__) from None
    except Lost as error:
        if sent.status in _HTTP_REFUSED or _wait_of(sent) is not None:
            what = f"answered {sent.status} and did not carry out the call"
            raise _refused(resource, sent, upstream, what, "") from None
        raise _failure(call, resource, sent, shown(hide.text(str(error)))) from None
    taint(call, resource)
    clean = await asyncio.to_thread(hide.body, canonical_json(raw))
    await afford_answer(call, resource.name, len(clean), reads=_reads(call))
    return msgspec.json.decode(clean, type=Result)


def taint(call: Call, resource: A2aResource) -> None:
    """What it says is from outside."""
    if resource.untrusted:
        call.taint(f"the A2A agent `{resource.name}`")


def _wait_of(sent: Sent) -> float | None:
    return wait_of(sent.status, sent.headers, b"", 1) if sent.status in _ASK_LATER else None


def _refused(
    resource: A2aResource, sent: Sent, upstream: Upstream, what: str, error: str
) -> CallFailed | QuotaExceeded:
    """What an answer says that can be relied on."""
    wait_s = _wait_of(sent)
    if wait_s is not None:
        upstream.told(wait_s)
        return upstream.exceeded(1)
    arrived = "refused" if sent.status in _HTTP_REFUSED else "yes"
    return CallFailed(f"`{resource.name}` {what}", sent=arrived, **({"error": error} if error else {}))


def _failure(call: Call, resource: A2aResource, sent: Sent, what: str) -> CallFailed | OutcomeUnknown:
    name = resource.name
    if not sent.begun:
        return CallFailed(f"`{name}` {what}; nothing was sent", sent="no")
    if call.plan.idempotent:
        return CallFailed(f"`{name}` {what}; the call may have arrived", sent="maybe")
    return outcome_unknown(
        call,
        f"`{name}` {what}; the message may have arrived, and it is not declared that `{name}` knows it again",
        sent="maybe",
    )
