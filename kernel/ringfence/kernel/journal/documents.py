"""Audit records as documents: each line of an export, of an archive, and of what is moved to another kernel."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from ringfence.kernel.journal.types import Phase, StoredRow

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBERS = ("chain", "pos", "step", "branch", "lane_step", "started_us", "duration_us")
_TEXTS = ("lane", "action", "resource", "effect", "verdict", "outcome", "effect_id")
# Where a part of a chain begins: the hash of the record before, and why it is only a part.
_PART_KEYS = frozenset({"previous", "since"})


def document_of(row: StoredRow) -> dict[str, Any]:
    """Show a row as a document that loses nothing: `row_of` makes the same row from it."""
    document: dict[str, Any] = {
        "time": _time_of(row.started_us),
        "chain": row.chain,
        "pos": row.pos,
        "kind": row.phase.name.lower(),
        "step": row.step,
        "branch": row.branch,
        "lane": row.lane,
        "lane_step": row.lane_step,
        "action": row.action,
        "resource": row.resource,
        "effect": row.effect,
        "verdict": row.verdict,
        "outcome": row.outcome,
        "digest": row.digest.hex(),
        "effect_id": row.effect_id,
        "started_us": row.started_us,
        "duration_us": row.duration_us,
    }
    try:
        document["body"] = row.body.decode()
    except UnicodeDecodeError:
        document["body_hex"] = row.body.hex()
    document["hash"] = row.hash.hex()
    return document


def row_of(document: Mapping[str, Any]) -> StoredRow:
    """Read a row back from its document.

    Raises:
        ValueError: it is no document of a row, or what it shows beside the row contradicts it.
    """
    chain, pos = document.get("chain"), document.get("pos")
    place = (chain if isinstance(chain, int) else 0, pos if isinstance(pos, int) else 0)
    try:
        body = document["body"].encode() if "body" in document else bytes.fromhex(document["body_hex"])
        row = StoredRow(
            **{name: document[name] for name in (*_NUMBERS, *_TEXTS)},
            phase=Phase[str(document["kind"]).upper()],
            digest=bytes.fromhex(document["digest"]),
            body=body,
            hash=bytes.fromhex(document["hash"]),
        )
        # Also catches a number that is a text, and a time that is not the row's.
        same = document_of(row) == {key: document[key] for key in document if key not in _PART_KEYS}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NotARecord("it is no audit record", place) from error
    typed = all(type(document[name]) is int for name in _NUMBERS) and all(
        type(document[name]) is str for name in _TEXTS
    )
    if not (same and typed):
        raise NotARecord("its parts contradict each other: it was changed", place)
    return row


class NotARecord(ValueError):
    """A document is none of a row: where it says it stands, and why it is not."""

    def __init__(self, why: str, place: tuple[int, int]) -> None:
        super().__init__(why)
        self.chain, self.pos = place


def _time_of(micros: int) -> str:
    try:
        moment = _EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        return ""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
