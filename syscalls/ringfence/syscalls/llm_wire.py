"""The wire formats of models' hosts: where a request goes, what it must not say, and how its reply is read. No I/O.

The library speaks chat completions by `llm.complete`'s own fields. The model gateway passes requests of unmodified programs
on: their prompt stands in `messages`, the rest of them in `extra`, and the host's own document comes back in `reply`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.llm_messages import MessageStream, message_of
from ringfence.syscalls.llm_reply import Reply, Stream, mapping, whole
from ringfence.syscalls.llm_responses import ResponseStream, response_of
from ringfence.syscalls.llm_sources import has_sources


class Parts(Protocol):
    """Puts together the parts of a streamed reply."""

    reply: Reply
    ended: bool
    broken: bool
    heard: Callable[[bytes], None] | None

    @property
    def complete(self) -> bool:
        """Whether the reply came to its end."""
        ...

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        ...

    def assembled(self) -> Reply:
        """What has come so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One wire format.

    Attributes:
        protocol: that a resource declares for it.
        path: below the resource's base.
        prompt: the request's key that holds the messages.
        limit_key: that carries the limit of a reply; empty: the resource says.
        asks_usage: whether a stream has to be asked for its usage.
        owned: keys that the kernel writes itself.
        refused: keys that would have the host do more than answer, or know what the kernel was not shown; with why.
        plain: kinds of tools that the program itself runs.
        either: kinds that the program runs where they say `execution: client`, and the host else.
        group: kind of a tool that only holds others, each of which is looked at; empty: there is none.
        hosted: beginnings of other kinds' names, where all that does not begin so is the program's, too.
        headers: of the program's that go along.
        whole: reads a reply in one piece; None: it is none.
        stream: makes what puts together one that comes in parts.
    """

    protocol: str
    path: str
    prompt: str = "messages"
    limit_key: str = ""
    asks_usage: bool = False
    owned: frozenset[str] = frozenset()
    refused: Mapping[str, str]
    plain: frozenset[str]
    either: frozenset[str] = frozenset()
    group: str = ""
    hosted: tuple[str, ...] = ()
    headers: Mapping[str, str]
    whole: Callable[[Mapping[str, Any]], Reply | None]
    stream: Callable[[], Parts]


_AT_HOST: Final = "the host would act by itself, where no rule holds"
_UNSEEN: Final = "the prompt would stand at the host, where it can't be counted; send all of it"
_HOSTED: Final[Mapping[str, str]] = dict.fromkeys(
    (
        "web_search_options",
        "search_parameters",
        "enable_search",
        "data_sources",
        "plugins",
        "mcp_servers",
        "container",
    ),
    _AT_HOST,
)
_OWNED: Final = frozenset({"model", "stream", "stream_options", "tools"})

WIRES: Final[Mapping[str, Wire]] = {
    "": Wire(
        protocol="openai",
        path="/chat/completions",
        asks_usage=True,
        refused={},
        plain=frozenset(),
        headers={},
        whole=whole,
        stream=Stream,
    ),
    "chat": Wire(
        protocol="openai",
        path="/chat/completions",
        asks_usage=True,
        owned=_OWNED | {"messages", "max_tokens", "max_completion_tokens"},
        refused=_HOSTED,
        plain=frozenset({"function", "custom"}),
        headers={"openai-beta": ""},
        whole=whole,
        stream=Stream,
    ),
    "responses": Wire(
        protocol="openai",
        path="/responses",
        prompt="input",
        limit_key="max_output_tokens",
        owned=_OWNED | {"input", "max_output_tokens"},
        refused={
            "previous_response_id": _UNSEEN,
            "conversation": _UNSEEN,
            "prompt": _UNSEEN,
            "background": _AT_HOST,
            **_HOSTED,
        },
        plain=frozenset({"function", "custom", "local_shell", "shell", "apply_patch"}),
        either=frozenset({"tool_search"}),
        group="namespace",
        headers={"openai-beta": ""},
        whole=response_of,
        stream=ResponseStream,
    ),
    "messages": Wire(
        protocol="anthropic",
        path="/messages",
        limit_key="max_tokens",
        owned=_OWNED | {"messages", "max_tokens"},
        refused=_HOSTED,
        plain=frozenset({"custom", ""}),
        hosted=("web_", "code_execution", "mcp", "advisor", "tool_search"),
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": ""},
        whole=message_of,
        stream=MessageStream,
    ),
}
"""By the name that a call gives as `api`; empty: the library's own."""


def check(
    api: str, extra: object, tools: Sequence[Any], headers: Mapping[str, str], messages: Sequence[Any] = ()
) -> Wire:
    """The wire format of a call, if its request says nothing that it may not; `messages` may bring tools, too.

    Raises:
        InvalidRequest: it does.
    """
    wire = WIRES.get(api)
    if wire is None:
        raise InvalidRequest(
            f"`api` is `{api}`; known are {', '.join(sorted(name for name in WIRES if name))}"
        )
    if not api:
        if extra is not None or headers:
            raise InvalidRequest("`extra` and `headers` go with an `api`; leave them out")
        return wire
    _check_extra(wire, extra)
    for name in headers:
        if name not in wire.headers:
            raise InvalidRequest(f"the header `{name}` does not go along to the host; leave it out")
    for tool in tools:
        _check_tool(wire, mapping(tool))
    # INVARIANT: wherever a request may declare tools, they are looked at: items of the responses protocol do
    # (`additional_tools`, results of a search for them).
    for item in messages if wire.group else ():
        if mapping(item).get("type") == "item_reference":
            raise InvalidRequest(f"an `item_reference` can't be used here: {_UNSEEN}")
        held: object = mapping(item).get("tools")
        for tool in cast("list[object]", held) if isinstance(held, list) else ():
            _check_tool(wire, mapping(tool))
    return wire


def _check_extra(wire: Wire, extra: object) -> None:
    if extra is not None and not isinstance(extra, dict):
        raise InvalidRequest("`extra` is no object; write the rest of the request into it")
    rest = mapping(cast("object", extra))
    for key, value in rest.items():
        if key in wire.owned:
            raise InvalidRequest(f"`extra.{key}` has a field of its own; write it there")
        if key in wire.refused and value not in (None, False):
            raise InvalidRequest(f"`{key}` can't be used here: {wire.refused[key]}")
        if key != "metadata" and has_sources({key: value}):
            raise InvalidRequest(
                f"`{key}` names a picture or a file, which only a message may; send it in a message"
            )
    if rest.get("n") not in (None, 1):
        raise InvalidRequest("`n` can't be used here: one reply at a time is reserved for; leave it out")


def _is_here(tool: Mapping[str, Any]) -> bool:
    """Whether the program runs a tool of its own kinds: a `shell` may also be a container of the host's, which may have a network."""
    return tool.get("type") != "shell" or mapping(tool.get("environment")).get("type") == "local"


def _check_tool(wire: Wire, tool: Mapping[str, Any]) -> None:
    kind = tool.get("type", "")
    if (kind is None or kind in wire.plain) and _is_here(tool):
        return
    if kind in wire.either and tool.get("execution") == "client":
        return
    held: object = tool.get("tools")
    if wire.group and kind == wire.group and isinstance(held, list):
        for inner in cast("list[object]", held):
            if mapping(inner).get("type") not in wire.plain or not _is_here(mapping(inner)):
                raise InvalidRequest(
                    f"a tool in `{kind}` can't be used here: {_AT_HOST}; use those of the program's own"
                )
        return
    if isinstance(kind, str) and wire.hosted and not kind.startswith(wire.hosted):
        return
    if kind == "shell" and kind in wire.plain:
        raise InvalidRequest(
            f"the tool `shell` can't be used here: {_AT_HOST}; declare it with `environment: {{type: local}}`"
        )
    raise InvalidRequest(f"the tool `{kind}` can't be used here: {_AT_HOST}; use a tool of the program's own")


def sent_headers(wire: Wire, given: Mapping[str, str]) -> dict[str, str]:
    """Headers of a request besides those of every one."""
    found = {name: given.get(name, usual) for name, usual in wire.headers.items()}
    return {name: value for name, value in found.items() if value}


def body_of(wire: Wire, extra: object, own: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """A request's document: the program's own words, and over them what the kernel writes."""
    document: dict[str, Any] = {**cast("dict[str, Any]", extra or {}), **own}
    if stream:
        document["stream"] = True
        if wire.asks_usage:
            document["stream_options"] = {"include_usage": True}
    return document
