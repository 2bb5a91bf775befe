"""`sandbox.workspace: direct`: unmodified programs on an overlay that the kernel judges at every boundary."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.scenes import Scene, manifest_of, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

ALL = ['fs.*: "/workspace/**"']
DIRECT = "sandbox: {workspace: direct}"


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def submit(scene: Scene, script: str, files: dict[str, Any] | None = None, **manifest: Any) -> str:
    more = manifest.pop("more", "")
    manifest.setdefault("allow", ALL)
    text = manifest_of(
        scene.name("direct"), ["sh", "-c", 'eval "$(cat)"'], more=f"{DIRECT}\n{more}", **manifest
    )
    return scene.operator.submit(text, files or {}, input_bytes=script.encode())


def commits(scene: Scene, agent: str) -> list[tuple[str, str, str]]:
    """Boundaries: what each was for, its effect and its outcome."""
    steps = scene.operator.steps(agent)
    return [(s["resource"], s["effect"], s["outcome"]) for s in steps if s["action"] == "workspace.commit"]


def tree(top: Path) -> dict[str, Any]:
    """Every path below a directory with its mode and content."""
    found: dict[str, Any] = {}
    for path in sorted(top.rglob("*")):
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        mode = path.lstat().st_mode
        found[str(path.relative_to(top))] = (mode, str(path.readlink()) if path.is_symlink() else content)
    return found


def test_a_script_writes_its_files_itself_and_the_end_takes_them_in(scene: Scene) -> None:
    script = """
pwd
echo new > made.txt; echo more >> kept.txt; rm old.txt; mkdir -p out/deep; mv a/b.txt out/deep/; ln -s ../kept.txt out/link
chmod 640 kept.txt
"""
    files = {"kept.txt": "kept\n", "old.txt": "old\n", "a/b.txt": "b\n", "a/c.txt": "c\n"}
    agent = submit(scene, script, files)
    before = tree(scene.live(agent))
    scene.await_end(agent)
    live = scene.live(agent)
    assert scene.output(agent).splitlines() == ["/workspace"]
    assert (live / "made.txt").read_text() == "new\n"
    assert (live / "kept.txt").read_text() == "kept\nmore\n"
    assert (live / "kept.txt").stat().st_mode & 0o777 == 0o640
    assert not (live / "old.txt").exists()
    assert (live / "out/deep/b.txt").read_text() == "b\n"
    assert (live / "out/link").readlink() == Path("../kept.txt")
    assert [p.name for p in (live / "a").iterdir()] == ["c.txt"]
    assert commits(scene, agent) == [("at the program's end", "DESTROY", "ok")]
    scene.operator.ask("Rollback", agent=agent, to="0")
    assert tree(live) == before


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_git_works_unmodified_and_all_it_did_is_rolled_back(scene: Scene) -> None:
    script = """
set -e
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q . && git add -A && git commit -qm first
git checkout -qb topic && echo two > note.txt && git commit -qam second && git mv note.txt moved.txt && git commit -qm third
git gc -q && git log --format=%s && git fsck
"""
    agent = submit(scene, script, {"note.txt": "one\n"})
    before = tree(scene.live(agent))
    scene.await_end(agent)
    assert scene.output(agent).splitlines()[:3] == ["third", "second", "first"]
    live = scene.live(agent)
    assert (live / "moved.txt").read_text() == "two\n"
    assert (live / ".git/HEAD").read_text().strip() == "ref: refs/heads/topic"
    scene.operator.ask("Rollback", agent=agent, to="0")
    assert tree(live) == before


def test_each_call_that_leaves_a_mark_comes_behind_a_boundary(scene: Scene) -> None:
    script = """
set -e
mkdir d; echo 1 > d/one; echo 1 > d/two
rf-call state.put '{"key": "k", "value": 1}'
cat d/one; rm d/one; echo 2 > d/two
rf-call now '{}' > /dev/null
rf-call state.put '{"key": "k", "value": 2}'
rf-call state.put '{"key": "k", "value": 3}'
rf-call workspace.commit '{}'
rm -r d
"""
    agent = submit(scene, script, allow=[*ALL, 'state.*: "**"'])
    scene.await_end(agent)
    steps = [(s["action"], s["resource"]) for s in scene.operator.steps(agent)]
    assert steps == [
        ("workspace.commit", "before state.put"),
        ("state.put", "k"),
        ("now", ""),
        ("workspace.commit", "before state.put"),
        ("state.put", "k"),
        ("state.put", "k"),
        ("workspace.commit", "asked by the program"),
        ("workspace.commit", "at the program's end"),
    ]
    live = scene.live(agent)
    assert tree(live) == {}
    points = scene.operator.ask("Points", agent=agent)["points"]
    assert [p["step"] for p in points if p["kind"] == "workspace"] == [1, 4, 8]
    scene.operator.ask("Rollback", agent=agent, to="5")
    assert {name: content for name, (_, content) in tree(live).items()} == {"d": None, "d/two": b"2\n"}
    scene.operator.ask("Rollback", agent=agent, to="1")
    assert {name: content for name, (_, content) in tree(live).items()} == {
        "d": None,
        "d/one": b"1\n",
        "d/two": b"1\n",
    }


def test_what_a_rule_denies_ends_the_program_and_is_dropped(scene: Scene) -> None:
    script = """
echo fine > fine.txt
rf-call state.put '{"key": "k", "value": 1}'
echo bad > locked/x; echo lost > lost.txt
rf-call state.put '{"key": "k", "value": 2}'
sleep 100
"""
    agent = submit(
        scene,
        script,
        {"locked/keep": ""},
        allow=[*ALL, 'state.*: "**"'],
        deny=['fs.write: "/workspace/locked/**"'],
    )
    ended = scene.await_end(agent, "failed")
    assert "/workspace/locked/x" in ended["error"]
    assert "dropped" in ended["error"]
    live = scene.live(agent)
    assert sorted(tree(live)) == ["fine.txt", "locked", "locked/keep"]
    assert commits(scene, agent) == [
        ("before state.put", "WRITE", "ok"),
        ("before state.put", "WRITE", "denied"),
    ]
    assert not (live.parent / "direct").exists()


def test_hidden_files_are_neither_seen_nor_lost_without_a_word(scene: Scene) -> None:
    files = {"data/.env": "secret", "data/open": "open"}
    deny = ['fs.*: "/workspace/data/.env"']
    agent = submit(scene, "ls -A data; rm -rf data", files, deny=deny)
    ended = scene.await_end(agent, "failed")
    assert scene.output(agent).split() == ["open"]
    assert "/workspace/data/.env" in ended["error"]
    assert (scene.live(agent) / "data/.env").read_text() == "secret"
    assert (scene.live(agent) / "data/open").read_text() == "open"


def test_a_pause_takes_in_what_was_done_so_far(scene: Scene) -> None:
    agent = submit(scene, "echo half > half; sleep 1000")
    eventually((scene.live(agent).parent / "direct/upper/half").exists, "nothing was written")
    assert not (scene.live(agent) / "half").exists()
    scene.operator.ask("Pause", agent=agent)
    assert (scene.live(agent) / "half").read_text() == "half\n"
    assert commits(scene, agent) == [("at a pause", "WRITE", "ok")]
    assert scene.show(agent)["process"] == "frozen"
    scene.operator.ask("Resume", agent=agent)
    scene.operator.ask("Kill", agent=agent)


def asked_of(scene: Scene, agent: str) -> dict[str, Any]:
    """The one call of an agent that waits for a person."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = [a for a in scene.operator.ask("Approvals")["approvals"] if a["agent"] == agent]
        return bool(found)

    eventually(there, f"{agent} asks nobody")
    return found[0]


def test_a_person_is_asked_while_the_program_stands_still(scene: Scene) -> None:
    script = """
echo 1 > asked/a
rf-call state.put '{"key": "k", "value": 1}' && echo went on
"""
    rules = {"allow": [*ALL, 'state.*: "**"'], "ask": ['fs.write: "/workspace/asked/**"']}
    agent = submit(scene, script, {"asked/keep": ""}, **rules)
    asked = asked_of(scene, agent)
    assert (asked["action"], scene.show(agent)["state"]) == ("workspace.commit", "parked")
    shown = scene.operator.ask("ApprovalShow", id=asked["id"])
    assert [c["path"] for c in shown["detail"]["changes"]] == ["/workspace/asked/a"]
    assert "+1" in shown["detail"]["diff"]
    assert not (scene.live(agent) / "asked/a").exists()
    scene.operator.ask("Approve", id=asked["id"])
    eventually(lambda: scene.show(agent)["state"] == "done", "it did not go on")
    assert (scene.live(agent) / "asked/a").read_text() == "1\n"
    assert "went on" in scene.output(agent)
    denied = submit(scene, script, {"asked/keep": ""}, **rules)
    asked = asked_of(scene, denied)
    scene.operator.ask("Deny", id=asked["id"], reason="not this")
    eventually(lambda: scene.show(denied)["state"] == "failed", "it was not ended")
    assert "not this" in scene.show(denied)["error"]
    assert sorted(tree(scene.live(denied))) == ["asked", "asked/keep"]
    assert "went on" not in scene.output(denied)


COUNTS = """
n=$(cat count 2>/dev/null || echo 0); n=$((n + 1)); echo $n > count
rf-call state.put "{{\\"key\\": \\"k\\", \\"value\\": $n}}"
echo torn > torn-$n
{after}
"""


@pytest.mark.parametrize("resume", ["replay", "own"])
def test_after_the_kernels_death_it_begins_where_it_says(scene: Scene, resume: str) -> None:
    """By replay on the workspace as submitted, with recorded answers; by itself on that of the last boundary."""
    script = COUNTS.format(after="if [ $n = 2 ] || [ -e again ]; then rm torn-*; else sleep 1000; fi")
    rules = {"allow": [*ALL, 'state.*: "**"'], "more": f"restart: {{resume: {resume}}}"}
    agent = submit(scene, script, {"kept": "k"}, **rules)
    live = scene.live(agent)
    eventually((live.parent / "direct/upper/torn-1").exists, "it did not come that far")
    assert (live / "count").read_text() == "1\n"
    scene.kernel.kill()
    assert not (live / "torn-1").exists()
    if resume == "own":
        scene.kernel.start()
        scene.await_end(agent)
        assert sorted(tree(live)) == ["count", "kept"]
        assert (live / "count").read_text() == "2\n"
        puts = [s for s in scene.operator.steps(agent) if s["action"] == "state.put"]
        assert len(puts) == 2
        return
    scene.kernel.start()
    eventually((live.parent / "direct/upper/torn-1").exists, "it was not started again")
    assert [s["action"] for s in scene.operator.steps(agent)] == ["workspace.commit", "state.put"]
    assert (live / "count").read_text() == "1\n"
    scene.operator.ask("Kill", agent=agent)


def test_an_ordered_stop_takes_in_what_one_that_resumes_by_itself_has(scene: Scene) -> None:
    script = "[ -e made ] || { echo 1 > made; echo ready; sleep 1000; }"
    agent = submit(scene, script, more="restart: {resume: own}")
    eventually(lambda: "ready" in scene.output(agent), "it wrote nothing")
    scene.kernel.stop()
    assert (scene.live(agent) / "made").read_text() == "1\n"
    scene.kernel.start()
    scene.await_end(agent)
    assert commits(scene, agent) == [("at the kernel's stop", "WRITE", "ok")]


def test_who_was_refused_can_be_granted_it_and_started_again(scene: Scene) -> None:
    script = "echo 1 > a; mkdir -p out; echo 2 > out/b"
    agent = submit(scene, script, allow=['fs.write: "/workspace/out/**"'])
    ended = scene.await_end(agent, "failed")
    assert "nothing allows fs.write on `/workspace/a`" in ended["error"]
    (step,) = scene.operator.steps(agent)
    why = scene.operator.ask("PolicyExplain", agent=agent, step=step["step"])
    assert (step["outcome"], why["verdict"]) == ("denied", "deny")
    scene.operator.ask("Grant", agent=agent, rule='fs.write: "/workspace/**"')
    scene.operator.ask("Start", agent=agent)
    scene.await_end(agent)
    assert sorted(tree(scene.live(agent))) == ["a", "out", "out/b"]


def test_a_spent_total_parks_it_and_more_lets_it_do_its_work_again(scene: Scene) -> None:
    script = "rm gone; echo 1 > made"
    agent = submit(scene, script, {"gone": "g"}, more="budgets: {total: {destructive: 0}}")
    eventually(lambda: scene.show(agent)["state"] == "parked", "it is not parked")
    assert sorted(tree(scene.live(agent))) == ["gone"]
    scene.operator.ask("Budget", agent=agent, name="destructive", value="1")
    scene.await_end(agent)
    assert sorted(tree(scene.live(agent))) == ["made"]


def test_commands_that_write_and_call_at_once_lose_nothing(scene: Scene) -> None:
    script = """
for n in 1 2 3; do
    ( for m in 1 2 3; do echo $n.$m > file-$n.$m; rf-call state.put "{\\"key\\": \\"at-once/$n\\", \\"value\\": $m}" > /dev/null; done ) &
done
wait
"""
    agent = submit(scene, script, allow=[*ALL, 'state.*: "**"'])
    scene.await_end(agent)
    found = tree(scene.live(agent))
    expected = {f"file-{n}.{m}": f"{n}.{m}\n".encode() for n in (1, 2, 3) for m in (1, 2, 3)}
    assert {name: content for name, (_, content) in found.items()} == expected
    steps = scene.operator.steps(agent)
    assert all(s["outcome"] == "ok" for s in steps)
    assert len([s for s in steps if s["action"] == "state.put"]) == 9


def test_sockets_are_refused_and_calls_on_files_have_no_place(scene: Scene) -> None:
    script = """
rf-call fs.write '{"path": "a", "data": "eA=="}' || true
rf-call fs.read '{"path": "seen"}'
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("door")'
"""
    agent = submit(scene, script, {"seen": "s"})
    ended = scene.await_end(agent, "failed")
    assert "a socket at `/workspace/door`" in ended["error"]
    assert "workspace is direct" in scene.output(agent, stderr=True)
    assert tree(scene.live(agent)) == {"seen": tree(scene.live(agent))["seen"]}


def test_an_export_of_a_running_one_has_all_it_did(scene: Scene) -> None:
    agent = submit(scene, "echo so far > made; echo ready; sleep 1000")
    eventually(lambda: "ready" in scene.output(agent), "it wrote nothing")
    assert scene.operator.stream("Export", agent=agent)
    assert (scene.live(agent) / "made").read_text() == "so far\n"
    assert commits(scene, agent) == [("before an export", "WRITE", "ok")]
    assert scene.show(agent)["process"] == "live"
    scene.operator.ask("Kill", agent=agent)


WAITS = """
import os
from ringfence import agent
with agent.boot() as rf:
    open("pid", "w").write(str(os.getpid()))
    memory = open("held", "w+")
    memory.write("held")
    rf.messages.receive()
    memory.flush()
    assert open("held").read() == "held"
"""


def test_one_that_only_waits_is_frozen_and_keeps_what_it_holds(scene: Scene) -> None:
    text = manifest_of(
        scene.name("waits"),
        ["python", "agent.py"],
        allow=[*ALL, 'messages.*: "**"'],
        more=f"{DIRECT}\napprovals: {{linger: 100ms}}",
    )
    agent = scene.operator.submit(text, {"agent.py": WAITS})
    shown: dict[str, Any] = {}

    def frozen() -> bool:
        shown.update(scene.show(agent))
        return (shown["state"], shown["process"]) == ("sleeping", "frozen")

    eventually(frozen, "it is not frozen")
    scene.operator.ask("Send", agent=agent, text="go on")
    scene.await_end(agent)
    assert (scene.live(agent) / "held").read_text() == "held"


def test_a_rollback_in_the_middle_goes_on_from_there(scene: Scene) -> None:
    script = """
echo 1 > a; rf-call state.put '{"key": "back", "value": 1}' > /dev/null
echo 2 >> a; rf-call state.put '{"key": "back", "value": 2}' > /dev/null
rm a; echo 3 > b; rf-call state.put '{"key": "back", "value": 3}' > /dev/null
echo ready; sleep 1000
"""
    agent = submit(scene, script, {"kept": "k"}, allow=[*ALL, 'state.*: "**"'])
    eventually(lambda: "ready" in scene.output(agent), "it did not come that far")
    live = scene.live(agent)
    assert sorted(tree(live)) == ["b", "kept"]
    second = [s["step"] for s in scene.operator.steps(agent) if s["action"] == "state.put"][1]
    scene.operator.ask("Rollback", agent=agent, to=str(second), start=True)
    assert (live / "a").read_text() == "1\n2\n"
    eventually(lambda: scene.output(agent).count("ready") == 2, "it does not go on")
    assert sorted(tree(live)) == ["b", "kept"]
    puts = [s for s in scene.operator.steps(agent) if s["action"] == "state.put" and s["branch"] == 1]
    assert len(puts) == 1
    fork = scene.operator.ask("Fork", agent=agent, at=str(second), start=False)["id"]
    assert "/workspace/a" in (scene.live(fork).parent / "direct-paths").read_text()
    scene.operator.ask("Kill", agent=agent)


def test_a_schedule_begins_each_run_on_what_the_last_one_left(scene: Scene) -> None:
    more = "restart: {resume: own}\nschedule: {every: 1h}"
    agent = submit(scene, "echo x >> runs", allow=ALL, more=more)
    for runs in (1, 2):
        scene.operator.ask("ScheduleRun", agent=agent)
        eventually(
            lambda wanted=runs: (
                (scene.live(agent) / "runs").exists()
                and (scene.live(agent) / "runs").read_text() == "x\n" * wanted
                and scene.show(agent)["state"] == "sleeping"
            ),
            "the run does not end",
        )
    scene.operator.ask("Kill", agent=agent)
