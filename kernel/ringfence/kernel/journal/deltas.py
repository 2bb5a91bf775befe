"""Checkpoints as they are stored: whole, or as what changed since an earlier one. No I/O.

A delta is a Zstandard frame that was made with the earlier state as its dictionary (RFC 8878): what both have in common costs
a reference, wherever it stands. So an agent that keeps its conversation in its state writes each message once.

INVARIANT: a base is committed before anything is stored against it, and lies on the lineage of whatever is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, cast

import zstandard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.syscalls.base import CheckpointSave

LINKS_MAX: Final = 256
"""Most deltas behind one whole state: so many are read at a restart."""
PLAIN_BYTES: Final = 256
"""Shorter states are stored as they are: a frame would save nothing."""
_STATE_BYTES_MAX: Final = (
    4 << 20
)  # a state is bounded at its call; this bounds what a damaged frame may claim
_LEVEL: Final = 3
_WINDOW_LOG_MAX: Final = 23


class Packing(IntEnum):
    """How the bytes of a checkpoint are to be read; the numbers are stored."""

    PLAIN = 0
    WHOLE = 1
    DELTA = 2


class UnpackError(ValueError):
    """The bytes can't be read: they are not those that were stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A committed checkpoint, and what was stored behind it since the last whole one.

    Attributes:
        step: the step that saved it.
        state: all of it, canonical JSON.
        links: deltas from the last whole state to it.
        whole_bytes: stored size of that whole state.
        delta_bytes: stored size of those deltas.
    """

    step: int
    state: bytes
    links: int
    whole_bytes: int
    delta_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSave:
    """A checkpoint ready to be stored.

    Attributes:
        save: what the agent gave.
        packing: how `data` is to be read.
        base: step of the checkpoint that `data` rests on; 0: none.
        data: the bytes that are stored.
        digest: SHA-256 of the state.
        links: as of `Base`, once it is committed.
        whole_bytes: the same.
        delta_bytes: the same.
    """

    save: CheckpointSave
    packing: Packing
    base: int
    data: bytes
    digest: bytes
    links: int
    whole_bytes: int
    delta_bytes: int

    def as_base(self, step: int) -> Base:
        """What the next one may rest on, once this one is committed at `step`."""
        return Base(
            step=step,
            state=self.save.state,
            links=self.links,
            whole_bytes=self.whole_bytes,
            delta_bytes=self.delta_bytes,
        )


def pack(save: CheckpointSave, base: Base | None) -> PackedSave:
    """Make the shortest form of a state.

    It is whole where that is shorter, and where the deltas since the last whole one have come to its size: so what is stored of a growing state
    is a small multiple of what was added, and what is read at a restart a small multiple of the state.

    Args:
        save: what the agent gave.
        base: the newest committed checkpoint of its lineage.
    """
    state = save.state
    digest = hashlib.sha256(state).digest()
    if base is not None and base.links < LINKS_MAX and base.delta_bytes < base.whole_bytes:
        data = _compressor(len(state), base.state).compress(state)
        # A whole one of such a state is not shorter than a quarter of it but for trivial texts.
        if len(data) < max(PLAIN_BYTES, len(state) // 4):
            return PackedSave(
                save=save,
                packing=Packing.DELTA,
                base=base.step,
                data=data,
                digest=digest,
                links=base.links + 1,
                whole_bytes=base.whole_bytes,
                delta_bytes=base.delta_bytes + len(data),
            )
    data, packing = state, Packing.PLAIN
    if len(state) > PLAIN_BYTES:
        data, packing = _compressor(len(state), None).compress(state), Packing.WHOLE
    return PackedSave(
        save=save,
        packing=packing,
        base=0,
        data=data,
        digest=digest,
        links=0,
        whole_bytes=len(data),
        delta_bytes=0,
    )


def unpack(packing: int, data: bytes, base: bytes | None) -> bytes:
    """Give the state back.

    Args:
        packing: as it was stored.
        data: the same.
        base: the whole state it rests on; None: it rests on none.

    Raises:
        UnpackError: they are not what `pack` gave, or the packing is one of a later release.
    """
    if packing == Packing.PLAIN:
        return data
    if packing not in (Packing.WHOLE, Packing.DELTA):
        raise UnpackError(f"packing `{packing}` is of a later release")
    if (packing == Packing.DELTA) != (base is not None):
        raise UnpackError("what it rests on is missing")
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= _STATE_BYTES_MAX:
            raise UnpackError("its size is none that a checkpoint has")
        dictionary = None if base is None else _dictionary(base)
        reader = zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=1 << _WINDOW_LOG_MAX)
        return reader.decompress(data)
    except zstandard.ZstdError as error:
        raise UnpackError(str(error)) from error


def unpack_chain(chain: Sequence[tuple[int, int, bytes]]) -> Base:
    """Give the last state of a chain back, with what is needed to go on from it.

    Args:
        chain: (step, packing, data), from the whole state on.

    Raises:
        UnpackError: a link of it can't be read, or the first is none to begin with.
    """
    state: bytes | None = None
    whole = deltas = 0
    for step, packing, data in chain:
        if packing == Packing.DELTA:
            state, deltas = unpack(packing, data, state), deltas + len(data)
        elif state is None:
            state, whole = unpack(packing, data, None), len(data)
        else:
            raise UnpackError(f"step {step} rests on nothing")
    if state is None:
        raise UnpackError("the whole state it rests on is missing")
    return Base(step=chain[-1][0], state=state, links=len(chain) - 1, whole_bytes=whole, delta_bytes=deltas)


def _dictionary(state: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(state, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _compressor(size: int, base: bytes | None) -> zstandard.ZstdCompressor:
    if base is None:
        return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    # The window has to reach back over all of the dictionary.
    window = min(_WINDOW_LOG_MAX, max(10, (size + len(base)).bit_length()))
    parameters = cast("Any", zstandard.ZstdCompressionParameters).from_level(_LEVEL, window_log=window)
    return zstandard.ZstdCompressor(dict_data=_dictionary(base), compression_params=parameters)
