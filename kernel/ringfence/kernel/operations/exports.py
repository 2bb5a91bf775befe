"""Exports: one agent with its verified journal and all its files, in one file for another kernel."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ringfence.kernel.config import VERSION
from ringfence.kernel.journal.blobs import BlobError, Blobs
from ringfence.kernel.journal.documents import document_of
from ringfence.kernel.journal.store_move import TABLES, branch_document, grant_document
from ringfence.kernel.journal.types import StoredRow
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.operations.submit import STAGING
from ringfence.kernel.parcel import Packer, canonical
from ringfence.kernel.problems import conflict
from ringfence.kernel.stillness import held_still
from ringfence.kernel.thread import Thread
from ringfence.sandbox import points
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.sandbox.trees import make_tar
from ringfence.sandbox.workspace import WorkspaceError

CHUNK = 1 << 20


async def export(kernel: Kernel, name: str, operator: str) -> AsyncIterator[bytes]:
    """Pack an agent; a running one is held still while its picture is taken.

    Raises:
        Problem: no such agent, it was spawned, a call does not finish, or something of it is damaged.
    """
    thread = await kernel.with_whole_past(name)
    await refuse_children(kernel, thread, "exported")
    await kernel.rollback.finish_interrupted(thread)
    home = kernel.layout.data / "agents"
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=home))
    try:
        await kernel.processes.boundaries.now(thread, "before an export")
        async with held_still(thread, kernel.processes.boundaries.thaw):
            try:
                await _gather(kernel, thread, staging)
                await asyncio.to_thread(_pack, kernel, thread, staging)
            except (BlobError, SnapshotError, WorkspaceError, OSError) as error:
                raise conflict(f"`{thread.id}` can't be exported: {error}") from error
        await kernel.core.operator_event("operator.export", thread.id, operator=operator)
        with (staging / "parcel").open("rb") as file:
            while data := await asyncio.to_thread(file.read, CHUNK):
                yield data
    finally:
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)


async def refuse_children(kernel: Kernel, thread: Thread, what: str) -> None:
    """Refuse what would give a spawned agent more rights than it has under its parent.

    Raises:
        Problem: it was spawned.
    """
    parents = await kernel.core.store.parents(thread.key)
    if parents:
        parent = await kernel.core.store.agent_by_key(parents[0])
        named = "another agent" if parent is None else f"`{parent.id}`"
        raise conflict(
            f"`{thread.id}` was spawned by {named} and has its rights under that one's, so it can't be {what} by itself"
        )


async def _gather(kernel: Kernel, thread: Thread, staging: Path) -> None:
    """Write what the database has of the agent, and the names of its long results."""
    store, core = kernel.core.store, kernel.core
    refs: set[str] = set()
    pos, head = core.journal.head(thread.key)
    with (staging / "journal.jsonl").open("wb") as file:
        async for row in store.audit(thread.key):
            if row.pos > pos:
                break
            file.write(canonical(document_of(row)) + b"\n")
            refs |= _refs(row)
    for table in TABLES:
        with (staging / f"{table}.jsonl").open("wb") as file:
            async for document in store.export_rows(table, thread.key):
                file.write(canonical(document) + b"\n")
                if table == "artifacts":
                    refs.add(document["ref"])
    record = await kernel.record(thread.id)
    facts = {
        "ringfence": VERSION,
        "id": record.id,
        "name": record.name,
        "thread": record.thread,
        "branch": thread.branch,
        "state": thread.state,
        "labels": dict(record.labels),
        "manifest": record.manifest,
        "source": record.source,
        "input": base64.b64encode(record.input).decode(),
        # A kernel that is not root is itself the owner of all files.
        "uid": record.uid if os.geteuid() == 0 else os.geteuid(),
        "branches": [branch_document(b) for b in await store.branches(thread.key)],
        "grants": [grant_document(g) for g in await store.grants(thread.key)],
        "head": {"chain": thread.key, "pos": pos, "hash": head.hex()},
    }
    (staging / "agent.json").write_bytes(canonical(facts))
    (staging / "refs").write_text("\n".join(sorted(refs)), encoding="ascii")


def _refs(row: StoredRow) -> set[str]:
    """Long results that a row points to."""
    if b'"artifact":' not in row.body:
        return set()
    ref = json.loads(row.body).get("artifact")
    return {ref} if isinstance(ref, str) else set()


def _pack(kernel: Kernel, thread: Thread, staging: Path) -> None:
    packer = Packer(staging / "parcel")
    for name in ("agent.json", "journal.jsonl", *(f"{table}.jsonl" for table in TABLES)):
        packer.add_file(name, staging / name)
    blobs: Blobs = kernel.core.blobs
    for ref in (staging / "refs").read_text(encoding="ascii").split():
        packer.add_chunks(f"blobs/{ref}", blobs.size(ref), blobs.chunks(ref))
    home = kernel.layout.agent(thread.id)
    for part in ("live", "image"):
        path = staging / part
        with path.open("wb") as file:
            for piece in make_tar(home / part):
                file.write(piece)
        packer.add_file(f"{part}.tar", path)
        path.unlink()
    _pack_points(packer, thread)
    members = packer.members()
    signature, public = kernel.anchor.sign(canonical(members))
    seal: dict[str, Any] = {
        "members": members,
        "public_key": public.decode(),
        "signature": signature.hex(),
    }
    packer.add_bytes("seal.json", canonical(seal))
    packer.close()


def _pack_points(packer: Packer, thread: Thread) -> None:
    store = thread.environment.snapshots
    packed: set[str] = set()
    for point in store.points():
        manifest = store.require(point)
        for path in manifest.paths:
            if path.kind != "file" or path.inline is not None or path.blob in packed:
                continue
            packed.add(path.blob)
            with open(store.open_blob(path.blob), "rb") as file:  # noqa: PTH123 - a descriptor
                packer.add_chunks(
                    f"points/blobs/{path.blob}", path.size, iter(lambda f=file: f.read(CHUNK), b"")
                )
        packer.add_bytes(f"points/{point}.json", points.dump(manifest))
