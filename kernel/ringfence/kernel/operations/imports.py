"""Imports: an agent of another kernel, with its journal, its files and its rights as this kernel's ceilings leave them."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from ringfence.kernel.config import AGENT_UID_BASE
from ringfence.kernel.inherit import append_all, row_in
from ringfence.kernel.journal.store_move import TABLES
from ringfence.kernel.journal.types import AgentRecord, BadRow, Row
from ringfence.kernel.operations.forks import settle_copy, start_unfinished
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.operations.removal import discard
from ringfence.kernel.operations.submit import STAGING, check_manifest
from ringfence.kernel.parcel import Parcel, ParcelError, unpack
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.policy.problems import ManifestError
from ringfence.policy.rules import parse_rule
from ringfence.policy.sections import is_name
from ringfence.sandbox import points
from ringfence.sandbox.content import ABSENT
from ringfence.sandbox.points import PointManifest
from ringfence.sandbox.snapshots import SnapshotError, SnapshotStore
from ringfence.sandbox.trees import extract_tar
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.v1 import operator_pb2 as pb

FILE_BYTES_MAX = 64 << 30
_MALFORMED = (KeyError, TypeError, ValueError, BadRow, ParcelError)
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


async def take_in(kernel: Kernel, frames: AsyncIterator[pb.ImportRequest], operator: str) -> dict[str, Any]:
    """Take over an agent from a stream of one header and the parts of an export.

    Raises:
        Problem: the file was changed (naming the first thing that was), or its manifest can't be used here; nothing of it is kept.
    """
    first = await anext(frames, None)
    if first is None or first.WhichOneof("frame") != "header":
        raise bad_usage("the first frame of an import has to be its header")
    name, key = first.header.name, first.header.public_key
    if name and not is_name(name):
        raise bad_usage(f"`{name}` is no name for an agent; use up to 63 letters, digits, `.`, `-` and `_`")
    agents = kernel.layout.data / "agents"
    agents.mkdir(mode=0o700, parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=agents))
    try:
        await _receive(frames, staging / "parcel")
        parcel = await _verified(kernel, staging, key)
        return await _store(kernel, parcel, name, operator)
    finally:
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)


async def _receive(frames: AsyncIterator[pb.ImportRequest], path: Path) -> None:
    size = 0
    with path.open("wb") as file:
        async for frame in frames:
            size += len(frame.data)
            if size > FILE_BYTES_MAX:
                raise bad_usage(f"the file is larger than {FILE_BYTES_MAX} bytes")
            try:
                await asyncio.to_thread(file.write, frame.data)
            except OSError as error:
                raise conflict(
                    f"the file can't be stored: {error}; make room in the data directory"
                ) from error


async def _verified(kernel: Kernel, staging: Path, key: str) -> Parcel:
    """Everything is read and held against its hashes, the manifest against this kernel, before anything is taken over."""
    try:
        parcel = await asyncio.to_thread(unpack, staging / "parcel", staging / "unpacked")
        (staging / "parcel").unlink()
        await asyncio.to_thread(_check_content, parcel)
    except ParcelError as error:
        raise Problem(f"the file can't be imported: {error}", exit_code=1, reason="BadExport") from error
    if key and key.split() != parcel.public_key.split():
        text = "the file was sealed by another key than the one that was given; nothing was imported"
        raise Problem(text, exit_code=1, reason="BadExport")
    facts = parcel.agent
    check_manifest(kernel, str(facts["manifest"]), str(facts["source"]))
    for grant in facts["grants"]:
        try:
            parse_rule(str(grant["rule"]), str(grant["verdict"]))
        except ManifestError as error:
            raise bad_usage(f"the permission `{grant['rule']}` can't be used here: {error}") from error
    return parcel


def _check_content(parcel: Parcel) -> None:
    for name in parcel.names("blobs/"):
        if _hash(parcel.root / "blobs" / name) != name:
            raise ParcelError(f"`blobs/{name}` is not what its name says")
    for point in parcel.names("points/"):
        if not point.endswith(".json"):
            continue
        try:
            manifest = _point(parcel, point.removesuffix(".json"))
        except SnapshotError as error:
            raise ParcelError(str(error)) from None
        for path in manifest.paths:
            blob = parcel.root / "points" / "blobs" / path.blob
            if (
                path.kind == "file"
                and path.inline is None
                and (not blob.is_file() or _hash(blob) != path.blob)
            ):
                raise ParcelError(
                    f"the content of `{path.path}` in rollback point `{manifest.point}` is missing or damaged"
                )
    facts = parcel.agent
    try:
        kinds = {
            "manifest": str,
            "source": str,
            "name": str,
            "thread": str,
            "branches": list,
            "grants": list,
            "branch": int,
        }
        whole = all(isinstance(facts[key], kind) for key, kind in kinds.items())
        base64.b64decode(facts["input"], validate=True)
    except (KeyError, ValueError, TypeError):
        whole = False
    if not whole:
        raise ParcelError("`agent.json` lacks something")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _point(parcel: Parcel, point: str) -> PointManifest:
    return points.parse((parcel.root / "points" / f"{point}.json").read_bytes(), point)


async def _store(kernel: Kernel, parcel: Parcel, name: str, operator: str) -> dict[str, Any]:
    core, facts = kernel.core, parcel.agent
    record = await core.store.create_agent(
        name=name or str(facts["name"]),
        thread=str(facts["thread"]),
        manifest=str(facts["manifest"]),
        source=str(facts["source"]),
        labels={str(k): str(v) for k, v in dict(facts["labels"]).items()},
        input=base64.b64decode(facts["input"]),
        owner=core.kernel,
        uid_base=AGENT_UID_BASE if os.geteuid() == 0 else None,
        grants=[],
        submitted_by=operator,
    )
    await start_unfinished(kernel, record)
    try:
        await _fill(kernel, parcel, record, operator)
        await core.failpoints.reach("import:filled", record.id)
    except BaseException as error:
        await discard(kernel, record, str(error))
        if isinstance(error, SnapshotError | WorkspaceError | OSError):
            raise conflict(f"the agent can't be stored: {error}; nothing of it is kept") from error
        if isinstance(error, _MALFORMED):
            # Sealed, and yet not what an export is: somebody made it by hand.
            text = (
                f"the file can't be imported: its parts are none of an agent ({error}); nothing of it is kept"
            )
            raise Problem(" ".join(text.split()), exit_code=1, reason="BadExport") from error
        raise
    thread = await settle_copy(kernel, record, "an operator, after an import")
    await core.operator_event("operator.import", record.id, operator=operator, source=facts["id"])
    head = facts["head"]
    return {
        "id": record.id,
        "name": record.name,
        "state": thread.state,
        "source": facts["id"],
        "records": head["pos"],
        "origin": str(kernel.layout.origin(record.id) / "journal.jsonl"),
        "unavailable": kernel.ownership.resources.unavailable(),
    }


async def _fill(kernel: Kernel, parcel: Parcel, record: AgentRecord, operator: str) -> None:
    core, facts = kernel.core, parcel.agent
    grants: list[Mapping[str, Any]] = facts["grants"]
    await core.store.take_branches_and_grants(record.key, facts["branches"], int(facts["branch"]), grants)
    fresh = await core.store.grants(record.key, active=False)
    ids = {str(old["id"]): new.id for old, new in zip(grants, fresh, strict=True)}
    head = facts["head"]
    origin = {
        "source": facts["id"],
        "source_chain": head["chain"],
        "source_pos": head["pos"],
        "source_hash": head["hash"],
    }
    evidence = await asyncio.to_thread(_hash, parcel.journal)
    await core.event(
        record.key,
        "agent.import",
        record.id,
        operator=operator,
        journal_sha256=evidence,
        sealed_by=hashlib.sha256(parcel.public_key.encode()).hexdigest(),
        **origin,
    )

    async def rows() -> AsyncIterator[Row]:
        for row in parcel.rows():
            yield row_in(record.key, row, renamed(row.body, ids))

    await append_all(core, rows())
    for table in TABLES:
        for document in parcel.lines(f"{table}.jsonl"):
            await core.store.import_row(table, record.key, document)
    await asyncio.to_thread(_lay_out, kernel, parcel, record)


def renamed(body: bytes, ids: Mapping[str, str]) -> bytes:
    """A body with the ids that grants have here. One that does not exist any more gets an id that no grant has."""
    if b'"grants":' not in body:
        return body
    try:
        parts = _decode(body)
        grants = msgspec.json.decode(parts["grants"], type=list[str])
    except (msgspec.MsgspecError, KeyError):
        return body
    parts["grants"] = msgspec.Raw(msgspec.json.encode([ids.get(grant, f"old-{grant}") for grant in grants]))
    return msgspec.json.encode(parts)


def _lay_out(kernel: Kernel, parcel: Parcel, record: AgentRecord) -> None:
    home = kernel.layout.agent(record.id)
    uid = record.uid if os.geteuid() == 0 else None
    for name in parcel.names("blobs/"):
        kernel.core.blobs.put_file(parcel.root / "blobs" / name)
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=home.parent))
    try:
        for part in ("live", "image"):
            (staging / part).mkdir(mode=0o755)
            if uid is not None:
                os.chown(staging / part, uid, uid)
            extract_tar(parcel.root / f"{part}.tar", staging / part, uid=uid)
        (staging / "scratch").mkdir(mode=0o711)
        (staging / "logs").mkdir(mode=0o700)
        _take_points(parcel, SnapshotStore(kernel.layout.points(record.id)), parcel.agent.get("uid"), uid)
        origin = kernel.layout.origin(record.id)
        origin.mkdir(mode=0o700, parents=True)
        for name in ("journal.jsonl", "agent.json", "seal.json"):
            shutil.copyfile(parcel.root / name, origin / name)
        staging.rename(home)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _take_points(parcel: Parcel, target: SnapshotStore, old: object, uid: int | None) -> None:
    def opened(blob: str) -> int:
        return os.open(parcel.root / "points" / "blobs" / blob, os.O_RDONLY | os.O_CLOEXEC)

    for name in parcel.names("points/"):
        if name.endswith(".json"):
            target.keep(_owned(_point(parcel, name.removesuffix(".json")), old, uid), opened)


def _owned(manifest: PointManifest, old: object, uid: int | None) -> PointManifest:
    """The point with owners of this host: the agent's files are its own, and all others the kernel's."""
    own: Callable[[int], int] = lambda was: uid if uid is not None and was == old else os.geteuid()  # noqa: E731
    paths = [
        path if path.kind == ABSENT else dataclasses.replace(path, uid=own(path.uid), gid=own(path.gid))
        for path in manifest.paths
    ]
    return dataclasses.replace(manifest, paths=tuple(paths))
