"""Reads what the journal has of a thread: replies to give again, effect ids that are taken, taint and files of earlier runs."""

from __future__ import annotations

from ringfence.kernel.core import Core
from ringfence.kernel.facts import Facts, Taint, earlier_runs, marks_of
from ringfence.kernel.journal.types import Damaged, StoredRow
from ringfence.kernel.reads import History
from ringfence.kernel.replay import Effects, Lineage, Replay
from ringfence.kernel.thread import NO_GRANTS, Thread


async def read_past(core: Core, thread: Thread, arrived: list[StoredRow]) -> None:
    """Have a thread know what its lineage has recorded.

    Args:
        core: the kernel's parts.
        thread: whose.
        arrived: outcomes that come in while this reads.

    Raises:
        Unavailable: the database is away; what it knew stays in force.
    """
    store, lineage = core.store, thread.lineage
    kept = thread.replay.unfinished.items()
    replay = Replay(unfinished={p: u for p, u in kept if lineage.holds(u.intent.branch, u.intent.step)})
    parts = lineage.parts
    thread.unreadable = ""
    try:
        replay.checkpoint = await store.latest_checkpoint(thread.key, parts)
    except Damaged as error:
        # Never taken for none: that would do all of it again.
        older = f"ringfence rollback {thread.id} --to {error.step - 1} --start"
        thread.unreadable = f"{error}; go on from before it: {older}"
    if replay.checkpoint is not None:
        replay.saved = replay.checkpoint.base
    after = 0 if replay.checkpoint is None else replay.checkpoint.step
    async for row in store.lineage_outcomes(thread.key, parts, after):
        replay.add(row)
        if not thread.asleep:
            replay.past.foresee(row)
        if row.action == "checkpoint.save" and row.outcome == "ok" and not thread.unreadable:
            # Its state was pruned where this agent comes from. Never passed over: the program would do that part again.
            thread.unreadable = f"the checkpoint of step {row.step} is missing, and the program can't go on without it; go on from a later one"
    effects = Effects()
    async for row in store.effect_outcomes(thread.key):
        effects.add(row)
    purged = frozenset(await store.purged_grants(thread.key)) or NO_GRANTS
    facts = await _facts(core, thread)
    # INVARIANT: from here to the end nothing suspends, so no call ends between what was read and what is taken over.
    for row in arrived:
        effects.add(row)
        if lineage.holds(row.branch, row.step):
            replay.add(row)
            facts.take_row(row)
    # Calls that have no outcome yet hold their ids too: those in flight, and those that a dead kernel left.
    consumed = effects.consumed(lineage)
    consumed.update(f.effect_id for f in thread.flights.values() if f.effect_id)
    consumed.update(u.intent.effect_id for u in replay.unfinished.values() if u.intent.effect_id)
    thread.effects, thread.consumed_effects = effects.known(), consumed
    replay.taken_back = effects.taken_back
    thread.purged = purged
    thread.replay = replay
    thread.facts, thread.history = facts, History()


async def _facts(core: Core, thread: Thread) -> Facts:
    """What the journal says of taint on the present branch, and of files of earlier runs."""
    store, lineage = core.store, thread.lineage
    born = await store.born_under(thread.key)
    marks = None if born is None else marks_of(born)
    facts = Facts()
    if marks is not None:
        taint = marks.tainted
        inherited = None if taint is None else Taint(step=0, source=f"its parent, tainted by {taint.text}")
        facts = Facts(inherited, marks.paths)
    branches = await store.branches(thread.key)
    every = [(b.branch, Lineage.of(b.branch, branches)) for b in branches]
    earlier = earlier_runs(lineage, every)
    async for row in store.fact_rows(thread.key):
        if lineage.holds(row.branch, row.step):
            facts.take_row(row)
        elif any(run.holds(row.branch, row.step) for run in earlier):
            facts.take_row(row, files_only=True)
    return facts
