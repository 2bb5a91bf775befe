"""Destructive HTTP calls: what they destroy is read and kept before, and put back by a rollback.

INVARIANT: nothing destructive is sent before what it destroys was read from the target, kept durably and read back.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httpx
import msgspec
from ringfence.policy.canonical import bare_url, canonical_url, split_url
from ringfence.policy.facts import field_of
from ringfence.policy.matcher import match_url_path
from ringfence.policy.problems import PatternError
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.syscalls.errors import SnapshotFailed
from ringfence.syscalls.http_body import NotPlain, json_of
from ringfence.syscalls.http_wire import ask

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call
    from ringfence.syscalls.declared import HttpResource, HttpUndo
    from ringfence.syscalls.http_common import Target

KEPT_BYTES_MAX: Final = 4 << 20
"""Longest answer that is kept of what a call destroys."""

GONE: Final = frozenset({404, 410})
_GOOD: Final = range(200, 300)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A point: what stood there, and how it is put back. `body` is base64, URLs are canonical."""

    resource: str
    keep_url: str
    method: str
    put_back_url: str
    content_type: str
    body: str


@dataclass(slots=True, kw_only=True)
class HttpPlan:
    """What a rollback would put back over HTTP, and what it leaves alone, with the reason by URL."""

    items: list[Kept] = field(default_factory=list[Kept])
    conflicts: dict[str, str] = field(default_factory=dict[str, str])


def undo_of(resource: HttpResource, method: str, url: str) -> HttpUndo | None:
    """How a call on a canonical URL of a resource is undone; None: nobody says so, or not however a server reads the URL."""
    found, bare = (_undo_at(resource, method, _path_below(resource, read)) for read in (url, bare_url(url)))
    return found if found is bare else None


def _undo_at(resource: HttpResource, method: str, path: str) -> HttpUndo | None:
    for one in resource.undo:
        if one.method in ("*", method) and match_url_path(one.path, path):
            return one
    return None


def _path_below(resource: HttpResource, url: str) -> str:
    base = len([part for part in split_url(canonical_url(resource.base)).segments if part])
    return "/" + "/".join(split_url(url).segments[base:])


async def keep(call: Call, undo: HttpUndo, target: Target, body: bytes) -> None:
    """Read what a call is about to destroy and keep it as the call's rollback point.

    Raises:
        SnapshotFailed: it can't be read or kept; nothing was sent that destroys.
    """
    store = call.env.snapshots
    point = f"p{call.step}"
    known = await asyncio.to_thread(store.load, point)
    # A crashed attempt has kept it, and may have destroyed it since.
    kept = msgspec.convert(known.extra, Kept) if known is not None else await _read(call, undo, target, body)
    if known is None:
        try:
            known = await asyncio.to_thread(store.put_record, point, msgspec.to_builtins(kept))
        except SnapshotError as error:
            raise SnapshotFailed(
                f"what `{target.resource.name}` holds there can't be kept: {error}; nothing was destroyed"
            ) from error
    call.add_point([kept.put_back_url], "http", known.size_bytes)


async def _read(call: Call, undo: HttpUndo, target: Target, body: bytes) -> Kept:
    resource = target.resource
    look, back = (_filled(target, parts, body) for parts in (undo.keep, undo.put_back))
    failed = f"what the call destroys can't be read from `{resource.name}` before"
    try:
        answer = await ask(resource, "GET", look, within_s=min(resource.timeout_s, call.deadline_s))
    except (TimeoutError, httpx.HTTPError) as error:
        raise SnapshotFailed(f"{failed}: {type(error).__name__}; nothing was sent") from None
    if answer.status not in _GOOD:
        raise SnapshotFailed(f"{failed}: it answered {answer.status}; nothing was sent")
    if len(answer.body) > KEPT_BYTES_MAX:
        raise SnapshotFailed(f"{failed}: it has more than {KEPT_BYTES_MAX} bytes; nothing was sent")
    return Kept(
        resource=resource.name,
        keep_url=look,
        method=undo.put_back_method,
        put_back_url=back,
        content_type=answer.content_type,
        body=base64.b64encode(answer.body).decode(),
    )


def _filled(target: Target, parts: Sequence[str], body: bytes) -> str:
    """A URL of the template's plain parts and holes, by turns."""
    path = _path_below(target.resource, target.url)
    text = ""
    for number, part in enumerate(parts):
        text += part if number % 2 == 0 else path if part == "path" else _value(part, target, body)
    try:
        return canonical_url(target.resource.base + text)
    except PatternError as error:
        raise SnapshotFailed(f"what the call destroys can't be named: {error}; nothing was sent") from None


def _value(pointer: str, target: Target, body: bytes) -> str:
    """A field of the body as one segment."""
    # INVARIANT: what is kept is what the target destroys, so a body that it may read in another way names nothing.
    try:
        value = field_of(json_of(body, target.headers), pointer)
    except NotPlain:
        raise SnapshotFailed(
            "what the call destroys can't be named: its body is no JSON, by its headers or in fact, or has a name twice; "
            "nothing was sent"
        ) from None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise SnapshotFailed(
            f"the body has no `{pointer}` that names what the call destroys; nothing was sent"
        )
    return quote(str(value), safe="")


# -- rollback ---------------------------------------------------------------------------------------------------------


async def plan_put_back(
    resources: Mapping[str, HttpResource], records: Sequence[Mapping[str, Any]]
) -> HttpPlan:
    """Find out what is to be put back; changes nothing.

    Args:
        resources: the declared ones.
        records: `extra` of the points' manifests, newest first.
    """
    plan = HttpPlan()
    # Of several for one place the oldest says how it was.
    oldest = {kept.put_back_url: kept for kept in (msgspec.convert(dict(one), Kept) for one in records)}
    for url, kept in oldest.items():
        reason = await _in_the_way(resources, kept)
        if reason is None:
            plan.items.append(kept)
        elif reason:
            plan.conflicts[url] = reason
    return plan


async def _in_the_way(resources: Mapping[str, HttpResource], kept: Kept) -> str | None:
    """Why it is left alone; empty: it stands there already; None: nothing is in the way."""
    resource = resources.get(kept.resource)
    if resource is None or resource.unavailable:
        return f"the resource `{kept.resource}` is no longer declared, or is unavailable"
    try:
        now = await ask(resource, "GET", kept.keep_url, within_s=resource.timeout_s)
    except (TimeoutError, httpx.HTTPError) as error:
        return f"`{kept.resource}` can't be asked what stands there now: {type(error).__name__}"
    if now.status in GONE:
        return None
    if now.status not in _GOOD:
        return f"`{kept.resource}` answered {now.status} when it was asked what stands there now"
    return "" if now.body == base64.b64decode(kept.body) else "something else stands there now"


async def put_back(resources: Mapping[str, HttpResource], plan: HttpPlan) -> None:
    """Put everything back; what fails becomes a conflict."""
    for kept in list(plan.items):
        resource = resources[kept.resource]
        try:
            answer = await ask(
                resource,
                kept.method,
                kept.put_back_url,
                within_s=resource.timeout_s,
                body=base64.b64decode(kept.body),
                content_type=kept.content_type,
            )
            failed = "" if answer.status in _GOOD else f"`{kept.resource}` answered {answer.status}"
        except (TimeoutError, httpx.HTTPError) as error:
            failed = f"`{kept.resource}` could not be reached: {type(error).__name__}"
        if failed:
            plan.items.remove(kept)
            plan.conflicts[kept.put_back_url] = f"it was not put back: {failed}"
