"""Parts of chains that were moved out of the database: their files, and what of a part has to stay.

A file is named by the positions that it holds and never changes: one audit record a line, as an export writes them,
compressed with Zstandard. So `zstd -dc` and `ringfence audit verify` read it without a database.

INVARIANT: a file is on disk, whole and read back, before any of its rows leaves the database.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

import zstandard
from ringfence.kernel.facts import marks_of
from ringfence.kernel.journal.chain import link, stored_image
from ringfence.kernel.journal.documents import document_of, row_of
from ringfence.kernel.journal.gaps import KEPT
from ringfence.kernel.journal.types import JournalError, Phase, StoredRow

SEGMENT_ROWS: Final = 1000
"""Most rows of one segment: they leave the database in one short transaction."""

SEGMENT_BYTES: Final = 4 << 20
"""Bodies of a segment, after which it is closed."""

LEVEL: Final = 9

ARCHIVED: Final = "journal.archived"
"""The event that says which rows were moved to a file, and what that file is."""

_OPERATOR_LANE: Final = "op"
_STAYING: Final = frozenset({"spawn", "rollback"})
"""Others ask for these rows: of a birth, and of a branch."""

_MAGIC: Final = b"\x28\xb5\x2f\xfd"


class ArchiveError(JournalError):
    """An archived part of a journal can't be read or written. `str()` says which and what to do."""

    def __init__(self, text: str, *, chain: int = 0, pos: int = 0) -> None:
        super().__init__(text)
        self.chain, self.pos = chain, pos


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One archived part of a chain.

    Attributes:
        first_step: of the rows that left the database; 0: none did.
        last_step: the same.
        behind: step of the checkpoint that it lies behind.
        rows: all of them; some stay in the database as well.
        kept: of each row that stays: position, hash of the row before it, and its own.
        before: hash of the row before the first.
        hash: of the last row.
        place: the file, below the archive's directory.
        sha256: of the file.
        pruned_at: when the file was given up; None: it is to be there.
    """

    chain: int
    first_pos: int
    last_pos: int
    first_step: int
    last_step: int
    behind: int
    rows: int
    since_us: int
    until_us: int
    size_bytes: int
    before: bytes
    hash: bytes
    sha256: bytes
    kept: bytes
    place: str
    at: datetime | None = None
    pruned_at: datetime | None = None

    def kept_rows(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Position, hash before, and hash of each row that stays."""
        yield from KEPT.iter_unpack(self.kept)

    def kept_positions(self) -> frozenset[int]:
        """Where the rows that stay stand."""
        return frozenset(pos for pos, _, _ in self.kept_rows())

    def facts(self) -> dict[str, Any]:
        """What the chain records of it."""
        return {
            "first": self.first_pos,
            "last": self.last_pos,
            "rows": self.rows,
            "before": self.before.hex(),
            "hash": self.hash.hex(),
            "kept_sha256": hashlib.sha256(self.kept).hexdigest(),
            "sha256": self.sha256.hex(),
            "file": self.place,
        }


def staying(rows: Sequence[StoredRow], *, behind: int, needed: frozenset[int]) -> frozenset[int]:
    """Positions of the rows that have to stay in the database.

    Whole steps go or stay, so that what is counted of a step is counted once.

    Args:
        rows: a part of one chain, in order.
        behind: rows of this and later steps stay: replay may ask for them.
        needed: steps that others need: with rows elsewhere, or with an approval.
    """
    steps: dict[int, list[StoredRow]] = {}
    for row in rows:
        steps.setdefault(row.step, []).append(row)
    return frozenset(
        row.pos
        for step, some in steps.items()
        if step <= 0 or step >= behind or step in needed or any(map(_asked_for, some)) or not _settled(some)
        for row in some
    )


def _settled(rows: Sequence[StoredRow]) -> bool:
    """Whether a step has an outcome that nobody waits for any more."""
    outcomes = [row.outcome for row in rows if row.phase is Phase.OUTCOME]
    return bool(outcomes) and outcomes[-1] not in ("parked", "unknown")


def _asked_for(row: StoredRow) -> bool:
    """Whether somebody may ask for a row that no replay asks for."""
    # INVARIANT: an effect that left the system is recognised for ever, whatever is kept of the rest.
    if row.phase is Phase.EVENT or row.effect_id or row.lane == _OPERATOR_LANE or row.action in _STAYING:
        return True
    marks = marks_of(row.body)
    if marks is None:
        return False
    # What began or ended a taint, what was written under one, and files that taint.
    begins = bool(marks.taints) and marks.tainted is None
    return bool(marks.untaints or marks.paths) or begins or row.effect != "READ"


def kept_of(rows: Sequence[StoredRow], before: bytes, positions: frozenset[int]) -> bytes:
    """What a segment says of the rows that stay."""
    parts: list[bytes] = []
    previous = before
    for row in rows:
        if row.pos in positions:
            parts.append(KEPT.pack(row.pos, previous, row.hash))
        previous = row.hash
    return b"".join(parts)


class Archive:
    """The directory of archived parts, with one directory for each agent."""

    def __init__(self, root: Callable[[], Path]) -> None:
        self._root = root

    @property
    def root(self) -> Path:
        """Where it is, as the kernel file in force says."""
        return self._root()

    def write(self, place: str, rows: Sequence[StoredRow], before: bytes) -> tuple[bytes, int]:
        """Write a file, durably and under its name only when it is whole.

        Args:
            place: where, below the directory.
            rows: a part of one chain.
            before: hash of the row before the first; a file so can be checked alone.

        Returns:
            Its SHA-256 and size.

        Raises:
            ArchiveError: it can't be written.
        """
        path = self.root / place
        documents = [document_of(row) for row in rows]
        documents[0] |= {"since": documents[0]["time"], "previous": before.hex()}
        text = b"".join(json.dumps(one, separators=(",", ":")).encode() + b"\n" for one in documents)
        data = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(text)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.draft")
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            for directory in (path.parent, self.root):
                _sync(directory)
        except OSError as error:
            raise ArchiveError(f"the archive `{path}` can't be written: {error.strerror or error}") from error
        return hashlib.sha256(data).digest(), len(data)

    def read(self, segment: Segment) -> list[StoredRow]:
        """All rows of a segment, held against its sum and its place in the chain.

        Raises:
            ArchiveError: the file is missing or is not what was archived.
        """
        path = self.root / segment.place
        where = {"chain": segment.chain, "pos": segment.first_pos}
        try:
            data = path.read_bytes()
        except OSError as error:
            text = f"the archived records {segment.first_pos} to {segment.last_pos} can't be read from `{path}` ({error.strerror or error})"
            raise ArchiveError(f"{text}; restore the file from your copy", **where) from error
        if hashlib.sha256(data).digest() != segment.sha256:
            raise ArchiveError(
                f"the archive `{path}` was changed: it is not the file that was written; restore it from your copy",
                **where,
            )
        rows = [replace(row, archived=True) for row in read_rows(data)]
        previous, pos = segment.before, segment.first_pos
        for row in rows:
            if row.chain != segment.chain or row.pos != pos or link(previous, stored_image(row)) != row.hash:
                raise ArchiveError(
                    f"the archive `{path}` holds a record that doesn't fit its chain",
                    chain=segment.chain,
                    pos=pos,
                )
            previous, pos = row.hash, pos + 1
        if previous != segment.hash or len(rows) != segment.rows:
            raise ArchiveError(f"the archive `{path}` does not end as it was recorded", **where)
        return rows

    def remove(self, place: str) -> int:
        """Remove a file; returns the bytes that were freed.

        Raises:
            ArchiveError: it can't be removed.
        """
        path = self.root / place
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise ArchiveError(f"the archive `{path}` can't be removed: {error.strerror or error}") from error
        return size

    def sweep(self, agent: str, places: Iterable[str]) -> None:
        """Remove what a kernel that died left of an agent: files that nothing names."""
        directory = self.root / agent
        known = {Path(place).name for place in places}
        for path in directory.iterdir() if directory.is_dir() else ():
            if path.name not in known:
                path.unlink(missing_ok=True)


def place_of(agent: str, first: int, last: int) -> str:
    """Name the file of a part."""
    return f"{agent}/{first:012d}-{last:012d}.jsonl.zst"


def read_rows(data: bytes) -> Iterator[StoredRow]:
    """Read the rows of a file.

    Raises:
        ArchiveError: it is none.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
            text = reader.read()
        for line in text.splitlines():
            document: Mapping[str, Any] = json.loads(line)
            yield row_of(document)
    except (zstandard.ZstdError, ValueError) as error:
        raise ArchiveError(f"an archive can't be read: {error}") from error


def opened(path: Path) -> IO[bytes]:
    """Open a file of audit records, compressed or not.

    Raises:
        OSError: it can't be read.
    """
    file = path.open("rb")
    if file.peek(len(_MAGIC))[: len(_MAGIC)] != _MAGIC:
        return file
    reader: Any = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=True)
    return io.BufferedReader(reader)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
