"""The evidence against an intruder who can write anything into the database."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ringfence.kernel.journal.anchor import Anchor, AnchorError, load_public_key, read_anchors
from ringfence.kernel.journal.audit import export, verify, verify_file, verify_store
from ringfence.kernel.journal.chain import genesis, link, stored_image
from ringfence.kernel.journal.store_base import stored_row
from ringfence.kernel.journal.types import Entry, Phase, Row

COLUMNS = (
    "chain, pos, step, started_us, duration_us, branch, lane_step, phase, lane, action, resource, effect, verdict, "
    "outcome, effect_id, digest, body, hash"
)


class Evidence:
    """A kernel with two agents of ten rows each, its heads signed once after five and once after ten."""

    def __init__(self, world, journal, kernel, agents, anchor):
        self.world, self.journal, self.kernel, self.agents, self.anchor = (
            world,
            journal,
            kernel,
            agents,
            anchor,
        )

    async def verify(self):
        return await verify(self.world.store, self.anchor.path, self.anchor.public_key)

    async def intrude(self, *statements):
        await self.world.sql("alter table journal disable trigger append_only")
        for statement in statements:
            await self.world.sql(*statement if isinstance(statement, tuple) else (statement,))

    async def rehash(self, chain):
        """Makes a chain right again in itself, as an intruder who knows the code would."""
        previous = genesis(chain)
        stored = await self.world.sql(
            f"select {COLUMNS} from journal where chain = %s order by pos", (chain,)
        )
        for pos, values in enumerate(stored, 1):
            facts = dict(zip(COLUMNS.split(", "), values, strict=True))
            row = stored_row(**(facts | {"pos": pos}))
            previous = link(previous, stored_image(row))
            await self.world.sql(
                "update journal set pos = %s, hash = %s where chain = %s and pos = %s",
                (pos, previous, chain, facts["pos"]),
            )


@pytest.fixture
async def evidence(world, entry, tmp_path):
    kernel = await world.kernel()
    agents = [await world.agent(kernel) for _ in range(2)]
    journal = await world.journal(kernel, *agents)
    anchor = Anchor(tmp_path / "anchor" / "heads.jsonl", tmp_path / "anchor" / "key.pem")
    for half in range(2):
        for step in range(half * 5 + 1, half * 5 + 6):
            await asyncio.gather(
                *[journal.append(entry(agent.key, step, body=b'{"n":%d}' % step)) for agent in agents]
            )
        assert await anchor.sign_heads(journal, world.store) is not None
    assert await anchor.sign_heads(journal, world.store) is None
    return Evidence(world, journal, kernel, agents, anchor)


async def test_an_untouched_database_is_right(evidence, world, entry):
    report = await evidence.verify()
    assert (report.ok, report.rows, report.chains, report.anchors, report.first_bad) == (True, 22, 3, 2, None)
    # Rows that come while it reads, and rows that no one has signed yet, are no fault.
    await evidence.journal.append(entry(evidence.agents[0].key, 11))
    assert (await verify_store(world.store, evidence.anchor, evidence.journal)).rows == 23
    assert await world.sql("select count(*) from anchors") == [(2,)]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("body", "'{\"n\":0}'"),
        ("step", "99"),
        ("started_us", "1"),
        ("duration_us", "1"),
        ("branch", "1"),
        ("lane_step", "99"),
        ("phase", "0"),
        ("lane", "'1'"),
        ("action", "'fs.list'"),
        ("resource", "'/workspace/b'"),
        ("effect", "'WRITE'"),
        ("verdict", "'deny'"),
        ("outcome", "'error'"),
        ("effect_id", "'aa'"),
        ("digest", "'e'"),
        ("hash", "decode(repeat('00', 32), 'hex')"),
    ],
)
async def test_a_change_of_any_column_shows(evidence, column, value):
    chain = evidence.agents[1].key
    await evidence.intrude(f"update journal set {column} = {value} where chain = {chain} and pos = 4")
    report = await evidence.verify()
    assert not report.ok
    assert (report.first_bad["chain"], report.first_bad["pos"]) == (chain, 4)


@pytest.mark.parametrize("pos", [1, 5, 10])
async def test_a_removed_row_shows_wherever_it_was(evidence, pos):
    chain = evidence.agents[0].key
    await evidence.intrude(f"delete from journal where chain = {chain} and pos = {pos}")
    report = await evidence.verify()
    assert not report.ok
    assert (report.first_bad["chain"], report.first_bad["pos"]) == (chain, pos)
    assert "missing" in report.first_bad["why"]


async def test_two_rows_that_changed_places_show(evidence):
    chain = evidence.agents[0].key
    await evidence.intrude(
        f"update journal set pos = -4 where chain = {chain} and pos = 4",
        f"update journal set pos = 4 where chain = {chain} and pos = 5",
        f"update journal set pos = 5 where chain = {chain} and pos = -4",
    )
    report = await evidence.verify()
    assert (report.first_bad["chain"], report.first_bad["pos"]) == (chain, 4)


async def test_a_row_moved_to_another_chain_shows(evidence):
    one, two = (agent.key for agent in evidence.agents)
    await evidence.intrude(f"update journal set chain = {two}, pos = 11 where chain = {one} and pos = 10")
    report = await evidence.verify()
    assert (report.first_bad["chain"], report.first_bad["pos"]) == (one, 10)


async def test_a_chain_that_is_gone_shows(evidence):
    for chain in (evidence.agents[0].key, evidence.agents[1].key):
        await evidence.intrude(f"delete from journal where chain = {chain}")
        report = await evidence.verify()
        assert report.first_bad["chain"] == evidence.agents[0].key


async def test_a_kernels_own_chain_that_is_gone_shows(evidence):
    await evidence.intrude("delete from journal where chain < 0")
    assert (await evidence.verify()).first_bad["chain"] == -evidence.kernel.key
    await evidence.intrude("delete from journal")
    assert (await evidence.verify()).first_bad["chain"] == -evidence.kernel.key


async def test_a_chain_with_all_its_hashes_made_anew_shows_through_the_signed_heads(evidence):
    chain = evidence.agents[0].key
    await evidence.intrude(f"delete from journal where chain = {chain} and pos = 3")
    await evidence.rehash(chain)
    report = await evidence.verify()
    assert not report.ok
    assert (report.first_bad["chain"], report.first_bad["pos"]) == (chain, 5)


async def test_a_rewritten_head_shows_although_later_ones_fit(evidence):
    """Cut to before the first head, then grown again past the last one: only a head in between differs."""
    chain, own = evidence.agents[0].key, -evidence.kernel.key
    await evidence.intrude(f"update journal set body = 'x' where chain = {chain} and pos = 2")
    await evidence.rehash(chain)
    ((pos, digest),) = await evidence.world.sql(
        "select pos, hash from journal where chain = %s order by pos desc limit 1", (chain,)
    )
    ((body,),) = await evidence.world.sql(f"select body from journal where chain = {own} and pos = 2")
    heads = json.loads(body)
    heads["heads"][0] = [chain, pos, digest.hex()]
    await evidence.intrude(
        ("update journal set body = %s where chain = %s and pos = 2", (json.dumps(heads).encode(), own))
    )
    await evidence.rehash(own)
    without_anchor = await verify(evidence.world.store, None, None)
    assert (without_anchor.first_bad["chain"], without_anchor.first_bad["pos"]) == (chain, 5)


async def test_a_database_rewritten_from_end_to_end_shows_through_the_anchor(evidence):
    chain, own = evidence.agents[0].key, -evidence.kernel.key
    await evidence.intrude(
        f"delete from journal where chain = {chain} and pos = 3", f"delete from journal where chain = {own}"
    )
    await evidence.rehash(chain)
    assert (await verify(evidence.world.store, None, None)).ok
    report = await evidence.verify()
    assert not report.ok
    assert report.first_bad["chain"] == own


async def test_a_tail_that_was_cut_off_before_anything_was_signed_shows_to_the_running_kernel(
    evidence, world, entry
):
    chain = evidence.agents[0].key
    await evidence.journal.append(entry(chain, 11))
    await evidence.intrude(f"delete from journal where chain = {chain} and pos = 11")
    assert (await evidence.verify()).ok
    report = await verify_store(world.store, evidence.anchor, evidence.journal)
    assert (report.first_bad["chain"], report.first_bad["pos"]) == (chain, 11)


async def test_an_anchor_file_that_was_touched_shows(evidence, world):
    path, good = evidence.anchor.path, evidence.anchor.path.read_bytes()
    first, second = good.splitlines(keepends=True)
    other = Ed25519PrivateKey.generate().public_key()
    with pytest.raises(AnchorError, match="wrong signature"):
        list(read_anchors(path, other))
    assert not (await verify(world.store, path, other)).ok
    for bad in (
        second,
        second + first,
        first.replace(b'"pos":1', b'"pos":2') + second,
        b"garbage\n" + good,
        b"[]\n" + good,
        good + b"{}\n",
    ):
        path.write_bytes(bad)
        assert not (await evidence.verify()).ok, bad
    # What a crash cut off was never promised; a whole line that this kernel wrote was.
    path.write_bytes(good + second[:40])
    assert (await verify_store(world.store, evidence.anchor)).ok
    for short in (first, b""):
        path.write_bytes(short)
        assert not (await verify_store(world.store, evidence.anchor)).ok
    path.unlink()
    assert not (await verify_store(world.store, evidence.anchor)).ok


async def test_the_key_and_the_file_outlive_the_kernel_and_a_torn_line(evidence, world, entry):
    path, key = evidence.anchor.path, evidence.anchor.path.with_name("key.pem")
    assert key.stat().st_mode & 0o777 == 0o600
    assert load_public_key(key.with_suffix(".pub")) == evidence.anchor.public_key
    with path.open("ab") as file:
        file.write(b'{"torn')
    again = Anchor(path, key)
    await evidence.journal.append(entry(evidence.agents[0].key, 11))
    assert (await again.sign_heads(evidence.journal, world.store)).previous
    assert [line.pos for line, _ in read_anchors(path, again.public_key)] == [1, 2, 3]
    assert (await verify_store(world.store, again)).ok
    key.chmod(0o644)
    with pytest.raises(AnchorError, match="chmod 600"):
        Anchor(path, key)
    key.chmod(0o600)
    key.write_bytes(b"nonsense")
    with pytest.raises(AnchorError, match="no private key"):
        Anchor(path, key)


async def test_another_key_is_noticed_and_never_put_to_use(evidence, world):
    path, key = evidence.anchor.path, evidence.anchor.path.with_name("key.pem")
    assert (await verify_store(world.store, evidence.anchor)).ok
    own = key.read_bytes()
    Anchor(path.with_name("other.jsonl"), key.with_name("other.pem"))
    key.write_bytes(key.with_name("other.pem").read_bytes())
    # A kernel that runs names it, one that starts refuses.
    report = await verify_store(world.store, evidence.anchor)
    assert not report.ok
    assert "was replaced" in report.first_bad["why"]
    with pytest.raises(AnchorError, match=r"is not the one that signed .*; restore it"):
        Anchor(path, key)
    key.unlink()
    assert "can't be read" in (await verify_store(world.store, evidence.anchor)).first_bad["why"]
    with pytest.raises(AnchorError, match=r"is gone; restore it"):
        Anchor(path, key)
    assert not key.exists()  # no new one hides that the old one was taken
    key.write_bytes(own)
    key.chmod(0o600)
    assert (await verify_store(world.store, Anchor(path, key))).ok


async def test_the_first_anchor_of_a_kernel_covers_what_a_killed_one_left_unsigned(world, entry, tmp_path):
    killed = await world.kernel()
    agent = await world.agent(killed)
    journal = await world.journal(killed, agent)
    await journal.append(entry(agent.key))
    await journal.append(Entry(row=Row(chain=-killed.key, phase=Phase.EVENT, action="kernel.start")))
    await world.store.set_agent(agent.key, state="done")
    kernel = await world.kernel()
    heir = await world.journal(kernel)
    anchor = Anchor(tmp_path / "heads.jsonl", tmp_path / "key.pem")
    await anchor.sign_heads(heir, world.store)
    evidence = Evidence(world, heir, kernel, [agent], anchor)
    assert (await evidence.verify()).rows == 3
    await evidence.intrude(f"delete from journal where chain = {-killed.key}")
    assert (await evidence.verify()).first_bad["chain"] == -killed.key
    await evidence.intrude(f"delete from journal where chain = {agent.key}")
    await evidence.intrude(f"delete from journal where chain = {-killed.key}")
    assert not (await evidence.verify()).ok


async def test_more_heads_than_one_row_holds(world, entry, tmp_path, monkeypatch):
    monkeypatch.setattr("ringfence.kernel.journal.anchor.HEADS_PER_ROW", 3)
    kernel = await world.kernel()
    agents = [await world.agent(kernel) for _ in range(7)]
    journal = await world.journal(kernel, *agents)
    await asyncio.gather(*[journal.append(entry(agent.key)) for agent in agents])
    anchor = Anchor(tmp_path / "heads.jsonl", tmp_path / "key.pem")
    assert (await anchor.sign_heads(journal, world.store)).pos == 3
    assert (await verify_store(world.store, anchor)).ok


async def save(path, documents):
    path.write_text("".join([json.dumps(document) + "\n" async for document in documents]))
    return path


async def test_an_exported_file_verifies_without_a_database(evidence, world, entry, tmp_path):
    await evidence.journal.append(
        entry(evidence.agents[0].key, 11, body=b"\xff\0 not text", resource="ä\u2028", started_us=-(1 << 63))
    )
    whole = await save(tmp_path / "all.jsonl", export(world.store))
    anchors = (evidence.anchor.path, evidence.anchor.public_key)
    assert verify_file(whole, *anchors) == {
        "ok": True,
        "rows": 23,
        "chains": 3,
        "anchors": 2,
        "first_bad": None,
        "partial": 0,
        "archived": 0,
        "pruned": 0,
    }
    one = await save(tmp_path / "one.jsonl", export(world.store, evidence.agents[1].key))
    assert verify_file(one)["rows"] == 10
    lines = whole.read_text().splitlines(keepends=True)
    for nr in range(len(lines)):
        tampered = tmp_path / "bad.jsonl"
        tampered.write_text("".join(lines[:nr] + lines[nr + 1 :]))
        # Line 12 is the row that was written after the last anchor: only the database knows of it.
        assert verify_file(tampered, *anchors)["ok"] is (nr == 12)
        for old, new in (
            ('"outcome": "', '"outcome": "x'),
            ('"kind": "', '"kind": "x'),
            ('"time": "', '"time": "1'),
        ):
            changed = lines[nr].replace(old, new)
            assert changed != lines[nr]
            tampered.write_text("".join([*lines[:nr], changed, *lines[nr + 1 :]]))
            assert verify_file(tampered)["ok"] is False


async def test_a_part_since_a_time_verifies_and_says_that_it_is_a_part(evidence, world, entry, tmp_path):
    moment = datetime.now(UTC)
    await evidence.journal.append(entry(evidence.agents[1].key, 11))
    # A call that began earlier is recorded after it.
    await evidence.journal.append(entry(evidence.agents[1].key, 12, started_us=1))
    path = await save(tmp_path / "part.jsonl", export(world.store, since=moment.isoformat()))
    report = verify_file(path)
    assert (report["ok"], report["rows"], report["chains"], report["partial"]) == (True, 2, 1, 1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0].replace('"step": 11', '"step": 13') + lines[1])
    assert verify_file(path)["first_bad"]["pos"] == 11
    # Without its first record it is no part, but a chain that lost its beginning.
    path.write_text(lines[1])
    assert verify_file(path)["first_bad"]["pos"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "nonsense\n",
        "[]\n",
        "{}\n",
        '{"chain": 1, "pos": 1}\n',
        "\0\n",
        "[" * 100_000,
        '{"chain": 1e999}\n',
        "null\n",
    ],
)
def test_a_file_that_is_no_export_is_a_broken_one(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    report = verify_file(path)
    assert report["ok"] is False
    assert report["first_bad"]["why"]


async def test_signing_waits_for_no_clock_and_survives_a_full_disk(evidence, world, entry):
    """The periodic task goes on after an error of the file, and signs what it missed."""
    await evidence.journal.append(entry(evidence.agents[0].key, 11))
    kept = evidence.anchor.path
    evidence.anchor.path = kept / "not" / "a" / "directory"
    task = asyncio.create_task(evidence.anchor.run(evidence.journal, world.store, 0.01))
    while evidence.journal.head(-evidence.kernel.key)[0] < 4:
        await world.store.ping()
    evidence.anchor.path = kept
    while len(kept.read_bytes().splitlines()) < 3:
        await world.store.ping()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await evidence.verify()).ok
    assert kept.stat().st_mode & 0o777 == 0o600
