"""Commands of exec.run: the overlay, its masks, what they may write, and what is left of them."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Box

FILES = {
    "a.txt": "hello\n",
    "dir/x": "x",
    "dir/sub/y": "y",
    "opaque/1": "1",
    "opaque/2": "2",
    "same": "same",
    "bits": "bits",
    "file-to-dir": "f",
    "dir-to-file/q": "q",
    "touched/t": "t",
    "moved/m": "m",
}


def facts_of(top: Path) -> dict[str, tuple[Any, ...]]:
    """Everything of a tree that a rollback or an agent could notice."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(top.rglob("*")):
        facts = path.lstat()
        what: Any = None
        if stat.S_ISREG(facts.st_mode):
            what = path.read_bytes()
        elif stat.S_ISLNK(facts.st_mode):
            what = str(path.readlink())
        found[str(path.relative_to(top))] = (
            facts.st_mode,
            facts.st_uid,
            facts.st_mtime_ns if what is not None else 0,
            what,
        )
    return found


def workspace_of(box: Box, files: dict[str, str] | None = None) -> Path:
    top = box.directory(box.fresh("workspace"), FILES if files is None else files)
    if files is None:
        (top / "link").symlink_to("a.txt")
        box.give(top)
    return top


def apply(box: Box, upper: Path, workspace: Path, text: str) -> None:
    box.host.call("apply", upper=str(upper), live=str(workspace), changes_json=text, uid=box.uid)


def test_a_command_sees_the_workspace_and_leaves_it_untouched(box: Box) -> None:
    workspace = workspace_of(box)
    before = facts_of(workspace)
    done = box.run("cat a.txt; pwd; id -un; echo changed > a.txt; cat a.txt; rm -rf dir; ls", workspace)
    assert (done.reason, done.code, done.err) == ("exit", 0, "")
    assert done.out.splitlines()[:4] == ["hello", "/workspace", "agent", "changed"]
    assert "dir" not in done.out.splitlines()
    assert facts_of(workspace) == before
    assert box.records() == []
    assert box.alive() == []


def test_the_working_directory_stdin_and_environment(box: Box) -> None:
    workspace = workspace_of(box)
    done = box.run("pwd; cat; env", workspace, cwd="/workspace/dir/sub", stdin="given\n", env={"X": "1"})
    lines = done.out.splitlines()
    assert lines[:2] == ["/workspace/dir/sub", "given"]
    assert {line.split("=")[0] for line in lines[2:]} <= {"X", "PATH", "PWD", "OLDPWD", "SHLVL", "_"}
    assert "host-canary" not in done.out
    with pytest.raises(Exception, match="`/workspace/nowhere`"):
        box.run("true", workspace, cwd="/workspace/nowhere")
    with pytest.raises(Exception, match="not a plain path"):
        box.run("true", workspace, cwd="/workspace/../etc")


def test_a_command_has_no_syscall_socket_and_no_program(box: Box) -> None:
    done = box.run("ls /run /program 2>&1; ls /", workspace_of(box))
    assert "ringfence" not in done.out
    assert "/program" not in done.out.replace("'/program': No such file", "")


def test_exit_status_and_signals(box: Box) -> None:
    workspace = workspace_of(box)
    assert (box.run("exit 9", workspace).reason, box.run("exit 9", workspace).code) == ("exit", 9)
    done = box.run("kill -TERM $$", workspace)
    assert (done.reason, done.code) == ("signal", -signal.SIGTERM)
    # A pipe that closes early ends its writer quietly: the signal is not ignored inside.
    assert box.run("yes | head -n 1", workspace).out == "y\n"


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
    ["/workspace/same2", "create", "file", 0o644, False],
]


def test_change_sets_are_exact_and_apply_gives_what_the_command_saw(box: Box) -> None:
    workspace = workspace_of(box)
    view = "find . -mindepth 1 -printf '%p %y %m %s %l\\n' | sed 's/ [0-9]* $/&/' | sort"
    done = box.run(SCRIPT + view, workspace)
    assert (done.code, done.err) == (0, "")
    changes = box.changes(done, workspace)
    assert sorted(changes) == sorted(EXPECTED)
    assert [row[0] for row in changes if row[1] == "remove"].index("/workspace/dir") == 0
    text = json.dumps({"version": 1, "changes": changes})
    apply(box, done.upper, workspace, text)
    after = facts_of(workspace)
    assert box.run(view, workspace).out == done.out.replace(" d 755 4096", " d 755 4096")
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
        with pytest.raises(Exception, match="can't be judged"):
            box.changes(done, workspace)


MASKED = {
    "keep": "k",
    ".env": "secret-1",
    "data/.env": "secret-2",
    "data/other": "o",
    ".ssh/id": "secret-3",
    ".ssh/deep/x": "secret-4",
}
MASKS = [
    "/workspace/.env",
    "/workspace/data/.env",
    "/workspace/.ssh",
    "/workspace/alias",
    "/workspace/absent",
]


def test_masked_paths_cannot_be_read_or_changed(box: Box) -> None:
    workspace = workspace_of(box, MASKED)
    (workspace / "alias").symlink_to("data/other")
    box.give(workspace)
    before = facts_of(workspace)
    script = """
cat .env; cat data/.env; cat .ssh/id; ls .ssh; ls .ssh/deep; cat alias; cp .env copy; cat /proc/self/cwd/.env; tar cf - . | grep -a secret-
ln .env hard; ln data/.env hard2; mv .env moved; rm -f .env; rm -rf .ssh; rm -rf data; mv data data2; chmod 777 .env .ssh; echo x > .env
echo x > .ssh/new; mkdir .ssh/new; ln -s data/.env soft; cat soft; python3 -c 'import mmap; open(".env","r+b")'
"""
    done = box.run(script, workspace, masks=MASKS)
    assert "secret-" not in done.out + done.err
    assert "o\n" not in done.out
    changes = box.changes(done, workspace)
    touched = {row[0] for row in changes}
    assert not touched & {
        f"/workspace/{name}"
        for name in (".env", "data/.env", ".ssh", ".ssh/id", ".ssh/deep", "alias", "data")
    }
    assert all(
        "secret" not in path.read_text(errors="replace") for path in done.upper.rglob("*") if path.is_file()
    )
    assert facts_of(workspace) == before
    assert "Permission denied" in done.err


def test_a_masked_file_is_masked_for_every_tool(box: Box) -> None:
    workspace = workspace_of(box, {".env": "secret", "sub/x": "x"})
    for argv in (
        ["cat", ".env"],
        ["cat", "/workspace/.env"],
        ["cat", "sub/../.env"],
        ["dd", "if=.env"],
        ["/bin/cp", ".env", "/tmp/c"],
    ):
        done = box.run("", workspace, argv=argv, masks=["/workspace/.env"])
        assert done.code != 0
        assert "secret" not in done.out


@pytest.mark.parametrize(
    "mask", ["/etc/passwd", "/workspace", "/workspace/../etc", "/workspace/a/", "relative"]
)
def test_masks_that_make_no_sense_are_refused(box: Box, mask: str) -> None:
    with pytest.raises(Exception, match=r"not a plain path|whole workspace"):
        box.run("true", workspace_of(box), masks=[mask])


def test_a_mask_that_leads_through_a_link_stops_the_start(box: Box) -> None:
    workspace = workspace_of(box, {"real/secret": "s"})
    (workspace / "alias").symlink_to("real")
    box.give(workspace)
    with pytest.raises(Exception, match="wall `masks`"):
        box.run("cat alias/secret", workspace, masks=["/workspace/alias/secret"])


def test_huge_output_stays_bounded_and_keeps_both_ends(box: Box) -> None:
    workspace = workspace_of(box)
    script = "echo first; yes 0123456789 | head -c 209715200; echo; echo the error is here; echo e >&2"
    done = box.run(script, workspace, limits={"disk_bytes": 16 << 20})
    assert (done.reason, done.code) == ("exit", 0)
    assert done.facts["stdout_bytes"] == 209715200 + len("first\n\nthe error is here\n")
    assert done.facts["stderr_bytes"] == 2
    size = Path(done.facts["stdout"]).stat().st_size
    assert size <= (4 << 20) + 100
    assert done.out.startswith("first\n0123456789\n")
    assert done.out.endswith("\nthe error is here\n")
    assert "bytes left out]" in done.out
    peak = box.host.call("peak_bytes")
    assert max(peak.values()) < 100 << 20, peak


def test_one_long_line_of_output(box: Box) -> None:
    done = box.run(
        "head -c 52428800 /dev/zero | tr '\\0' x", workspace_of(box), limits={"disk_bytes": 8 << 20}
    )
    assert done.facts["stdout_bytes"] == 52428800
    assert (done.reason, done.code) == ("exit", 0)


REMOVED = """
import os
for n in range(1000):
    f = open("gone", "wb"); os.unlink("gone")
    f.write(bytes(1 << 20)); f.flush(); os.dup(f.fileno())
import time; time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("argv", "ended"),
    [
        (["sh", "-c", "while head -c 1048576 /dev/zero >> big; do :; done; exit 1"], ("exit", 1)),
        (["sh", "-c", "n=0; while :; do n=$((n+1)); head -c 300000 /dev/zero > f$n; done"], ("disk", -9)),
        (["python3", "-c", REMOVED], ("disk", -9)),
    ],
    ids=["one file", "many files", "removed files"],
)
def test_the_upper_layer_is_bounded(box: Box, argv: list[str], ended: tuple[str, int]) -> None:
    workspace = workspace_of(box)
    done = box.run("", workspace, argv=argv, limits={"disk_bytes": 8 << 20, "timeout_s": 30})
    # One file alone can't grow past the limit; all together are measured, and the command is killed.
    assert (done.reason, done.code) == ended
    assert box.alive() == []
    assert box.records() == []


def test_timeout_and_memory_of_a_command(box: Box) -> None:
    workspace = workspace_of(box)
    done = box.run("echo begun; sleep 1000", workspace, limits={"timeout_s": 0.5})
    assert (done.reason, done.code, done.out) == ("timeout", -9, "begun\n")
    eat = ["python3", "-c", "x = bytearray(400 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"]
    assert box.run("", workspace, argv=eat, limits={"memory_bytes": 96 << 20}).reason == "memory"
    assert box.alive() == []


def test_cancelling_ends_the_tree_first(box: Box) -> None:
    workspace = workspace_of(box)
    script = "setsid sleep 1000 $0 & echo up > up; exec sleep 1000"
    spec = box.command_spec(
        [
            "/bin/sh",
            "-c",
            "python3 -c 'import sys,time; time.sleep(1000)' $0 & echo up > up; wait",
            box.token,
        ],
        workspace,
    )
    del script
    number, future = box.host.begin("command", **spec)
    while not (Path(spec["scratch"]) / "upper" / "up").exists():
        assert not future.done()
    box.host.call("cancel", order=number)
    assert box.alive() == []
    with pytest.raises(Exception, match="cancelled"):
        future.result(30)
    assert box.records() == []


def test_commands_on_one_workspace_do_not_share_layers(box: Box) -> None:
    workspace = workspace_of(box)
    first = box.run("echo 1 > one", workspace)
    second = box.run("ls one", workspace)
    assert second.code != 0
    assert box.changes(first, workspace) == [["/workspace/one", "create", "file", 0o644, False]]
    assert box.changes(second, workspace) == []


def test_a_scratch_directory_in_use_is_refused(box: Box) -> None:
    workspace = workspace_of(box)
    spec = box.command_spec(["/bin/true"], workspace)
    box.host.call("command", **spec)
    with pytest.raises(Exception, match="wall `scratch directory`"):
        box.host.call("command", **spec)
