"""Calls that make up for others: what is sent at a rollback for a call that left the system, as its resource declares it.

The operator's declaration decides what is sent and with which credential; the agent's rights and totals have no say. Values
come from the recorded request and its recorded answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, urljoin

import httpx
import msgspec
from ringfence.policy.canonical import canonical_url
from ringfence.policy.exact import Exact
from ringfence.policy.facts import field_of
from ringfence.policy.problems import PatternError
from ringfence.policy.undoing import LOCATION, REPLY, split_holes
from ringfence.syscalls.errors import QuotaExceeded
from ringfence.syscalls.http_body import NotPlain, json_of
from ringfence.syscalls.http_place import belongs, path_below
from ringfence.syscalls.http_undo import GONE
from ringfence.syscalls.http_wire import ask
from ringfence.syscalls.upstream import HOLD_S_MAX, upstream_of

if TYPE_CHECKING:
    from ringfence.syscalls.declared import HttpResource, HttpUndo

SENT_AGAIN: Final = frozenset({"DELETE", "PUT"})
"""Methods that do nothing twice when they are sent twice, by the standard (RFC 9110, 9.2.2)."""

VALUE_CHARS_MAX: Final = 1024
_GOOD: Final = range(200, 300)
_DOTS: Final = re.compile(r"\.{1,2}")


class NoWay(Exception):
    """A call can't be made up for; the message says why."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent. `url` is canonical and below the resource's base; `body` is text, empty: none."""

    resource: str
    method: str
    url: str
    body: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        failed: why it failed; empty: it was done.
        status: of the answer; 0: there was none.
        sent: whether it may have arrived.
    """

    failed: str = ""
    status: int = 0
    sent: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A call as the journal has it: its canonical URL, headers and body, and the answer."""

    url: str
    headers: Mapping[str, str]
    body: bytes
    status: int
    answer_headers: Mapping[str, str]
    answer: bytes


def compensation_of(
    resource: HttpResource, undo: HttpUndo, call: Recorded, resources: Collection[HttpResource]
) -> Request:
    """The request that makes up for a call.

    Args:
        resource: of the call.
        undo: what it declares.
        call: as it was recorded, with its answer.
        resources: all that are declared.

    Raises:
        NoWay: the call failed, or a value that the declaration names is not in what was recorded.
    """
    if call.status not in _GOOD:
        raise NoWay(f"it was answered with {call.status}, so nobody knows what there is to take back")
    if tuple(undo.compensate[1::2]) == (LOCATION,):
        text = _location(call)
    else:
        text = "".join(
            part if number % 2 == 0 else _segment(resource, part, call)
            for number, part in enumerate(undo.compensate)
        )
        text = resource.base + text
    url = _below(resource, text, resources)
    body = "" if undo.body is None else msgspec.json.encode(_filled(resource, undo.body, call)).decode()
    return Request(resource=resource.name, method=undo.compensate_method, url=url, body=body)


def check_nameable(resource: HttpResource, undo: HttpUndo, call: Recorded) -> None:
    """Look whether a call that is not sent yet names what its compensation takes of it. Of its answer nobody knows.

    Raises:
        NoWay: it doesn't; who chose its body chose that nothing makes up for it.
    """
    for hole in filter(_of_request, undo.compensate[1::2]):
        _segment(resource, hole, call)
    for hole in filter(_of_request, _holes(undo.body)):
        _found(resource, hole, call)


def _of_request(hole: str) -> bool:
    return hole not in {"path", LOCATION} and not hole.startswith(REPLY)


def _holes(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in cast("Mapping[str, Any]", value).values():
            yield from _holes(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _holes(inner)
    elif isinstance(value, str):
        yield from split_holes(value)[1::2]


def _below(resource: HttpResource, text: str, resources: Collection[HttpResource]) -> str:
    """A canonical URL of this resource.

    INVARIANT: a value from an answer or a request leads to no other resource, whose credential would be another.
    """
    try:
        url = canonical_url(text)
    except PatternError as error:
        raise NoWay(f"the compensation can't be named: {error}") from None
    if not belongs(url, resource, resources):
        raise NoWay(
            f"the compensation would go to `{url.partition('?')[0]}`, which is not below `{resource.base}`, or is another "
            "resource's"
        )
    return url


def _location(call: Recorded) -> str:
    said = call.answer_headers.get("location", "")
    if not said:
        raise NoWay("the answer has no `Location`")
    try:
        return urljoin(call.url, said)
    except ValueError:
        raise NoWay("the `Location` of the answer is no URL") from None


def _found(resource: HttpResource, hole: str, call: Recorded) -> Any:
    """The value of a hole."""
    if hole == "path":
        return path_below(resource, call.url)
    if hole == LOCATION:
        return _below(resource, _location(call), (resource,))
    of_reply = hole.startswith(REPLY)
    pointer = hole.removeprefix(REPLY)
    body, headers = call.body, call.headers
    if of_reply:
        # It was decoded when it came.
        body = call.answer
        headers = {name: said for name, said in call.answer_headers.items() if name.lower() == "content-type"}
    where = "the answer" if of_reply else "the request"
    try:
        value = field_of(json_of(body, headers), pointer)
    except NotPlain:
        raise NoWay(f"{where} is no JSON, by its headers or in fact") from None
    if not isinstance(value, str | int | float) or value == "" or len(str(value)) > VALUE_CHARS_MAX:
        raise NoWay(f"{where} has no `{pointer}` to name it by")
    if not _sendable(value):
        raise NoWay(f"the `{pointer}` of {where} is nothing that JSON can carry on")
    return value


def _sendable(value: str | float) -> bool:
    """Whether a value is of JSON: no `NaN`, which Python's reader takes, and no half of a character."""
    if isinstance(value, float):
        return isinstance(value, Exact)
    return not isinstance(value, str) or not any("\ud800" <= char <= "\udfff" for char in value)


def _segment(resource: HttpResource, hole: str, call: Recorded) -> str:
    value = _found(resource, hole, call)
    if hole == "path":
        return str(value)
    if isinstance(value, bool | float) or _DOTS.fullmatch(str(value)):
        raise NoWay(f"`{hole}` is `{value}`, which can't be a part of a path")
    return quote(str(value), safe="")


def _filled(resource: HttpResource, value: Any, call: Recorded) -> Any:
    """A JSON value with its holes filled: a text that is one hole becomes the value itself."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return {name: _filled(resource, inner, call) for name, inner in table.items()}
    if isinstance(value, list):
        return [_filled(resource, inner, call) for inner in cast("list[Any]", value)]
    if not isinstance(value, str):
        return value
    parts = split_holes(value)
    if len(parts) == 3 and not parts[0] and not parts[2]:  # noqa: PLR2004 - one hole and nothing around it
        return _as_written(_found(resource, parts[1], call))
    return "".join(
        part if number % 2 == 0 else _shown(_found(resource, part, call)) for number, part in enumerate(parts)
    )


def _as_written(value: Any) -> Any:
    """A value for JSON; an amount goes back digit for digit as it came."""
    return msgspec.Raw(value.text.encode()) if isinstance(value, Exact) else value


def _shown(value: Any) -> str:
    """A value within a text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.text if isinstance(value, Exact) else str(value)


async def send_compensation(resource: HttpResource, request: Request, *, key: str, agent: str) -> Done:
    """Send it once. What takes something away that is gone already counts as done.

    Args:
        resource: whose credential and rate it goes by.
        request: what is sent.
        key: the same at each try; sent where the resource takes one.
        agent: in whose turn it stands in the resource's line.
    """
    name = resource.name
    if resource.unavailable:
        return Done(failed=f"`{name}` is unavailable: {resource.unavailable}", sent=False)
    try:
        await upstream_of(resource).turn(agent, HOLD_S_MAX)
    except QuotaExceeded as error:
        return Done(failed=error.message, sent=False)
    header = resource.idempotency_header
    try:
        answer = await ask(
            resource,
            request.method,
            request.url,
            within_s=resource.timeout_s,
            body=request.body.encode() if request.body else None,
            content_type="application/json" if request.body else "",
            headers={} if header is None else {header: key},
        )
    except httpx.ConnectError:
        return Done(failed=f"`{name}` can't be reached", sent=False)
    except (TimeoutError, httpx.HTTPError) as error:
        return Done(failed=f"`{name}` gave no answer: {type(error).__name__}; it may have arrived")
    if answer.status in _GOOD or (request.method == "DELETE" and answer.status in GONE):
        return Done(status=answer.status)
    return Done(failed=f"`{name}` answered {answer.status}", status=answer.status)
