"""Approvals that hold for longer than once: the same call of the same agent, for a while, until somebody ends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import Denied
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, console, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

WRITE = 'fs.write: "/workspace/data/**"'
HOUR_MS = 3_600_000


@pytest.fixture
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def waiting(scene: Scene) -> list[dict[str, Any]]:
    return scene.operator.ask("Approvals")["approvals"]


def asked(scene: Scene, held: Held, call: Any) -> tuple[Any, str]:
    """Make a call that asks; gives what becomes of it and its approval."""
    before = {a["id"] for a in waiting(scene)}
    making = held.rf.thread(call)
    found: list[str] = []

    def there() -> bool:
        found[:] = [a["id"] for a in waiting(scene) if a["id"] not in before]
        return bool(found)

    eventually(there, "nobody is asked")
    return making, found[0]


def approved_for_an_hour(scene: Scene, held: Held) -> str:
    making, id_ = asked(scene, held, lambda: held.rf.fs.write_text("data/a", "x"))
    answer = scene.operator.ask("Approve", id=id_, for_ms=HOUR_MS)
    assert answer["good_until"] is not None
    making.result()
    return id_


def test_the_same_call_asks_nobody_again_and_any_other_does(scene: Scene) -> None:
    held = scene.hold(ask=[WRITE], files={"data/a": "old"})
    id_ = approved_for_an_hour(scene, held)
    for _ in range(3):
        held.rf.fs.write_text("data/a", "x")
    assert waiting(scene) == []
    last = held.last()
    assert (last["verdict"], last["outcome"]) == ("ask", "ok")
    assert scene.operator.ask("PolicyExplain", agent=held.id, step=last["step"])["verdict"] == "ask"
    # Another text, another file: another call.
    for other in (lambda: held.rf.fs.write_text("data/a", "y"), lambda: held.rf.fs.write_text("data/b", "x")):
        making, another = asked(scene, held, other)
        scene.operator.ask("Deny", id=another, reason="no")
        with pytest.raises(Denied):
            making.result()
    assert scene.operator.ask("ApprovalShow", id=id_)["good_until"] is not None


def test_it_is_no_other_agents(scene: Scene) -> None:
    approved_for_an_hour(scene, scene.hold(ask=[WRITE], files={"data/a": "old"}))
    other = scene.hold(ask=[WRITE], files={"data/a": "old"})
    making, id_ = asked(scene, other, lambda: other.rf.fs.write_text("data/a", "x"))
    scene.operator.ask("Deny", id=id_, reason="not you")
    with pytest.raises(Denied):
        making.result()


def test_what_is_revoked_stays_revoked_under_it(scene: Scene) -> None:
    held = scene.hold(ask=[WRITE], files={"data/a": "old"})
    approved_for_an_hour(scene, held)
    scene.operator.ask("Revoke", agent=held.id, rule_or_grant=WRITE)
    with pytest.raises(Denied):
        held.rf.fs.write_text("data/a", "x")


def test_it_ends_when_it_is_ended_and_over_a_killed_kernel_it_lasts(scene: Scene) -> None:
    held = scene.hold(ask=[WRITE], files={"data/a": "old"})
    id_ = approved_for_an_hour(scene, held)
    scene.kernel.kill()
    scene.kernel.start()
    held = held.again()
    held.rf.thread(
        lambda: held.rf.fs.write_text("data/a", "x")
    ).result()  # in its old place: answered from the record
    held.rf.fs.write_text("data/a", "x")
    shown = console("approvals", "end", id_, "--reason", "done", "--data", str(scene.kernel.data))
    assert shown.returncode == 0, shown.stderr
    making, another = asked(scene, held, lambda: held.rf.fs.write_text("data/a", "x"))
    scene.operator.ask("Deny", id=another, reason="over")
    with pytest.raises(Denied):
        making.result()
    with pytest.raises(Refused, match="no further call"):
        scene.operator.ask("ApprovalEnd", id=id_)


def test_what_can_not_hold_for_longer_is_refused(scene: Scene) -> None:
    held = scene.hold(ask=[WRITE], files={"data/a": "old"})
    making, id_ = asked(scene, held, lambda: held.rf.fs.write_text("data/a", "x"))
    with pytest.raises(Refused, match="approved once"):
        scene.operator.ask("Approve", id=id_, for_ms=HOUR_MS, arguments=b'{"path":"data/a","data":"eA=="}')
    with pytest.raises(Refused, match="30 days"):
        scene.operator.ask("Approve", id=id_, for_ms=31 * 24 * HOUR_MS)
    scene.operator.ask("Approve", id=id_)
    making.result()
    question, id_ = asked(scene, held, lambda: held.rf.ask("May I?"))
    with pytest.raises(Refused, match="each time anew"):
        scene.operator.ask("Approve", id=id_, for_ms=HOUR_MS)
    scene.operator.ask("Approve", id=id_, reason="yes")
    question.result()
