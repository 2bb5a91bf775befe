"""Old steps leave the database for files; whoever reads the journal, counts or recognises effects finds them as before."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from ringfence.kernel.compaction import Compacted
from ringfence.kernel.journal import segments
from ringfence.kernel.journal.audit import export, verify_file, verify_store
from ringfence.kernel.journal.segments import ArchiveError
from ringfence.kernel.operations import agents, forks, pruning, removal, rollbacks
from ringfence.kernel.problems import Problem
from ringfence.kernel.thread import Thread
from ringfence.policy.keeping import Keeping, PointsKept
from support.heart import URL, Heart, heart_on
from support.scenes import short_directory

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

NOW = Keeping(journal_s=0.0, journal_steps=0)
ALLOWED = ["now", 'http.*: "http://pay.test/**"', 'state.*: "**"', 'fs.*: "/workspace/**"', "checkpoint.save"]


@pytest.fixture
async def heart(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Heart]:
    monkeypatch.setattr("ringfence.kernel.compaction.ROWS_LEAST", 1)
    monkeypatch.setattr("ringfence.kernel.compaction.SEGMENT_ROWS", 16)
    monkeypatch.setattr("ringfence.kernel.compaction.PAUSE_S", 0)
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


@pytest.fixture
def world_sql(dsn: str) -> Any:
    """Runs a statement as an intruder would."""

    async def run(text: LiteralString) -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await connection.execute(text)

    return run


async def saved(heart: Heart, thread: Thread, at: int) -> None:
    answer = await heart.call(thread, at, "checkpoint.save", state={"at": at}, schema_version=1, next_child=0)
    assert answer.failure is None, answer.failure


async def worked(heart: Heart, name: str = "heart", steps: int = 40) -> Thread:
    """An agent with some reads, changes of the state, one request that left the system, and a checkpoint after each ten."""
    thread = await heart.agent(allow=ALLOWED, name=name)
    for at in range(steps):
        if at % 10 == 9:
            await saved(heart, thread, at)
        elif at == 3:
            await heart.call(thread, at, url=URL)
        elif at % 10 == 5:
            await heart.call(thread, at, "state.put", key=f"{name}/{at}", value=at)
        else:
            assert (await heart.call(thread, at, "state.get", key="seen")).failure is None
    return thread


async def compacted(heart: Heart, thread: Thread, keeping: Keeping = NOW) -> Compacted:
    return await heart.kernel.compaction.compact(thread, keeping, dry=False)


async def picture(heart: Heart, thread: Thread) -> dict[str, Any]:
    """All that can be asked of a journal."""
    store, key = heart.core.store, thread.key
    record = await heart.kernel.record(thread.id)
    events = {"journal.archived", "journal.pruned", "agent.checkpoints_pruned"}
    return {
        "audit": [row for row in [r async for r in store.audit(key)] if row.action not in events],
        "lineage": [r async for r in store.lineage_outcomes(key, thread.lineage.parts, 0)],
        "later": [r async for r in store.lineage_outcomes(key, thread.lineage.parts, 12)],
        "steps": [
            {k: v for k, v in s.items() if k != "archived"}
            async for s in agents.step_documents(heart.kernel, record)
        ],
        "page": await store.steps_page(key, 4, 7),
        "one": await store.step(key, 2),
        "counts": await store.counts(key),
        "amounts": await store.amounts(key),
        "effects": [r async for r in store.effect_outcomes(key)],
        "hashes": [await store.hash_at(key, pos) for pos in (1, 7, 30)],
    }


async def rows_left(heart: Heart, thread: Thread) -> int:
    return len(await heart.core.store.rows_between(thread.key, 1, 1 << 40))


async def test_what_was_archived_is_read_as_before(heart: Heart) -> None:
    thread = await worked(heart)
    before = await picture(heart, thread)
    done = await compacted(heart, thread)
    assert done.behind == 40
    assert done.parts >= 2
    assert done.rows > 30
    assert await rows_left(heart, thread) < 14
    assert await picture(heart, thread) == before
    shown = [s async for s in agents.step_documents(heart.kernel, await heart.kernel.record(thread.id))]
    assert [s["step"] for s in shown if not s["archived"]] == [
        4,
        40,
    ]  # the request that left, and the checkpoint
    again = await compacted(heart, thread)
    assert again.nothing


async def test_the_next_kernel_goes_on_and_recognises_the_effect(heart: Heart) -> None:
    thread = await worked(heart)
    await compacted(heart, thread)
    known, used = set(thread.effects), thread.consumed_effects
    spent = dict(thread.budgets.spent)
    again = await heart.adopted_again(thread)
    assert again.replay.checkpoint is not None
    assert again.replay.checkpoint.lane_step == 39
    assert (set(again.effects), again.consumed_effects) == (known, used)
    assert len(known) == 1
    assert dict(again.budgets.spent) == spent
    assert (await heart.call(again, 40, "state.get", key="seen")).step == 41


async def test_the_chain_verifies_with_its_files_and_names_what_was_changed(heart: Heart) -> None:
    thread = await worked(heart)
    await compacted(heart, thread)
    await heart.kernel.anchor.sign_heads(heart.core.journal, heart.core.store)
    report = await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)
    assert report.ok, report.first_bad
    assert report.archived > 30
    root = heart.core.store.archive.root
    files = sorted((root / thread.id).iterdir())
    assert verify_file(files[0])["ok"]
    data = files[1].read_bytes()
    files[1].unlink()
    report = await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)
    assert not report.ok
    assert "restore the file from your copy" in str(report.first_bad)
    files[1].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArchiveError, match="was changed"):
        await heart.core.store.step(thread.key, 30)
    files[1].write_bytes(data)
    async with asyncio.timeout(20):
        report = await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)
    assert report.ok


async def test_a_row_that_stayed_is_held_against_the_file(heart: Heart, world_sql: Any) -> None:
    thread = await worked(heart)
    await compacted(heart, thread)
    await world_sql("alter table journal disable trigger append_only")
    await world_sql("update journal set resource = 'http://pay.test/other' where effect_id <> ''")
    report = await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)
    assert report.first_bad is not None
    assert "not the one that was archived" in report.first_bad["why"]


async def test_points_hold_the_archive_up_and_nothing_goes_back_beyond_it(heart: Heart) -> None:
    thread = await worked(heart)
    await heart.call(thread, 40, "fs.write", path="/workspace/a.txt", data="bmV3")
    await saved(heart, thread, 41)
    store = heart.kernel.layout.points(thread.id)
    assert [p.stem for p in store.glob("p*.json")] == ["p41"]
    assert (await compacted(heart, thread)).behind == 40
    with pytest.raises(Problem, match="before 40 are archived"):
        await heart.kernel.rollback.plans.cut_for(thread, "39")
    cut = await heart.kernel.rollback.plans.cut_for(thread, "p41")
    assert cut.step == 40
    await rollbacks.rollback(
        heart.kernel, thread.id, "p41", preview=False, path="", start=False, operator="me"
    )
    assert thread.replay.checkpoint is not None
    assert thread.replay.checkpoint.lane_step == 39
    assert (await compacted(heart, thread)).nothing  # its own point is there now


async def test_an_abandoned_branch_that_can_be_had_back_keeps_its_steps(heart: Heart) -> None:
    thread = await worked(heart, steps=10)
    for at in range(10, 20):
        await heart.call(thread, at, "state.get", key="seen")
    await heart.call(thread, 20, "fs.write", path="/workspace/a.txt", data="bmV3")
    back = await rollbacks.rollback(
        heart.kernel, thread.id, "12", preview=False, path="", start=False, operator="me"
    )
    await heart.kernel.retention.prune(thread, PointsKept(count=1), operator="me")
    for at in range(10, 30):
        await heart.call(thread, at, "state.get", key="seen")
    await saved(heart, thread, 30)
    # The point of the rollback leads to the branch that was left, which goes on from the checkpoint of step 10.
    assert (await compacted(heart, thread)).behind == 10
    await rollbacks.rollback(
        heart.kernel, thread.id, back["point"], preview=False, path="", start=False, operator="me"
    )
    for at in range(10, 20):
        answer = await heart.call(thread, at, "state.get", key="seen")
        assert (answer.step, answer.replayed) == (at + 1, True)
    assert (await heart.call(thread, 20, "fs.write", path="/workspace/a.txt", data="bmV3")).replayed


async def test_an_unknown_outcome_and_a_call_under_way_stay(heart: Heart) -> None:
    thread = await heart.agent(allow=ALLOWED, ask=['state.delete: "**"'])
    waiting = heart.begin(thread, 0, "state.delete", lane="0.0", key="a")
    async with asyncio.timeout(20):
        while not await heart.core.store.approvals(None, everything=False):
            await asyncio.sleep(0.01)
    for at in range(20):
        await heart.call(thread, at, "state.get", key="seen")
    await saved(heart, thread, 20)
    await compacted(heart, thread)
    rows = await heart.core.store.rows_between(thread.key, 1, 1 << 40)
    assert {row.step for row in rows if row.action == "state.delete"} == {1}
    assert not waiting.done()


async def test_a_fork_takes_the_archived_past_along(heart: Heart) -> None:
    thread = await worked(heart)
    await heart.call(thread, 40, "state.get", key="seen")
    await compacted(heart, thread)
    await heart.processes.set_state(thread, "paused")
    made = await forks.fork(heart.kernel, thread.id, "41", new_name="copy", start=False, operator="me")
    copy = await heart.kernel.thread(made["id"])
    assert (await heart.core.store.counts(copy.key))["calls"] == (await heart.core.store.counts(thread.key))[
        "calls"
    ]
    assert copy.replay.checkpoint is not None
    assert set(copy.effects) == set(thread.effects)


async def test_a_file_given_up_leaves_a_gap_that_the_chain_vouches_for(
    heart: Heart, tmp_path: Path, world_sql: Any
) -> None:
    thread = await worked(heart)
    await compacted(heart, thread)
    await heart.kernel.anchor.sign_heads(heart.core.journal, heart.core.store)
    await heart.processes.set_state(thread, "failed")
    done = Compacted(agent=thread.id)
    await heart.kernel.compaction.give_up(thread.key, thread.id, 0.0, done, dry=False)
    assert done.given_up >= 2
    assert not list((heart.core.store.archive.root / thread.id).iterdir())
    report = await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)
    assert report.ok, report.first_bad
    assert report.pruned == (await heart.core.store.archived(thread.key))["pruned"] - sum(
        len(s.kept_positions()) for s in await heart.core.store.segments(thread.key)
    )
    path = tmp_path / "all.jsonl"
    lines = [json.dumps(document) async for document in export(heart.core.store)]
    path.write_text("\n".join(lines) + "\n")
    assert verify_file(path, heart.kernel.anchor.path, heart.kernel.anchor.public_key)["ok"]
    # Without the word of the chain it is a hole like any other.
    path.write_text("\n".join(line for line in lines if "journal.pruned" not in line) + "\n")
    assert not verify_file(path)["ok"]
    with pytest.raises(Problem, match="were pruned"):
        await forks.fork(heart.kernel, thread.id, "40", new_name="", start=False, operator="me")
    # It goes on from its checkpoint; what it read in the steps that are gone nobody knows.
    again = await heart.adopted_again(thread)
    assert again.replay.checkpoint is not None
    assert await again.history.as_facts(heart.core, again) is None
    await world_sql("update segments set pruned_at = null")
    report = await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)
    assert not report.ok


async def test_the_rows_of_a_removed_agent_go_whole(heart: Heart) -> None:
    thread = await worked(heart, name="gone")
    before = [row async for row in heart.core.store.audit(thread.key)]
    await heart.processes.set_state(thread, "done")
    await removal.remove(heart.kernel, thread.id, "me")
    done = await pruning.prune(heart.kernel, "", older_than_ms=0, dry=True, operator="me")
    assert done["agents"][0]["archived_rows"] > 35
    assert await rows_left(heart, thread) > 40
    done = await pruning.prune(heart.kernel, thread.id, older_than_ms=0, dry=False, operator="me")
    assert done["agents"][0]["archived_rows"] > 35
    after = [row async for row in heart.core.store.audit(thread.key)]
    assert after[: len(before)] == before
    # Nothing is left to do: what says so is no reason to write another file.
    again = await pruning.prune(heart.kernel, thread.id, older_than_ms=0, dry=False, operator="me")
    assert again["agents"] == []
    assert (await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)).ok


async def test_what_fails_on_the_way_leaves_all_in_place(
    heart: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = await worked(heart)
    before = await picture(heart, thread)
    for name in ("archive:written", "archive:recorded", "archive:moved"):

        async def stop(point: str, _agent: str, wanted: str = name) -> None:
            if point == wanted:
                raise RuntimeError(wanted)

        monkeypatch.setattr(type(heart.core.failpoints), "reach", staticmethod(stop))
        with pytest.raises(RuntimeError, match=name):
            await compacted(heart, thread)
        assert await picture(heart, thread) == before
        assert (await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)).ok
    monkeypatch.undo()
    monkeypatch.setattr("ringfence.kernel.compaction.ROWS_LEAST", 1)
    await compacted(heart, thread)
    assert await picture(heart, thread) == before
    assert (await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)).ok


@pytest.mark.parametrize("removed", [False, True])
async def test_two_looks_at_once_take_no_file_from_each_other(
    heart: Heart, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    thread = await worked(heart)
    before = [row async for row in heart.core.store.audit(thread.key)]
    if removed:
        await heart.processes.set_state(thread, "done")
        await removal.remove(heart.kernel, thread.id, "me")
    swept, others = asyncio.Event(), list[asyncio.Task[Any]]()
    loop, sweep = asyncio.get_running_loop(), segments.Archive.sweep

    def sweeps(self: segments.Archive, agent: str, places: list[str]) -> None:
        sweep(self, agent, places)
        if others:
            loop.call_soon_threadsafe(swept.set)

    async def look() -> int:
        if removed:
            done = await pruning.prune(heart.kernel, thread.id, older_than_ms=0, dry=False, operator="me")
            return sum(one["archived_rows"] for one in done["agents"])
        return (await heart.kernel.compaction.compact(thread, NOW, dry=False)).rows

    async def reach(point: str, _agent: str) -> None:
        if point == "archive:written" and not others:
            others.append(asyncio.create_task(look()))
            # It either sweeps now, or waits for this one.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(swept.wait(), 0.5)

    monkeypatch.setattr(segments.Archive, "sweep", sweeps)
    monkeypatch.setattr(type(heart.core.failpoints), "reach", staticmethod(reach))
    assert await look() > 0
    await asyncio.gather(*others)
    after = [row async for row in heart.core.store.audit(thread.key)]
    assert after[: len(before)] == before
    assert (await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)).ok


async def test_another_kernel_that_owns_the_agent_is_not_robbed(heart: Heart, world_sql: Any) -> None:
    thread = await worked(heart)
    rows = await rows_left(heart, thread)
    segment = segments.Segment(
        chain=thread.key,
        first_pos=1,
        last_pos=2,
        first_step=1,
        last_step=2,
        behind=40,
        rows=2,
        since_us=0,
        until_us=0,
        size_bytes=0,
        before=b"",
        hash=b"",
        sha256=b"",
        kept=b"",
        place="x",
    )
    await world_sql("update agents set owner = null")
    gone = await heart.core.store.archive_rows(heart.core.kernel, heart.core.fence, segment, [1, 2])
    assert gone is None
    assert await rows_left(heart, thread) == rows
    gone = await heart.core.store.archive_rows(heart.core.kernel, heart.core.fence - 1, segment, [1, 2])
    assert gone is None


# -- checkpoints --------------------------------------------------------------------------------------------------------


async def saved_steps(heart: Heart, thread: Thread) -> dict[int, int | None]:
    """Steps whose checkpoints are there, with those that they rest on."""
    rows = heart.core.store.export_rows("checkpoints", thread.key)
    return {row["step"]: row["base"] async for row in rows}


async def test_checkpoints_go_that_nobody_comes_back_to(heart: Heart) -> None:
    thread = await heart.agent(allow=ALLOWED)
    texts: list[str] = []
    for at in range(12):
        # Each adds a quarter of the first: some rest on others, some on none.
        texts += [hashlib.sha256(f"{at} {nr}".encode()).hexdigest() for nr in range(4 if at else 16)]
        state = {"texts": texts}
        await heart.call(thread, at, "checkpoint.save", state=state, schema_version=1, next_child=0)
    before = await saved_steps(heart, thread)
    assert len(before) == 12
    needed, step = list[int](), 12
    while step is not None:
        needed.insert(0, step)
        step = before[step]
    assert 1 < len(needed) < 12
    assert (
        await heart.kernel.compaction.compact(thread, NOW, dry=True)
    ).checkpoints == 0  # nothing is archived
    assert (await compacted(heart, thread)).document()["checkpoints"] == 12 - len(needed)
    assert list(await saved_steps(heart, thread)) == needed
    assert (await compacted(heart, thread)).nothing
    again = await heart.adopted_again(thread)
    assert again.replay.checkpoint is not None
    assert json.loads(again.replay.checkpoint.state) == {"texts": texts}
    assert again.unreadable == ""
    with pytest.raises(Problem, match="nothing goes back beyond the checkpoint"):
        await forks.fork(heart.kernel, again.id, "11", new_name="", start=False, operator="me")
    assert (await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)).ok


async def test_a_checkpoint_that_is_missing_is_never_passed_over(heart: Heart, world_sql: Any) -> None:
    thread = await worked(heart)
    await world_sql("delete from checkpoints where step = 40")
    again = await heart.adopted_again(thread)
    assert "the checkpoint of step 40 is missing" in again.unreadable
