"""Work claims and changes of the shared state as programs use them, on a real kernel, with kills between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import Conflict, InvalidRequest
from support.kernels import eventually
from support.scenes import Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

ALL = ['state.*: "**"', 'claim.take: "**"']

WAITER = """
import asyncio
from ringfence import agent

async def main():
    async with agent.boot_async() as rf:
        async with await rf.claim("job/1", 60, wait_s=None) as claim:
            total = await rf.state.update("total", lambda n: n + 1, default=0, claim=claim)
            print(claim.fence, total, flush=True)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def test_who_waits_for_a_claim_gets_it_when_its_holder_is_killed(scene: Scene) -> None:
    holder = scene.hold(name="holder", allow=ALL)
    claim = holder.rf.claim("job/1", 3600)
    assert holder.rf.state.put("total", 1, claim=claim) == 1
    waiter = scene.submit(WAITER, name="waiter", allow=ALL)
    eventually(lambda: scene.show(waiter)["state"] == "sleeping", "it does not wait")
    scene.kernel.kill()
    scene.kernel.start()
    scene.operator.ask("Kill", agent=holder.id)
    scene.await_end(waiter)
    assert scene.output(waiter).split() == ["2", "2"]
    # It gave the claim back at the end of its block.
    later = scene.hold(name="later", allow=ALL)
    assert later.rf.claim("job/1", 60).fence == 3


def test_a_program_that_starts_again_goes_on_under_its_own_claim(scene: Scene) -> None:
    held = scene.hold(name="again", allow=ALL)
    claim = held.rf.claim("job/2", 3600)
    scene.kill_program(held.id)
    again = held.again()
    # The take is replayed, so it is the same claim.
    same = again.rf.claim("job/2", 3600)
    assert (same.fence, same.until) == (claim.fence, claim.until)
    assert again.rf.state.put("done", "2", claim=[same]) == 1
    assert same.renew(7200) > claim.until
    with again.rf.state.transaction(claim=same) as tx:
        tx.put("done", tx.get("done") + "!")
    assert same.release()
    assert not same.release()
    lost = again.refused(Conflict, lambda: again.rf.state.delete("done", claim=same))
    assert "the claim is lost: `job/2` with fence 1 is held by nobody; take it again" in str(lost)
    again.refused(InvalidRequest, lambda: again.rf.claim("job/2", 0.5))


def test_lanes_of_one_agent_are_kept_apart(scene: Scene) -> None:
    rf = scene.hold(name="lanes", allow=ALL).rf

    def work() -> str:
        try:
            return str(rf.claim("job/3", 60).fence)
        except Conflict as refused:
            return refused.metadata["lane"]

    first = rf.claim("job/3", 60)
    assert rf.parallel([work, work]) == ["0", "0"]
    first.release()
    found = sorted(rf.parallel([work, work]))
    assert found[1] == "2", found
    assert found[0].startswith("0."), found


def test_no_update_is_lost_and_a_conflict_names_who_was_faster(scene: Scene) -> None:
    """C58, over what agents share: files are each agent's own."""
    ours, theirs = (scene.hold(name=name, allow=ALL) for name in ("ours", "theirs"))
    both = [ours.rf, theirs.rf]

    def faster(value: list[int]) -> list[int]:
        if len(value) < 3:
            theirs.rf.state.update("list", lambda now: [*now, 1], default=[])
        return [*value, 0]

    assert ours.rf.state.update("list", faster, default=[]) == [1, 1, 1, 0]
    seen = both[0].state.get_versioned("list")
    both[1].state.put("list", [])
    step = theirs.last()["step"]
    lost = ours.refused(Conflict, lambda: ours.rf.state.put("list", [0], if_version=seen.version))
    assert f"`list` is at version 5 by {theirs.id} at step {step}, it was read at 4" in str(lost)
    always = ours.refused(
        Conflict, lambda: ours.rf.state.update("list", lambda _: theirs.rf.state.put("list", [2]), tries=3)
    )
    assert "`list` is at version 8" in str(always)
