"""The hash chain: no two rows have one image, and no edit of a chain goes unseen."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import fields, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.journal.audit import document_of, row_of, verify_file
from ringfence.kernel.journal.chain import genesis, link, stored_image
from ringfence.kernel.journal.copyrows import chained, copy_data, int8_array, prepare, record_array
from ringfence.kernel.journal.types import Entry, Phase, Row, StoredRow
from ringfence.kernel.journal.verifier import HEADS_ACTION, Verifier, read_heads, write_heads

int8 = st.integers(-(1 << 63), (1 << 63) - 1)
int4 = st.integers(-(1 << 31), (1 << 31) - 1)
# Beyond the length of words that are cached, too.
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8) | st.just(
    "w" * 65
)
data = st.binary(max_size=8)

contents = st.fixed_dictionaries(
    {
        "step": int8,
        "started_us": int8.filter(bool),
        "duration_us": int8,
        "branch": int4,
        "lane_step": int4,
        "phase": st.sampled_from(Phase),
        "lane": text,
        "action": text.filter(lambda word: word != HEADS_ACTION),
        "resource": text,
        "effect": text,
        "verdict": text,
        "outcome": text,
        "effect_id": text,
        "digest": data,
        "body": data,
    }
)
chain_of_contents = st.lists(contents, min_size=1, max_size=6)


def made(chain, all_contents):
    """Rows as the writer makes them, not as the verifier would."""
    loop = asyncio.new_event_loop()
    try:
        pending = [
            prepare(Entry(row=Row(chain=chain, **facts)), loop.create_future(), 0.0) for facts in all_contents
        ]
    finally:
        loop.close()
    links = chained(pending, {chain: (0, genesis(chain))})
    return [
        StoredRow(chain=chain, pos=one.pos, hash=one.hash, **facts)
        for one, facts in zip(links, all_contents, strict=True)
    ]


def check(*chains, heads=()):
    verifier = Verifier()
    for head in heads:
        verifier.expect(*head)
    for rows in chains:
        for row in rows:
            verifier.feed(row)
    verifier.finish()
    return verifier


def test_a_chain_begins_with_the_hash_of_its_number():
    assert genesis(7) == hashlib.sha256(b"ringfence:7").digest()
    assert genesis(-7) == hashlib.sha256(b"ringfence:-7").digest()


def test_the_image_of_a_row_is_as_documented():
    row = made(
        1,
        [
            {
                "step": 2,
                "started_us": 3,
                "duration_us": 4,
                "branch": 5,
                "lane_step": 6,
                "phase": Phase.EVENT,
                "lane": "0",
                "action": "ä",
                "resource": "",
                "effect": "",
                "verdict": "",
                "outcome": "ok",
                "effect_id": "",
                "digest": b"",
                "body": b"xyz",
            }
        ],
    )[0]
    wanted = b"".join(
        len(column).to_bytes(4, "big") + column
        for column in (
            *[number.to_bytes(8, "big") for number in (1, 1, 2, 3, 4)],
            *[number.to_bytes(4, "big") for number in (5, 6)],
            (3).to_bytes(2, "big"),
            *[b"0", "ä".encode(), b"", b"", b"", b"ok", b"", b"", b"xyz"],
        )
    )
    assert stored_image(row) == wanted
    assert row.hash == hashlib.sha256(genesis(1) + wanted).digest()


@given(int8.filter(bool), chain_of_contents)
def test_what_the_writer_chains_the_verifier_accepts(chain, all_contents):
    rows = made(chain, all_contents)
    verifier = check(rows, heads=[(chain, rows[-1].pos, rows[-1].hash)])
    assert verifier.first_bad is None
    assert (verifier.rows, verifier.chains) == (len(rows), 1)


@given(contents, contents)
def test_rows_with_one_image_are_one_row(one, other):
    (a,), (b,) = made(1, [one]), made(1, [other])
    assert (stored_image(a) == stored_image(b)) == (one == other)


@given(chain_of_contents, contents, st.data())
def test_any_edit_of_a_chain_is_seen(all_contents, fresh, draw):
    rows = made(3, all_contents)
    head = (3, rows[-1].pos, rows[-1].hash)
    nr = draw.draw(st.integers(0, len(rows) - 1))
    removed = rows[:nr] + rows[nr + 1 :]
    doubled = rows[: nr + 1] + rows[nr:]
    edits = [removed, doubled]
    changed = replace(rows[nr], **fresh)
    if changed != rows[nr]:
        edits.append([*rows[:nr], changed, *rows[nr + 1 :]])
    other = draw.draw(st.integers(0, len(rows) - 1))
    if other != nr:
        swapped = list(rows)
        swapped[nr], swapped[other] = swapped[other], swapped[nr]
        edits.append(swapped)
        renumbered = list(rows)
        renumbered[nr] = replace(rows[other], pos=rows[nr].pos)
        renumbered[other] = replace(rows[nr], pos=rows[other].pos)
        edits.append(renumbered)
    for edit in edits:
        assert check(edit, heads=[head]).first_bad is not None


@given(chain_of_contents, contents, st.integers(0, 5))
def test_a_chain_made_anew_is_seen_through_any_head_at_or_after_the_change(all_contents, fresh, nr):
    rows = made(3, all_contents)
    nr %= len(rows)
    forged = made(3, [*all_contents[:nr], fresh, *all_contents[nr + 1 :]])
    for row in rows:
        found = check(forged, heads=[(3, row.pos, row.hash)]).first_bad
        assert (found is not None) == (row.pos > nr and fresh != all_contents[nr])


@given(chain_of_contents)
def test_a_cut_tail_is_seen_through_the_head(all_contents):
    rows = made(3, all_contents)
    for length in range(len(rows)):
        assert check(rows[:length]).first_bad is None
        found = check(rows[:length], heads=[(3, rows[-1].pos, rows[-1].hash)]).first_bad
        assert found["chain"] == 3
        assert found["pos"] == (length + 1)


@given(chain_of_contents, chain_of_contents)
def test_heads_in_a_kernels_chain_bind_the_agents(of_one, of_two):
    one, two = made(1, of_one), made(2, of_two)
    heads = [(1, one[-1].pos, one[-1].hash), (2, two[-1].pos, two[-1].hash)]
    event = dict.fromkeys(("step", "duration_us", "branch", "lane_step"), 0) | dict.fromkeys(
        ("lane", "resource", "effect", "verdict", "outcome", "effect_id"), ""
    )
    event |= {"started_us": 1, "phase": Phase.EVENT, "action": HEADS_ACTION, "digest": b""}
    own = made(-1, [event | {"body": write_heads(heads)}])
    assert check(own, one, two).first_bad is None
    assert check(own, one[:-1], two).first_bad["chain"] == 1
    assert check(own, one).first_bad["chain"] == 2
    assert check(own, two).first_bad["chain"] == 1
    assert check(own, two, one).first_bad is not None
    assert check(own).first_bad is not None
    for bad in (b"", b"{}", b'{"heads":[[1]]}', b'{"heads":[[1,1,"zz"]]}', b'{"heads":1}', b"[" * 10_000):
        assert check(made(-1, [event | {"body": bad}]), one, two).first_bad["chain"] == -1
        with pytest.raises(ValueError, match=r".*"):
            read_heads(bad)
    disagreeing = write_heads([heads[0], (1, one[-1].pos, genesis(9))])
    assert check(made(-1, [event | {"body": disagreeing}]), one, two).first_bad["chain"] == 1


@given(int8.filter(bool), contents)
def test_a_document_loses_nothing(chain, facts):
    (row,) = made(chain, [facts])
    document = json.loads(json.dumps(document_of(row)))
    assert row_of(document) == row
    for key in document:
        changed = dict(document)
        changed[key] = f"{changed[key]}0" if isinstance(changed[key], str) else changed[key] - 1
        try:
            again = row_of(changed)
        except ValueError:
            continue
        assert again != row, key


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40), st.sampled_from([b"{}\n", b"\n", b"[1]\n"]))))
def test_no_file_brings_the_check_down(tmp_path_factory, parts):
    (row,) = made(
        1,
        [
            dict.fromkeys(("step", "duration_us", "branch", "lane_step"), 0)
            | {
                "started_us": 1,
                "phase": Phase.EVENT,
                "lane": "",
                "action": "a",
                "resource": "",
                "effect": "",
                "verdict": "",
                "outcome": "",
                "effect_id": "",
                "digest": b"",
                "body": b"",
            }
        ],
    )
    line = json.dumps(document_of(row)).encode() + b"\n"
    path = tmp_path_factory.mktemp("files") / "x.jsonl"
    path.write_bytes(b"".join(line if part is None else part for part in parts))
    report = verify_file(path)
    assert report["ok"] is (path.read_bytes() in {b"", line})


@given(chain_of_contents)
def test_packed_rows_hold_every_column_in_both_forms(all_contents):
    loop = asyncio.new_event_loop()
    try:
        pending = [
            prepare(Entry(row=Row(chain=5, **facts)), loop.create_future(), 0.0) for facts in all_contents
        ]
    finally:
        loop.close()
    links = chained(pending, {5: (0, genesis(5))})
    copied = copy_data(links)
    assert copied.startswith(b"PGCOPY\n\xff\r\n\0")
    assert copied.endswith(b"\xff\xff")
    at = 19
    for one in links:
        assert copied[at : at + 2] == (18).to_bytes(2, "big")
        at += 2
        for _ in range(18):
            at += 4 + int.from_bytes(copied[at : at + 4], "big")
        assert copied[at - 32 : at] == one.hash
    assert at == len(copied) - 2
    packed = record_array(links, 4711)
    assert packed[:20] == b"".join(n.to_bytes(4, "big") for n in (1, 0, 4711, len(links), 1))
    at = 20
    for one in links:
        end = at + 4 + int.from_bytes(packed[at : at + 4], "big")
        assert packed[at + 4 : at + 8] == (18).to_bytes(4, "big")
        assert packed[end - 32 : end] == one.hash
        at = end
    assert at == len(packed)


def test_an_array_of_no_numbers_has_no_dimension():
    assert int8_array([]) == b"\0\0\0\0\0\0\0\0\0\0\0\x14"
    assert int8_array([None, -1])[-16:] == b"\xff\xff\xff\xff\0\0\0\x08" + b"\xff" * 8


def test_the_stored_row_and_the_row_have_the_same_columns():
    stored = {one.name for one in fields(StoredRow) if one.compare}
    assert stored == {one.name for one in msgspec.structs.fields(Row)} | {"pos", "hash"}
    assert link(b"a", b"b") == hashlib.sha256(b"ab").digest()
