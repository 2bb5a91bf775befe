"""An agent's state in layers, each of which can be listed and read on its own: docs/layers.md.

A layer is one JSON document, made item by item in bounded memory. It is the picture of one moment: what the journal says up to
its head then, and of the tables what was kept up to that step.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from ringfence.kernel.journal.blobs import BlobError
from ringfence.kernel.journal.types import Damaged, Phase, StoredRow
from ringfence.kernel.operations.kernel import Kernel, from_us
from ringfence.kernel.operations.surroundings import environment_items
from ringfence.kernel.problems import bad_usage, conflict
from ringfence.kernel.thread import Thread

FORMAT: Final = "ringfence-layer"
VERSION: Final = 1

PAGE_STEPS: Final = 100

_PIECE: Final = 3 << 18
"""Bytes of an artifact that are encoded at a time: no base64 group lies across two of them."""

_TALK: Final = frozenset(
    {"llm.complete", "messages.send", "messages.receive", "memory.append", "memory.search", "ask"}
)
"""Calls of the conversation. All others are results of tools, but those that make the task's own state."""

_TASK: Final = frozenset({"checkpoint.save"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a picture is taken.

    Attributes:
        pos: head of the agent's chain.
        hash: of that row.
        step: newest step of the agent.
    """

    pos: int
    hash: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item of a layer.

    Attributes:
        document: as it is shown.
        ref: artifact whose bytes belong to it; empty: none.
        name: the key that they stand under.
        size_bytes: how many there are.
        encoded: whether they are shown as base64; else they are JSON themselves.
    """

    document: dict[str, Any]
    ref: str = ""
    name: str = ""
    size_bytes: int = 0
    encoded: bool = False

    @property
    def shown_bytes(self) -> int:
        """Length of the item in the document."""
        size = len(msgspec.json.encode(self.document))
        if not self.ref:
            return size
        body = 2 + 4 * ((self.size_bytes + 2) // 3) if self.encoded else self.size_bytes
        return size + len(f',"{self.name}":') + body


Items = AsyncIterator[Item]


# -- the layers -----------------------------------------------------------------------------------------------------


async def _calls(
    kernel: Kernel, thread: Thread, moment: Moment
) -> AsyncIterator[tuple[StoredRow, dict[str, Any]]]:
    """The calls that have ended on the present branch: the row of each outcome, with its body and the arguments of its intent."""
    after, lineage = 0, thread.lineage
    while rows := await kernel.core.store.steps_page(thread.key, after, PAGE_STEPS):
        after = max(row.step for row in rows)
        found: dict[int, list[StoredRow]] = {}
        for row in rows:
            if row.pos <= moment.pos and lineage.holds(row.branch, row.step):
                found.setdefault(row.step, []).append(row)
        for step in sorted(found):
            bodies: list[dict[str, Any]] = [msgspec.json.decode(row.body) for row in found[step]]
            row, body = found[step][-1], bodies[-1]
            if row.phase is Phase.OUTCOME and row.outcome != "parked" and not body.get("aside"):
                said = next((one["arguments"] for one in bodies if "arguments" in one), None)
                yield row, {**body, "arguments": said}


def _call_item(row: StoredRow, body: dict[str, Any]) -> Item:
    """A call with its arguments and its whole result, also where that lies outside the journal."""
    document: dict[str, Any] = {
        "kind": "call",
        "step": row.step,
        "lane": row.lane,
        "lane_step": row.lane_step,
        "branch": row.branch,
        "at": from_us(row.started_us),
        "action": row.action,
        "resource": row.resource,
        "effect": row.effect,
        "outcome": row.outcome,
        "digest": row.digest.hex(),
        "effect_id": row.effect_id,
        "arguments": body["arguments"],
    }
    if "error" in body:
        document["error"] = body["error"]
    if "artifact" not in body:
        document["result"] = body.get("result")
        return Item(document=document)
    document["result_ref"] = body["artifact"]
    return Item(document=document, ref=body["artifact"], name="result", size_bytes=int(body["result_bytes"]))


async def _memory(kernel: Kernel, thread: Thread, moment: Moment) -> Items:
    """What was said: to models and by them, to people and other agents; and the texts that it kept."""
    store = kernel.core.store
    async for row, body in _calls(kernel, thread, moment):
        if row.action in _TALK:
            yield _call_item(row, body)
    async for row in store.export_rows("messages", thread.key):
        if row["voided_at"] is None and row["taken_step"] is None:
            named = {name: row[name] for name in ("sender", "sender_name", "is_json", "body", "sent_at")}
            yield Item(document={"kind": "waiting", "id": f"m{row['key']}", **named})
    async for row in store.export_rows("memories", thread.key):
        if not row["hidden"] and row["step"] <= moment.step:
            named = {name: row[name] for name in ("text", "tags", "metadata", "step", "created_at")}
            yield Item(document={"kind": "entry", "id": f"e{row['key']}", **named})


async def _task(kernel: Kernel, thread: Thread, _moment: Moment) -> Items:
    """What it is about: its input, its newest checkpoint, the state keys that it wrote last, the claims that it holds."""
    store = kernel.core.store
    record = await kernel.record(thread.id)
    yield Item(document={"kind": "input", "data": base64.b64encode(record.input).decode()})
    yield Item(
        document={
            "kind": "status",
            "state": thread.state,
            "waiting_for": thread.waiting_for or None,
            "error": thread.error or None,
        }
    )
    try:
        saved = await store.latest_checkpoint(thread.key, thread.lineage.parts)
    except Damaged as error:
        raise conflict(
            f"the task of `{thread.id}` can't be read: {error}; roll back to before that step"
        ) from error
    if saved is not None:
        yield Item(
            document={
                "kind": "checkpoint",
                "step": saved.step,
                "schema_version": saved.schema_version,
                "state": msgspec.Raw(saved.state),
            }
        )
    async for row in store.layer_rows("state", thread.id):
        yield Item(document={"kind": "state", **row})
    async for row in store.layer_rows("claims", thread.id):
        yield Item(document={"kind": "claim", **row})


async def _results(kernel: Kernel, thread: Thread, moment: Moment) -> Items:
    """What its tools answered."""
    async for row, body in _calls(kernel, thread, moment):
        if row.action not in _TALK and row.action not in _TASK:
            yield _call_item(row, body)


async def _artifacts(kernel: Kernel, thread: Thread, moment: Moment) -> Items:
    """What it made, with the bytes."""
    async for row in kernel.core.store.export_rows("artifacts", thread.key):
        if row["hidden"] or row["step"] > moment.step:
            continue
        names = ("name", "version", "ref", "media_type", "size_bytes", "step", "created_at")
        document = {"kind": "artifact", **{name: row[name] for name in names}}
        yield Item(document=document, ref=row["ref"], name="data", size_bytes=row["size_bytes"], encoded=True)


async def _environment(kernel: Kernel, thread: Thread, moment: Moment) -> Items:
    """What it works with: the kernel, models and tools with their versions, resources, the rights in force."""
    calls = [_seen(row, body) async for row, body in _calls(kernel, thread, moment)]
    for document in await environment_items(kernel, thread, calls):
        yield Item(document=document)


def _seen(row: StoredRow, body: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
    """Of a call what its surroundings are made from: of models what they said of themselves."""
    if row.action != "llm.complete" or row.outcome != "ok":
        return row.action, row.step, {}
    said: dict[str, Any] = body.get("result") or {}
    kept = {name: said[name] for name in ("model", "resource", "tokenizer") if name in said}
    asked: dict[str, Any] = body.get("arguments") or {}
    return row.action, row.step, {"asked": asked.get("model"), **kept}


LAYERS: Final[dict[str, Callable[[Kernel, Thread, Moment], Items]]] = {
    "memory": _memory,
    "task": _task,
    "results": _results,
    "artifacts": _artifacts,
    "environment": _environment,
}
"""Every layer by its name."""


# -- what operators get ---------------------------------------------------------------------------------------------


async def layers(kernel: Kernel, name: str) -> dict[str, Any]:
    """The layers of an agent, with how much is in each.

    Raises:
        Problem: no such agent.
    """
    thread = await kernel.thread(name)
    moment = await _now(kernel, thread)
    found: list[dict[str, Any]] = []
    for layer, items in LAYERS.items():
        head, tail = _frame(thread, layer, moment)
        count, size = 0, len(head) + len(tail)
        async for item in items(kernel, thread, moment):
            size += item.shown_bytes + (2 if count else 1)
            count += 1
        about = (items.__doc__ or "").strip()
        found.append({"layer": layer, "items": count, "size_bytes": size, "about": about})
    return {"id": thread.id, "name": thread.record.name, "at_step": moment.step, "layers": found}


async def export_layer(kernel: Kernel, name: str, layer: str, operator: str) -> AsyncIterator[bytes]:
    """One layer as a JSON document.

    Raises:
        Problem: no such agent or layer, or something of it is damaged.
    """
    if layer not in LAYERS:
        raise bad_usage(f"no layer `{layer[:80]}`; there are {', '.join(LAYERS)}", "NoSuchLayer")
    thread = await kernel.thread(name)
    moment = await _now(kernel, thread)
    await kernel.core.operator_event("operator.export_layer", thread.id, operator=operator, layer=layer)
    head, tail = _frame(thread, layer, moment)
    yield head
    first = True
    async for item in LAYERS[layer](kernel, thread, moment):
        yield b"\n" if first else b",\n"
        first = False
        async for piece in _shown(kernel, item):
            yield piece
    yield tail


async def _now(kernel: Kernel, thread: Thread) -> Moment:
    pos, digest = kernel.core.journal.head(thread.key)
    counts = await kernel.core.store.counts(thread.key)
    return Moment(pos=pos, hash=digest.hex(), step=int(counts.get("max_step", 0)))


def _frame(thread: Thread, layer: str, moment: Moment) -> tuple[bytes, bytes]:
    head = msgspec.json.encode(
        {
            "format": FORMAT,
            "version": VERSION,
            "layer": layer,
            "id": thread.id,
            "name": thread.record.name,
            "thread": thread.record.thread,
            "branch": thread.branch,
            "at_step": moment.step,
            "head": {"chain": thread.key, "pos": moment.pos, "hash": moment.hash},
        }
    )
    return head[:-1] + b',"items":[', b"\n]}\n"


async def _shown(kernel: Kernel, item: Item) -> AsyncIterator[bytes]:
    document = msgspec.json.encode(item.document)
    if not item.ref:
        yield document
        return
    yield document[:-1] + f',"{item.name}":'.encode()
    chunks = kernel.core.blobs.chunks(item.ref)
    try:
        if item.encoded:
            yield b'"'
        rest = b""
        while chunk := await asyncio.to_thread(next, chunks, b""):
            if not item.encoded:
                yield chunk
                continue
            rest += chunk
            whole = len(rest) - len(rest) % 3
            if whole >= _PIECE:
                yield base64.b64encode(rest[:whole])
                rest = rest[whole:]
        if item.encoded:
            yield base64.b64encode(rest) + b'"'
    except BlobError as error:
        raise conflict(f"the layer can't be exported: {error}") from error
    yield b"}"
