"""Rollback on a real kernel: files, state and rows come back exactly; rights, budgets and evidence stay; crashes are finished."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from ringfence.agent import BudgetExhausted, Denied
from ringfence.kernel.postgres import EmbeddedPostgres
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, scene_on

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec: {resources: {shop: {type: postgres, embedded: true}}}
"""

ALL = ['fs.*: "/workspace/**"', 'state.*: "**"', 'exec.run: "*"', "sql.*: {database: shop}"]

TREE: dict[str, Any] = {
    "plain.txt": "plain",
    "run.sh": (0o755, "#!/bin/sh\n"),
    "private": (0o600, "private"),
    "dir/inner.txt": "inner",
    "dir/deep/leaf": b"\x00\xff leaf",
    "dir/empty": None,
    "empty": None,
    "becomes-dir": "file",
    "becomes-link/x": "x",
    "timed.txt": "timed",
    "untouched.txt": "untouched",
}


MANGLE = """
rm becomes-dir; mkdir becomes-dir; echo y > becomes-dir/y
rm -r becomes-link; ln -s plain.txt becomes-link
chmod 700 private
rm dangling; echo z > dangling
mkdir -p dir/deep; echo 1 > dir/deep/leaf
"""


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with scene_on(None, config=CONFIG) as scene:
        with shop(scene) as connection:
            connection.execute("create table stock (id int primary key, name text not null, kept bytea)")
            connection.execute("create table log (id serial primary key, line text)")
        yield scene


def shop(scene: Scene) -> psycopg.Connection[Any]:
    """A connection of our own to the target, beside the kernel's."""
    return psycopg.connect(EmbeddedPostgres(scene.kernel.data).dsn("shop", "shop"), autocommit=True)


def picture(root: Path) -> dict[str, Any]:
    """Everything about a tree: kind, mode, times, owner, bytes or where a link leads."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        facts = path.lstat()
        content: Any = None
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
        mtime = facts.st_mtime_ns if not path.is_dir() else None
        found[str(path.relative_to(root))] = (oct(facts.st_mode), facts.st_uid, facts.st_gid, mtime, content)
    return found


def rolled(held: Held, to: str | int, **more: Any) -> dict[str, Any]:
    held.disconnect()
    return held.operator.ask("Rollback", agent=held.id, to=str(to), **more)


def test_a_tree_comes_back_byte_for_byte(scene: Scene) -> None:
    held = scene.hold(allow=ALL, files=TREE)
    (held.live / "link").symlink_to("plain.txt")
    (held.live / "dangling").symlink_to("nowhere")
    before = picture(held.live)
    rf = held.rf
    rf.fs.write_text("plain.txt", "changed")
    rf.fs.append_text("private", "more")
    rf.fs.write_text("new/deep/file", "new")
    rf.fs.move("run.sh", "moved.sh")
    rf.fs.delete("dir", recursive=True)
    rf.fs.delete("empty", recursive=True)
    rf.fs.delete("link")
    rf.exec.run(["sh", "-ec", MANGLE])
    rf.exec.run(["touch", "-d", "@1000000000", "timed.txt"])
    assert (held.live / "timed.txt").stat().st_mtime == 1_000_000_000
    rf.fs.write_text("plain.txt", "changed again")
    assert picture(held.live) != before
    preview = held.operator.ask("Rollback", agent=held.id, to="0", preview=True)
    assert preview["preview"] is True
    assert preview["conflicts"] == []
    touched = {change["target"] for change in preview["changes"]}
    for path in ("plain.txt", "private", "new", "run.sh", "moved.sh", "dir", "dir/deep/leaf", "dir/empty", "empty", "link",
                 "becomes-dir", "becomes-link", "dangling"):  # fmt: skip
        assert f"/workspace/{path}" in touched, path
    # What a command gave another time, and nothing else, is touched.
    assert "/workspace/timed.txt" in touched
    assert "/workspace/untouched.txt" not in touched
    kinds = {change["target"]: change["kind"] for change in preview["changes"]}
    assert {kinds[f"/workspace/{path}"] for path in ("dir", "empty", "new", "dir/deep")} == {"directory"}
    assert {kinds[f"/workspace/{path}"] for path in ("plain.txt", "run.sh", "new/deep/file")} == {"file"}
    assert kinds["/workspace/link"] == "link"
    after = picture(held.live)
    assert after != before  # a preview changes nothing
    done = rolled(held, 0)
    assert picture(held.live) == before
    assert (done["state"], done["branch"]) == ("paused", 1)
    assert {c["target"] for c in done["changes"]} == touched
    assert scene.show(held.id)["process"] == "none"
    # A rollback is itself behind a point: back to the future, exactly.
    rolled(held, done["point"])
    assert {k: v for k, v in picture(held.live).items() if not k.startswith("new")} == {
        k: v for k, v in after.items() if not k.startswith("new")
    }
    assert (held.live / "new/deep/file").read_text() == "new"
    assert scene.operator.ask("AuditVerify")["ok"]


def test_what_others_made_stays_and_is_named(scene: Scene) -> None:
    """C43, C44: a is the agent's, u and ignored/i are other programs'."""
    held = scene.hold(allow=ALL, files={"a": "a0", "gone": "g", "dir/x": "x", "both": "0"})
    held.rf.fs.write_text("a", "a1")
    held.rf.fs.write_text("n", "new")
    held.rf.fs.write_text("both", "1")
    held.rf.fs.delete("gone")
    held.rf.fs.delete("dir", recursive=True)
    (held.live / "u").write_text("made by another program")
    (held.live / "ignored").mkdir()
    (held.live / "ignored" / "i").write_text("i")
    (held.live / "both").write_text("2, by another program")
    (held.live / "gone").write_text("made anew by another program")
    preview = held.operator.ask("Rollback", agent=held.id, to="0", preview=True)
    assert {c["target"] for c in preview["conflicts"]} == {"/workspace/both", "/workspace/gone"}
    assert all(c["reason"] for c in preview["conflicts"])
    done = rolled(held, 0)
    assert {c["target"] for c in done["conflicts"]} == {"/workspace/both", "/workspace/gone"}
    read = {str(p.relative_to(held.live)): p.read_text() for p in held.live.rglob("*") if p.is_file()}
    assert read == {
        "a": "a0",
        "dir/x": "x",
        "u": "made by another program",
        "ignored/i": "i",
        "both": "2, by another program",
        "gone": "made anew by another program",
    }


def test_state_and_rows_come_back(scene: Scene) -> None:
    held = scene.hold(allow=ALL)
    other = scene.hold(allow=ALL)
    with shop(scene) as connection:
        connection.execute(
            "insert into stock values (1, 'one', '\\x00ff'), (2, 'two', null), (3, 'three', null)"
        )
        before = connection.execute("select * from stock order by id").fetchall()
        rf = held.rf
        rf.state.put("roll/kept", "old")
        rf.state.put("roll/both", "old")
        cut = held.last()["step"]
        rf.state.put("roll/kept", "new")
        rf.state.delete("roll/both")
        rf.state.put("roll/made", 1)
        rf.state.put("roll/others", 1)
        other.rf.state.put("roll/others", 2)
        rf.sql.execute("shop", "update stock set name = 'ONE', kept = null where id = 1")
        rf.sql.execute("shop", "delete from stock where id in (2, 3)")
        rf.sql.execute("shop", "insert into stock (id, name) values (4, 'four')")
        rf.sql.execute("shop", "update stock set name = 'FOUR' where id = 4")
        preview = held.operator.ask("Rollback", agent=held.id, to=str(cut), preview=True)
        kinds = {(c["kind"], c["action"]) for c in preview["changes"]}
        assert ("state", "restore") in kinds
        assert ("state", "remove") in kinds
        assert any("stock" in c["target"] for c in preview["changes"])
        assert [c["target"] for c in preview["conflicts"]] == ["roll/others"]
        done = rolled(held, cut)
        assert connection.execute("select * from stock order by id").fetchall() == before
        assert other.rf.state.get("roll/kept") == "old"
        assert other.rf.state.get("roll/both") == "old"
        assert other.rf.state.get("roll/made") is None
        assert other.rf.state.get("roll/others") == 2
        assert done["point"]
        rolled(held, done["point"])
        assert connection.execute("select id, name from stock order by id").fetchall() == [
            (1, "ONE"),
            (4, "FOUR"),
        ]
        assert other.rf.state.get("roll/kept") == "new"
        connection.execute("delete from stock")


def test_one_path_alone(scene: Scene) -> None:
    held = scene.hold(allow=ALL, files={"a": "a0", "d/b": "b0", "d/c": "c0"})
    held.rf.state.put("path/key", 1)
    for path in ("a", "d/b", "d/c"):
        held.rf.fs.write_text(path, "1")
    done = rolled(held, 0, path="d")
    assert {c["target"] for c in done["changes"]} == {"/workspace/d/b", "/workspace/d/c"}
    assert [(held.live / p).read_text() for p in ("a", "d/b", "d/c")] == ["1", "b0", "c0"]
    assert done["branch"] == 0
    assert scene.sql("select value from state where key = 'path/key'") == [(b"1",)]
    for wrong in ("../x", "/etc", "d/../../x"):
        with pytest.raises(Refused) as refused:
            rolled(held, 0, path=wrong)
        assert refused.value.exit_code == 2, wrong


def test_rights_and_budgets_do_not_come_back(scene: Scene) -> None:
    held = scene.hold(
        allow=['fs.write: "/workspace/**"', 'fs.read: "/workspace/**"', 'state.put: "rights/**"'],
        files={"a": "a"},
        more="budgets: {total: {calls: 6, destructive: 1}, on_exhausted: refuse}",
    )
    held.rf.fs.write_text("a", "1")
    held.rf.state.put("rights/x", 1)
    held.operator.ask("Revoke", agent=held.id, rule_or_grant="state.put")
    granted = held.operator.ask("Grant", agent=held.id, rule='fs.delete: "/workspace/**"')
    held.rf.fs.delete("a")
    used = budget(held, "calls")
    rolled(held, 0, start=True)
    held.again()
    assert (held.live / "a").read_text() == "a"
    # What was revoked stays revoked, what was granted stays granted, what is spent stays spent.
    held.refused(Denied, lambda: held.rf.state.put("rights/x", 1))
    assert [g["id"] for g in scene.show(held.id)["grants"] if g["origin"] == "operator"] == [granted["id"]]
    assert budget(held, "calls") >= used
    held.refused(BudgetExhausted, lambda: held.rf.fs.delete("a"))
    assert (held.live / "a").read_text() == "a"
    for _ in range(10):
        if budget(held, "calls") >= 6:
            break
        held.rf.fs.read_text("a")
    held.refused(BudgetExhausted, lambda: held.rf.fs.read_text("a"))


def budget(held: Held, name: str) -> float:
    return next(b["used"] for b in held.operator.ask("Show", agent=held.id)["budgets"] if b["name"] == name)


def test_points_are_listed_verified_and_named_when_missing(scene: Scene) -> None:
    held = scene.hold(allow=ALL, files={"a": "a"})
    held.rf.fs.write_text("a", "b" * 10_000)
    held.rf.fs.delete("a")
    points = held.operator.ask("Points", agent=held.id, verify=True)["points"]
    assert [(p["id"], p["step"], p["kind"], p["verified"], p["covers"]) for p in points] == [
        ("p1", 1, "workspace", True, ["/workspace/a"]),
        ("p2", 2, "workspace", True, ["/workspace/a"]),
    ]
    for to, code in (("p9", 4), ("99", 4), ("yesterday", 2), ("2026-01-01T00:00:00", 2), ("-1", 2), ("", 2)):
        with pytest.raises(Refused) as refused:
            held.operator.ask("Rollback", agent=held.id, to=to, preview=True)
        assert refused.value.exit_code == code, to
    # A point whose bytes are damaged is found, and nothing is restored from it.
    store = scene.kernel.data / "points" / held.id
    digest = hashlib.sha256(b"b" * 10_000).hexdigest()
    (blob,) = (p for p in store.rglob("*") if p.is_file() and digest in str(p).replace("/", ""))
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o600)
    blob.write_bytes(data)
    points = held.operator.ask("Points", agent=held.id, verify=True)["points"]
    assert [p["verified"] for p in points] == [True, False]
    with pytest.raises(Refused) as refused:
        rolled(held, "p2")
    assert refused.value.exit_code == 5
    assert not (held.live / "a").exists()


def test_diff_shows_what_changed_between_points(scene: Scene) -> None:
    held = scene.hold(allow=ALL, files={"a": "one\n"})
    held.rf.fs.write_text("a", "two\n")
    held.rf.fs.write_text("n", "new\n")
    held.rf.fs.delete("a")
    first = held.operator.ask("Diff", agent=held.id, to="p3")["changes"]
    assert [(c["path"], c["kind"]) for c in first] == [
        ("/workspace/a", "modified"),
        ("/workspace/n", "created"),
    ]
    assert "-one" in first[0]["diff"]
    assert "+two" in first[0]["diff"]
    assert "No newline" not in first[0]["diff"]
    held.rf.fs.write_text("n", "new\x0bline")
    (made,) = [c for c in held.operator.ask("Diff", agent=held.id)["changes"] if c["path"] == "/workspace/n"]
    assert made["diff"].endswith("+new\x0bline\n\\ No newline at end of file\n")
    now = held.operator.ask("Diff", agent=held.id)["changes"]
    assert [(c["path"], c["kind"]) for c in now] == [("/workspace/a", "removed"), ("/workspace/n", "created")]


def test_a_diff_after_a_rollback_is_of_the_branch_that_goes_on(scene: Scene) -> None:
    held = scene.hold(allow=ALL, files={"a": "one\n", "b": "one\n"})
    held.rf.fs.write_text("a", "two\n")
    held.rf.fs.write_text("b", "two\n")
    done = rolled(held, "1")

    def diff(**where: str) -> list[tuple[str, str]]:
        found = held.operator.ask("Diff", agent=held.id, **where)["changes"]
        return [(change["path"], change["kind"]) for change in found]

    assert diff() == [("/workspace/a", "modified")]
    assert diff(**{"from": done["point"]}) == [("/workspace/b", "modified")]
    # The branch that was left can be looked at as well: how it stood just before, and between any two steps of it.
    assert diff(to=done["point"]) == [("/workspace/a", "modified"), ("/workspace/b", "modified")]
    assert diff(**{"from": "1", "to": "2"}) == [("/workspace/b", "modified")]
    assert diff(**{"from": "2", "to": "3"}) == [("/workspace/b", "modified")]
    assert diff(**{"from": "1", "to": "3"}) == []
    # Going back a single path stays on the branch: it is a change like others.
    rolled(held, "0", path="/workspace/a")
    assert diff() == []


@pytest.mark.parametrize("point", ["before_restore"])
def test_a_rollback_that_a_crash_cut_short_is_finished(scene: Scene, point: str) -> None:
    held = scene.hold(allow=ALL, files=TREE)
    before = picture(held.live)
    with shop(scene) as connection:
        connection.execute("insert into stock values (10, 'ten', null)")
    held.rf.fs.delete("dir", recursive=True)
    held.rf.fs.write_text("plain.txt", "changed")
    held.rf.fs.write_text("new", "new")
    held.rf.state.put(f"crash/{point}", 1)
    held.rf.sql.execute("shop", "delete from stock where id = 10")
    held.disconnect()
    kernel = scene.kernel
    kernel.arm(f"rollback:{point}")

    def ask() -> None:
        with pytest.raises(Refused):
            scene.operator.ask("Rollback", agent=held.id, to="0")

    asking = threading.Thread(target=ask)
    asking.start()
    kernel.await_hit(f"rollback:{point}")
    kernel.kill()
    asking.join()
    kernel.disarm(f"rollback:{point}")
    kernel.start()
    shown = scene.show(held.id)
    try:
        eventually(
            lambda: scene.show(held.id)["waiting_for"] == "an operator, after a rollback",
            "the rollback was not finished",
        )
    except AssertionError as error:
        error.add_note(f"{scene.show(held.id)}, at first {shown}\n{kernel.log.read_text()[-4000:]}")
        raise
    assert picture(held.live) == before
    assert scene.sql("select value from state where key = %s", f"crash/{point}") == [(None,)]
    with shop(scene) as connection:
        assert connection.execute("select name from stock where id = 10").fetchall() == [("ten",)]
        connection.execute("delete from stock")
    shown = scene.show(held.id)
    assert (shown["state"], shown["process"], shown["branch"]) == ("paused", "none", 1)
    steps = scene.operator.steps(held.id)
    assert [(s["action"], s["outcome"]) for s in steps if s["action"] == "rollback"] == [("rollback", "ok")]
    assert scene.operator.ask("AuditVerify")["ok"]
    scene.operator.ask("Start", agent=held.id)
    held.again()
    held.socket = scene.socket_of(held.id)
    assert held.rf.fs.read_text("plain.txt") == "plain"


def test_a_changed_record_is_found_and_named(scene: Scene) -> None:
    """The last test: it breaks the evidence of this kernel for good."""
    held = scene.hold(allow=ALL, files={"a": "a"})
    for number in range(5):
        held.rf.fs.write_text("a", str(number))
    assert scene.operator.ask("AuditVerify")["ok"]
    key = scene.key_of(held.id)
    with pytest.raises(psycopg.errors.RaiseException):
        scene.sql("update journal set verdict = 'allow' where chain = %s", key)
    (pos,) = scene.sql("select pos from journal where chain = %s and step = 3 and phase = 1", key)[0]
    with psycopg.connect(scene.database, autocommit=True) as connection:
        connection.execute("alter table journal disable trigger append_only")
        connection.execute(
            "update journal set resource = '/workspace/innocent' where chain = %s and pos = %s", [key, pos]
        )
        connection.execute("alter table journal enable trigger append_only")
    report = scene.operator.ask("AuditVerify")
    assert report["ok"] is False
    assert (report["first_bad"]["chain"], report["first_bad"]["pos"]) == (key, pos)
    from support.scenes import console

    done = console("audit", "verify", "--data", str(scene.kernel.data))
    assert done.returncode == 1
    assert str(pos) in done.stdout + done.stderr
