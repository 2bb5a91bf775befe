"""Answers, and how they are read from and written to the journal."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import TYPE_CHECKING, Any

import msgspec
from ringfence.kernel.journal.blobs import BlobError, Blobs
from ringfence.kernel.journal.types import Phase, Row, StoredRow
from ringfence.syscalls import errors
from ringfence.syscalls.errors import AuditChainBroken, Internal, Revoked, SyscallError
from ringfence.syscalls.llm_parts import kept, put_back

if TYPE_CHECKING:
    from ringfence.kernel.thread import Thread

ERRORS: dict[str, type[SyscallError]] = {
    cls.reason: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, SyscallError) and cls is not SyscallError
}
"""Every error by its stable name."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent gets.

    Attributes:
        step: thread-wide sequence number; 0 where nothing was recorded and the step may be made again.
        result: JSON, None on a failure.
        failure: why it did not succeed.
        replayed: whether it came from the journal.
        park: why the agent has to be parked after this answer; empty otherwise.
        withheld: whether nobody gets it: the program is ended first.
        pos: position of the row that it came from; 0: it is new.
    """

    step: int
    result: bytes | None = None
    failure: SyscallError | None = None
    replayed: bool = False
    park: str = ""
    withheld: bool = False
    pos: int = 0


class _Body(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"null")
    artifact: str | None = None
    taken: bool = False
    error: dict[str, Any] | None = None
    grants: list[str] = []
    reserved: dict[str, float] = {}
    used: dict[str, float] = {}


_decode = msgspec.json.Decoder(_Body).decode


async def answer_from(row: StoredRow, blobs: Blobs, purged: frozenset[str]) -> Answer:
    """The recorded answer of a step. Charges nothing, is not decided again and is not a use of a right."""
    body = _decode(row.body)
    if purged and purged.intersection(body.grants):
        withheld = (
            f"the recorded result of step {row.step} is withheld: its permission was revoked with --purge"
        )
        return Answer(step=row.step, failure=Revoked(withheld), replayed=True, pos=row.pos)
    if body.error is not None:
        return Answer(step=row.step, failure=error_from(body.error), replayed=True, pos=row.pos)
    if body.artifact is not None or body.taken:
        try:
            result = await asyncio.to_thread(_result, body, blobs)
            return Answer(step=row.step, result=result, replayed=True, pos=row.pos)
        except BlobError as error:
            lost = f"the recorded result of step {row.step} can't be read: {error}; restore the artifact directory"
            return Answer(step=row.step, failure=AuditChainBroken(lost), replayed=True, pos=row.pos)
    return Answer(step=row.step, result=bytes(body.result), replayed=True, pos=row.pos)


def _result(body: _Body, blobs: Blobs) -> bytes:
    """The whole of a recorded result, from where its parts are kept.

    Raises:
        BlobError: one of them is gone, or its bytes have changed.
    """
    found = bytes(body.result) if body.artifact is None else blobs.get(body.artifact)
    if not body.taken:
        return found
    document = msgspec.json.decode(found)
    contents = {part.name: blobs.get(part.ref) for part in kept(document)}
    return msgspec.json.encode(put_back(document, contents))


_DECIDED = ("approval", "rules", "grants", "reason", "epoch", "policy_version")


def decided_part(body: bytes) -> dict[str, Any]:
    """What a row's body says about the decision: it goes along with whatever is recorded of the call later."""
    said: dict[str, Any] = msgspec.json.decode(body)
    return {"rules": [], "grants": [], **{name: said[name] for name in _DECIDED if name in said}}


def used_grants(intent: StoredRow) -> frozenset[str]:
    """Grants that a call rested on when its intent was written; the uses of limited ones are used up."""
    return frozenset(_decode(intent.body).grants)


def reserved_amounts(intent: StoredRow) -> dict[str, float]:
    """What a call held of tokens, dollars and bytes when its intent was written."""
    return _decode(intent.body).reserved


def used_amounts(outcome: StoredRow) -> dict[str, float]:
    """What an outcome says that a call used of them."""
    return _decode(outcome.body).used


def error_payload(error: SyscallError) -> bytes:
    """The `"error":…,` part of a body."""
    document = {"reason": error.reason, "message": error.message, "metadata": error.metadata}
    return b'"error":' + msgspec.json.encode(document) + b","


def error_from(document: dict[str, Any]) -> SyscallError:
    """The error that `error_payload` wrote."""
    cls = ERRORS.get(str(document.get("reason")), Internal)
    metadata: dict[str, str] = document.get("metadata") or {}
    return cls(str(document.get("message")), **metadata)


def effect_identity(thread: str, action: str, resource: str, digest: bytes, occurrence: int) -> str:
    """Effect id: the same over retries, restarts and branches for the same call at the same occurrence."""
    text = "\x1f".join((thread, action, resource, digest.hex(), str(occurrence)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def refusal_row(
    thread: Thread, step: int, lane: str, lane_step: int, action: str, digest: bytes, error: SyscallError
) -> Row:
    """The outcome of a request that never became a call."""
    return Row(
        chain=thread.key,
        phase=Phase.OUTCOME,
        step=step,
        branch=thread.branch,
        lane=lane,
        lane_step=lane_step,
        action=action,
        verdict="deny",
        outcome=error.outcome,
        digest=digest,
        started_us=time.time_ns() // 1000,
        body=b"{" + error_payload(error) + b'"rules":[],"grants":[]}',
    )
