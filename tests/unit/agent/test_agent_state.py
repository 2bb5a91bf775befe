"""The shared state's transactions and the program's own checkpoints."""

from __future__ import annotations

import json

import pytest
from ringfence import agent
from ringfence.v1 import syscalls_pb2 as pb


def test_values_versions_and_conditions(kernel, values):
    kernel.bodies |= values({"a": ({"n": 1}, 3)})
    kernel.bodies["state.put"] = lambda arguments: {"version": 4}
    kernel.bodies["state.delete"] = lambda arguments: {"existed": True, "version": 5}
    with agent.boot() as rf:
        assert rf.state.get("a") == {"n": 1}
        assert rf.state.get("b") is None
        assert rf.state.get("b", "none") == "none"
        assert rf.state.get_versioned("a").version == 3
        assert rf.state.put("a", [1], if_version=0) == 4
        assert kernel.arguments() == {"key": "a", "value": [1], "if_version": 0}
        rf.state.put("a", None)
        assert kernel.arguments() == {"key": "a", "value": None}
        assert rf.state.delete("a", if_version=4) is True
        with pytest.raises(agent.InvalidRequest, match="use strings as keys"):
            rf.state.put("a", {"x": [{1: 2}]})


def test_a_transaction_commits_what_it_read_and_wrote(kernel, values):
    stored = {"a": (1, 3), "b": (2, 8)}
    kernel.bodies |= values(stored)
    with agent.boot() as rf, rf.state.transaction() as tx:
        tx.put("sum", tx.get("a") + tx.get("b") + tx.get("c", 0))
        assert tx.get("sum") == 3
        tx.delete("b")
        assert tx.get("b", "gone") == "gone"
        tx.put("d", 1)
        tx.delete("d")
    assert kernel.arguments() == {
        "reads": {"a": 3, "b": 8, "c": 0},
        "puts": {"sum": 3},
        "deletes": ["b", "d"],
    }
    assert stored == {"a": (1, 3), "sum": (3, 1)}


def test_a_transaction_whose_reads_changed_conflicts(kernel, values):
    stored = {"a": (1, 3)}
    kernel.bodies |= values(stored)

    def change_meanwhile(tx) -> None:
        tx.get("a")
        stored["a"] = (7, 4)
        assert tx.get("a") == 7  # seen anew, but the first version counts
        tx.put("b", 1)

    with agent.boot() as rf, pytest.raises(agent.Conflict) as caught, rf.state.transaction() as tx:
        change_meanwhile(tx)
    assert caught.value.metadata == {"keys": "a"}
    assert "b" not in stored


def test_a_block_that_raises_or_writes_nothing_commits_nothing(kernel, values):
    kernel.bodies |= values({"a": (1, 3)})
    with agent.boot() as rf:
        with pytest.raises(ZeroDivisionError), rf.state.transaction() as tx:
            tx.put("a", tx.get("a") // 0)
        with rf.state.transaction() as tx:
            tx.get("a")
    assert {call.action for call in kernel.calls} == {"state.get"}


def restored(state: object, version: int) -> pb.Welcome:
    return pb.Welcome(
        agent="a1", thread="t1", branch=1, restored=True, checkpoint=json.dumps(state).encode(),
        checkpoint_version=version, next_step=7, next_child=2,
    )  # fmt: skip


def test_a_checkpoint_says_where_its_lanes_go_on(kernel):
    kernel.welcome = restored({"page": 3}, 1)
    kernel.bodies["checkpoint.save"] = lambda _: {"step": 1}
    with agent.boot() as rf:
        assert rf.checkpoint.restored == {"page": 3}
        assert rf.checkpoint.restored_version == 1
        rf.thread(rf.now).join()
        assert rf.checkpoint.save({"page": 4}) == 2
        rf.checkpoint.save([1], version=9)
    assert kernel.places() == [("0.2", 0), ("0", 7), ("0", 8)]
    assert kernel.arguments(1) == {"state": {"page": 4}, "schema_version": 1, "next_child": 3}
    assert kernel.arguments(2)["schema_version"] == 9


def test_without_a_checkpoint_there_is_none(kernel):
    with agent.boot() as rf:
        assert rf.checkpoint.restored is None
        assert rf.checkpoint.restored_version is None


def test_an_older_checkpoint_is_upgraded_step_by_step(kernel):
    kernel.welcome = restored({"page": 3}, 1)
    upgraders = {1: lambda old: {"pages": [old["page"]]}, 2: lambda old: {**old, "done": False}}
    with agent.boot(checkpoint_version=3, upgraders=upgraders) as rf:
        assert rf.checkpoint.restored == {"pages": [3], "done": False}
        assert rf.checkpoint.restored_version == 1


@pytest.mark.parametrize(
    ("welcome", "version", "match"),
    [
        (restored({}, 3), 2, "has version 3, this program reads 2"),
        (restored({}, 1), 3, "no upgrader leads from 1 to 2"),
        (pb.Welcome(restored=True, checkpoint=b"{cut", checkpoint_version=1), 1, "not JSON"),
        (pb.Welcome(restored=True, checkpoint=b"\xff", checkpoint_version=1), 1, "not JSON"),
    ],
)
def test_a_checkpoint_that_can_not_be_read_is_an_error(kernel, welcome, version, match):
    kernel.welcome = welcome
    with pytest.raises(agent.CheckpointUnreadable, match=match), agent.boot(checkpoint_version=version):
        pass


def test_an_upgrader_that_can_not_read_a_state_is_named_with_version_and_field(kernel):
    kernel.welcome = restored({"page": 3}, 1)
    upgraders = {1: lambda old: old, 2: lambda old: {"pages": old["pages"]}}
    said = "has version 1, and its upgrader from 2 to 3 can't read it: it has no `pages`"
    with pytest.raises(agent.CheckpointUnreadable, match=said):
        agent.boot(checkpoint_version=3, upgraders=upgraders).__enter__()


async def test_asyncio_reads_and_saves_the_same(kernel):
    kernel.welcome = restored({"page": 3}, 1)
    kernel.bodies["checkpoint.save"] = lambda _: {"step": 1}
    async with agent.boot_async(checkpoint_version=2, upgraders={1: lambda old: old["page"]}) as rf:
        assert rf.checkpoint.restored == 3
        assert await rf.checkpoint.save({"page": 4}) == 1
    assert kernel.arguments() == {"state": {"page": 4}, "schema_version": 2, "next_child": 2}


async def test_a_checkpoint_beside_a_running_task_is_refused(kernel):
    import asyncio

    gate = asyncio.Event()
    async with agent.boot_async() as rf:
        task = asyncio.create_task(gate.wait())
        with pytest.raises(agent.InvalidRequest, match=r"`0\.0` is still running"):
            await rf.checkpoint.save({})
        gate.set()
        await task
    assert kernel.calls == []
