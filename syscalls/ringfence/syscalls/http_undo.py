"""HTTP calls whose resource says what to keep: what they change is read and kept before, and put back by a rollback.

INVARIANT: such a call is not sent before what it changes was read from the target, kept durably and read back.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import httpx
import msgspec
from ringfence.policy.canonical import bare_url, canonical_url
from ringfence.policy.facts import field_of
from ringfence.policy.matcher import match_url_path
from ringfence.policy.problems import PatternError
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.syscalls.errors import QuotaExceeded, SnapshotFailed
from ringfence.syscalls.http_body import NotPlain, json_of
from ringfence.syscalls.http_place import belongs, path_below
from ringfence.syscalls.http_wire import Said, ask
from ringfence.syscalls.upstream import HOLD_S_MAX, upstream_of

if TYPE_CHECKING:
    from ringfence.sandbox.snapshots import SnapshotStore
    from ringfence.syscalls.base import Call
    from ringfence.syscalls.declared import HttpResource, HttpUndo
    from ringfence.syscalls.http_common import Target

log = logging.getLogger(__name__)

KEPT_BYTES_MAX: Final = 4 << 20
"""Longest answer that is kept of what a call destroys."""

GONE: Final = frozenset({404, 410})
NOTHING: Final = "gone"
"""What stands where nothing does."""

_GOOD: Final = range(200, 300)
_BETWEEN: Final = "changed by somebody else between two of these calls; go back to a later step to have that"


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A point: what stood there, and how it is put back. `body` is base64, URLs are canonical.

    Attributes:
        absent: whether nothing stood there, so that `method` and `put_back_url` remove what stands there since.
        after: SHA-256 of what the call left there, `gone` where it left nothing; empty: that is not known.
    """

    resource: str
    keep_url: str
    method: str
    put_back_url: str
    content_type: str
    body: str
    absent: bool = False
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPoint:
    """A point without the body, of which there may be thousands with megabytes each: it is read again when it is sent.

    Attributes:
        kept: the point, `body` left out.
        before: SHA-256 of that body, `gone` where nothing stood there.
        read: gives the whole point; raises `SnapshotError`.
    """

    kept: Kept
    before: str
    read: Callable[[], Kept]


def kept_point(store: SnapshotStore, point: str) -> KeptPoint:
    """Look at a point.

    Raises:
        SnapshotError: it is gone or damaged.
    """

    def read() -> Kept:
        return msgspec.convert(dict(store.require(point).extra), Kept)

    kept = read()
    before = NOTHING if kept.absent else hashlib.sha256(base64.b64decode(kept.body)).hexdigest()
    return KeptPoint(kept=msgspec.structs.replace(kept, body=""), before=before, read=read)


@dataclass(slots=True, kw_only=True)
class HttpPlan:
    """What a rollback would put back over HTTP, and what it leaves alone, with the reason by URL."""

    items: list[Kept] = field(default_factory=list[Kept])
    conflicts: dict[str, str] = field(default_factory=dict[str, str])
    standing: list[Kept] = field(default_factory=list[Kept])
    """What stands there as it did before, by whomever."""
    sources: dict[str, Callable[[], Kept]] = field(default_factory=dict[str, Callable[[], Kept]])
    """By `keep_url`, what reads the body that is put back."""


def undo_of(resource: HttpResource, method: str, url: str) -> HttpUndo | None:
    """How a call on a canonical URL of a resource is undone; None: nobody says so, or not however a server reads the URL."""
    if not resource.undo:
        return None
    found, bare = (_undo_at(resource, method, path_below(resource, read)) for read in (url, bare_url(url)))
    return found if found is bare else None


def _undo_at(resource: HttpResource, method: str, path: str) -> HttpUndo | None:
    for one in resource.undo:
        if one.method in ("*", method) and match_url_path(one.path, path):
            return one
    return None


async def keep(call: Call, undo: HttpUndo, target: Target, body: bytes) -> None:
    """Read what a call is about to destroy or change and keep it as the call's rollback point.

    Raises:
        SnapshotFailed: it can't be read or kept; nothing was sent that destroys.
        QuotaExceeded: the resource's rate has no turn for it in time; nothing was sent.
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


async def note_after(call: Call, target: Target) -> None:
    """Note how a call left what it changed, so that a rollback tells that from what others did. What can't be read is not known."""
    store, point = call.env.snapshots, f"p{call.step}"
    known = await asyncio.to_thread(store.load, point)
    if known is None or target.method == "DELETE":
        return
    kept = msgspec.convert(known.extra, Kept)
    try:
        await upstream_of(target.resource).wait(call)
        left = _print_of(
            await ask(
                target.resource,
                "GET",
                kept.keep_url,
                within_s=min(target.resource.timeout_s, max(call.deadline_s, 1)),
            )
        )
        fresh = msgspec.structs.replace(kept, after=left)
        await asyncio.to_thread(store.put_record, point, msgspec.to_builtins(fresh))
    except (TimeoutError, httpx.HTTPError, SnapshotError, QuotaExceeded) as error:
        log.warning("how step %d left `%s` is not known: %s", call.step, target.resource.name, error)


def _print_of(answer: Said) -> str:
    """What stands there, in short; empty: nobody can tell."""
    if answer.status in GONE:
        return NOTHING
    return hashlib.sha256(answer.body).hexdigest() if answer.status in _GOOD else ""


async def _read(call: Call, undo: HttpUndo, target: Target, body: bytes) -> Kept:
    resource = target.resource
    every = call.env.http.values()
    look = _filled(target, undo.keep, body, every)
    failed = f"what the call destroys can't be read from `{resource.name}` before"
    await upstream_of(resource).wait(call)
    try:
        answer = await ask(resource, "GET", look, within_s=min(resource.timeout_s, call.deadline_s))
    except (TimeoutError, httpx.HTTPError) as error:
        raise SnapshotFailed(f"{failed}: {type(error).__name__}; nothing was sent") from None
    absent = answer.status in GONE and bool(undo.remove)
    if answer.status not in _GOOD and not absent:
        raise SnapshotFailed(f"{failed}: it answered {answer.status}; nothing was sent")
    if len(answer.body) > KEPT_BYTES_MAX:
        raise SnapshotFailed(f"{failed}: it has more than {KEPT_BYTES_MAX} bytes; nothing was sent")
    return Kept(
        resource=resource.name,
        keep_url=look,
        method="DELETE" if absent else undo.put_back_method,
        put_back_url=_filled(target, undo.remove if absent else undo.put_back, body, every),
        content_type="" if absent else answer.content_type,
        body="" if absent else base64.b64encode(answer.body).decode(),
        absent=absent,
    )


def _filled(target: Target, parts: Sequence[str], body: bytes, resources: Collection[HttpResource]) -> str:
    """A URL of the template's plain parts and holes, by turns."""
    path = path_below(target.resource, target.url)
    text = ""
    for number, part in enumerate(parts):
        text += part if number % 2 == 0 else path if part == "path" else _value(part, target, body)
    failed = "what the call destroys can't be named"
    try:
        url = canonical_url(target.resource.base + text)
    except PatternError as error:
        raise SnapshotFailed(f"{failed}: {error}; nothing was sent") from None
    if not belongs(url, target.resource, resources):
        raise SnapshotFailed(f"{failed}: it is not below `{target.resource.name}`; nothing was sent")
    return url


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
    try:
        return quote(str(value), safe="")
    except UnicodeEncodeError:
        raise SnapshotFailed(
            f"the `{pointer}` of the body holds half a character; nothing was sent"
        ) from None


# -- rollback ---------------------------------------------------------------------------------------------------------


async def plan_put_back(
    resources: Mapping[str, HttpResource], points: Sequence[KeptPoint], agent: str
) -> HttpPlan:
    """Find out what is to be put back; changes nothing. What a rate has no turn for in time is left alone.

    Args:
        resources: the declared ones.
        points: newest first.
        agent: in whose turn the questions stand in the resources' lines.
    """
    plan = HttpPlan()
    found: dict[str, KeptPoint] = {}
    between: set[str] = set()
    for point in points:
        kept, newer = point.kept, found.get(point.kept.keep_url)
        # Of several for one place the oldest says how it was, and the newest how it was left.
        after = kept.after if newer is None else newer.kept.after
        found[kept.keep_url] = replace(point, kept=msgspec.structs.replace(kept, after=after))
        # What a call found is what an older one left, or what that one had found: then it failed, or was taken back.
        if newer is not None and newer.before not in (kept.after or NOTHING, point.before):
            between.add(kept.keep_url)
    for point in found.values():
        kept = point.kept
        plan.sources[kept.keep_url] = point.read
        reason = await _in_the_way(resources, kept, point.before, agent)
        if reason is None and kept.keep_url in between:
            plan.conflicts[kept.put_back_url] = _BETWEEN
        elif reason is None:
            plan.items.append(kept)
        elif reason:
            plan.conflicts[kept.put_back_url] = reason
        else:
            plan.standing.append(kept)
    return plan


async def _in_the_way(
    resources: Mapping[str, HttpResource], kept: Kept, before: str, agent: str
) -> str | None:
    """Why it is left alone; empty: it stands there already; None: nothing is in the way."""
    resource = resources.get(kept.resource)
    if resource is None or resource.unavailable:
        return f"the resource `{kept.resource}` is no longer declared, or is unavailable"
    if not all(belongs(url, resource, resources.values()) for url in (kept.keep_url, kept.put_back_url)):
        return f"it is no longer below `{kept.resource}` in the kernel file"
    try:
        await upstream_of(resource).turn(agent, HOLD_S_MAX)
        now = await ask(resource, "GET", kept.keep_url, within_s=resource.timeout_s)
    except QuotaExceeded as error:
        return error.message
    except (TimeoutError, httpx.HTTPError) as error:
        return f"`{kept.resource}` can't be asked what stands there now: {type(error).__name__}"
    stands = _print_of(now)
    if not stands:
        return f"`{kept.resource}` answered {now.status} when it was asked what stands there now"
    if stands == before:
        return ""
    if stands == kept.after or (stands == NOTHING and not kept.after):
        return None
    return "somebody removed it since" if stands == NOTHING else "something else stands there now"


async def put_back(
    resources: Mapping[str, HttpResource], kept: Kept, read: Callable[[], Kept], agent: str
) -> str:
    """Put one thing back, in the agent's turn; `read` gives it whole. Returns why that failed; empty: it stands there again."""
    resource = resources[kept.resource]
    try:
        await upstream_of(resource).turn(agent, HOLD_S_MAX)
        whole = await asyncio.to_thread(read)
        answer = await ask(
            resource,
            kept.method,
            kept.put_back_url,
            within_s=resource.timeout_s,
            body=None if kept.absent else base64.b64decode(whole.body),
            content_type=kept.content_type,
        )
    except (SnapshotError, QuotaExceeded) as error:
        return f"it was not put back: {error}"
    except (TimeoutError, httpx.HTTPError) as error:
        return f"it was not put back: `{kept.resource}` could not be reached: {type(error).__name__}"
    if answer.status in _GOOD or (kept.absent and answer.status in GONE):
        return ""
    return f"it was not put back: `{kept.resource}` answered {answer.status}"
