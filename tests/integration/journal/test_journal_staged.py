"""Children whose files a kernel made: another one learns whether they were born only where that can't change any more."""

from __future__ import annotations

import pytest


@pytest.fixture
async def makers(world):
    """The asker, one that ran before it on the same directory, and a living one of another directory; with their ids."""
    before = await world.kernel(data_dir="/a")
    living = await world.kernel(data_dir="/b")
    asker = await world.kernel(data_dir="/a")
    names = {one.key: (await world.store.new_agent_key(one.key))[1] for one in (before, living, asker)}
    return asker, (before, names[before.key]), (living, names[living.key]), names[asker.key]


async def test_what_a_dead_kernel_made_was_never_born(world, makers):
    asker, (before, name), _, _ = makers
    assert await world.store.was_born(asker.key, asker.fence, name, 1, "child-abcde") is False
    assert not await world.store.heartbeat(before.key, before.fence, 600)


async def test_what_a_living_kernel_makes_is_left_alone(world, makers):
    asker, _, (living, name), own = makers
    assert await world.store.was_born(asker.key, asker.fence, name, 1, "child-abcde") is None
    assert await world.store.was_born(asker.key, asker.fence, own, 1, "child-abcde") is None
    assert await world.store.was_born(asker.key, asker.fence, "k-ofanotherd", 1, "child-abcde") is None
    assert await world.store.heartbeat(living.key, living.fence, 600)
    await world.sql("update kernels set lease_until = clock_timestamp() where key = %s", [living.key])
    assert await world.store.was_born(asker.key, asker.fence, name, 1, "child-abcde") is False
    assert not await world.store.heartbeat(living.key, living.fence, 600)


async def test_whoever_is_fenced_learns_nothing(world, makers):
    asker, (before, name), _, own = makers
    assert await world.store.was_born(before.key, before.fence, own, 1, "child-abcde") is None
    assert await world.store.was_born(asker.key, asker.fence + 1000, name, 1, "child-abcde") is None
    assert await world.store.heartbeat(asker.key, asker.fence, 600)


async def test_a_child_with_a_row_was_born(world, makers):
    asker, (_, name), _, _ = makers
    child = await world.agent(asker, "child")
    assert await world.store.was_born(asker.key, asker.fence, name, 1, child.id) is True
