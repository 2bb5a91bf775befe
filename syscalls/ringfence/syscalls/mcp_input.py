"""What a server asks for before it answers a call: a person's words, a model's, or directories.

The kernel answers none of it. A call whose server asks is over, and what it asked is its result; the answers go with another call, which is
decided, charged and recorded like the first. So nothing waits in the middle of a call, and each round is on record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast

from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import CallFailed, InvalidRequest

REQUESTS_MAX: Final = 8
"""Most things that a server may ask for at once."""

BYTES_MAX: Final = 64 << 10
"""Longest JSON of what it asks for, and of what has to be given along with the answers."""

ABLE: Final[Mapping[str, Mapping[str, Any]]] = {"elicitation": {"form": {}}, "sampling": {}, "roots": {}}
"""What callers may be able to answer, as the protocol declares it."""
_METHODS: Final = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}


class Asked(Protocol):
    """Arguments of a call that a server may ask something for."""

    @property
    def can(self) -> Sequence[str]:
        """What the caller can answer."""
        ...

    @property
    def responses(self) -> Any:
        """Answers."""
        ...

    @property
    def state(self) -> str:
        """What the server gave along."""
        ...


def check(arguments: Asked) -> None:
    """See to it that answers are some.

    Raises:
        InvalidRequest: they are not, or nobody can be able to do what the caller says.
    """
    for one in arguments.can:
        if one not in ABLE:
            raise InvalidRequest(f"`can` has `{one[:40]}`; known: {', '.join(f'`{name}`' for name in ABLE)}")
    if arguments.responses is not None and not isinstance(arguments.responses, dict):
        raise InvalidRequest("`responses` are a JSON object: by the keys of the requests, what answers each")


def params_of(arguments: Asked) -> dict[str, Any]:
    """Answers as a server takes them."""
    given: dict[str, Any] = {}
    if arguments.responses is not None:
        given["inputResponses"] = arguments.responses
    if arguments.state:
        given["requestState"] = arguments.state
    return given


def abilities(arguments: Asked) -> dict[str, Any]:
    """What the caller can do, as the protocol declares it."""
    return {name: ABLE[name] for name in sorted(set(arguments.can))}


def needed_by(data: Any) -> str:
    """What the data of an error says that a caller has to be able to do, with commas between."""
    needed: Any = cast("dict[str, Any]", data).get("requiredCapabilities") if isinstance(data, dict) else None
    return ",".join(name for name in ABLE if isinstance(needed, dict) and name in needed)


def wanted(server: str, raw: Mapping[str, Any], can: Sequence[str]) -> dict[str, Any] | None:
    """What a server asks for; None: nothing, it has answered.

    Raises:
        CallFailed: it asks for what the caller can't give, or for what is passed on to nobody.
    """
    if raw.get("resultType", "complete") == "complete":
        return None
    requests: Any = raw.get("inputRequests")
    state: Any = raw.get("requestState") or ""
    if raw.get("resultType") != "input_required" or not isinstance(state, str):
        raise _refused(server, "an answer of a kind that nobody here knows")
    given = _object(requests)
    if len(given) > REQUESTS_MAX or len(canonical_json([given, state])) > BYTES_MAX:
        raise _refused(
            server, f"more than {REQUESTS_MAX} things at once, or more than {BYTES_MAX} bytes of them"
        )
    for one in given.values():
        said = _object(one)
        method = str(said.get("method"))
        if _METHODS.get(method) not in can:
            raise _refused(server, f"`{method[:40]}`, which its caller can't answer")
        # INVARIANT: nobody is sent to a page by the words of a server.
        if method == "elicitation/create" and _object(said.get("params")).get("mode", "form") != "form":
            raise _refused(server, "somebody to open a page, which is passed on to nobody")
    return {"requests": given, "state": state}


def _object(value: Any) -> dict[str, Any]:
    """An object of JSON; an empty one where it is none."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _refused(server: str, what: str) -> CallFailed:
    return CallFailed(f"`{server}` asks for {what}; it may have done a part of the call", sent="yes")
