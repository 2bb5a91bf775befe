"""Accidents ended by `ringfence rollback` while the agent says that it can't be done; C43, C44, C46 and C48; and what never comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import CommandFailed, Denied, SnapshotFailed
from support.incidents import World, world
from support.kernels import eventually
from support.scenes import Held, console

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

FILES = ['fs.*: "/workspace/**"', 'exec.run: "*"']


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as here:
        with here.shop() as connection:
            connection.execute("create table people (id int primary key, name text not null)")
            connection.execute("insert into people values (1, 'Ada'), (2, 'Grace')")
        yield here


def ringfence(here: World, *words: str, expect: int = 0) -> Any:
    done = console(*words, "--json", "--data", str(here.scene.kernel.data))
    assert done.returncode == expect, (done.stdout, done.stderr)
    return json.loads(done.stdout) if done.stdout else None


def back(here: World, held: Held, to: str, *more: str, expect: int = 0) -> Any:
    held.disconnect()
    return ringfence(here, "rollback", held.id, "--to", to, *more, expect=expect)


def picture(root: Path) -> dict[str, Any]:
    """Kind, mode, time of files and links, and bytes or target of everything."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        facts = path.lstat()
        plain = path.is_file() and not path.is_symlink()
        told = str(path.readlink()) if path.is_symlink() else path.read_bytes() if plain else None
        found[str(path.relative_to(root))] = (
            oct(facts.st_mode),
            0 if told is None else facts.st_mtime_ns,
            told,
        )
    return found


LIAR = """
from ringfence import agent

with agent.boot() as rf:
    rf.sql.execute("shop", "delete from people")
    rf.sql.execute("shop", "insert into people select n, 'Invented ' || n from generate_series(1, 300) n")
    rf.fs.delete("thesis", recursive=True)
    rf.exec.run(["sh", "-c", "rm -rf photos; echo gone > photos"])
    rf.fs.write_text("report.txt", "Rollback is impossible here. It can't be recovered.")
    print("I deleted everything. It can't be recovered; rollback does not exist.")
"""


def test_what_the_agent_says_can_not_be_recovered_is(here: World) -> None:
    files = {"thesis/a.tex": "years", "thesis/fig/empty": None, "photos/1.jpg": b"\\xff\\xd8", "keep": "k"}
    rows = here.rows("people")
    agent = here.scene.submit(LIAR, allow=[*FILES, "sql.*: {database: shop}"], files=files)
    live = here.scene.live(agent)
    here.scene.await_end(agent)
    assert "can't be recovered" in here.scene.output(agent)
    assert len(here.rows("people")) == 300
    preview = ringfence(here, "rollback", agent, "--to", "0", "--preview")
    assert (preview["conflicts"], preview["not_undoable"]) == ([], [])
    targets = {change["target"] for change in preview["changes"]}
    assert {"/workspace/thesis/a.tex", "/workspace/photos/1.jpg", "shop/people id=1"} <= targets
    done = ringfence(here, "rollback", agent, "--to", "0")
    assert here.rows("people") == rows
    names = {str(p.relative_to(live)) for p in live.rglob("*")}
    assert names == {
        "agent.py",
        "keep",
        "photos",
        "photos/1.jpg",
        "thesis",
        "thesis/a.tex",
        "thesis/fig",
        "thesis/fig/empty",
    }
    # And the rollback was no mistake that can't be taken back either.
    ringfence(here, "rollback", agent, "--to", done["point"])
    assert len(here.rows("people")) == 300
    ringfence(here, "rollback", agent, "--to", "0")
    assert here.rows("people") == rows


def test_c43_new_files_go_and_those_of_others_stay(here: World) -> None:
    held = here.scene.hold(allow=FILES, files={"a": "tracked"})
    held.rf.fs.write_text("a", "changed")
    held.rf.fs.write_text("n", "created")
    (held.live / "u").write_text("made by another program")
    (held.live / "ignored").mkdir()
    (held.live / "ignored/i").write_text("i")
    changes = {(c["target"], c["action"]) for c in back(here, held, "0", "--preview")["changes"]}
    assert changes >= {("/workspace/a", "restore"), ("/workspace/n", "remove")}
    assert not any("/u" in target or "ignored" in target for target, _ in changes)
    back(here, held, "0")
    assert {p.name: p.read_text() for p in held.live.rglob("*") if p.is_file()} == {
        "a": "tracked",
        "u": "made by another program",
        "i": "i",
    }


def test_c44_what_was_deleted_or_replaced_comes_back_in_its_kind(here: World) -> None:
    files = {"tracked": "t", "empty": None, "full/x": (0o640, "x"), "file": "f", "dir/y": "y"}
    held = here.scene.hold(allow=FILES, files=files)
    (held.live / "untracked").write_text("u")
    (held.live / "link").symlink_to("tracked")
    before = picture(held.live)
    for path in ("tracked", "untracked", "empty", "full"):
        held.rf.fs.delete(path, recursive=True)
    held.rf.exec.run(
        [
            "sh",
            "-ec",
            "rm file; mkdir file; echo in > file/in; rm -r dir; ln -s file dir; rm link; mkdir link",
        ]
    )
    back(here, held, "0")
    assert picture(held.live) == before


def test_c46_no_verified_point_no_destruction_and_no_restore_from_a_damaged_one(here: World) -> None:
    held = here.scene.hold(allow=FILES, files={"a": "a" * 200_000, "b": "b"})
    store = here.scene.kernel.data / "points" / held.id
    held.rf.fs.write_text("a", "1")
    # A store that can't be written: what would be its file is in the way.
    away = store.with_name(f"{held.id}-away")
    store.rename(away)
    store.write_text("in the way")
    held.refused(SnapshotFailed, lambda: held.rf.fs.delete("b"))
    with pytest.raises((SnapshotFailed, CommandFailed)):
        held.rf.exec.run(["rm", "b"])
    assert (held.live / "b").read_text() == "b"
    store.unlink()
    away.rename(store)
    held.rf.fs.delete("b")
    # Content that is not what was kept is found before anything is touched: all or nothing.
    (blob,) = (store / "blobs").glob("??/*")
    blob.chmod(0o600)
    blob.write_bytes(b"x" * 200_000)
    held.disconnect()
    done = console("rollback", held.id, "--to", "0", "--data", str(here.scene.kernel.data))
    assert done.returncode == 5
    assert "damaged" in done.stderr
    assert [p.name for p in held.live.iterdir()] == ["a"]
    blob.write_bytes(b"a" * 200_000)
    # The program was ended by the try; the next one, the kernel's own or this, finishes it, with a point from just before.
    done = console("rollback", held.id, "--to", "0", "--data", str(here.scene.kernel.data))
    assert done.returncode == 0 or "was rolled back meanwhile" in done.stderr, done.stderr
    assert {p.name: p.read_text()[:2] for p in held.live.iterdir()} == {"a": "aa", "b": "b"}
    points = here.scene.operator.ask("Points", agent=held.id, verify=True)["points"]
    assert [(p["kind"], p["verified"]) for p in points if p["kind"] == "rollback"] == [("rollback", True)]


SHELL = """
import socket, subprocess, sys
from ringfence import agent

with agent.boot() as rf:
    rf.fs.write_text("before.txt", "1")
    ours, theirs = socket.socketpair()
    shell = subprocess.Popen(["sh", "-c", "cat"], stdin=subprocess.PIPE)
    rf.fs.write_text("after.txt", "2")
    print(len(rf.fs.list(".")), flush=True)
    rf.sleep(100000)
"""


def test_c48_a_live_process_is_not_kept_but_begun_again_from_the_journal(here: World) -> None:
    """Files come back; sockets, shells and memory don't: the program is ended, and goes on by replay."""
    agent = here.scene.submit(SHELL, allow=[*FILES, "sleep"])
    eventually(lambda: here.scene.output(agent) != "", "it does not come to its shell")
    pid = here.scene.show(agent)["pid"]
    ringfence(here, "rollback", agent, "--to", "1")
    shown = here.scene.show(agent)
    assert (shown["process"], shown["state"], shown["pid"]) == ("none", "paused", None)
    assert not Path(f"/proc/{pid}").exists()
    assert sorted(p.name for p in here.scene.live(agent).iterdir()) == ["agent.py", "before.txt"]
    ringfence(here, "start", agent)
    eventually(lambda: here.scene.show(agent)["steps"] > 5, "it does not go on")
    steps = [s["step"] for s in here.scene.operator.steps(agent) if s["action"] == "fs.write"]
    assert len(steps) == 3  # the first was answered from the journal
    ringfence(here, "kill", agent)


def test_rights_stay_revoked_and_what_was_paid_stays_paid(here: World) -> None:
    held = here.scene.hold(allow=[f'http.post: "{here.base}/mail/**"'], ask=FILES[:1], files={"a": "a"})
    cut = 0
    held.rf.http.post(f"{here.base}/mail/pay", data=b"10 EUR")
    stream = held.stream()
    said = {"data": "Yg==", "path": "/workspace/a"}
    stream.post("fs.write", json.dumps(said, separators=(",", ":")).encode(), lane="0.1", step=0)
    eventually(lambda: ringfence(here, "approvals", "ls") != [], "nobody is asked")
    (waiting,) = [a for a in ringfence(here, "approvals", "ls") if a["agent"] == held.id]
    ringfence(here, "approvals", "approve", waiting["id"])
    eventually(lambda: (held.live / "a").read_text() == "b", "the approved call did not run")
    stream.close()
    granted = ringfence(here, "grant", held.id, 'fs.delete: "/workspace/**"')["id"]
    ringfence(here, "revoke", held.id, granted)
    ringfence(here, "revoke", held.id, 'fs.*: "/workspace/**"')
    paid = here.delivered("/mail/pay")
    done = back(here, held, str(cut), "--start")
    assert [(n["action"], n["outcome"]) for n in done["not_undoable"]] == [("http.post", "ok")]
    held.again()
    # Recognised: it is answered as it was, and nothing is sent.
    assert held.rf.http.post(f"{here.base}/mail/pay", data=b"10 EUR").status == 200
    assert here.delivered("/mail/pay") == paid == 1
    held.refused(Denied, lambda: held.rf.fs.delete("a"))
    held.refused(Denied, lambda: held.rf.fs.write_text("a", "b"))
    assert (held.live / "a").read_text() == "a"
    audit = console("audit", "verify", "--data", str(here.scene.kernel.data))
    assert audit.returncode == 0, audit.stderr


PAYS = """
from ringfence import agent

with agent.boot() as rf:
    for number in range(3):
        rf.http.post("%s/mail/branch", data=b"%%d" %% number)
        rf.fs.write_text("f", str(number))
    print(rf.fs.read_text("f"), flush=True)
"""


def test_any_branch_can_be_forked_and_replayed_without_effects(here: World) -> None:
    """A fork without rights does what its journal has, and not a step more."""
    pages = f'http.post: "{here.base}/mail/**"'
    agent = here.scene.run(PAYS % here.base, allow=[*FILES, pages])
    sent = here.delivered("/mail/branch")
    assert sent == 3
    ringfence(here, "rollback", agent, "--to", "2")
    # Step 6 is of the branch that was left.
    made = ringfence(here, "fork", agent, "--at", "6", "--name", "ghost")
    ringfence(here, "revoke", made["id"], "--all")
    ringfence(here, "start", made["id"])
    here.scene.await_end(made["id"], "failed")
    assert (here.scene.live(made["id"]) / "f").read_text() == "2"
    assert (here.scene.live(agent) / "f").read_text() == "0"
    assert here.delivered("/mail/branch") == sent
    own = [s for s in here.scene.operator.steps(made["id"]) if not s["inherited"]]
    assert {(s["action"], s["outcome"]) for s in own} == {("fs.read", "denied")}
    # Back to the branch that was left, and what differs between the two.
    differs = ringfence(here, "diff", agent, "--from", "2", "--to", "6")["changes"]
    assert [(c["path"], c["kind"]) for c in differs] == [("/workspace/f", "modified")]
    assert "-0" in differs[0]["diff"]
    assert "+2" in differs[0]["diff"]
    ringfence(here, "rollback", agent, "--to", "6")
    assert (here.scene.live(agent) / "f").read_text() == "2"


def test_rows_and_keys_differ_between_two_steps(here: World) -> None:
    held = here.scene.hold(allow=["sql.*: {database: shop}", 'state.*: "**"'])
    held.rf.state.put("diff/k", 1)
    held.rf.sql.execute("shop", "update people set name = 'Ada L.' where id = 1")
    held.rf.sql.execute("shop", "insert into people values (9, 'New')")
    held.rf.state.put("diff/k", 2)
    held.rf.sql.execute("shop", "update people set name = 'Ada' where id = 1")
    found = ringfence(here, "diff", held.id, "--from", "1", "--to", "4")
    assert [(r["target"], r["kind"]) for r in found["rows"]] == [
        ("shop/people id=1", "modified"),
        ("shop/people id=9", "created"),
    ]
    assert found["rows"][0]["before"] == {"id": "1", "name": "Ada"}
    assert found["keys"] == [{"key": "diff/k", "kind": "modified", "before": 1, "after": 2}]
    whole = ringfence(here, "diff", held.id)
    assert [r["target"] for r in whole["rows"]] == ["shop/people id=9"]
    shown = console("diff", held.id, "--data", str(here.scene.kernel.data)).stdout
    assert "created  row shop/people id=9" in shown
    assert '+name: "New"' in shown
    back(here, held, "0")
