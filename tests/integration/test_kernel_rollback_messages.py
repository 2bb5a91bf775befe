"""Rollback of messages, memories and artifacts on a real kernel: nothing is lost, nothing comes twice, and it can be undone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import NoSuchResource
from support.scenes import Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

ALL = ['messages.*: "*"', 'memory.*: "**"', 'artifacts.*: "*"']


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def rollback(held: Held, to: int | str, *, preview: bool = False, start: bool = True) -> dict[str, Any]:
    held.disconnect()
    return held.operator.ask("Rollback", agent=held.id, to=str(to), preview=preview, start=start)


def moved(document: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted((c["action"], c["detail"]) for c in document["changes"] if c["kind"] == "message")


def receive(held: Held) -> str | None:
    message = held.rf.messages.receive(timeout_s=0)
    return None if message is None else message.text


def replayed(held: Held, count: int) -> None:
    """Makes the calls again that the journal has: a program that is started again does."""
    for _ in range(count):
        held.rf.now()


def test_what_was_received_after_the_cut_comes_back_in_its_order(scene: Scene) -> None:
    ann, bob = scene.hold(name="ann", allow=ALL), scene.hold(name="bob", allow=ALL)
    for text in ("one", "two", "three"):
        ann.rf.messages.send(bob.id, text)
    bob.rf.now()
    assert [receive(bob), receive(bob)] == ["one", "two"]
    preview = rollback(bob, 1, preview=True)
    assert moved(preview) == [("return", f"from {ann.id}")] * 2
    done = rollback(bob, 1)
    assert (done["changes"], done["not_undoable"]) == (preview["changes"], [])
    bob.again()
    replayed(bob, 1)
    assert [receive(bob) for _ in range(4)] == ["one", "two", "three", None]


def test_what_was_sent_after_the_cut_is_voided_unless_somebody_has_it(scene: Scene) -> None:
    ann, bob = scene.hold(name="ann", allow=ALL), scene.hold(name="bob", allow=ALL)
    ann.rf.messages.send(bob.id, "before")
    cut = ann.last()["step"]
    ann.rf.messages.send(bob.id, "taken")
    ann.rf.messages.send(bob.id, "not yet")
    assert [receive(bob), receive(bob)] == ["before", "taken"]
    done = rollback(ann, cut)
    assert moved(done) == [("void", f"to {bob.id}")]
    (lost,) = done["not_undoable"]
    assert (lost["step"], lost["action"], lost["outcome"]) == (cut + 1, "messages.send", "ok")
    assert lost["resource"].endswith(f"to {bob.id}")
    assert receive(bob) is None
    ann.again()
    ann.rf.messages.send(bob.id, "before")  # answered from the journal
    ann.rf.messages.send(bob.id, "anew")
    assert [receive(bob), receive(bob)] == ["anew", None]


def test_what_it_sent_to_itself_is_gone_as_the_preview_says(scene: Scene) -> None:
    ann = scene.hold(name="ann", allow=ALL)
    ann.rf.now()
    ann.rf.messages.send(ann.id, "taken")
    assert receive(ann) == "taken"
    ann.rf.messages.send(ann.id, "not yet")
    preview = rollback(ann, 1, preview=True)
    assert moved(preview) == [("void", f"to {ann.id}")] * 2
    done = rollback(ann, 1)
    assert (done["changes"], done["not_undoable"]) == (preview["changes"], preview["not_undoable"])
    assert done["not_undoable"] == []
    ann.again()
    replayed(ann, 1)
    assert receive(ann) is None


def test_a_rollback_of_the_rollback_takes_and_sends_again_exactly_once(scene: Scene) -> None:
    ann, bob = scene.hold(name="ann", allow=ALL), scene.hold(name="bob", allow=ALL)
    ann.rf.messages.send(bob.id, "question")
    bob.rf.now()
    assert receive(bob) == "question"
    bob.rf.messages.send(ann.id, "answer")
    bob.rf.memory.append("asked a question")
    bob.rf.artifacts.put("answer.txt", "42")
    done = rollback(bob, 1, start=False)
    kinds = sorted((c["kind"], c["action"]) for c in done["changes"])
    assert kinds == [("artifact", "hide"), ("memory", "hide"), ("message", "return"), ("message", "void")]
    assert receive(ann) is None
    undone = rollback(bob, done["point"])
    kinds = sorted((c["kind"], c["action"]) for c in undone["changes"])
    assert kinds == [("artifact", "restore"), ("memory", "restore"), ("message", "send"), ("message", "take")]
    bob.again()
    replayed(bob, 1)
    assert receive(bob) == "question"  # answered from the journal
    assert receive(ann) == "answer"
    bob.rf.messages.send(ann.id, "answer")
    bob.rf.memory.append("asked a question")
    bob.rf.artifacts.put("answer.txt", "42")
    assert receive(bob) is None
    assert receive(ann) is None
    assert [entry.text for entry in bob.rf.memory.search("question")] == ["asked a question"]
    assert (bob.rf.artifacts.get("answer.txt").text, bob.rf.artifacts.get("answer.txt").version) == ("42", 1)


def test_what_was_kept_after_the_cut_is_hidden_from_everybody(scene: Scene) -> None:
    ann, bob = scene.hold(name="ann", allow=ALL), scene.hold(name="bob", allow=ALL)
    ann.rf.memory.append("first fact", space="team")
    ann.rf.artifacts.put("report", "old")
    cut = ann.last()["step"]
    ann.rf.memory.append("second fact", space="team")
    new = ann.rf.artifacts.put("report", "new")
    assert len(bob.rf.memory.search("fact", space="team")) == 2
    rollback(ann, cut)
    ann.again()
    ann.rf.memory.append("first fact", space="team")
    ann.rf.artifacts.put("report", "old")
    assert [entry.text for entry in bob.rf.memory.search("fact", space="team")] == ["first fact"]
    assert (ann.rf.artifacts.get("report").text, ann.rf.artifacts.get("report").version) == ("old", 1)
    with pytest.raises(NoSuchResource):
        ann.rf.artifacts.get(new.ref)
    assert ann.rf.artifacts.put("report", "third").version == 3
    assert ann.rf.artifacts.get("report").text == "third"
