"""Work claims over two kernels: one holder at a time, and nothing is written under a claim that is lost."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from ringfence.kernel.journal.types import StateConflict
from ringfence.syscalls import claim_release, claim_renew, claim_take
from ringfence.syscalls.base import StateChange
from ringfence.syscalls.errors import Conflict

TTL_MS = 600_000


class Worker:
    """An agent of a kernel that claims and writes; each call is a step of its own."""

    def __init__(self, agent, journal, entry):
        self.agent, self.id, self._journal, self._entry, self._step = agent, agent.id, journal, entry, 0

    def _append(self, atomic, finish):
        self._step += 1
        return self._journal.append(self._entry(self.agent.key, self._step, atomic=atomic, finish=finish))

    async def _work(self, body, **values):
        arguments, found = body.Arguments(**values), []

        def finish(done):
            found.append(body.finish(arguments, done))
            return msgspec.json.encode(found[-1])

        await self._append(body.transaction(arguments), finish)
        return found[-1]

    async def take(self, key, ttl_ms=TTL_MS):
        return (await self._work(claim_take, key=key, ttl_ms=ttl_ms)).fence

    async def renew(self, key, fence):
        return await self._work(claim_renew, key=key, fence=fence, ttl_ms=TTL_MS)

    async def release(self, key, fence):
        return (await self._work(claim_release, key=key, fence=fence)).released

    async def put(self, key, value, **claims):
        done = await self._append(StateChange(puts={key: value}, **claims), lambda _: b"{}")
        return done.versions[key]


@pytest.fixture
async def workers(world, entry):
    """Two agents of two kernels on one database."""
    kernels = await world.kernel(data_dir="/a"), await world.kernel(data_dir="/b")
    agents = [await world.agent(kernel, name) for kernel, name in zip(kernels, "ab", strict=True)]
    journals = [await world.journal(kernel, agent) for kernel, agent in zip(kernels, agents, strict=True)]
    return [Worker(agent, journal, entry) for agent, journal in zip(agents, journals, strict=True)]


async def test_a_claim_has_one_holder_over_all_kernels(workers):
    ours, theirs = workers
    assert await ours.take("job") == 1
    with pytest.raises(
        Conflict, match=f"`job` is claimed by {ours.id} since its step 1, until 20"
    ) as refused:
        await theirs.take("job")
    assert refused.value.metadata["agent"] == ours.id
    assert await ours.release("job", 1)
    assert await theirs.take("job") == 2
    assert not await ours.release("job", 1)
    with pytest.raises(Conflict, match=f"fence 1 is lost: {theirs.id} took it at step 2 with fence 2"):
        await ours.renew("job", 1)


async def test_of_many_who_want_it_at_once_one_gets_it(workers):
    tries = [worker.take(f"job-{nr}") for nr in range(20) for worker in workers]
    found = await asyncio.gather(*tries, return_exceptions=True)
    for nr in range(20):
        pair = found[2 * nr : 2 * nr + 2]
        assert sorted(type(one).__name__ for one in pair) == ["Conflict", "int"], pair


async def test_what_is_written_under_a_claim_is_refused_once_it_is_lost(world, workers):
    ours, theirs = workers
    fence = await ours.take("job")
    assert await ours.put("result", b"1", claims={"job": fence}) == 1
    # Its time runs out: nobody has to see to that, and nothing counts under it from then on.
    await world.sql("update claims set until = clock_timestamp() - interval '1 second'")
    with pytest.raises(StateConflict) as late:
        await ours.put("result", b"2", claims={"job": fence})
    assert late.value.claims == {"job": (fence, "", 1, fence)}
    await ours.renew("job", fence)
    assert await ours.put("result", b"2", claims={"job": fence}) == 2
    await world.sql("update claims set until = clock_timestamp() - interval '1 second'")
    newer = await theirs.take("job")
    assert newer == fence + 1
    for claims in ({"job": fence}, {"job": newer}, {"never": 1}):
        with pytest.raises(StateConflict) as lost:
            await ours.put("result", b"3", claims=claims)
        assert set(lost.value.claims) == set(claims)
    assert await theirs.put("result", b"4", claims={"job": newer}) == 3


async def test_the_claims_of_an_agent_that_ended_are_free(world, workers):
    ours, theirs = workers
    await ours.take("job")
    await world.sql("update agents set state = 'killed' where id = %s", [ours.id])
    assert await theirs.take("job") == 2


async def test_the_same_lane_takes_its_own_claim_anew_and_fences_off_what_it_was(workers):
    ours, _ = workers
    assert await ours.take("job") == 1
    assert await ours.take("job") == 2
    with pytest.raises(StateConflict):
        await ours.put("result", b"1", claims={"job": 1})
    assert await ours.put("result", b"1", claims={"job": 2}) == 1


async def test_a_rollback_releases_what_was_claimed_after_the_cut(world, workers):
    ours, theirs = workers
    await ours.take("kept")
    await ours.take("gone")
    lineage = [(0, 1)]
    listed = await world.store.rewind_atoms(ours.agent.key, lineage, dry=True)
    assert [(one.kind, one.target, one.action) for one in listed] == [("claim", "gone", "release")]
    await world.store.rewind_atoms(ours.agent.key, lineage, dry=False)
    assert await theirs.take("gone") == 2
    with pytest.raises(Conflict):
        await theirs.take("kept")


async def test_two_who_lock_claims_and_keys_crosswise_never_wait_for_each_other(workers):
    ours, theirs = workers
    fences = {"a": await ours.take("a"), "b": await ours.take("b")}
    others = {"c": await theirs.take("c"), "d": await theirs.take("d")}
    await asyncio.gather(
        *(ours.put(key, b"1", claims=fences) for key in "xyzyx" * 10),
        *(theirs.put(key, b"2", claims=others) for key in "zyxyz" * 10),
        *(ours.renew(key, fence) for key, fence in fences.items()),
        *(theirs.renew(key, fence) for key, fence in others.items()),
    )
