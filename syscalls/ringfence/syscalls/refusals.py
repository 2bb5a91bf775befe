"""Refusals that several bodies make in the same words."""

from __future__ import annotations

from ringfence.syscalls.base import Call
from ringfence.syscalls.declared import HttpResource, LlmResource, SqlResource
from ringfence.syscalls.errors import NoSuchResource, OutcomeUnknown


def refuse_unavailable(resource: HttpResource | LlmResource | SqlResource) -> None:
    """Refuse a resource that can't be used, for want of its secret.

    Raises:
        NoSuchResource: it is unavailable; the message says why and what to do.
    """
    if resource.unavailable:
        raise NoSuchResource(f"resource `{resource.name}` is unavailable: {resource.unavailable}")


def outcome_unknown(call: Call, what: str, **metadata: str) -> OutcomeUnknown:
    """The error for a call of which nobody can say whether it happened, with the command that settles it.

    Args:
        call: the call.
        what: what is known, and what to look at.
        metadata: facts as strings.
    """
    settle = f"settle it: ringfence resolve {call.env.agent} {call.step} --as done|not-done"
    return OutcomeUnknown(f"{what}; {settle}", **metadata)
