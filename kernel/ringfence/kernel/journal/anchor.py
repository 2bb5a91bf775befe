"""Signed heads of the audit chain, kept outside the database.

Every line of the anchor file is one JSON object: time, kernel, chain, pos and hash of the kernel's own chain,
the digest of the heads of agents' chains recorded up to there, the SHA-256 of the line before, and an Ed25519
signature over the rest. Whoever rewrites the database and all its hashes lacks the key; whoever has the file,
or a copy shipped elsewhere, sees it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from ringfence.kernel.journal.types import Entry, JournalError, Phase, Row
from ringfence.kernel.journal.verifier import HEADS_ACTION, write_heads

if TYPE_CHECKING:
    from ringfence.kernel.journal.store import Store
    from ringfence.kernel.journal.writer import Journal

logger = logging.getLogger(__name__)

EVERY_S = 30.0
HEADS_PER_ROW = 500
LINE_BYTES_MAX = 64 << 10
_NEW_KEY = "restore it from your copy, or move `{anchors}` away to begin a new file"


class AnchorError(JournalError):
    """The anchor file or its key can't be used; `str()` says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorLine:
    """One signed head of a kernel's own chain.

    Attributes:
        heads_digest: SHA-256 over the bodies of the `audit.heads` rows written with it.
        previous: SHA-256 of the line before, empty for the first.
    """

    time: str
    kernel: int
    chain: int
    pos: int
    hash: bytes
    heads_digest: bytes
    previous: str

    def signed_bytes(self) -> bytes:
        """What the signature covers: canonical JSON."""
        return _canonical(
            {
                "time": self.time,
                "kernel": self.kernel,
                "chain": self.chain,
                "pos": self.pos,
                "hash": self.hash.hex(),
                "heads_digest": self.heads_digest.hex(),
                "previous": self.previous,
            }
        )


class Anchor:
    """The anchor file of one kernel, and the key that signs it."""

    def __init__(self, path: Path, key_path: Path) -> None:
        """Open both; a missing key is made, with its public half beside it as `.pub`.

        Args:
            path: the anchor file.
            key_path: the private key in PEM, mode 0600.

        Raises:
            AnchorError: the key can't be read, others may read it, or it is not the one that signed the file.
            OSError: a directory or file can't be made.
        """
        self.path = path
        self.key_path = key_path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        last = _mend(path)
        self._key = _load_or_make_key(key_path, path if last else None)
        self.public_key = self._key.public_key()
        if last:
            _check_signed_by(self.public_key, last, path, key_path)
        self._previous = hashlib.sha256(last).hexdigest() if last else ""
        self._signed: dict[int, tuple[int, bytes]] = {}
        self._own: tuple[int, bytes] | None = None
        self._lock = asyncio.Lock()

    @property
    def tail(self) -> str:
        """SHA-256 of the file's last line as this kernel knows it; empty: there is none."""
        return self._previous

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        """Sign something else with the key of the anchors; returns the signature and the public key in PEM."""
        public = self.public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return self._key.sign(data), public

    def key_problem(self) -> str:
        """What is wrong with the key's file now; empty: it holds the key that signs here."""
        try:
            key = _read_key(self.key_path)
        except (AnchorError, OSError) as error:
            return f"the key that signs the anchors can't be read any more: {error}"
        if key.public_key() != self.public_key:
            return f"the key `{self.key_path}` was replaced while the kernel ran; restore it from your copy"
        return ""

    async def run(self, journal: Journal, store: Store, every_s: float = EVERY_S) -> None:
        """Sign heads now and then, until cancelled.

        Args:
            journal: whose heads to sign.
            store: where anchors are also kept, for people to look at.
            every_s: seconds between two anchors.
        """
        while True:
            try:
                await self.sign_heads(journal, store)
            except (JournalError, OSError) as error:
                logger.warning("the audit heads can't be signed now: %s", error)
            await asyncio.sleep(every_s)

    async def sign_heads(self, journal: Journal, store: Store) -> AnchorLine | None:
        """Record heads that moved on the kernel's own chain, and sign that chain's head.

        The first time it looks at all chains of the database: a kernel that was killed signed nothing at its
        end.

        Returns:
            The line added to the file, which is on disk; None: nothing moved.

        Raises:
            JournalError: the journal can't commit; nothing is signed.
            OSError: the file can't be written.
        """
        async with self._lock:
            heads = await self._moved(journal, store)
            digest = hashlib.sha256()
            ordered = sorted((chain, pos, head) for chain, (pos, head) in heads.items())
            for at in range(0, len(ordered), HEADS_PER_ROW):
                body = write_heads(ordered[at : at + HEADS_PER_ROW])
                digest.update(body)
                row = Row(chain=journal.own_chain, phase=Phase.EVENT, action=HEADS_ACTION, body=body)
                await journal.append(Entry(row=row))
            own = journal.head(journal.own_chain)
            if own == self._own or own[0] == 0:
                return None
            line = AnchorLine(
                time=datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
                kernel=-journal.own_chain,
                chain=journal.own_chain,
                pos=own[0],
                hash=own[1],
                heads_digest=digest.digest(),
                previous=self._previous,
            )
            signature = self._key.sign(line.signed_bytes())
            text = _with_signature(line, signature)
            await asyncio.to_thread(_append, self.path, text)
            self._previous = hashlib.sha256(text).hexdigest()
            self._own = own
            self._signed.update(heads)
            await store.add_anchor(line.kernel, line.pos, line.hash, line.heads_digest, signature)
            return line

    async def _moved(self, journal: Journal, store: Store) -> dict[int, tuple[int, bytes]]:
        heads = journal.heads()
        if self._own is None:
            # An older kernel's number is smaller, so its chain's is larger than ours.
            known = await store.heads()
            heads = {chain: head for chain, head in known.items() if chain > journal.own_chain} | heads
        return {
            chain: head
            for chain, head in heads.items()
            if chain != journal.own_chain and head[0] > 0 and self._signed.get(chain) != head
        }


def read_anchors(path: Path, public_key: Ed25519PublicKey) -> Iterator[tuple[AnchorLine, str]]:
    """Read an anchor file and check its signatures and its own chain of lines.

    Yields:
        Each line with the SHA-256 of its text.

    A last line without its end is one that a crash cut off: it was never promised, and is left out.

    Raises:
        AnchorError: a line is no anchor, was changed, or one before it was taken out.
        OSError: the file can't be read.
    """
    previous = ""
    with path.open("rb") as file:
        nr = 0
        while text := file.readline(LINE_BYTES_MAX):
            nr += 1
            if not text.endswith(b"\n"):
                if len(text) < LINE_BYTES_MAX:
                    return
                raise AnchorError(f"line {nr} of the anchor file is too long")
            line, signature = _parse(text, nr)
            try:
                public_key.verify(signature, line.signed_bytes())
            except InvalidSignature:
                raise AnchorError(
                    f"line {nr} of the anchor file has a wrong signature: changed, or signed by another key"
                ) from None
            if line.previous != previous:
                raise AnchorError(f"a line before line {nr} of the anchor file was changed or taken out")
            previous = hashlib.sha256(text).hexdigest()
            yield line, previous


def load_public_key(path: Path) -> Ed25519PublicKey:
    """Read a public key in PEM.

    Raises:
        AnchorError: it holds no Ed25519 public key.
        OSError: the file can't be read.
    """
    try:
        key = load_pem_public_key(path.read_bytes())
    except ValueError as error:
        raise AnchorError(f"`{path}` holds no public key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise AnchorError(f"`{path}` holds no Ed25519 key")
    return key


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _with_signature(line: AnchorLine, signature: bytes) -> bytes:
    value = json.loads(line.signed_bytes())
    return _canonical(value | {"signature": signature.hex()}) + b"\n"


def _parse(text: bytes, nr: int) -> tuple[AnchorLine, bytes]:
    try:
        value = json.loads(text)
        line = AnchorLine(
            time=str(value["time"]),
            kernel=int(value["kernel"]),
            chain=int(value["chain"]),
            pos=int(value["pos"]),
            hash=bytes.fromhex(value["hash"]),
            heads_digest=bytes.fromhex(value["heads_digest"]),
            previous=str(value["previous"]),
        )
        signature = bytes.fromhex(value["signature"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AnchorError(f"line {nr} of the anchor file is no anchor") from error
    return line, signature


def _load_or_make_key(path: Path, signed: Path | None) -> Ed25519PrivateKey:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        # INVARIANT: a new key would make everything signed before look forged, and hide that the old one was taken.
        if signed is not None:
            raise AnchorError(f"the key `{path}` is gone; {_NEW_KEY.format(anchors=signed)}")
        _make_key(path)
    return _read_key(path)


def _check_signed_by(key: Ed25519PublicKey, last: bytes, anchors: Path, key_path: Path) -> None:
    try:
        line, signature = _parse(last, 0)
        key.verify(signature, line.signed_bytes())
    except AnchorError:
        text = f"the last line of `{anchors}` is no anchor: restore the file from your copy, or move it away to begin a new one"
        raise AnchorError(text) from None
    except InvalidSignature:
        text = (
            f"the key `{key_path}` is not the one that signed `{anchors}`: it was replaced, or the file was"
        )
        raise AnchorError(f"{text}; {_NEW_KEY.format(anchors=anchors)}") from None


def _read_key(path: Path) -> Ed25519PrivateKey:
    if path.stat().st_mode & 0o077:
        raise AnchorError(f"others may read the key `{path}`: make it yours alone with chmod 600")
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise AnchorError(f"`{path}` holds no private key; restore it from your copy") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise AnchorError(f"`{path}` holds no Ed25519 key; restore it from your copy")
    return key


def _make_key(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _write_new(path.with_suffix(".pub"), public, 0o644)
    # The private half appears under its name only when it is whole.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    _write_new(draft, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    draft.rename(path)
    _sync_directory(path.parent)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _append(path: Path, text: bytes) -> None:
    fresh = not path.exists()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "ab") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if fresh:
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mend(path: Path) -> bytes:
    """Cut off a line that a crash left unfinished; returns the last whole one, empty where there is none."""
    if not path.exists():
        return b""
    last = b""
    whole = 0
    with path.open("r+b") as file:
        for text in file:
            if text.endswith(b"\n"):
                last = text
                whole += len(text)
        if whole < file.seek(0, os.SEEK_END):
            logger.warning("the anchor file ended in an unfinished line, which is cut off")
            file.truncate(whole)
            os.fsync(file.fileno())
    return last
