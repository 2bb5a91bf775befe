"""Change sets: exactly what a command did, and how it gets into the live workspace."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from workspace_kit import apply, facts_of, workspace_of

if TYPE_CHECKING:
    from conftest import Box


SCRIPT = """
echo more >> a.txt; rm -r dir; rm -r opaque; mkdir opaque; echo 2b > opaque/2; touch same; chmod 600 bits
rm file-to-dir; mkdir -p file-to-dir/deep; echo n > file-to-dir/deep/n; rm -r dir-to-file; echo f > dir-to-file
ln -sfn bits link; touch touched; mv moved renamed; ln a.txt hard; ln -s /etc/passwd out; mkdir empty
: > new; rm new; cp same same2; cat same2 > same; mkdir -p t/u; rm -r t
"""
EXPECTED = [
    ["/workspace/a.txt", "modify", "file", 0o644, False],
    ["/workspace/bits", "metadata", "file", 0o600, False],
    ["/workspace/dir", "remove", "directory", 0o755, False],
    ["/workspace/dir/sub", "remove", "directory", 0o755, False],
    ["/workspace/dir/sub/y", "remove", "file", 0o644, False],
    ["/workspace/dir/x", "remove", "file", 0o644, False],
    ["/workspace/dir-to-file", "remove", "directory", 0o755, False],
    ["/workspace/dir-to-file/q", "remove", "file", 0o644, False],
    ["/workspace/dir-to-file", "create", "file", 0o644, False],
    ["/workspace/empty", "create", "directory", 0o755, False],
    ["/workspace/file-to-dir", "remove", "file", 0o644, False],
    ["/workspace/file-to-dir", "create", "directory", 0o755, False],
    ["/workspace/file-to-dir/deep", "create", "directory", 0o755, False],
    ["/workspace/file-to-dir/deep/n", "create", "file", 0o644, False],
    ["/workspace/hard", "create", "file", 0o644, False],
    ["/workspace/link", "modify", "link", 0o777, False],
    ["/workspace/moved", "remove", "directory", 0o755, False],
    ["/workspace/moved/m", "remove", "file", 0o644, False],
    ["/workspace/opaque/2", "modify", "file", 0o644, False],
    ["/workspace/opaque/1", "remove", "file", 0o644, False],
    ["/workspace/out", "create", "link", 0o777, False],
    ["/workspace/renamed", "create", "directory", 0o755, False],
    ["/workspace/renamed/m", "create", "file", 0o644, False],
    ["/workspace/same", "metadata", "file", 0o644, False],
    ["/workspace/same2", "create", "file", 0o644, False],
]


def test_change_sets_are_exact_and_apply_gives_what_the_command_saw(box: Box) -> None:
    workspace = workspace_of(box)
    # The size of a directory is its file system's own affair.
    view = (
        r"find . -mindepth 1 \( -type d -printf '%p %y %m\n' \) -o \( -type f -printf '%p %y %m %s %T@\n' \) "
        r"-o -printf '%p %y %m %s %l\n' | sort"
    )
    done = box.run(SCRIPT + view, workspace)
    assert (done.code, done.err) == (0, "")
    changes = box.changes(done, workspace)
    assert sorted(changes) == sorted(EXPECTED)
    assert [row[0] for row in changes if row[1] == "remove"].index("/workspace/dir") == 0
    text = json.dumps({"version": 1, "changes": changes})
    apply(box, done.upper, workspace, text)
    after = facts_of(workspace)
    assert box.run(view, workspace).out == done.out
    owner = box.uid if box.uid is not None else box.owner
    if owner is not None:
        assert {facts[1] for facts in after.values()} == {owner}
    apply(box, done.upper, workspace, text)
    assert facts_of(workspace) == after
    assert box.changes(done, workspace) == []
    box.host.call("discard", scratch=str(done.upper.parent))
    assert not done.upper.parent.exists()


def test_times_attributes_and_holes_survive_apply(box: Box) -> None:
    workspace = workspace_of(box)
    script = """
import os
with open("sparse", "wb") as f: f.seek(50 << 20); f.write(b"end")
with open("tagged", "w") as f: f.write("t")
os.setxattr("tagged", "user.kind", b"draft")
os.mkdir("box"); os.setxattr("box", "user.kind", b"box")
for name in ("tagged", "box"): os.utime(name, ns=(1_600_000_000_000_000_001, 1_600_000_000_000_000_007))
os.chmod("box", 0o750); os.setxattr("a.txt", "user.only", b"attribute")
"""
    done = box.run("", workspace, argv=["python3", "-c", script])
    assert done.code == 0, done.err
    changes = box.changes(done, workspace)
    assert ["/workspace/a.txt", "metadata", "file", 0o644, False] in changes
    apply(box, done.upper, workspace, json.dumps({"version": 1, "changes": changes}))
    assert os.getxattr(workspace / "tagged", "user.kind") == b"draft"
    assert os.getxattr(workspace / "box", "user.kind") == b"box"
    assert os.getxattr(workspace / "a.txt", "user.only") == b"attribute"
    assert (workspace / "tagged").stat().st_mtime_ns == 1_600_000_000_000_000_007
    assert (workspace / "box").stat().st_mtime_ns == 1_600_000_000_000_000_007
    assert (workspace / "sparse").stat().st_size == (50 << 20) + 3
    assert (workspace / "sparse").stat().st_blocks * 512 < 1 << 20
    assert [name for name in os.listxattr(workspace / "a.txt") if "overlay" in name] == []


def test_no_file_of_the_workspace_is_changed_in_place(box: Box) -> None:
    workspace = workspace_of(box)
    kept = box.place / box.fresh("kept")
    os.link(workspace / "a.txt", kept)
    os.link(workspace / "bits", box.place / f"{kept.name}-bits")
    done = box.run("echo more >> a.txt; chmod 600 bits", workspace)
    apply(box, done.upper, workspace, json.dumps({"version": 1, "changes": box.changes(done, workspace)}))
    assert kept.read_text() == "hello\n"
    assert (workspace / "a.txt").read_text() == "hello\nmore\n"
    assert stat.S_IMODE((box.place / f"{kept.name}-bits").stat().st_mode) == 0o644


def test_apply_may_be_cut_off_anywhere_and_run_again(box: Box) -> None:
    workspace = workspace_of(box, {f"d{n % 7}/f{n}": "old" for n in range(200)})
    script = "for d in d*; do for f in $d/*; do echo new > $f; done; done; rm -r d0; mkdir e; for n in $(seq 100); do echo n > e/$n; done"
    done = box.run(script, workspace)
    assert done.code == 0
    text = json.dumps({"version": 1, "changes": box.changes(done, workspace)})
    host = box.another_host()
    arguments = {"upper": str(done.upper), "live": str(workspace), "changes_json": text, "uid": box.uid}
    _, future = host.begin("apply", **arguments)
    while not future.done() and (workspace / "d0/f0").exists():
        pass
    host.process.kill()
    host.process.wait()
    apply(box, done.upper, workspace, text)
    assert not (workspace / "d0").exists()
    assert {path.read_text() for path in workspace.glob("d*/*")} == {"new\n"}
    assert len(list((workspace / "e").iterdir())) == 100
    assert box.changes(done, workspace) == []


@pytest.mark.parametrize(
    ("script", "row"),
    [
        ("cp /bin/true s; chmod 4755 s", ["/workspace/s", "create", "file", 0o4755, True]),
        ("cp /bin/true s; chmod 2755 s", ["/workspace/s", "create", "file", 0o2755, True]),
        ("chmod u+s same", ["/workspace/same", "metadata", "file", 0o4644, True]),
        ("mkfifo p", ["/workspace/p", "create", "fifo", 0o644, False]),
        (
            "python3 -c 'import socket; socket.socket(1).bind(\"s\")'",
            ["/workspace/s", "create", "socket", 0o755, False],
        ),
    ],
)
def test_what_no_workspace_may_hold_is_flagged(box: Box, script: str, row: list[Any]) -> None:
    workspace = workspace_of(box)
    done = box.run(script, workspace)
    assert box.changes(done, workspace) == [row]
    if row[2] in ("fifo", "socket"):
        with pytest.raises(Exception, match="can't be applied"):
            apply(box, done.upper, workspace, json.dumps({"version": 1, "changes": [row]}))


def test_a_command_cannot_forge_the_overlay(box: Box) -> None:
    workspace = workspace_of(box)
    script = """
import os
for name in ("user.overlay.opaque", "trusted.overlay.opaque", "user.overlay.redirect", "user.overlay.whiteout"):
    for path in ("dir", "dir/x"):
        try: os.setxattr(path, name, b"y")
        except OSError: pass
try: os.mknod("white", 0o020000, 0); print("made")
except OSError as error: print(error.errno)
"""
    done = box.run("", workspace, argv=["python3", "-c", script])
    assert done.out == "1\n"
    assert box.changes(done, workspace) == []


def test_a_name_that_cannot_be_judged_is_refused(box: Box) -> None:
    workspace = workspace_of(box)
    for name in ("a\\nb", "e\\u0301", "zero\\u200bwidth", "\\udcff"):
        done = box.run("", workspace, argv=["python3", "-c", f"import os; open(os.fsencode('{name}'), 'w')"])
        assert done.code == 0, done.err
        with pytest.raises(Exception, match="no rule can name"):
            box.changes(done, workspace)
