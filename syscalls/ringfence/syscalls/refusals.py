"""Refusals that several bodies make in the same words."""

from __future__ import annotations

from ringfence.syscalls.base import Call
from ringfence.syscalls.declared import (
    A2aResource,
    HttpResource,
    LlmResource,
    McpResource,
    ObjectResource,
    SqlResource,
)
from ringfence.syscalls.errors import BudgetExhausted, CallFailed, NoSuchResource, OutcomeUnknown


def refuse_unavailable(
    resource: A2aResource | HttpResource | LlmResource | McpResource | ObjectResource | SqlResource,
) -> None:
    """Refuse a resource that can't be used, for want of its secret.

    Raises:
        NoSuchResource: it is unavailable; the message says why and what to do, and `unavailable` names it.
    """
    if resource.unavailable:
        raise NoSuchResource(
            f"resource `{resource.name}` is unavailable: {resource.unavailable}", unavailable=resource.name
        )


def outcome_unknown(call: Call, what: str, **metadata: str) -> OutcomeUnknown:
    """The error for a call of which nobody can say whether it happened, with the command that settles it.

    Args:
        call: the call.
        what: what is known, and what to look at.
        metadata: facts as strings.
    """
    settle = f"settle it: ringfence resolve {call.env.agent} {call.step} --as done|not-done"
    return OutcomeUnknown(f"{what}; {settle}", **metadata)


async def afford_answer(call: Call, name: str, size: int, *, reads: bool) -> None:
    """Have a budget of bytes cover the answer of a declared server or agent.

    Args:
        call: the call.
        name: who answered.
        size: of the answer in bytes.
        reads: whether the call changed nothing there.

    Raises:
        BudgetExhausted: of a call that only reads.
        CallFailed: the call was carried out, and its answer is larger than what is left.
    """
    if call.answer_max is None:
        return
    call.receiving(size)
    try:
        await call.afford(size)
    except BudgetExhausted as error:
        if reads:
            raise
        # INVARIANT: what was carried out is never refused as if it had not been, or it would be made again.
        raise CallFailed(
            f"`{name}` carried out the call, and its answer is larger than what is left: {error.message}",
            sent="yes",
            budget="bytes",
        ) from None
