"""The evidence: its documents, their export, and the check of chains, heads and anchors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.kernel.journal.anchor import Anchor, AnchorError, read_anchors
from ringfence.kernel.journal.documents import NotARecord, document_of, row_of
from ringfence.kernel.journal.gaps import Gap
from ringfence.kernel.journal.segments import ArchiveError, opened
from ringfence.kernel.journal.types import JournalError
from ringfence.kernel.journal.verifier import Bad, Verifier

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from ringfence.kernel.journal.store import Store
    from ringfence.kernel.journal.writer import Journal

LINE_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What a check found.

    Attributes:
        ok: nothing is missing, changed, added or reordered.
        rows: records that fitted, up to the first bad one.
        chains: chains looked at.
        anchors: signed lines looked at.
        first_bad: the first record that doesn't fit, or None.
        partial: chains of which only a later part was there to check.
        archived: records of these that were read from files of the archive.
        pruned: records that were given up on purpose, which the chains say.
    """

    ok: bool
    rows: int
    chains: int
    anchors: int
    first_bad: Bad | None
    partial: int = 0
    archived: int = 0
    pruned: int = 0


async def verify_store(store: Store, anchor: Anchor, journal: Journal | None = None) -> AuditReport:
    """Check the whole database against a kernel's anchor file; see `verify`.

    Raises:
        Unavailable: the database is away.
    """
    report = await verify(store, anchor.path, anchor.public_key, journal=journal, tail=anchor.tail)
    problem = anchor.key_problem()
    if not problem or report.first_bad is not None:
        return report
    return replace(report, ok=False, first_bad=Bad(chain=0, pos=0, why=problem))


async def verify(
    store: Store,
    anchor_path: Path | None,
    public_key: Ed25519PublicKey | None,
    *,
    journal: Journal | None = None,
    tail: str = "",
) -> AuditReport:
    """Read all rows and check chains, signed heads and anchors.

    Memory holds a page of rows and 40 bytes a signed head.

    Args:
        store: the database.
        anchor_path: the anchor file, or a copy of it; None: only the chains and the heads recorded in them.
        public_key: what its lines are signed with.
        journal: a running journal; rows it knows to be durable must be there too.
        tail: SHA-256 of a line that the anchor file must hold; empty: none.

    Raises:
        Unavailable: the database is away.
    """
    verifier = Verifier()
    # Promises are collected before the rows are read, so that rows written meanwhile break none.
    for chain, (pos, digest) in (journal.heads() if journal is not None else {}).items():
        verifier.expect(chain, pos, digest)
    anchors = _expect_anchors(verifier, anchor_path, public_key, tail)
    if verifier.first_bad is None:
        try:
            async for item in store.evidence(check=True):
                verifier.pass_by(item) if isinstance(item, Gap) else verifier.feed(item)
                if verifier.first_bad is not None:
                    break
            else:
                verifier.finish()
        except ArchiveError as error:
            verifier.fail(error.chain, error.pos, str(error))
    return _report(verifier, anchors)


def verify_file(
    path: Path, anchor_path: Path | None = None, public_key: Ed25519PublicKey | None = None
) -> dict[str, Any]:
    """Check an exported file, line by line, without a database.

    Args:
        path: JSON lines as `export` makes them.
        anchor_path: an anchor file to check it against as well. It names kernels' chains, so the file must
            hold these.
        public_key: what its lines are signed with.

    Returns:
        An AuditReport as a document.

    Raises:
        OSError: a file can't be read.
    """
    verifier = Verifier()
    anchors = _expect_anchors(verifier, anchor_path, public_key)
    partial = 0
    last: int | None = None
    try:
        for document in _documents(path, verifier):
            if document.get("kind") == "gap":
                gap = _gap_of(document)
                last = gap.chain
                verifier.pass_by(gap)
                continue
            row = row_of(document)
            if row.chain != last and "since" in document:
                partial += 1
                previous = document.get("previous")
                verifier.begin_part(row.chain, row.pos - 1, None if previous is None else _hex(previous))
            last = row.chain
            verifier.feed(row)
            if verifier.first_bad is not None:
                break
        else:
            verifier.finish()
    except NotARecord as error:
        verifier.fail(error.chain, error.pos, str(error))
    return asdict(_report(verifier, anchors, partial))


async def export(
    store: Store, chain: int | None = None, since: datetime | str | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Walk the audit records as documents: kernels' chains first, each chain in its order.

    Args:
        store: the database.
        chain: an agent's key, or minus a kernel's; None: all.
        since: only what was recorded from the first call on that started then or later. A chain's first record
            then carries the hash of the one before it, so that the part can be checked.

    Raises:
        Unavailable: the database is away.
    """
    moment = moment_of(since)
    last: int | None = None
    async for row in store.evidence(chain, moment):
        if isinstance(row, Gap):
            last = row.chain
            yield row.document()
            continue
        document = document_of(row)
        if moment is not None and row.chain != last:
            document["since"] = moment.isoformat()
            before = await store.hash_at(row.chain, row.pos - 1)
            if before is not None:
                document["previous"] = before.hex()
        last = row.chain
        yield document


def moment_of(since: datetime | str | None) -> datetime | None:
    """Read a time.

    Raises:
        JournalError: it is not in RFC 3339.
    """
    if since is None or since == "":
        return None
    try:
        moment = datetime.fromisoformat(since) if isinstance(since, str) else since
    except ValueError as error:
        raise JournalError(f"`{since}` is no time; write it as 2026-01-31T12:00:00Z") from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _gap_of(document: dict[str, Any]) -> Gap:
    try:
        return Gap.of(document)
    except NotARecord:
        raise
    except ValueError as error:
        raise NotARecord(str(error), (0, 0)) from error


def _hex(text: object) -> bytes:
    try:
        return bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return b""


def _documents(path: Path, verifier: Verifier) -> Iterator[dict[str, Any]]:
    with opened(path) as file:
        nr = 0
        while text := file.readline(LINE_BYTES_MAX):
            nr += 1
            try:
                document = json.loads(text)
            except (ValueError, RecursionError):
                document = None
            if not isinstance(document, dict):
                verifier.fail(0, 0, f"line {nr} is no audit record")
                return
            yield document


def _expect_anchors(
    verifier: Verifier, path: Path | None, public_key: Ed25519PublicKey | None, tail: str = ""
) -> int:
    if path is None or public_key is None:
        return 0
    count = 0
    found = not tail
    try:
        for line, digest in read_anchors(path, public_key) if path.exists() else ():
            verifier.expect(line.chain, line.pos, line.hash)
            count += 1
            found = found or digest == tail
    except AnchorError as error:
        verifier.fail(0, 0, str(error))
    if not found:
        verifier.fail(0, 0, "lines that this kernel signed are missing from the anchor file")
    return count


def _report(verifier: Verifier, anchors: int, partial: int = 0) -> AuditReport:
    return AuditReport(
        ok=verifier.first_bad is None,
        rows=verifier.rows,
        chains=verifier.chains,
        anchors=anchors,
        first_bad=verifier.first_bad,
        partial=partial,
        archived=verifier.archived,
        pruned=verifier.pruned,
    )
