"""Reading and changing files of a workspace: all or nothing, never in place, nothing left over."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ringfence.sandbox import openat
from ringfence.sandbox.workspace import Workspace, WorkspaceError


@pytest.fixture
def live(tmp_path):
    root = tmp_path / "live"
    root.mkdir()
    return root


@pytest.fixture
def workspace(live):
    with Workspace(live) as opened:
        yield opened


def leftovers(live):
    staging = live.parent / ".tmp-live"
    return list(staging.iterdir()) if staging.exists() else []


def reason(effect) -> str:
    with pytest.raises(WorkspaceError) as caught:
        effect()
    assert "\n" not in str(caught.value)
    return caught.value.reason


def test_write_makes_parents_and_reads_back(workspace, live):
    size, version = workspace.write("/workspace/a/b/c.txt", b"hello")
    found = workspace.read("/workspace/a/b/c.txt")
    assert (found.data, found.size_bytes, found.version) == (b"hello", 5, version)
    assert size == 5
    assert stat.S_IMODE((live / "a/b/c.txt").stat().st_mode) == 0o644
    assert stat.S_IMODE((live / "a/b").stat().st_mode) == 0o755
    assert leftovers(live) == []


def test_the_mode_is_for_new_files_only_and_the_umask_has_no_say(workspace, live):
    old = os.umask(0o077)
    try:
        workspace.write("/workspace/new/x", b"1", 0o664)
    finally:
        os.umask(old)
    assert stat.S_IMODE((live / "new/x").stat().st_mode) == 0o664
    assert stat.S_IMODE((live / "new").stat().st_mode) == 0o755
    (live / "new/x").chmod(0o750)
    os.setxattr(live / "new/x", "user.note", b"kept")
    workspace.write("/workspace/new/x", b"2", 0o600)
    assert stat.S_IMODE((live / "new/x").stat().st_mode) == 0o750
    assert os.getxattr(live / "new/x", "user.note") == b"kept"


def test_no_inode_is_changed_in_place(workspace, live):
    (live / "f").write_text("before")
    with (live / "f").open("rb") as before:
        workspace.append("/workspace/f", b"!")
        workspace.write("/workspace/f", b"other")
        assert before.read() == b"before"


def test_a_hard_link_from_elsewhere_is_refused_and_can_be_removed(workspace, live, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("canary")
    (live / "f").hardlink_to(outside)
    assert reason(lambda: workspace.read("/workspace/f")) == "InvalidRequest"
    assert reason(lambda: workspace.append("/workspace/f", b"!")) == "InvalidRequest"
    assert reason(lambda: workspace.write("/workspace/f", b"!")) == "InvalidRequest"
    assert workspace.search("/workspace", "", "canary", 0, lambda _: True) == ([], 1, False)
    assert workspace.delete("/workspace/f", recursive=False) == 1
    assert outside.read_text() == "canary"


def test_append_adds_and_creates(workspace):
    assert workspace.append("/workspace/log", b"one\n")[0] == 4
    assert workspace.append("/workspace/log", b"two\n")[0] == 8
    assert workspace.read("/workspace/log").data == b"one\ntwo\n"


def test_append_to_a_file_with_holes_keeps_them(workspace, live):
    with (live / "sparse").open("wb") as file:
        file.truncate(64 << 20)
    size, _ = workspace.append("/workspace/sparse", b"end")
    assert size == (64 << 20) + 3
    assert (live / "sparse").stat().st_blocks * 512 < 1 << 20
    assert workspace.read("/workspace/sparse", (64 << 20) - 2).data == b"\0\0end"


def test_every_write_is_another_version(workspace):
    versions = [workspace.write("/workspace/f", b"same")[1] for _ in range(50)]
    assert len(set(versions)) == len(versions)


def test_parts_of_a_file(workspace, live):
    (live / "f").write_bytes(bytes(range(100)))
    assert workspace.read("/workspace/f", 10, 5).data == bytes(range(10, 15))
    assert workspace.read("/workspace/f", 95, 50).data == bytes(range(95, 100))
    assert workspace.read("/workspace/f", 200).data == b""
    assert workspace.read("/workspace/f", max_bytes=7).data == bytes(range(7))
    assert workspace.read("/workspace/f", max_bytes=7).size_bytes == 100
    assert workspace.read_within("/workspace/f", 0, 0, max_bytes=1000, only_below=99) is None
    assert reason(lambda: workspace.read("/workspace/f", -1)) == "InvalidRequest"


def test_what_is_no_file_is_not_read_and_a_pipe_blocks_nobody(workspace, live):
    (live / "d").mkdir()
    os.mkfifo(live / "pipe")
    assert reason(lambda: workspace.read("/workspace/d")) == "InvalidRequest"
    assert reason(lambda: workspace.read("/workspace/pipe")) == "InvalidRequest"
    assert reason(lambda: workspace.write("/workspace/d", b"x")) == "InvalidRequest"
    assert reason(lambda: workspace.write("/workspace/pipe", b"x")) == "InvalidRequest"
    assert reason(lambda: workspace.append("/workspace/d", b"x")) == "InvalidRequest"
    assert reason(lambda: workspace.write("/workspace", b"x")) == "InvalidRequest"
    assert reason(lambda: workspace.read("/workspace/none")) == "NoSuchResource"
    (live / "f").write_text("x")
    assert reason(lambda: workspace.read("/workspace/f/below")) == "NoSuchResource"
    assert reason(lambda: workspace.write("/workspace/f/below", b"x")) == "NoSuchResource"
    assert leftovers(live) == []


def test_list_and_stat_show_links_as_links(workspace, live):
    (live / "b").write_text("12")
    (live / "a").mkdir()
    (live / "c").symlink_to("b")
    assert [
        (info.path, info.kind, info.size_bytes, info.target) for info in workspace.list("/workspace")
    ] == [
        ("/workspace/a", "directory", 0, ""),
        ("/workspace/b", "file", 2, ""),
        ("/workspace/c", "link", 0, "b"),
    ]
    assert workspace.stat("/workspace/c").target == "b"
    assert workspace.stat("/workspace").kind == "directory"
    assert reason(lambda: workspace.list("/workspace/b")) == "InvalidRequest"
    assert reason(lambda: workspace.list("/workspace/none")) == "NoSuchResource"


def test_move_never_replaces(workspace, live):
    (live / "f").write_text("f")
    (live / "g").write_text("g")
    (live / "d/sub").mkdir(parents=True)
    (live / "l").symlink_to("/nowhere")
    assert reason(lambda: workspace.move("/workspace/f", "/workspace/g")) == "Conflict"
    assert reason(lambda: workspace.move("/workspace/f", "/workspace/l")) == "Conflict"
    assert reason(lambda: workspace.move("/workspace/f", "/workspace/d")) == "Conflict"
    assert reason(lambda: workspace.move("/workspace/d", "/workspace/d/sub/x")) == "InvalidRequest"
    assert reason(lambda: workspace.move("/workspace/f", "/workspace/f")) == "InvalidRequest"
    assert reason(lambda: workspace.move("/workspace/none", "/workspace/x")) == "NoSuchResource"
    assert not (live / "x").exists()
    workspace.move("/workspace/d", "/workspace/new/parent/d")
    assert (live / "new/parent/d/sub").is_dir()
    workspace.move("/workspace/l", "/workspace/m")
    assert (live / "m").readlink() == Path("/nowhere")


def test_move_on_a_file_system_that_can_not_rename_without_replacing(workspace, live, monkeypatch):
    def refuse(*_):
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(openat, "_renameat2_call", refuse)
    (live / "f").write_text("f")
    (live / "d/sub").mkdir(parents=True)
    (live / "l").symlink_to("f")
    for name in ("f", "d", "l"):
        kind = workspace.stat(f"/workspace/{name}").kind
        workspace.move(f"/workspace/{name}", f"/workspace/new/{name}")
        assert workspace.stat(f"/workspace/new/{name}").kind == kind
        assert workspace.fingerprint(f"/workspace/{name}") == "absent"
        (live / name).write_text("in the way")
        assert (
            reason(lambda each=name: workspace.move(f"/workspace/new/{each}", f"/workspace/{each}"))
            == "Conflict"
        )
    assert (live / "new/d/sub").is_dir()


def test_delete(workspace, live):
    (live / "d/e/f").mkdir(parents=True)
    (live / "d/x").write_text("x")
    (live / "d/l").symlink_to("/etc")
    (live / "empty").mkdir()
    assert reason(lambda: workspace.delete("/workspace/d", recursive=False)) == "InvalidRequest"
    assert reason(lambda: workspace.delete("/workspace/empty", recursive=False)) == "InvalidRequest"
    assert reason(lambda: workspace.delete("/workspace", recursive=True)) == "InvalidRequest"
    assert reason(lambda: workspace.delete("/workspace/none", recursive=True)) == "NoSuchResource"
    assert workspace.delete("/workspace/d/l", recursive=False) == 1
    assert Path("/etc").is_dir()
    assert workspace.delete("/workspace/d", recursive=True) == 4
    assert [entry.name for entry in live.iterdir()] == ["empty"]
    assert leftovers(live) == []


def test_delete_goes_deeper_than_descriptors_and_recursion(workspace, live):
    depth = 1500
    here = os.open(live, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert workspace.delete("/workspace/d", recursive=True) == depth
    assert list(live.iterdir()) == []
    assert leftovers(live) == []


def test_fingerprints_tell_states_apart(workspace, live):
    (live / "f").write_text("x")
    seen = {workspace.fingerprint("/workspace/f"), workspace.fingerprint("/workspace/none")}
    (live / "f").chmod(0o600)
    seen.add(workspace.fingerprint("/workspace/f"))
    (live / "f").write_text("y")
    seen.add(workspace.fingerprint("/workspace/f"))
    (live / "f").unlink()
    for target in ("x", "y"):
        (live / "f").symlink_to(target)
        seen.add(workspace.fingerprint("/workspace/f"))
        (live / "f").unlink()
    (live / "f").mkdir()
    seen.add(workspace.fingerprint("/workspace/f"))
    (live / "f").rmdir()
    os.mkfifo(live / "f")
    seen.add(workspace.fingerprint("/workspace/f"))
    assert len(seen) == 8
    assert workspace.fingerprint("/workspace/f/below") == "absent"


def test_a_write_that_does_not_fit_changes_nothing_and_says_what_to_do(live):
    (live / "f").write_text("old")
    program = textwrap.dedent(f"""
        import resource, signal
        from pathlib import Path
        from ringfence.sandbox.workspace import Workspace, WorkspaceError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        workspace = Workspace(Path({str(live)!r}))
        for effect in (lambda: workspace.write("/workspace/new/f", bytes(5000)),
                       lambda: workspace.write("/workspace/f", bytes(5000)),
                       lambda: workspace.append("/workspace/f", bytes(5000))):
            try:
                effect()
            except WorkspaceError as error:
                print(error.reason, error)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["NoSpace"] * 3
    assert (live / "f").read_text() == "old"
    assert not (live / "new").exists()
    assert leftovers(live) == []


def test_sweep_removes_what_a_crash_left(workspace, live):
    workspace.write("/workspace/f", b"x")
    staging = live.parent / ".tmp-live"
    assert stat.S_IMODE(staging.stat().st_mode) == 0o700
    (staging / "half").write_text("x")
    (staging / "tree/deep").mkdir(parents=True)
    workspace.sweep()
    assert leftovers(live) == []
    assert workspace.read("/workspace/f").data == b"x"


def test_a_root_that_is_not_there(tmp_path):
    with pytest.raises(WorkspaceError, match="can't be opened"):
        Workspace(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes root")
def test_new_files_and_directories_get_the_uid(live):
    with Workspace(live, uid=54321) as workspace:
        workspace.write("/workspace/a/f", b"x")
        assert (live / "a").stat().st_uid == (live / "a/f").stat().st_uid == 54321
        os.chown(live / "a/f", 12345, 12346)
        workspace.write("/workspace/a/f", b"y")
        facts = (live / "a/f").stat()
        assert (facts.st_uid, facts.st_gid) == (12345, 12346)
