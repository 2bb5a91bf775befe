"""A rollback point that the journal knows and the store has lost stops a rollback; what may have been sent is listed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ringfence.kernel.operations.rollbacks import undo_document
from ringfence.kernel.rollback_cuts import Cut
from ringfence.syscalls.errors import Fenced
from support.heart import URL, Heart, heart_on
from support.kernels import Refused, running
from support.scenes import short_directory

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: lost}
spec:
  run: {command: [python, agent.py]}
  permissions: {allow: [{fs.*: "/workspace/**"}]}
"""

PROGRAM = """
from ringfence import agent

with agent.boot() as rf:
    for name in ("a.txt", "b.txt", "c.txt"):
        rf.fs.write_text(name, "new")
"""


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


@pytest.mark.sandbox
@pytest.mark.parametrize("preview", [True, False])
def test_a_deleted_point_is_refused_by_name_and_nothing_changes(tmp_path: Path, preview: bool) -> None:
    with running(tmp_path / "d") as kernel:
        old = dict.fromkeys(("a.txt", "b.txt", "c.txt"), "old")
        agent = kernel.operator.submit(MANIFEST, {"agent.py": PROGRAM, **old})
        assert kernel.operator.wait(agent)["state"] == "done"
        live = Path(kernel.operator.ask("Show", agent=agent)["workspace"])
        (kernel.data / "points" / agent / "p2.json").unlink()
        found = kernel.operator.ask("Points", agent=agent, verify=True)["points"]
        assert [(p["id"], p["verified"]) for p in found] == [("p1", True), ("p2", False), ("p3", True)]
        with pytest.raises(Refused, match=r"rollback point `p2` is gone: .*; restore the points") as refused:
            kernel.operator.ask("Rollback", agent=agent, to="0", preview=preview)
        assert refused.value.exit_code == 5
        assert {name: (live / name).read_text() for name in old} == dict.fromkeys(old, "new")
        # What does not need it goes.
        kernel.operator.ask("Rollback", agent=agent, to="2", preview=preview)
        assert (live / "c.txt").read_text() == ("new" if preview else "old")


async def test_what_may_have_been_sent_is_listed_as_not_undoable(heart: Heart) -> None:
    thread = await heart.agent(allow=['http.*: "http://pay.test/**"'])
    assert (await heart.call(thread, 0)).failure is None
    # A second one is sent, and the journal takes no more rows just then: an intent without an outcome.
    heart.post.stop("after")
    calling = heart.begin(thread, 1, url=URL + "/2")
    await heart.post.reached["after"].wait()
    heart.core.journal.forget(thread.key)
    heart.post.go("after")
    assert isinstance((await calling).failure, Fenced)
    thread = await heart.adopted_again(thread)
    plans = heart.kernel.rollback.plans
    for cut, expected in ((0, [(2, "unknown"), (1, "ok")]), (1, [(2, "unknown")]), (2, [])):
        undo = await plans.plan(thread, Cut(step=cut, parent=0, seen=0), None)
        document = undo_document(undo)["not_undoable"]
        assert [(call["step"], call["outcome"]) for call in document] == expected
