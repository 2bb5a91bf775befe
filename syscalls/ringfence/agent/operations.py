"""What each method of the library sends and how it reads the answer. For both front ends; no I/O."""

from __future__ import annotations

import base64
import binascii
import os
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, TypeAlias, TypeVar

from ringfence.agent import values, wire
from ringfence.agent.errors import Conflict, InvalidRequest

T = TypeVar("T")
StrPath: TypeAlias = str | os.PathLike[str]
Json: TypeAlias = dict[str, Any]

WORKSPACE: Final = "/workspace"
READ_ATTEMPTS: Final = 3
RANDOM_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """One call: its action, arguments, and how its result is read."""

    action: str
    arguments: Json
    decode: Callable[[Json], T]


Script: TypeAlias = Generator[Operation[Any], Any, T]
"""Several calls that make one result: yields operations, is sent their results."""


def b64(data: bytes | bytearray | memoryview) -> str:
    """Encode bytes as JSON carries them."""
    return base64.b64encode(data).decode("ascii")


def unb64(text: str) -> bytes:
    """Decode bytes as JSON carries them."""
    return binascii.a2b_base64(text)


def moment(text: str) -> datetime:
    """Parse an RFC 3339 time."""
    return datetime.fromisoformat(text)


def raw(action: str, arguments: Mapping[str, Any]) -> Operation[Json]:
    """Any row of the table, for those that have no method here."""
    return Operation(action, dict(arguments), lambda result: result)


# --- fs


def _file_info(entry: Json) -> values.FileInfo:
    modified = entry.get("modified_at")
    return values.FileInfo(
        path=entry["path"],
        kind=entry.get("kind", "other"),
        size_bytes=int(entry.get("size_bytes", 0)),
        mode=int(entry.get("mode", 0)),
        modified_at=moment(modified) if modified else None,
        target=entry.get("target", ""),
    )


def _content(result: Json) -> values.FileContent:
    return values.FileContent(
        data=unb64(result.get("data", "")),
        size_bytes=int(result.get("size_bytes", 0)),
        version=result.get("version", ""),
    )


def _written(result: Json) -> values.Written:
    return values.Written(size_bytes=int(result.get("size_bytes", 0)), version=result.get("version", ""))


def fs_read(path: StrPath, offset: int = 0, limit: int = 0) -> Operation[values.FileContent]:
    """Read one part, as far as one call goes."""
    arguments: Json = {"path": os.fspath(path)}
    if offset:
        arguments["offset"] = offset
    if limit:
        arguments["limit"] = limit
    return Operation("fs.read", arguments, _content)


def read_all(path: StrPath, offset: int, limit: int) -> Script[bytes]:
    """Read a range in as many calls as the kernel's limit makes necessary, all of one version of the file.

    Raises:
        Conflict: the file kept changing while it was read.
    """
    for _ in range(READ_ATTEMPTS):
        first: values.FileContent = yield fs_read(path, offset, limit)
        end = first.size_bytes if not limit else min(first.size_bytes, offset + limit)
        parts, at, part = [first.data], offset + len(first.data), first
        while part.data and at < end and part.version == first.version:
            part = yield fs_read(path, at, end - at if limit else 0)
            parts.append(part.data)
            at += len(part.data)
        if part.version == first.version:
            return b"".join(parts)
    raise Conflict(
        f"`{os.fspath(path)}` changed each time while it was read in parts: read it when its writer is done"
    )


def fs_list(path: StrPath) -> Operation[values.Found[values.FileInfo]]:
    """List one directory."""
    return Operation(
        "fs.list",
        {"path": os.fspath(path)},
        lambda r: values.Found(map(_file_info, r.get("entries", ())), withheld=int(r.get("withheld", 0))),
    )


def fs_stat(path: StrPath) -> Operation[values.FileInfo]:
    """Describe one path."""
    return Operation("fs.stat", {"path": os.fspath(path)}, lambda r: _file_info(r["info"]))


def fs_search(path: StrPath, glob: str, text: str, limit: int) -> Operation[values.Found[values.SearchMatch]]:
    """Find files by name and content."""

    def decode(result: Json) -> values.Found[values.SearchMatch]:
        return values.Found(
            (
                values.SearchMatch(path=m["path"], line=int(m.get("line", 0)), text=m.get("text", ""))
                for m in result.get("matches", ())
            ),
            withheld=int(result.get("withheld", 0)),
            truncated=bool(result.get("truncated", False)),
        )

    return Operation(
        "fs.search", {"path": os.fspath(path), "glob": glob, "text": text, "limit": limit}, decode
    )


def fs_write(path: StrPath, data: bytes, mode: int) -> Operation[values.Written]:
    """Replace or create a file."""
    arguments: Json = {"path": os.fspath(path), "data": b64(data)}
    if mode:
        arguments["mode"] = mode
    return Operation("fs.write", arguments, _written)


def fs_append(path: StrPath, data: bytes) -> Operation[values.Written]:
    """Add to a file."""
    return Operation("fs.append", {"path": os.fspath(path), "data": b64(data)}, _written)


def fs_move(path: StrPath, to: StrPath) -> Operation[str]:
    """Rename."""
    return Operation(
        "fs.move", {"path": os.fspath(path), "to": os.fspath(to)}, lambda r: str(r.get("path", ""))
    )


def fs_delete(path: StrPath, recursive: bool) -> Operation[int]:
    """Remove."""
    arguments: Json = {"path": os.fspath(path), "recursive": recursive}
    return Operation("fs.delete", arguments, lambda r: int(r.get("removed", 0)))


# --- state, checkpoint


def state_get(key: str) -> Operation[values.Versioned]:
    """Read one key."""
    return Operation(
        "state.get",
        {"key": key},
        lambda r: values.Versioned(
            found=bool(r.get("found", False)), value=r.get("value"), version=int(r.get("version", 0))
        ),
    )


def state_put(
    key: str, value: Any, if_version: int | None, claims: Mapping[str, int] | None = None
) -> Operation[int]:
    """Write one key."""
    wire.check_plain(f"the value of `{key}`", value)
    arguments: Json = {"key": key, "value": value}
    if if_version is not None:
        arguments["if_version"] = if_version
    if claims:
        arguments["claims"] = dict(claims)
    return Operation("state.put", arguments, lambda r: int(r.get("version", 0)))


def state_delete(
    key: str, if_version: int | None, claims: Mapping[str, int] | None = None
) -> Operation[bool]:
    """Remove one key."""
    arguments: Json = {"key": key}
    if if_version is not None:
        arguments["if_version"] = if_version
    if claims:
        arguments["claims"] = dict(claims)
    return Operation("state.delete", arguments, lambda r: bool(r.get("existed", False)))


def state_transaction(
    reads: Mapping[str, int],
    puts: Mapping[str, Any],
    deletes: Sequence[str],
    claims: Mapping[str, int] | None = None,
) -> Operation[dict[str, int]]:
    """Commit several writes at once."""
    arguments: Json = {"reads": dict(reads), "puts": dict(puts), "deletes": list(deletes)}
    if claims:
        arguments["claims"] = dict(claims)
    return Operation(
        "state.transaction",
        arguments,
        lambda r: {key: int(version) for key, version in r.get("versions", {}).items()},
    )


def checkpoint_save(state: Any, version: int, next_child: int) -> Operation[None]:
    """Save the program's own state."""
    wire.check_plain("the checkpoint", state)
    arguments: Json = {"state": state, "schema_version": version, "next_child": next_child}
    return Operation("checkpoint.save", arguments, lambda _: None)


# --- time and chance


def now() -> Operation[datetime]:
    """Read the kernel's clock."""
    return Operation("now", {}, lambda r: moment(r["time"]))


def ask(question: str, details: Any) -> Operation[values.Answer]:
    """Ask a person."""
    arguments: Json = {"question": question}
    if details is not None:
        arguments["details"] = details
    return Operation("ask", arguments, lambda r: values.Answer(**r))


def sleep(seconds: float) -> Operation[datetime]:
    """Wait."""
    return Operation("sleep", {"duration_ms": max(0, round(seconds * 1000))}, lambda r: moment(r["time"]))


def _random(size: int) -> Operation[bytes]:
    return Operation("random", {"size_bytes": size}, lambda r: unb64(r["data"]))


def random_bytes(size: int) -> Script[bytes]:
    """Get random bytes, in several calls where they are many."""
    if size < 0:
        raise InvalidRequest(f"`{size}` random bytes are impossible: ask for 0 or more")
    parts = list[bytes]()
    for start in range(0, size, RANDOM_BYTES):
        part: bytes = yield _random(min(RANDOM_BYTES, size - start))
        parts.append(part)
    return b"".join(parts)


def random_float() -> Operation[float]:
    """Get a float in [0, 1) with all 53 bits random."""
    return Operation(
        "random", {"size_bytes": 8}, lambda r: (int.from_bytes(unb64(r["data"]), "big") >> 11) * 2.0**-53
    )


def random_uuid() -> Operation[uuid.UUID]:
    """Get a random UUID of version 4."""
    return Operation("random", {"size_bytes": 16}, lambda r: uuid.UUID(bytes=unb64(r["data"]), version=4))
