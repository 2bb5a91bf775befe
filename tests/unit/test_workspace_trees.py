"""Whole trees: copies and archives."""

from __future__ import annotations

import io
import os
import socket
import stat
import tarfile
from pathlib import Path

import pytest
from ringfence.sandbox.workspace import Workspace, WorkspaceError, copy_tree, extract_tar, make_tar


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "source"
    (root / "d/empty").mkdir(parents=True)
    (root / "d/f").write_text("content")
    (root / "d/f").chmod(0o750)
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o6755)
    (root / "twin").hardlink_to(root / "d/f")
    (root / "link").symlink_to("d/f")
    (root / "out").symlink_to("/etc/hostname")
    (root / os.fsdecode(b"bad\xff")).write_text("x")
    os.setxattr(root / "d/f", "user.note", b"n")
    for name in ("d/empty", "d/f", "d", "."):
        os.utime(root / name, ns=(1_600_000_000_123_456_789,) * 2)
    os.utime(root / "link", ns=(1_500_000_000_000_000_001,) * 2, follow_symlinks=False)
    return root


def times(root):
    return {name: os.lstat(root / name).st_mtime_ns for name in (".", "d", "d/f", "d/empty", "link")}


def test_a_copy_has_all_and_shares_nothing(source, tmp_path):
    target = tmp_path / "home/live"
    copy_tree(source, target)
    assert times(target) == times(source)
    assert (target / "d/f").read_text() == (target / "twin").read_text() == "content"
    assert (target / "d/f").stat().st_nlink == 1
    assert (target / "d/f").stat().st_ino != (target / "twin").stat().st_ino
    assert stat.S_IMODE((target / "d/f").stat().st_mode) == 0o750
    assert stat.S_IMODE((target / "run").stat().st_mode) == 0o755
    assert os.getxattr(target / "d/f", "user.note") == b"n"
    assert (target / "link").readlink() == Path("d/f")
    assert (target / "out").readlink() == Path("/etc/hostname")
    assert (target / os.fsdecode(b"bad\xff")).exists()
    with Workspace(target) as workspace, pytest.raises(WorkspaceError, match="leads out"):
        workspace.canonical("out")


def test_a_copy_leaves_out_what_is_to_be_skipped(source, tmp_path):
    seen = []

    def skip(path):
        seen.append(path)
        return path in {"/workspace/d/f", "/workspace/link"}

    copy_tree(source, tmp_path / "image", skip=skip)
    assert not (tmp_path / "image/d/f").exists()
    assert not os.path.lexists(tmp_path / "image/link")
    assert (tmp_path / "image/d/empty").is_dir()
    assert "/workspace/d/empty" in seen


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_copy_refuses_what_is_no_file(source, tmp_path, kind):
    if kind == "pipe":
        os.mkfifo(source / "d/odd")
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(source / "d/odd"))
    with pytest.raises(WorkspaceError, match="d/odd` is a device, socket or pipe") as caught:
        copy_tree(source, tmp_path / "target")
    assert caught.value.reason == "InvalidRequest"


def test_a_copy_goes_nowhere_it_should_not(source, tmp_path):
    with pytest.raises(WorkspaceError, match="lies inside"):
        copy_tree(source, source / "d/copy")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("x")
    with pytest.raises(WorkspaceError, match="not empty"):
        copy_tree(source, tmp_path / "full")
    with pytest.raises(WorkspaceError) as caught:
        copy_tree(tmp_path / "none", tmp_path / "target")
    assert caught.value.reason == "NoSuchResource"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes root")
def test_a_copy_belongs_to_the_uid(source, tmp_path):
    copy_tree(source, tmp_path / "live", uid=54321)
    owners = {os.lstat(tmp_path / "live" / name).st_uid for name in (".", "d", "d/f", "link", "d/empty")}
    assert owners == {54321}


def test_pack_and_unpack_bring_back_the_same(source, tmp_path):
    (source / "long").mkdir()
    (source / "long" / ("n" * 200)).write_bytes(os.urandom(3_000_001))
    (tmp_path / "out.tar").write_bytes(b"".join(make_tar(source)))
    extract_tar(tmp_path / "out.tar", tmp_path / "back")
    back = tmp_path / "back"
    names = {path.relative_to(source) for path in source.rglob("*")}
    assert names == {path.relative_to(back) for path in back.rglob("*")}
    assert (back / "long" / ("n" * 200)).read_bytes() == (source / "long" / ("n" * 200)).read_bytes()
    assert stat.S_IMODE((back / "d/f").stat().st_mode) == 0o750
    assert (back / "out").readlink() == Path("/etc/hostname")
    assert abs((back / "d").stat().st_mtime_ns - 1_600_000_000_123_456_789) < 1_000
    with tarfile.open(tmp_path / "out.tar") as archive:
        assert all(member.uid == 0 and not member.name.startswith("/") for member in archive)


def test_a_part_is_named_from_itself(source):
    with tarfile.open(fileobj=io.BytesIO(b"".join(make_tar(source, "/workspace/d")))) as archive:
        assert archive.getnames() == ["empty", "f"]
    with tarfile.open(fileobj=io.BytesIO(b"".join(make_tar(source, "/workspace/d/f")))) as archive:
        assert archive.getnames() == ["f"]
    with pytest.raises(WorkspaceError) as caught:
        list(make_tar(source, "/workspace/none"))
    assert caught.value.reason == "NoSuchResource"


def archive_of(*members) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = link
            info.size = 3 if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(b"abc") if kind == tarfile.REGTYPE else None)
    stream.seek(0)
    return stream


@pytest.mark.parametrize(
    "members",
    [
        [("../evil", tarfile.REGTYPE, "")],
        [("a/../../evil", tarfile.REGTYPE, "")],
        [("/evil", tarfile.REGTYPE, "")],
        [("/workspace/evil", tarfile.REGTYPE, "")],
        [("l", tarfile.SYMTYPE, ".."), ("l/evil", tarfile.REGTYPE, "")],
        [("l", tarfile.SYMTYPE, "../evil"), ("l", tarfile.REGTYPE, "")],
        [("h", tarfile.LNKTYPE, "../../etc/passwd")],
        [("h", tarfile.LNKTYPE, "missing")],
        [("l", tarfile.SYMTYPE, "/etc/passwd"), ("h", tarfile.LNKTYPE, "l")],
        [("dev", tarfile.CHRTYPE, "")],
        [("pipe", tarfile.FIFOTYPE, "")],
        [("f", tarfile.REGTYPE, ""), ("f", tarfile.REGTYPE, "")],
        [("f", tarfile.REGTYPE, ""), ("f/below", tarfile.REGTYPE, "")],
        [("a\u200bb", tarfile.REGTYPE, "")],
        [(".", tarfile.REGTYPE, "")],
    ],
)
def test_a_bad_archive_is_refused_and_reaches_nothing(tmp_path, members):
    target = tmp_path / "inner/live"
    with pytest.raises(WorkspaceError) as caught:
        extract_tar(archive_of(*members), target)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner"]
    assert {path.name for path in (tmp_path / "inner").iterdir()} <= {"live", ".tmp-live"}


def test_hard_links_of_an_archive_become_files(tmp_path):
    members = [("f", tarfile.REGTYPE, ""), ("h", tarfile.LNKTYPE, "f")]
    extract_tar(archive_of(*members), tmp_path / "live")
    assert (tmp_path / "live/h").read_text() == "abc"
    assert (tmp_path / "live/h").stat().st_nlink == 1


def test_too_much_or_no_archive_at_all(tmp_path):
    with pytest.raises(WorkspaceError) as caught:
        extract_tar(archive_of(("f", tarfile.REGTYPE, "")), tmp_path / "a", max_bytes=2)
    assert caught.value.reason == "NoSpace"
    for junk in (b"this is no archive" * 100, archive_of(("f", tarfile.REGTYPE, "")).getvalue()[:700]):
        with pytest.raises(WorkspaceError) as caught:
            extract_tar(io.BytesIO(junk), tmp_path / "b")
        assert caught.value.reason == "InvalidRequest"
