"""Rollback points as records, and the text they are kept in."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence.sandbox import content
from ringfence.sandbox.regular import IrregularError, read_regular

FORMAT = 1

POINT_BYTES_MAX = 1 << 30
"""Bytes that one manifest may have; its effect doesn't start where it would have more."""

_END = b'"}\n'
"""What every manifest ends with."""


class SnapshotError(Exception):
    """No verified rollback point, or one that can't be used; `str()` is one line that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointPath:
    """One path as it was before a call.

    Attributes:
        path: canonical path.
        before: fingerprint, as `Workspace.fingerprint` gives it.
        kind: `absent`, `file`, `directory` or `link`.
        mode: permission bits.
        uid: owner on this host.
        gid: group on this host.
        mtime_ns: modification time, nanoseconds since the epoch.
        size: length of a file's content in bytes.
        blob: SHA-256 of a file's content in hex; empty for other kinds.
        inline: a small file's content, kept in the manifest itself; None: it is in the blob store.
        target: where a link points, as written in it.
        xattrs: the `user.*` attributes, access lists, and capabilities of a program where the kernel is root.
        data: where a file holds data, as pairs of start and end, its holes left out; None: as the blob has it.
        links: how many names a file has.
        inode: number by which names of one file are known as such; 0: not kept.
    """

    path: str
    before: str
    kind: str
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    blob: str = ""
    inline: bytes | None = None
    target: str = ""
    xattrs: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    data: tuple[tuple[int, int], ...] | None = None
    links: int = 1
    inode: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PointManifest:
    """One rollback point.

    Attributes:
        point: its id.
        paths: before-images, parents before what is in them.
        size_bytes: content kept for it.
        expect: the fingerprint each path is expected to have after the effect; may lack some.
        parents: modification times of the directories around the paths.
        extra: JSON of the call's own, such as a change set or rows.
    """

    point: str
    paths: tuple[PointPath, ...] = ()
    size_bytes: int = 0
    expect: Mapping[str, str] = field(default_factory=dict[str, str])
    parents: Mapping[str, int] = field(default_factory=dict[str, int])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreItem:
    """One change that a rollback makes.

    Attributes:
        path: canonical path.
        action: `restore` (another state stands there), `create` (nothing does) or `remove` (nothing was there).
        current: fingerprint when the plan was made.
        before: the state to bring back.
        parent_mtime_ns: time to give its directory back; None: leave it.
    """

    path: str
    action: str
    current: str
    before: PointPath
    parent_mtime_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """What a rollback of some points would do to the workspace.

    Attributes:
        items: the changes, parents before what is in them.
        conflicts: paths that others changed since; they are left as they are.
        unchanged: paths that already are as they were.
        reasons: one line for each conflict.
        kinds: `file`, `directory`, `link` or `other` for each path of the points: what it was, or what it is where nothing was.
    """

    items: tuple[RestoreItem, ...]
    conflicts: tuple[str, ...]
    unchanged: tuple[str, ...]
    reasons: Mapping[str, str]
    kinds: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Something of a point that can't be read back as it was kept.

    Attributes:
        path: whose content; empty: the point's manifest, and so all that it covers.
        where: `here`, or `store` for a shared one.
        why: one line.
    """

    path: str
    where: str = "here"
    why: str


def absent(path: str) -> PointPath:
    """The before-image of a path where nothing stood."""
    return PointPath(path=path, before=content.ABSENT, kind=content.ABSENT)


def _dump_path(entry: PointPath) -> dict[str, Any]:
    record: dict[str, Any] = {"path": entry.path, "before": entry.before, "kind": entry.kind}
    if entry.kind == content.ABSENT:
        return record
    record |= {"mode": entry.mode, "uid": entry.uid, "gid": entry.gid, "mtime_ns": entry.mtime_ns}
    if entry.kind == "file":
        record |= {"size": entry.size, "blob": entry.blob}
        if entry.inline is not None:
            record["inline"] = base64.b64encode(entry.inline).decode()
        if entry.data is not None:
            record["data"] = entry.data
        record |= {"links": entry.links, "inode": entry.inode}
    if entry.kind == "link":
        record["target"] = entry.target
    if entry.xattrs:
        record["xattrs"] = {name: base64.b64encode(value).decode() for name, value in entry.xattrs.items()}
    return record


def _load_path(record: dict[str, Any]) -> PointPath:
    inline = record.pop("inline", None)
    xattrs = {name: base64.b64decode(value) for name, value in record.pop("xattrs", {}).items()}
    data: list[tuple[int, int]] | None = record.pop("data", None)
    return PointPath(
        inline=None if inline is None else base64.b64decode(inline),
        xattrs=xattrs,
        data=None if data is None else tuple((start, end) for start, end in data),
        **record,
    )


def dump(manifest: PointManifest) -> bytes:
    """Write a manifest: one line of JSON, then one with its SHA-256.

    ASCII JSON keeps every file name, undecodable bytes included, as they come from the file system.

    Raises:
        SnapshotError: `extra` is not JSON.
    """
    body = {
        "format": FORMAT,
        "point": manifest.point,
        "size_bytes": manifest.size_bytes,
        "paths": [_dump_path(entry) for entry in manifest.paths],
        "expect": dict(manifest.expect),
        "parents": dict(manifest.parents),
        "extra": dict(manifest.extra),
    }
    try:
        line = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"point `{manifest.point}` holds something that is not JSON: {error}") from error
    text = line + b"\n" + _seal(line)
    if len(text) > POINT_BYTES_MAX:
        raise SnapshotError(
            f"point `{manifest.point}` would have {len(text)} bytes beside its files, and may have {POINT_BYTES_MAX}; "
            "change less at once"
        )
    return text


def sized(text: bytes, size: int) -> bytes:
    """The text of a manifest that says another size: so that it is written once where the size is that of the text itself."""
    line = text.partition(b"\n")[0].replace(_NO_SIZE, b'"size_bytes":%d,' % size, 1)
    return line + b"\n" + _seal(line)


_NO_SIZE = b'"size_bytes":0,'


def holds(path: Path, text: bytes, point: str) -> bool:
    """Whether the file of a manifest has this very text.

    Raises:
        SnapshotError: it is no file that a manifest may be in.
        OSError: it can't be read.
    """
    try:
        return read_regular(path, POINT_BYTES_MAX, _END) == text
    except IrregularError as error:
        raise _damaged(point, str(error.strerror)) from error


def _seal(line: bytes) -> bytes:
    return json.dumps({"sha256": hashlib.sha256(line).hexdigest()}).encode("ascii") + b"\n"


def _unseal(text: bytes, point: str) -> dict[str, Any]:
    if not text:
        raise ValueError("its file is empty")
    line, _, seal = text.partition(b"\n")
    if seal != _seal(line):
        raise ValueError("its checksum differs, so it was changed or cut short")
    body: dict[str, Any] = json.loads(line)
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']}, this version reads {FORMAT}")
    if body["point"] != point:
        raise ValueError(f"it is the manifest of `{body['point']}`")
    return body


def read(path: Path, point: str) -> PointManifest:
    """Read a manifest back from its file. Nothing that stands there instead holds the caller up or fills its memory.

    Raises:
        SnapshotError: it is damaged, or from a later version.
        FileNotFoundError: there is none.
        OSError: it can't be read.
    """
    try:
        return parse(read_regular(path, POINT_BYTES_MAX, _END), point)
    except IrregularError as error:
        raise _damaged(point, str(error.strerror)) from error


def _damaged(point: str, why: str) -> SnapshotError:
    return SnapshotError(
        f"rollback point `{point}` is damaged: {why}; restore the points directory from a backup"
    )


def parse(text: bytes, point: str) -> PointManifest:
    """Read a manifest back.

    Raises:
        SnapshotError: it is damaged, or from a later version.
    """
    try:
        body = _unseal(text, point)
    except ValueError as error:
        why = str(error) if type(error) is ValueError else "it is not JSON"
        raise _damaged(point, why) from error
    except (KeyError, TypeError) as error:
        raise _damaged(point, "it is not a rollback point") from error
    try:
        return PointManifest(
            point=point,
            size_bytes=body["size_bytes"],
            paths=tuple(_load_path(record) for record in body["paths"]),
            expect=body["expect"],
            parents=body["parents"],
            extra=body["extra"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(
            point, "it lacks something that a rollback point has, or has something else"
        ) from error
