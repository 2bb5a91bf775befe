"""The file that carries an agent from one kernel to another: a gzip-compressed tar, written and read in bounded memory.

    format.json               what this is, and its version
    agent.json                the agent, its branches, grants and the head of its chain
    journal.jsonl             its chain, as `audit --export` writes it
    TABLE.jsonl               checkpoints, memories, artifacts, messages, budgets
    blobs/SHA256              long results and artifacts
    live.tar, image.tar       workspace and program image
    points/ID.json, points/blobs/SHA256
    seal.json                 SHA-256 of every member before it, signed with the key of the kernel's anchors

Nothing of it is taken over before all of it was read and found right.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from ringfence.kernel.journal.documents import row_of
from ringfence.kernel.journal.types import StoredRow
from ringfence.kernel.journal.verifier import Verifier

FORMAT = "ringfence-export"
VERSION = 1

PARCEL_BYTES_MAX = 64 << 30
"""Most bytes that an export may unpack to."""

MEMBERS_MAX = 1_000_000
"""Most files in one."""

DOCUMENT_BYTES_MAX = 64 << 20
"""Longest line, and longest `agent.json`."""

_CHUNK = 1 << 20
_MEMBER = re.compile(
    r"(format|agent|seal)\.json|(journal|checkpoints|memories|artifacts|messages|budgets)\.jsonl|(live|image)\.tar"
    r"|blobs/[0-9a-f]{64}|points/blobs/[0-9a-f]{64}|points/p\d{1,18}\.json"
)
_REQUIRED = ("format.json", "agent.json", "journal.jsonl", "live.tar", "image.tar")


class ParcelError(Exception):
    """An export that can't be used. `str()` says what is wrong, and with which part."""


def canonical(value: Any) -> bytes:
    """The bytes that a seal signs."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Packer:
    """Writes a parcel, member by member."""

    def __init__(self, target: Path) -> None:
        self._file = gzip.open(target, "wb", compresslevel=1)  # noqa: SIM115 - closed by `close`
        self._tar = tarfile.open(fileobj=self._file, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._members: dict[str, str] = {}
        self.add_bytes("format.json", canonical({"format": FORMAT, "version": VERSION}))

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add a short member."""
        self._add(name, len(data), io.BytesIO(data))

    def add_file(self, name: str, path: Path) -> None:
        """Add a file."""
        with path.open("rb") as file:
            self._add(name, path.stat().st_size, file)

    def add_chunks(self, name: str, size: int, chunks: Iterable[bytes]) -> None:
        """Add a member of a known size from its parts."""
        self._add(name, size, cast("IO[bytes]", _Reader(chunks)))

    def _add(self, name: str, size: int, source: IO[bytes]) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o600
        reader = _Hashing(source)
        self._tar.addfile(info, cast("IO[bytes]", reader))
        self._members[name] = reader.digest.hexdigest()

    def members(self) -> dict[str, str]:
        """SHA-256 of each member so far."""
        return dict(self._members)

    def close(self) -> None:
        """End the file."""
        self._tar.close()
        self._file.close()


class _Reader:
    """A file of the parts of something."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size:
            part = next(self._chunks, None)
            if part is None:
                break
            self._rest += part
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


class _Hashing:
    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        return data


@dataclass(slots=True, kw_only=True)
class Parcel:
    """A parcel that was unpacked, and its parts.

    Attributes:
        root: directory with its members.
        agent: what `agent.json` says.
        public_key: the key, in PEM, that sealed it.
        members: SHA-256 of each.
    """

    root: Path
    agent: dict[str, Any] = field(default_factory=dict[str, Any])
    public_key: str = ""
    members: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def journal(self) -> Path:
        """Its chain."""
        return self.root / "journal.jsonl"

    def names(self, prefix: str) -> list[str]:
        """Names of the members beneath a directory, without it."""
        return sorted(name[len(prefix) :] for name in self.members if name.startswith(prefix))

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The documents of a member; none where there is no such member."""
        path = self.root / name
        if not path.exists():
            return
        with path.open("rb") as file:
            nr = 0
            while text := file.readline(DOCUMENT_BYTES_MAX):
                nr += 1
                yield _document(text, f"line {nr} of `{name}`")

    def rows(self) -> Iterator[StoredRow]:
        """The rows of its chain.

        Raises:
            ParcelError: a line is no record.
        """
        for nr, document in enumerate(self.lines("journal.jsonl"), 1):
            try:
                yield row_of(document)
            except ValueError as error:
                raise ParcelError(f"record {nr} of the chain is damaged: {error}") from None


def _document(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ParcelError(f"{what} is no JSON document")
    return cast("dict[str, Any]", value)


def unpack(source: Path, root: Path) -> Parcel:
    """Unpack a parcel beneath an empty directory and verify all of it.

    Raises:
        ParcelError: it is no export, of a later version, cut off, or something in it was changed; names the first thing.
    """
    parcel = Parcel(root=root)
    found: dict[str, str] = {}
    try:
        with gzip.open(source, "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
            _extract(tar, root, found)
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        broken = _first_bad_record(parcel)
        raise ParcelError(broken or f"the file is damaged or cut off: {error}") from None
    _check_format(root, found)
    parcel.members |= found
    # The chain first: what was changed there is named by its place.
    broken = _first_bad_record(parcel)
    if broken:
        raise ParcelError(broken)
    _check_seal(parcel, found)
    return parcel


def _extract(tar: tarfile.TarFile, root: Path, found: dict[str, str]) -> None:
    left = PARCEL_BYTES_MAX
    for member in tar:
        name = member.name
        if not member.isreg() or not _MEMBER.fullmatch(name) or name in found or len(found) >= MEMBERS_MAX:
            raise ParcelError(f"`{name[:80]}` has no place in an export, or is there twice")
        left -= member.size
        if left < 0:
            raise ParcelError(f"the file unpacks to more than {PARCEL_BYTES_MAX} bytes")
        stream = tar.extractfile(member)
        path = root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with path.open("wb") as file:
            while stream is not None and (data := stream.read(_CHUNK)):
                digest.update(data)
                file.write(data)
        found[name] = digest.hexdigest()


def _check_format(root: Path, found: dict[str, str]) -> None:
    if "format.json" not in found:
        raise ParcelError("it is no export of an agent; make one with: ringfence export AGENT --to FILE")
    facts = _document((root / "format.json").read_bytes()[:_CHUNK], "`format.json`")
    if facts.get("format") != FORMAT:
        raise ParcelError("it is no export of an agent; make one with: ringfence export AGENT --to FILE")
    if facts.get("version") != VERSION:
        raise ParcelError(
            f"its format is version {facts.get('version')}, this release reads {VERSION}; import it with the release that wrote it"
        )
    missing = next((name for name in (*_REQUIRED, "seal.json") if name not in found), None)
    if missing:
        raise ParcelError(f"`{missing}` is missing: the file was cut off or changed")


def _first_bad_record(parcel: Parcel) -> str:
    """The first record of the chain that doesn't fit; empty: all do, up to the head that the export names."""
    verifier = Verifier()
    try:
        with contextlib.suppress(FileNotFoundError):
            parcel.agent = _document((parcel.root / "agent.json").read_bytes(), "`agent.json`")
        head: dict[str, Any] = parcel.agent.get("head") or {}
        if head:
            verifier.expect(int(head["chain"]), int(head["pos"]), bytes.fromhex(str(head["hash"])))
        for row in parcel.rows():
            verifier.feed(row)
            if head and (row.chain, row.pos) > (int(head["chain"]), int(head["pos"])):
                return f"record {row.pos} of the chain comes after its head"
        verifier.finish()
    except ParcelError as error:
        return str(error)
    except (KeyError, TypeError, ValueError):
        return "`agent.json` names no head of the chain"
    bad = verifier.first_bad
    return "" if bad is None else f"record {bad['pos']} of the chain: {bad['why']}"


def _check_seal(parcel: Parcel, found: dict[str, str]) -> None:
    seal = _document((parcel.root / "seal.json").read_bytes(), "`seal.json`")
    try:
        members: dict[str, str] = dict(seal["members"])
        public = str(seal["public_key"])
        key = cast("Ed25519PublicKey", load_pem_public_key(public.encode()))
        key.verify(bytes.fromhex(seal["signature"]), canonical(members))
    except (KeyError, TypeError, ValueError, AttributeError, InvalidSignature):
        raise ParcelError("`seal.json` was changed: its signature doesn't fit") from None
    for name in sorted(members.keys() | (found.keys() - {"seal.json"})):
        if members.get(name) != found.get(name):
            state = "is missing" if name not in found else "was changed" if name in members else "was added"
            raise ParcelError(f"`{name}` {state}")
    parcel.public_key = public
