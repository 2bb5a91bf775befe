"""Operations on what agents send each other and keep: messages, tasks, memory, artifacts. For both front ends; no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ringfence.agent import kept, wire
from ringfence.agent.errors import InvalidRequest
from ringfence.agent.operations import Json, Operation, Script, b64, moment, unb64
from ringfence.agent.values import Found

ARTIFACT_BYTES_MAX: Final = (3 << 20) - (64 << 10)
_REF: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


# --- messages


def send(to: str, text: str | None, value: Any) -> Operation[str]:
    """Send a text or a JSON value."""
    if text is not None and value is not None:
        raise InvalidRequest("a message is either `text` or `json`: leave one of them out")
    if text is None:
        wire.check_plain("the message", value)
        return Operation("messages.send", {"to": to, "json": value}, lambda r: str(r["id"]))
    return Operation("messages.send", {"to": to, "text": text}, lambda r: str(r["id"]))


def receive(timeout_s: float | None, sender: str) -> Operation[kept.Message | None]:
    """Take the oldest message."""
    arguments: Json = {}
    if timeout_s is not None:
        arguments["timeout_ms"] = max(0, round(timeout_s * 1000))
    if sender:
        arguments["from"] = sender
    return Operation("messages.receive", arguments, _message)


def _message(result: Json) -> kept.Message | None:
    found = result.get("message")
    if found is None:
        return None
    return kept.Message(
        id=found["id"],
        sender=found["from"],
        sender_name=found.get("from_name", ""),
        text=found.get("text"),
        json=found.get("json"),
        sent_at=moment(found["sent_at"]),
    )


# --- tasks


def update(task: str, state: str, text: str | None, value: Any, artifact: str) -> Operation[str]:
    """Tell of a task."""
    if text is not None and value is not None:
        raise InvalidRequest("what is told is either `text` or `json`: leave one of them out")
    arguments: Json = {"task": task, "state": state, "artifact": artifact}
    if text is not None:
        arguments["text"] = text
    elif value is not None:
        wire.check_plain("what is told", value)
        arguments["json"] = value
    return Operation("tasks.update", arguments, lambda r: str(r["state"]))


# --- memory


def append(
    text: str, tags: Sequence[str], metadata: Mapping[str, Any] | None, space: str, language: str
) -> Operation[str]:
    """Keep a text."""
    arguments: Json = {"text": text, "tags": list(tags), "space": space, "language": language}
    if metadata is not None:
        wire.check_plain("the metadata", metadata)
        arguments["metadata"] = dict(metadata)
    return Operation("memory.append", arguments, lambda r: str(r["id"]))


def search(
    query: str, limit: int, offset: int, tags: Sequence[str], space: str, language: str
) -> Operation[Found[kept.Entry]]:
    """Find texts."""
    arguments: Json = {
        "query": query,
        "limit": limit,
        "offset": offset,
        "tags": list(tags),
        "space": space,
        "language": language,
    }

    def decode(result: Json) -> Found[kept.Entry]:
        return Found(map(_entry, result.get("entries", ())), truncated=bool(result.get("truncated", False)))

    return Operation("memory.search", arguments, decode)


def _entry(found: Json) -> kept.Entry:
    return kept.Entry(
        id=found["id"],
        text=found["text"],
        tags=tuple(found.get("tags", ())),
        metadata=found.get("metadata") or {},
        score=float(found.get("score", 0)),
        created_at=moment(found["created_at"]),
        agent=found.get("agent", ""),
    )


# --- artifacts


def put(name: str, content: str | bytes, media_type: str) -> Operation[kept.Stored]:
    """Keep bytes, or a text as UTF-8."""
    if isinstance(content, str):
        data, media_type = content.encode(), media_type or "text/plain; charset=utf-8"
    else:
        data = content
    if len(data) > ARTIFACT_BYTES_MAX:
        raise InvalidRequest(
            f"the content of `{name}` has {len(data)} bytes and one call carries at most {ARTIFACT_BYTES_MAX}: "
            "put it in parts, or write a file"
        )
    arguments: Json = {"name": name, "data": b64(data)}
    if media_type:
        arguments["media_type"] = media_type
    return Operation("artifacts.put", arguments, _stored)


def _stored(result: Json) -> kept.Stored:
    return kept.Stored(
        ref=result["ref"], version=int(result["version"]), size_bytes=int(result.get("size_bytes", 0))
    )


def _content(result: Json) -> kept.Content:
    return kept.Content.of(
        unb64(result.get("data", "")),
        name=result.get("name", ""),
        version=int(result.get("version", 0)),
        ref=result["ref"],
        media_type=result.get("media_type", ""),
        size_bytes=int(result.get("size_bytes", 0)),
    )


def _part(which: Json, offset: int, limit: int) -> Operation[kept.Content]:
    arguments = dict(which)
    if offset:
        arguments["offset"] = offset
    if limit:
        arguments["limit"] = limit
    return Operation("artifacts.get", arguments, _content)


def get(name_or_ref: str, version: int, offset: int, limit: int) -> Script[kept.Content]:
    """Read a range, in as many calls as the kernel's limit makes necessary, all of one version."""
    which: Json = {"ref" if _REF.fullmatch(name_or_ref) else "name": name_or_ref}
    if version:
        which["version"] = version
    first: kept.Content = yield _part(which, offset, limit)
    end = first.size_bytes if not limit else min(first.size_bytes, offset + limit)
    parts: list[bytes] = [first]
    at, part = offset + len(first), first
    while part and at < end:
        part = yield _part({"ref": first.ref}, at, end - at)
        parts.append(part)
        at += len(part)
    if len(parts) == 1:
        return first
    return kept.Content.of(
        b"".join(parts),
        name=first.name,
        version=first.version,
        ref=first.ref,
        media_type=first.media_type,
        size_bytes=first.size_bytes,
    )
