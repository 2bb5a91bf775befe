"""The stored form of checkpoints: whole, or what changed."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.kernel.journal.deltas import (
    LINKS_MAX,
    Base,
    PackedSave,
    Packing,
    UnpackError,
    pack,
    unpack,
    unpack_chain,
)
from ringfence.syscalls.base import CheckpointSave


def save(state: bytes) -> CheckpointSave:
    return CheckpointSave(state=state, schema_version=1, next_child=0)


def keep(states: list[bytes]) -> list[PackedSave]:
    """Store states one after the other, each against the one before."""
    kept: list[PackedSave] = []
    base: Base | None = None
    for step, state in enumerate(states, 1):
        kept.append(pack(save(state), base))
        base = kept[-1].as_base(step)
    return kept


def chain_of(kept: list[PackedSave], step: int) -> list[tuple[int, int, bytes]]:
    """What the store hands out for a step: from its whole state on."""
    chain: list[tuple[int, int, bytes]] = []
    while step:
        packed = kept[step - 1]
        chain.insert(0, (step, packed.packing, packed.data))
        step = packed.base
    return chain


json_states = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=200),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
).map(lambda value: json.dumps(value).encode())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(json_states, st.binary(max_size=3000)), min_size=1, max_size=12))
def test_every_state_comes_back_as_it_was(states: list[bytes]) -> None:
    kept = keep(states)
    for step, state in enumerate(states, 1):
        found = unpack_chain(chain_of(kept, step))
        assert found.state == state
        assert found == kept[step - 1].as_base(step)
        assert kept[step - 1].digest == hashlib.sha256(state).digest()


def message(number: int) -> dict[str, object]:
    return {"role": "tool", "content": hashlib.shake_256(b"%d" % number).hexdigest(300), "id": number}


def growing(count: int) -> list[bytes]:
    talk = [message(number) for number in range(count)]
    return [json.dumps({"messages": talk[: n + 1], "at": n}).encode() for n in range(count)]


def test_what_is_stored_of_a_growing_state_follows_what_was_added() -> None:
    """The last hundred messages cost what the first hundred did, whatever the history behind them."""
    kept = keep(growing(400))
    stored = [len(packed.data) for packed in kept]
    assert sum(stored[300:]) < 2 * sum(stored[:100])
    assert sum(stored) < 3 * len(kept[-1].save.state)
    # Stored whole each time, even compressed, it would be of another order.
    assert sum(len(packed.save.state) for packed in kept) > 60 * sum(stored)


def test_what_is_read_at_a_restart_is_bounded() -> None:
    state = json.dumps([message(number) for number in range(300)]).encode()
    kept = keep([state + b" " * n for n in range(LINKS_MAX + 2)])
    assert max(packed.links for packed in kept) == LINKS_MAX
    assert kept[-1].packing is Packing.WHOLE
    for packed in keep(growing(200)):
        assert packed.delta_bytes <= 2 * packed.whole_bytes + 1200


def test_another_state_is_stored_whole() -> None:
    first, second = (hashlib.shake_256(seed).digest(4000) for seed in (b"1", b"2"))
    kept = keep([first, second])
    assert [(packed.packing, packed.base) for packed in kept] == [(Packing.WHOLE, 0), (Packing.WHOLE, 0)]
    assert keep([b"{}"])[0].packing is Packing.PLAIN


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_changed_byte_is_found_or_changes_nothing(at: int) -> None:
    """What a frame does not notice itself, the digest of the state does; some bytes of a base nothing rests on."""
    kept = keep(growing(23)[20:])
    for place in range(len(kept[at].data)):
        chain = chain_of(kept, 3)
        step, packing, data = chain[at]
        chain[at] = (step, packing, data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        try:
            found = unpack_chain(chain)
        except UnpackError:
            continue
        same = hashlib.sha256(found.state).digest() == kept[2].digest
        assert same == (found.state == kept[2].save.state)


def test_what_can_not_be_read_is_refused() -> None:
    kept = keep(growing(23)[20:])
    with pytest.raises(UnpackError, match="missing"):
        unpack_chain(chain_of(kept, 3)[1:])
    with pytest.raises(UnpackError, match="missing"):
        unpack_chain([])
    with pytest.raises(UnpackError, match="rests on nothing"):
        unpack_chain([*chain_of(kept, 2), *chain_of(kept, 1)])
    with pytest.raises(UnpackError, match="`7` is of a later release"):
        unpack(7, b"", None)
    with pytest.raises(UnpackError):
        unpack(Packing.WHOLE, kept[0].data[:-4], None)
    bomb = pack(save(b"0" * (8 << 20)), None)
    assert len(bomb.data) < 2000
    with pytest.raises(UnpackError, match="its size is none"):
        unpack(bomb.packing, bomb.data, None)
