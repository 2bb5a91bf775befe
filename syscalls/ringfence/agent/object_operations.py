"""Operations on objects of declared resources, for both front ends; no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfence.agent import kept
from ringfence.agent.errors import InvalidRequest
from ringfence.agent.operations import Json, Operation, Script, b64, moment, unb64
from ringfence.agent.values import Found

if TYPE_CHECKING:
    from collections.abc import Mapping

OBJECT_BYTES_MAX = 3080192
"""What one call carries."""


def listed(prefix: str, after: str, limit: int) -> Operation[Found[kept.ObjectInfo]]:
    """List objects."""
    arguments: Json = {"prefix": prefix}
    if after:
        arguments["after"] = after
    if limit:
        arguments["limit"] = limit

    def decode(result: Json) -> Found[kept.ObjectInfo]:
        return Found(map(_info, result.get("objects", ())), truncated=bool(result.get("truncated", False)))

    return Operation("object.list", arguments, decode)


def _info(found: Json) -> kept.ObjectInfo:
    at = found.get("modified_at", "")
    return kept.ObjectInfo(
        object=found["object"],
        size_bytes=int(found.get("size_bytes", 0)),
        version=found.get("version", ""),
        modified_at=moment(at) if at else None,
    )


def _content(result: Json) -> kept.ObjectContent:
    return kept.ObjectContent.of(
        unb64(result.get("data", "")),
        version=result.get("version", ""),
        size_bytes=int(result.get("size_bytes", 0)),
        content_type=result.get("content_type", ""),
        metadata=result.get("metadata") or {},
    )


def _part(name: str, offset: int, limit: int, version: str) -> Operation[kept.ObjectContent]:
    arguments: Json = {"object": name}
    if offset:
        arguments["offset"] = offset
    if limit:
        arguments["limit"] = limit
    if version:
        arguments["if_version"] = version
    return Operation("object.get", arguments, _content)


def get(name: str, offset: int, limit: int) -> Script[kept.ObjectContent]:
    """Read a range, in as many calls as the kernel's limit makes necessary, all of one version."""
    first: kept.ObjectContent = yield _part(name, offset, limit, "")
    end = first.size_bytes if not limit else min(first.size_bytes, offset + limit)
    parts: list[bytes] = [first]
    at, part = offset + len(first), first
    while part and at < end:
        part = yield _part(name, at, end - at, first.version)
        parts.append(part)
        at += len(part)
    return first if len(parts) == 1 else first.with_data(b"".join(parts))


def put(
    name: str, content: str | bytes, content_type: str, metadata: Mapping[str, str] | None, if_version: str
) -> Operation[kept.ObjectStored]:
    """Write bytes, or a text as UTF-8."""
    if isinstance(content, str):
        data, content_type = content.encode(), content_type or "text/plain; charset=utf-8"
    else:
        data = content
    if len(data) > OBJECT_BYTES_MAX:
        raise InvalidRequest(
            f"the content of `{name}` has {len(data)} bytes and one call carries at most {OBJECT_BYTES_MAX}"
        )
    arguments: Json = {"object": name, "data": b64(data)}
    if content_type:
        arguments["content_type"] = content_type
    if metadata:
        arguments["metadata"] = dict(metadata)
    if if_version:
        arguments["if_version"] = if_version

    def decode(result: Json) -> kept.ObjectStored:
        return kept.ObjectStored(
            version=result["version"],
            size_bytes=int(result.get("size_bytes", 0)),
            created=bool(result.get("created", False)),
        )

    return Operation("object.put", arguments, decode)


def delete(name: str, if_version: str) -> Operation[int]:
    """Remove one."""
    arguments: Json = {"object": name}
    if if_version:
        arguments["if_version"] = if_version
    return Operation("object.delete", arguments, lambda result: int(result.get("size_bytes", 0)))
