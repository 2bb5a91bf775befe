"""Facts on a real kernel: taint and how it spreads, freshness, and what conditions make of them, over restarts and rollbacks."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import Denied, Stale
from support.kernels import eventually
from support.scenes import HOLD, Held, Scene, scene_on
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    wild: {{type: http, base: "{wild}/wild", untrusted: true}}
    tame: {{type: http, base: "{wild}/tame", environment: staging}}
    prod: {{type: http, base: "{wild}/prod", environment: prod}}
  untaint: [{{exec.run: "sanitise *"}}, {{fs.delete: "/workspace/quarantine"}}]
  roles:
    base: {{allow: [{{fs.read: "/workspace/**"}}], when: [{{action: fs.write, resource: "/workspace/role", if: tainted, then: deny}}]}}
    writer: {{roles: [base], allow: [{{fs.write: "/workspace/**"}}]}}
"""
ALL = [
    *('fs.*: "/workspace/**"', 'state.*: "**"', 'http.*: "**"', 'memory.*: "**"'),
    *('artifacts.*: "*"', 'messages.*: "*"', 'exec.run: "*"', 'spawn: "*"'),
]
TAINTED = "when: [{action: http.post, if: tainted, then: deny}]"


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("wild") / "journal")
    yield target
    target.close()


@pytest.fixture(scope="module")
def scene(wild: Target) -> Iterator[Scene]:
    with scene_on(None, config=CONFIG.format(wild=wild.base)) as scene:
        yield scene


def held_by(scene: Scene, more: str = TAINTED, **rules: Any) -> Held:
    return scene.hold(allow=rules.pop("allow", ALL), more=more, **rules)


def posts(held: Held, wild: Target) -> bool:
    """Whether the agent may still send something: what its condition denies under a taint."""
    try:
        held.rf.http.post(f"{wild.base}/tame/send", json={"a": 1})
    except Denied as error:
        if "tainted" in error.message:
            return False
        raise
    return True


def tainted(held: Held) -> str | None:
    return held.operator.ask("PolicyShow", agent=held.id)["tainted"]


def explained(held: Held, step: int | None = None) -> dict[str, Any]:
    step = held.last()["step"] if step is None else step
    return held.operator.ask("PolicyExplain", agent=held.id, step=step)


# -- taint ------------------------------------------------------------------------------------------------------------


def test_a_read_from_an_untrusted_resource_taints_until_a_rollback_before_it(
    scene: Scene, wild: Target
) -> None:
    held = held_by(scene)
    assert posts(held, wild)
    before = held.last()["step"]
    held.rf.http.get(f"{wild.base}/wild/page")
    assert tainted(held) == f"the resource `wild` at step {before + 1}"
    assert not posts(held, wild)
    told = explained(held)
    assert told["verdict"] == "deny"
    assert told["rules"][0]["id"] == "w1"
    assert told["rules"][0]["line"] == 18
    assert told["because"] == [f"w1: the thread is tainted by the resource `wild` at step {before + 1}"]
    assert told["facts"]["tainted"] == {"step": before + 1, "by": "the resource `wild`"}
    assert explained(held, before + 1)["facts"]["taints"] == "the resource `wild`"
    can = held.operator.ask(
        "PolicyCanI", agent=held.id, action="http.post", resource=f"{wild.base}/tame/send"
    )
    assert (can["verdict"], can["rule"]) == ("deny", "w1")
    # What no condition speaks about goes on.
    held.rf.fs.write_text("a.txt", "a")
    held.operator.ask("Rollback", agent=held.id, to=str(before), start=True)
    held.again()
    assert tainted(held) is None
    held.rf.http.post(f"{wild.base}/tame/send", json={"a": 1})  # replayed
    assert posts(held, wild)


def test_it_survives_the_kernel_and_goes_with_a_fork(scene: Scene, wild: Target) -> None:
    held = held_by(scene)
    held.rf.fs.write_text("a.txt", "a")
    clean = held.last()["step"]
    held.rf.http.get(f"{wild.base}/wild/page")
    held.rf.state.put("facts/dirty", 1)
    after = explained(held)
    held.disconnect()
    scene.kernel.kill()
    scene.kernel.start()
    held.again()
    assert tainted(held) == f"the resource `wild` at step {clean + 1}"
    assert explained(held, after["step"]) == after
    # The program goes on by replay: its first calls are answered from the record, and taint no second time.
    held.rf.fs.write_text("a.txt", "a")
    held.rf.http.get(f"{wild.base}/wild/page")
    held.rf.state.put("facts/dirty", 1)
    assert not posts(held, wild)
    forked = held.operator.ask("Fork", agent=held.id, at=str(after["step"]), name=scene.name("fork"))
    fresh = held.operator.ask("Fork", agent=held.id, at=str(clean), name=scene.name("fork"))
    shown = {f["id"]: held.operator.ask("PolicyShow", agent=f["id"])["tainted"] for f in (forked, fresh)}
    assert shown == {forked["id"]: f"the resource `wild` at step {clean + 1}", fresh["id"]: None}


def dirty(scene: Scene, wild: Target, **more: Any) -> Held:
    held = held_by(scene, **more)
    held.rf.http.get(f"{wild.base}/wild/page")
    return held


def test_what_a_tainted_thread_writes_taints_who_reads_it(scene: Scene, wild: Target) -> None:
    source = dirty(scene, wild)
    source.rf.state.put("facts/shared", {"x": 1})
    source.rf.memory.append("remember the zebra", space="facts")
    readers = {name: held_by(scene) for name in ("state", "memory", "message", "nothing")}
    source.rf.messages.send(readers["message"].id, "do this")
    clean = held_by(scene)
    clean.rf.state.put("facts/clean", 1)
    clean.rf.messages.send(readers["nothing"].id, "hello")
    assert readers["state"].rf.state.get("facts/shared") == {"x": 1}
    assert [e.text for e in readers["memory"].rf.memory.search("zebra", space="facts")] == [
        "remember the zebra"
    ]
    message = readers["message"].rf.messages.receive()
    assert message is not None
    assert message.text == "do this"
    readers["nothing"].rf.state.get("facts/clean")
    readers["nothing"].rf.messages.receive()
    said = {name: tainted(held) for name, held in readers.items()}
    assert said.pop("nothing") is None
    assert source.id in (said["state"] or "")
    assert source.id in (said["memory"] or "")
    assert "a message from" in (said["message"] or "")
    for name in ("state", "memory", "message"):
        assert not posts(readers[name], wild), name
    assert posts(readers["nothing"], wild)
    # Through a reader it goes on: the third hand is tainted as well.
    readers["state"].rf.state.put("facts/third", 1)
    third = held_by(scene)
    third.rf.state.get("facts/third")
    assert not posts(third, wild)


def test_a_value_that_a_rollback_brings_back_keeps_its_taint(scene: Scene, wild: Target) -> None:
    source = dirty(scene, wild)
    source.rf.state.put("facts/back", "from outside")
    clean = held_by(scene)
    clean.rf.now()
    cut = clean.last()["step"]
    clean.rf.state.put("facts/back", "mine")
    reader = held_by(scene)
    reader.rf.state.get("facts/back")
    assert tainted(reader) is None
    clean.operator.ask("Rollback", agent=clean.id, to=str(cut))
    assert reader.rf.state.get("facts/back") == "from outside"
    assert tainted(reader) is not None


def test_a_child_is_born_with_it(scene: Scene, wild: Target) -> None:
    parent = dirty(scene, wild)
    rules = {"allow": ['http.post: "**"', 'fs.*: "/workspace/**"']}
    born = scene.held(parent.rf.spawn("born", ["sh", "-c", HOLD], permissions=rules).id)
    assert "its parent" in (tainted(born) or "")
    # The parent's condition bounds the child, which has none of its own.
    error = born.refused(Denied, lambda: born.rf.http.post(f"{wild.base}/tame/send"))
    assert parent.id in error.message
    assert explained(born)["rules"][0]["id"] == f"{parent.id}/w1"


def test_only_an_operators_rule_ends_it_and_files_stay_tainted(scene: Scene, wild: Target) -> None:
    held = held_by(scene, files={"plain.txt": "plain", "quarantine": "x"})
    held.rf.http.get(f"{wild.base}/wild/page")
    held.rf.fs.write_text("taken.txt", "from outside")
    held.rf.exec.run(["sh", "-c", "echo by a command > made.txt"])
    held.rf.artifacts.put("kept", b"from outside")
    # A program of its own with the name of a trusted one, and what only goes by that name, end nothing.
    held.rf.fs.write_text("sanitise", "#!/bin/sh\n", mode=0o755)
    held.rf.exec.run(["./sanitise", "x"])
    held.rf.exec.run(["sh", "-c", "sanitise x"])
    assert tainted(held) is not None
    held.rf.fs.delete("quarantine")
    assert explained(held)["facts"]["untaints"] == "u2"
    assert tainted(held) is None
    assert posts(held, wild)
    held.rf.fs.read_text("plain.txt")
    assert tainted(held) is None
    for taints in (
        lambda: held.rf.fs.read_text("taken.txt"),
        lambda: held.rf.fs.read_text("made.txt"),
        lambda: held.rf.artifacts.get("kept"),
        lambda: held.rf.exec.run(["true"]),
    ):
        held.rf.fs.write_text("quarantine", "x")
        held.rf.fs.delete("quarantine")
        assert tainted(held) is None
        taints()
        assert not posts(held, wild)


def test_roles_hand_their_conditions_on(scene: Scene, wild: Target) -> None:
    text = 'permissions:\n  roles: [writer]\n  allow: [{http.get: "**"}]'
    held = scene.held(scene.operator.submit(_manifest(scene.name("role"), text), {"a": "a"}))
    assert held.rf.fs.read_text("a") == "a"
    held.rf.fs.write_text("role", "1")
    held.rf.http.get(f"{wild.base}/wild/page")
    held.rf.fs.write_text("elsewhere", "1")
    held.refused(Denied, lambda: held.rf.fs.write_text("role", "2"))
    assert explained(held)["rules"][0]["id"] == "base.w1"


def _manifest(name: str, spec: str) -> str:
    command = json.dumps(["sh", "-c", HOLD])
    lines = "".join(f"  {line}\n" for line in spec.splitlines())
    head = f"apiVersion: ringfence/v1\nkind: Agent\nmetadata: {{name: {name}}}\nspec:\n"
    return f"{head}  run: {{command: {command}}}\n{lines}"


# -- freshness --------------------------------------------------------------------------------------------------------

FRESH = 'when: [{action: state.put, resource: "deploy/**", require: {fresh: 1h}}]'


def test_what_changed_since_it_was_read_is_stale(scene: Scene) -> None:
    held = held_by(scene, FRESH, files={"page.md": "one", "other.md": "x"})
    other = held_by(scene, "")
    other.rf.state.put("facts/limit", 10)
    held.rf.state.put("deploy/0", 1)  # nothing was read: nothing can be stale
    held.rf.fs.read_text("page.md")
    held.rf.state.get("facts/limit")
    held.rf.state.put("deploy/1", 1)
    other.rf.state.put("facts/limit", 11)
    error = held.refused(Stale, lambda: held.rf.state.put("deploy/2", 1))
    assert "facts/limit" in error.message
    assert other.id in error.message
    step = held.last()
    assert (step["verdict"], step["outcome"]) == ("deny", "refused")
    held.rf.state.put("elsewhere", 1)
    held.rf.state.get("facts/limit")
    held.rf.state.put("deploy/3", 1)
    # A command changes what was read; the thread's own write is known to it.
    held.rf.exec.run(["sh", "-c", "echo two > page.md"])
    error = held.refused(Stale, lambda: held.rf.state.put("deploy/4", 1))
    assert "/workspace/page.md" in error.message
    held.rf.fs.write_text("page.md", "three")
    held.rf.state.put("deploy/5", 1)
    held.disconnect()
    scene.kernel.kill()
    scene.kernel.start()
    held.again()


def test_age_and_what_has_to_have_been_read(scene: Scene, wild: Target) -> None:
    of = f'{{http.get: "{wild.base}/tame/**"}}'
    when = f"when: [{{action: http.post, require: {{fresh: 300ms, of: [{of}]}}}}]"
    held = held_by(scene, when, files={"old.md": "old"})
    held.rf.fs.read_text("old.md")
    error = held.refused(Stale, lambda: held.rf.http.post(f"{wild.base}/tame/send"))
    assert "nothing was read of" in error.message

    def goes_through() -> bool:
        held.rf.http.get(f"{wild.base}/tame/page")
        try:
            held.rf.http.post(f"{wild.base}/tame/send")
        except Stale:
            return False
        return True

    eventually(goes_through, "no read was ever fresh enough")

    def is_stale() -> bool:
        try:
            held.rf.http.post(f"{wild.base}/tame/send")
        except Stale as error:
            return "tame/page" in error.message and "s old" in error.message
        return False

    eventually(is_stale, "it never grew old")


def test_a_rollback_and_a_restart_find_the_same_reads(scene: Scene) -> None:
    held = held_by(scene, FRESH, files={"page.md": "one"})
    held.rf.fs.read_text("page.md")
    read = held.last()["step"]
    held.rf.fs.write_text("page.md", "two")
    held.rf.state.put("deploy/a", 1)
    held.operator.ask("Rollback", agent=held.id, to=str(read), start=True)
    held.again()
    held.rf.fs.read_text("page.md")  # replayed: it is not read again
    held.rf.state.put("deploy/b", 1)  # the content is what was read, though the file was put back
    held.rf.exec.run(["sh", "-c", "echo three > page.md"])
    held.refused(Stale, lambda: held.rf.state.put("deploy/c", 1))


# -- the other facts --------------------------------------------------------------------------------------------------


def test_an_environment_that_an_agent_is_pinned_to(scene: Scene, wild: Target) -> None:
    held = held_by(scene, "environment: staging")
    held.rf.http.get(f"{wild.base}/tame/page")
    held.rf.http.get(f"{wild.base}/wild/page")  # of no environment
    error = held.refused(Denied, lambda: held.rf.http.get(f"{wild.base}/prod/page"))
    assert "`prod`" in error.message


def test_what_a_thread_made_itself(scene: Scene) -> None:
    when = """
when:
  - {action: fs.delete, if: {created: false}, then: deny}
  - {action: state.delete, if: {created: false}, then: deny}
"""
    held = held_by(scene, when, files={"theirs": "x", "dir/theirs": "x"})
    other = held_by(scene, "")
    other.rf.state.put("facts/theirs", 1)
    held.rf.fs.write_text("mine", "x")
    held.rf.exec.run(["sh", "-c", "echo x > dir/mine"])
    held.rf.state.put("facts/mine", 1)
    held.refused(Denied, lambda: held.rf.fs.delete("theirs"))
    held.refused(Denied, lambda: held.rf.fs.delete("dir", recursive=True))
    held.refused(Denied, lambda: held.rf.state.delete("facts/theirs"))
    cut = held.last()["step"]
    for path in ("mine", "dir/mine"):
        held.rf.fs.delete(path)
    held.rf.state.delete("facts/mine")
    held.operator.ask("Rollback", agent=held.id, to=str(cut - 3), start=True)
    held.again()
    assert (held.live / "mine").read_text() == "x"


def test_amounts_and_budgets(scene: Scene, wild: Target) -> None:
    more = """
when:
  - {action: http.post, if: {amount: {field: /json/amount, over: 100}}, then: deny}
  - {action: http.put, if: {budget: {total: calls, over: 50%}}, then: deny}
budgets: {total: {calls: 10}}
"""
    held = held_by(scene, more)
    held.rf.http.put(f"{wild.base}/tame/x")
    held.rf.http.post(f"{wild.base}/tame/send", json={"amount": 100})
    for wrong in ({"amount": 100.01}, {"amount": "1"}, {}, [1], {"amount": True}):
        held.refused(Denied, lambda wrong=wrong: held.rf.http.post(f"{wild.base}/tame/send", json=wrong))
    # Of a name that stands there twice, whatever its case, nobody knows which one the target takes.
    for twice in (b'{"amount": 1, "amount": 1000}', b'{"amount": 1, "Amount": 1000}'):
        held.refused(Denied, lambda twice=twice: held.rf.http.post(f"{wild.base}/tame/send", data=twice))
    held.rf.http.put(f"{wild.base}/tame/x")
    for _ in range(3):
        held.rf.now()
    error = held.refused(Denied, lambda: held.rf.http.put(f"{wild.base}/tame/x"))
    assert "budget `calls`" in error.message


# -- people -----------------------------------------------------------------------------------------------------------


def test_a_person_is_told_why_and_where_it_comes_from(scene: Scene, wild: Target) -> None:
    held = held_by(
        scene, "when: [{action: http.post, if: tainted, then: ask}]", files={"to": "account-4711-x"}
    )
    held.rf.http.get(f"{wild.base}/wild/page")
    held.rf.fs.read_text("to")
    read = held.last()["step"]
    url = f"{wild.base}/tame/send"
    stream = held.stream()
    body = base64.b64encode(json.dumps({"to": "account-4711-x", "n": 3}).encode()).decode()
    stream.post("http.post", json.dumps({"url": url, "body": body}).encode(), lane="test", step=0)
    eventually(lambda: bool(held.operator.ask("Approvals", agent=held.id)["approvals"]), "nobody was asked")
    (record,) = held.operator.ask("Approvals", agent=held.id)["approvals"]
    assert record["rules"] == ["w1"]
    assert record["detail"]["because"][0].startswith("w1: the thread is tainted by the resource `wild`")
    (source,) = record["detail"]["provenance"]
    assert (source["argument"], source["step"], source["action"]) == ("/json/to", read, "fs.read")
    shown = held.operator.ask("ApprovalShow", id=record["id"])
    assert shown["why"] == ["w1 '{action: http.post, if: tainted, then: ask}' of the manifest"]
    held.operator.ask("Approve", id=record["id"])
    assert not stream.receive().reply.HasField("failure")
    stream.close()
    assert held.last()["outcome"] == "ok"
    assert explained(held)["facts"]["provenance"][0]["argument"] == "/json/to"


# -- runs and reloads -------------------------------------------------------------------------------------------------

RUNS = """
from ringfence import agent
with agent.boot() as rf:
    if any(entry.path.endswith("mark") for entry in rf.fs.list(".")):
        rf.now()
        print(rf.fs.read_text("mark"))
    else:
        rf.http.get("%s/wild/page")
        rf.fs.write_text("mark", "x")
"""


def test_a_new_run_is_clean_until_it_reads_what_an_earlier_one_wrote(scene: Scene, wild: Target) -> None:
    agent = scene.submit(
        RUNS % wild.base,
        name="nightly",
        allow=ALL,
        more="schedule: {every: 24h}",
    )

    def run(number: int) -> list[dict[str, Any]]:
        scene.operator.ask("ScheduleRun", agent=agent)
        eventually(
            lambda: (
                scene.operator.ask("ScheduleList")["schedules"][0]["runs"] == number
                and scene.show(agent)["state"] == "sleeping"
            ),
            f"run {number} does not end: {scene.output(agent, stderr=True)[-500:]}",
        )
        return scene.operator.steps(agent)

    def facts(step: dict[str, Any]) -> tuple[bool, str | None]:
        found = scene.operator.ask("PolicyExplain", agent=agent, step=step["step"])["facts"]
        return found["tainted"] is not None, found["taints"]

    first = run(1)
    assert [facts(s) for s in first[-2:]] == [(False, "the resource `wild`"), (True, None)]
    second = run(2)[len(first) :]
    assert [s["action"] for s in second] == ["fs.list", "now", "fs.read"]
    assert [facts(s) for s in second] == [
        (False, "the file `/workspace/mark`"),
        (True, None),
        (True, None),
    ]


def test_ceilings_that_are_reloaded_bind_at_once(scene: Scene, wild: Target) -> None:
    held = dirty(scene, wild, more="")
    held.rf.state.put("facts/free", 1)
    text = scene.kernel.config.read_text()
    try:
        scene.kernel.config.write_text(
            text + "  ceilings: {when: [{action: state.put, if: tainted, then: deny}]}\n"
        )
        scene.operator.ask("Reload")
        held.refused(Denied, lambda: held.rf.state.put("facts/free", 2))
        assert explained(held)["rules"][0] | {"line": 0} == {
            "id": "cw1",
            "text": "{action: state.put, if: tainted, then: deny}",
            "origin": "ceilings",
            "verdict": "deny",
            "agent": None,
            "line": 0,
        }
    finally:
        scene.kernel.config.write_text(text)
        scene.operator.ask("Reload")
    held.rf.state.put("facts/free", 3)


@pytest.mark.parametrize(
    ("point", "call"),
    [
        ("fs.write:before_outcome", lambda held: held.rf.fs.write_text("late.txt", "from outside")),
        ("exec.run:before_outcome", lambda held: held.rf.exec.run(["sh", "-c", "echo x > late.txt"])),
    ],
)
def test_what_a_dead_kernel_wrote_under_a_taint_stays_tainted(
    scene: Scene, wild: Target, point: str, call: Any
) -> None:
    held = dirty(scene, wild, files={"quarantine": "x"})
    scene.kernel.arm(point)
    held.rf.thread(lambda: call(held))
    scene.kernel.await_hit(point)
    scene.kernel.kill()
    scene.kernel.disarm(point)
    held.disconnect()
    scene.kernel.start()
    held.again()
    held.rf.http.get(f"{wild.base}/wild/page")
    held.rf.thread(lambda: call(held)).result()  # the program goes on by replay: it is done already
    held.rf.fs.delete("quarantine")
    assert tainted(held) is None
    held.rf.fs.read_text("late.txt")
    assert "late.txt" in (tainted(held) or "")
