"""Writes what became of a call, and knows the effects that have left the system."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import unicodedata
from collections.abc import Callable

import msgspec
from ringfence.kernel import parking
from ringfence.kernel.config import ARGUMENT_BYTES_MAX, INLINE_RESULT_BYTES_MAX
from ringfence.kernel.core import Core
from ringfence.kernel.facts import marks_of
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.blobs import BlobError
from ringfence.kernel.journal.types import Entry, JournalError, Row, StateConflict
from ringfence.kernel.places import NEWEST
from ringfence.kernel.replay import Try
from ringfence.kernel.settled import Answer, answer_from, effect_identity, error_payload, refusal_row
from ringfence.kernel.thread import Thread
from ringfence.syscalls.base import Effect, Recovery
from ringfence.syscalls.codec import Decoded, canonical_json, decode_arguments
from ringfence.syscalls.errors import (
    CallFailed,
    Conflict,
    Fenced,
    InvalidRequest,
    JournalUnavailable,
    OutcomeUnknown,
    SyscallError,
)
from ringfence.syscalls.lent import ArtifactFound
from ringfence.syscalls.llm_parts import Kept, Part, take
from ringfence.syscalls.table import Row as TableRow

log = logging.getLogger(__name__)

UNRECORDED = (JournalUnavailable, Fenced)
"""Failures that leave no row: the agent may make the same step again."""


KEPT_STATES = frozenset({"paused", "parked", "killed", "unknown"})
"""States that a call of the agent does not change."""


class Request(msgspec.Struct):
    """One call as it came in. Not frozen: once decoded, its arguments are kept in their canonical form alone.

    Attributes:
        lane: whose step it is.
        lane_step: which one.
        action: the row, as the caller names it.
        raw: the arguments, as they came or as they were decoded.
        deadline_ms: longest run; 0: the kernel's limit.
        shrink: told how many bytes are left of the arguments.
        refusal: why they can't be read, where the door knows it already.
        alike: whether its place was found by what the manifest leaves of it (`restart.ignore`): what is recorded there may
            differ from it in the rest.
        digest: SHA-256 of the arguments as they were made, where `raw` has them as they are recorded: with pointers.
        parts: what those point to, until it is kept.
    """

    lane: str
    lane_step: int
    action: str
    raw: bytes
    deadline_ms: int = 0
    shrink: Callable[[int], None] | None = None
    refusal: SyscallError | None = None
    alike: bool = False
    digest: bytes = b""
    parts: dict[str, Part] = msgspec.field(default_factory=dict[str, Part])

    def recorded(self, raw: bytes, digest: bytes) -> Request:
        """Put arguments that are on record in place of its own."""
        self.raw, self.digest, self.parts = raw, digest, {}
        return self

    def decode(self, row: TableRow) -> Decoded:
        """Decode the arguments and let go of the bytes as they came: blanks say nothing, and a call may wait for long.

        Raises:
            InvalidRequest: they are no arguments of the row.
        """
        if self.refusal is not None:
            raise self.refusal
        if len(self.raw) > ARGUMENT_BYTES_MAX:
            raise InvalidRequest(
                f"the arguments have {len(self.raw)} bytes; the limit is {ARGUMENT_BYTES_MAX}"
            )
        arguments, canonical, digest = decode_arguments(row, self.raw)
        if row.takes_out and not self.digest:
            arguments, self.parts = row.body.take_out(arguments)
            if self.parts:
                # INVARIANT: the digest is that of the whole, so that older journals answer and no part goes unnoticed.
                canonical, self.digest = canonical_json(arguments), digest
        self.raw = canonical
        if self.shrink is not None:
            self.shrink(len(self.raw) + sum(len(part.data) for part in self.parts.values()))
        return arguments, canonical, self.digest or digest


def inline_payload(result: bytes) -> bytes:
    """The `"result":…,` part of a body that holds the result itself."""
    return b'"result":' + result + b","


class Outcomes:
    """Outcomes of one kernel's calls."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def payload(self, result: bytes, found: object = None, flight: Flight | None = None) -> bytes:
        """The `"result":…,` part of a body; a large one goes to the artifacts and leaves its reference and version.

        Pictures and the like in what a model answered go there by themselves, where a `flight` is given: the next turn sends them again.
        """
        taken = b""
        if flight is not None and flight.row.takes_out:
            result, taken = await _taken(flight, result)
        if len(result) <= INLINE_RESULT_BYTES_MAX:
            return taken + inline_payload(result)
        try:
            ref = await asyncio.to_thread(self._core.blobs.put, result)
        except BlobError as error:
            # What has happened must be recorded whatever the artifact store says.
            log.warning("a result of %d bytes stays in the journal: %s", len(result), error)
            return taken + inline_payload(result)
        version = getattr(found, "version", None)
        read = b"" if version is None else b'"version":' + msgspec.json.encode(version) + b","
        return taken + b'"artifact":' + msgspec.json.encode(ref) + b',"result_bytes":%d,' % len(result) + read

    # -- failures -------------------------------------------------------------------------------------------------

    async def fail(self, flight: Flight, error: SyscallError) -> Answer:
        """Record a refusal or failure, then answer with it; withheld where the agent is parked for it."""
        why = parking.parks(flight, error)
        if why:
            return await parking.park(flight, why, lambda: self._fail(flight, error))
        return await self._fail(flight, error)

    async def _fail(self, flight: Flight, error: SyscallError) -> Answer:
        flight.ending = True
        if flight.rerun and not flight.effect_started and error.outcome != "unknown":
            # INVARIANT: nobody says that it was not done on the word of what refuses to do it again.
            error = OutcomeUnknown(
                f"this {flight.row.action} may have been sent before a crash, and can't be made again: {error.message}; "
                f"settle it: ringfence resolve {flight.thread.id} {flight.step} --as done|not-done"
            )
        error.metadata.setdefault("audit_id", flight.audit_id)
        if error.outcome in ("denied", "refused"):
            flight.give_back()
        if error.outcome != "unknown":
            # It did not happen, so the next try is the same occurrence and carries the same key.
            flight.thread.consumed_effects.discard(flight.effect_id)
        row = flight.outcome_row(error.outcome, error_payload(error))
        if error.outcome == "denied":
            row.verdict = error.metadata.get("verdict", "deny")
        try:
            # An approval that the call waits for is closed together with it.
            closing = self._core.approvals.ending(flight, error)
            if flight.intent_written:
                await self._core.append_outcome(row, closing)
            else:
                await self._core.append(Entry(row=row, atomic=closing))
        except UNRECORDED as unrecorded:
            return Answer(step=0, failure=unrecorded)
        self._keep(flight, row)
        if error.outcome == "unknown":
            await self.show_unknown(flight.thread)
        return Answer(step=flight.step, failure=error)

    async def show_unknown(self, thread: Thread) -> None:
        """Show that an agent needs a person to settle an outcome; one that an operator froze or ended stays so."""
        waits = thread.replay.waits()
        if not waits or thread.state in KEPT_STATES:
            return
        thread.state, thread.waiting_for = "unknown", f"the outcome of step {waits[0]}"
        await thread.announce()
        try:
            async with thread.storing:
                await self._core.store.set_agent(
                    thread.key, state=thread.state, waiting_for=thread.waiting_for
                )
        except JournalError as error:
            # The outcome itself is recorded, so the next start comes back to here.
            log.warning("%s is unknown, which can't be stored now: %s", thread.id, error)

    async def refuse(self, thread: Thread, request: Request, error: SyscallError) -> Answer:
        """Record a request that names no row or can't be read: it is evidence too."""
        step = thread.take_step()
        error.metadata.setdefault("audit_id", f"{thread.id}/{step}")
        digest = hashlib.sha256(request.raw).digest()
        row = refusal_row(
            thread, step, request.lane, request.lane_step, printable(request.action)[:64], digest, error
        )
        try:
            await self._core.append(Entry(row=row))
            answer = Answer(step=step, failure=error)
        except UNRECORDED as unrecorded:
            answer = Answer(step=0, failure=unrecorded)
        if self._core.telemetry is not None:
            self._core.telemetry.refused(thread, self._core.table.get(request.action), row, answer)
        return answer

    # -- effects that leave the system ----------------------------------------------------------------------------

    def next_effect_id(self, flight: Flight) -> str:
        """The id of this call at its next occurrence on the branch; from now on it is taken."""
        occurrence = 0
        while True:
            identity = effect_identity(
                flight.thread.record.thread,
                flight.row.action,
                flight.plan.resource,
                flight.digest,
                occurrence,
            )
            if identity not in flight.thread.consumed_effects:
                flight.thread.consumed_effects.add(identity)
                return identity
            occurrence += 1

    def known_effect(self, flight: Flight) -> Try | None:
        """An effect that another branch has already sent: what left the system is not sent twice."""
        if flight.row.recovery is not Recovery.KEYED or flight.effect_id or flight.effect is Effect.READ:
            return None
        flight.effect_id = self.next_effect_id(flight)
        # What a rollback put back or made up for is done no more, so that to do it again is another effect with another key.
        while flight.effect_id in flight.thread.replay.taken_back:
            flight.effect_id = self.next_effect_id(flight)
        return flight.thread.effects.get(flight.effect_id)

    async def recognise(self, flight: Flight, tried: Try) -> tuple[bytes, bytes]:
        """The recorded result of an effect that was sent on another branch, and the payload of its outcome here.

        Raises:
            OutcomeUnknown: it was sent, and nobody knows yet what became of it.
        """
        known = await flight.thread.replay.past.row(self._core, flight.thread, tried)
        answer = await answer_from(known, self._core.blobs, frozenset())
        if answer.result is None:
            raise OutcomeUnknown(
                f"this {flight.row.action} was sent at step {known.step} and its outcome is unknown; "
                f"settle it: ringfence resolve {flight.thread.id} {flight.step} --as done|not-done"
            )
        marks = marks_of(known.body)
        if marks is not None and (marks.taints or marks.tainted):
            # What came back then comes back again.
            flight.taint(marks.taints or f"what was {flight.row.action} on `{known.resource}`")
        return answer.result, await self.payload(answer.result) + b'"recognised":%d,' % known.step

    @staticmethod
    def remember(flight: Flight, row: Row) -> None:
        """A process that was restarted while this call ran asks for it again."""
        thread, point = flight.thread, flight.point
        if point is not None and point["kind"] == "workspace":
            asked = (q.resource for q in flight.questions if q.action.startswith("fs."))
            thread.environment.touched(path for path in asked if isinstance(path, str))
        Outcomes._keep(flight, row)
        if row.effect_id:
            thread.effects[row.effect_id] = Try(row.step, NEWEST, row.branch, row.outcome == "unknown")

    @staticmethod
    def _keep(flight: Flight, row: Row) -> None:
        thread = flight.thread
        if flight.marks is not None or thread.history.watching:
            flight.noted(row)
        if flight.generation != thread.generation or thread.arrived is not None or row.outcome == "unknown":
            thread.recorded(flight.stored(row), flight.generation)


async def _taken(flight: Flight, result: bytes) -> tuple[bytes, bytes]:
    """A result with pointers in place of its binary parts, which are kept, and what its row says of that."""
    parts: dict[str, Part] = {}
    document = await asyncio.to_thread(lambda: take(msgspec.json.decode(result), parts))
    try:
        for name, part in parts.items():
            artifact = kept_as(name, part)
            await flight.env.artifacts.keep_page(part.data, artifact, flight.step)
    except (CallFailed, JournalError) as error:
        log.warning("parts of the result of %s stay in it: %s", flight.audit_id, error)
        return result, b""
    return (msgspec.json.encode(document), b'"taken":true,') if parts else (result, b"")


def kept_as(name: str, part: Part) -> ArtifactFound:
    """The artifact that keeps a part."""
    size = len(part.data)
    return ArtifactFound(
        name=name, version=0, ref=Kept(name, size).ref, media_type=part.media_type, size_bytes=size
    )


def conflict_error(conflict: StateConflict) -> Conflict:
    """Name the keys, and who changed them in which step."""
    keys, claims = sorted(conflict.keys.items()), sorted(conflict.claims.items())
    parts: list[str] = []
    if keys:
        named = ", ".join(
            f"`{key}` is at version {now.version} {_writer(now.agent, now.step)}, it was read at {now.read}"
            for key, now in keys
        )
        parts.append(f"changed since it was read: {named}; read again and retry")
    if claims:
        named = ", ".join(
            f"`{key}` with fence {now.given} is "
            + (
                f"held {_writer(now.agent, now.step)} with fence {now.fence}"
                if now.agent
                else "held by nobody"
            )
            for key, now in claims
        )
        parts.append(f"the claim is lost: {named}; take it again, then look at what was done meanwhile")
    conflicts = [
        {"key": key, "version": now.version, "agent": now.agent, "step": now.step, "read": now.read}
        for key, now in keys
    ]
    lost = [
        {"key": key, "fence": now.fence, "agent": now.agent, "step": now.step, "given": now.given}
        for key, now in claims
    ]
    return Conflict(
        "; ".join(parts),
        keys=",".join(key for key, _ in [*keys, *claims]),
        conflicts=canonical_json(conflicts).decode(),
        claims=canonical_json(lost).decode(),
    )


def _writer(agent: str, step: int) -> str:
    return f"by {agent} at step {step}" if agent else "by nobody"


def printable(text: str) -> str:
    """Input as it may stand in a message or a row: no control or format characters, bounded."""
    return "".join(c if unicodedata.category(c)[0] != "C" else "\ufffd" for c in text[:200])
