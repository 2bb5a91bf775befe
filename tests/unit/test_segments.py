"""What of a part of a chain has to stay in the database, and what a part's file says of itself."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.journal.chain import genesis, link, stored_image
from ringfence.kernel.journal.gaps import Gap
from ringfence.kernel.journal.segments import Archive, ArchiveError, Segment, kept_of, place_of, staying
from ringfence.kernel.journal.types import Phase, StoredRow

CHAIN = 7
OUTCOMES = ("ok", "error", "denied", "refused", "unknown", "parked", "cancelled")


def row(pos: int, step: int, phase: Phase, **more: object) -> StoredRow:
    values: dict[str, object] = {
        "branch": 0, "lane": "0", "lane_step": step, "action": "fs.read", "resource": "/workspace/a", "effect": "READ",
        "verdict": "allow", "outcome": "ok" if phase is Phase.OUTCOME else "", "digest": b"d", "effect_id": "",
        "started_us": pos, "duration_us": 0, "body": b"{}", "hash": b"", **more,
    }  # fmt: skip
    return StoredRow(chain=CHAIN, pos=pos, step=step, phase=phase, **values)  # type: ignore[arg-type]


@st.composite
def parts(draw: st.DrawFn) -> list[StoredRow]:
    found: list[StoredRow] = []
    previous = genesis(CHAIN)
    for pos in range(1, draw(st.integers(2, 40))):
        phase = draw(
            st.sampled_from([Phase.INTENT, Phase.OUTCOME, Phase.OUTCOME, Phase.PROGRESS, Phase.EVENT])
        )
        one = row(
            pos,
            0 if phase is Phase.EVENT else draw(st.integers(1, 12)),
            phase,
            outcome=draw(st.sampled_from(OUTCOMES)) if phase is Phase.OUTCOME else "",
            effect_id=draw(st.sampled_from(["", "", "", "e1"])),
            lane=draw(st.sampled_from(["0", "0", "0.1", "op"])),
            action=draw(st.sampled_from(["fs.read", "state.put", "spawn"])),
            effect=draw(st.sampled_from(["READ", "WRITE"])),
            body=draw(
                st.sampled_from(
                    [
                        b"{}",
                        b'{"facts":{"taints":"a page"},"result":1}',
                        b'{"facts":{"tainted":{"step":1,"source":"a page"},"taints":"another"},"result":1}',
                        b'{"facts":{"paths":["/workspace/a"]},"result":1}',
                    ]
                )
            ),
        )
        digest = link(previous, stored_image(one))
        found.append(
            row(
                **{n: getattr(one, n) for n in one.__slots__ if n not in ("chain", "hash", "archived")},
                hash=digest,
            )
        )
        previous = digest
    return found


@given(parts(), st.integers(1, 13), st.frozensets(st.integers(1, 12), max_size=3))
def test_nothing_goes_that_anybody_may_ask_for(
    rows: list[StoredRow], behind: int, needed: frozenset[int]
) -> None:
    stays = staying(rows, behind=behind, needed=needed)
    gone = [one for one in rows if one.pos not in stays]
    # Whole steps go, or stay.
    assert not {one.step for one in gone} & {one.step for one in rows if one.pos in stays}
    for one in gone:
        assert 0 < one.step < behind
        assert one.step not in needed
        assert not one.effect_id
        assert one.lane != "op"
        assert one.action != "spawn"
        assert one.phase is not Phase.EVENT
        assert b'"paths"' not in one.body
        if b'"facts"' in one.body:
            # It was tainted before already, and nobody else read what it wrote.
            assert (b'"tainted"' in one.body, one.effect) == (True, "READ")
    for step in {one.step for one in gone}:
        last = [one.outcome for one in rows if one.step == step and one.phase is Phase.OUTCOME][-1]
        assert last not in ("unknown", "parked")


@given(parts(), st.integers(1, 13), st.data())
def test_what_stays_of_a_part_is_known_by_its_hashes(
    rows: list[StoredRow], behind: int, data: st.DataObject
) -> None:
    stays = staying(rows, behind=behind, needed=frozenset())
    kept = [one for one in rows if one.pos in stays]
    gap = Gap(
        chain=CHAIN, first=1, last=rows[-1].pos, before=genesis(CHAIN), hash=rows[-1].hash,
        kept=kept_of(rows, genesis(CHAIN), stays), rows=tuple(kept),
    )  # fmt: skip
    assert gap.misfit() is None
    assert Gap.of(gap.document()) == gap
    if kept:
        one = data.draw(st.sampled_from(kept))
        others = tuple(other for other in kept if other is not one)
        changed = row(
            **{n: getattr(one, n) for n in one.__slots__ if n not in ("chain", "resource", "archived")},
            resource="x",
        )
        for rest in (others, (*others, changed)):
            missing = Gap(
                **{n: getattr(gap, n) for n in ("chain", "first", "last", "before", "hash", "kept")},
                rows=rest,
            )
            misfit = missing.misfit()
            assert misfit is not None
            assert misfit[0] == one.pos


@given(rows=parts())
def test_a_file_gives_its_rows_back_or_says_what_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, rows: list[StoredRow]
) -> None:
    directory: Path = tmp_path_factory.mktemp("archive")
    archive = Archive(lambda: directory)
    place = place_of("a-1", 1, rows[-1].pos)
    sha256, size = archive.write(place, rows, genesis(CHAIN))
    segment = Segment(
        chain=CHAIN, first_pos=1, last_pos=rows[-1].pos, first_step=1, last_step=9, behind=9, rows=len(rows), since_us=0,
        until_us=0, size_bytes=size, before=genesis(CHAIN), hash=rows[-1].hash, sha256=sha256, kept=b"", place=place,
    )  # fmt: skip
    assert archive.read(segment) == rows
    assert all(one.archived for one in archive.read(segment))
    path = directory / place
    data = path.read_bytes()
    assert hashlib.sha256(data).digest() == sha256
    path.write_bytes(data[:-1])
    with pytest.raises(ArchiveError, match="was changed"):
        archive.read(segment)
    archive.remove(place)
    with pytest.raises(ArchiveError, match="restore the file"):
        archive.read(segment)
    (path.parent / ".draft").write_bytes(b"half")
    archive.sweep("a-1", [])
    assert not list(path.parent.iterdir())
