"""Rollback points as records, and the text they are kept in."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringfence.sandbox import content

FORMAT = 1


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
        xattrs: the `user.*` attributes.
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
    if entry.kind == "link":
        record["target"] = entry.target
    if entry.xattrs:
        record["xattrs"] = {name: base64.b64encode(value).decode() for name, value in entry.xattrs.items()}
    return record


def _load_path(record: dict[str, Any]) -> PointPath:
    inline = record.pop("inline", None)
    xattrs = {name: base64.b64decode(value) for name, value in record.pop("xattrs", {}).items()}
    return PointPath(inline=None if inline is None else base64.b64decode(inline), xattrs=xattrs, **record)


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
    return line + b"\n" + json.dumps({"sha256": hashlib.sha256(line).hexdigest()}).encode("ascii") + b"\n"


def _unseal(text: bytes, point: str) -> dict[str, Any]:
    line, seal, end = text.split(b"\n")
    if end or json.loads(seal)["sha256"] != hashlib.sha256(line).hexdigest():
        raise ValueError("its checksum differs")
    body: dict[str, Any] = json.loads(line)
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']}, this version reads {FORMAT}")
    if body["point"] != point:
        raise ValueError(f"it is the manifest of `{body['point']}`")
    return body


def parse(text: bytes, point: str) -> PointManifest:
    """Read a manifest back.

    Raises:
        SnapshotError: it is damaged, or from a later version.
    """
    try:
        body = _unseal(text, point)
        return PointManifest(
            point=point,
            size_bytes=body["size_bytes"],
            paths=tuple(_load_path(record) for record in body["paths"]),
            expect=body["expect"],
            parents=body["parents"],
            extra=body["extra"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(
            f"rollback point `{point}` is damaged: {error}; restore the points directory from a backup"
        ) from error
