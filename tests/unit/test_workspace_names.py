"""Names of paths: one spelling for policy, whatever was asked for and however links lie."""

from __future__ import annotations

import errno
import os
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.sandbox import names, openat
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


def refused(workspace, path, **options) -> WorkspaceError:
    with pytest.raises(WorkspaceError) as caught:
        workspace.canonical(path, **options)
    return caught.value


@pytest.mark.parametrize(
    ("asked", "canonical"),
    [
        ("notes.md", "/workspace/notes.md"),
        ("/workspace/notes.md", "/workspace/notes.md"),
        ("/workspace", "/workspace"),
        (".", "/workspace"),
        ("./a//b/./c/", "/workspace/a/b/c"),
        ("//workspace//a", "/workspace/a"),
        ("workspace/a", "/workspace/workspace/a"),
        ("...", "/workspace/..."),
        ("a b/ü.txt", "/workspace/a b/ü.txt"),
        ("%2e%2e/etc", "/workspace/%2e%2e/etc"),
    ],
)
def test_one_spelling(workspace, asked, canonical):
    assert workspace.canonical(asked) == canonical


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "/",
        "..",
        "a/../b",
        "/workspace/../etc/passwd",
        "/etc/passwd",
        "/workspace-secret/a",
        "/workspacex",
        "/proc/self/environ",
        "/proc/self/root/workspace/a",
        "/dev/null",
        "/sys/kernel",
        "a\nb",
        "a\0b",
        "a\u200bb",
        "a\u202eb",
        "\ufeffa",
        "a\u00adb",
        "x" * 256,
        "é" * 128,
        "a/" * 2100,
        "\udcc3\udca9",
        "\ud800",
    ],
)
def test_what_can_not_be_meant_is_refused_as_invalid(workspace, asked):
    error = refused(workspace, asked)
    assert error.reason == "InvalidRequest"
    assert "\n" not in str(error)
    str(error).encode()


def test_decomposed_names_become_composed(workspace, live):
    (live / "caf\u00e9").write_text("x")
    assert workspace.canonical("cafe\u0301") == "/workspace/caf\u00e9"


def test_a_name_that_stands_only_decomposed_is_refused_and_says_so(workspace, live):
    (live / "cafe\u0301").write_text("x")
    error = refused(workspace, "cafe\u0301")
    assert error.reason == "InvalidRequest"
    assert "NFC" in str(error)
    assert refused(workspace, "/workspace//cafe\u0301").reason == "InvalidRequest"


def test_a_link_is_no_way_to_another_spelling(workspace, live):
    (live / "cafe\u0301").write_text("x")
    (live / "l").symlink_to("cafe\u0301")
    (live / "zero\u200bwidth").write_text("x")
    (live / "z").symlink_to("zero\u200bwidth")
    assert "NFC" in str(refused(workspace, "l"))
    assert "U+200B" in str(refused(workspace, "z"))


def test_undecodable_names_are_handled_as_they_are(workspace, live):
    name = os.fsdecode(b"bad\xff.txt")
    (live / name).write_text("x")
    path = workspace.canonical(name)
    assert path == f"/workspace/{name}"
    assert workspace.read(path).data == b"x"
    assert [info.path for info in workspace.list("/workspace")] == [path]


def test_links_inside_resolve_to_what_they_name(workspace, live):
    (live / "real/deep").mkdir(parents=True)
    (live / "real/deep/f").write_text("x")
    (live / "d").symlink_to("real")
    (live / "abs").symlink_to("/workspace/real/deep")
    (live / "real/up").symlink_to("../real/deep/f")
    (live / "twice").symlink_to("d/up")
    assert workspace.canonical("d/deep/f") == "/workspace/real/deep/f"
    assert workspace.canonical("abs/f") == "/workspace/real/deep/f"
    assert workspace.canonical("twice") == "/workspace/real/deep/f"
    assert workspace.canonical("twice", follow=False) == "/workspace/twice"
    assert workspace.canonical("d/up", follow=False) == "/workspace/real/up"


def test_a_new_path_beneath_a_linked_directory_resolves_its_parents(workspace, live):
    (live / "real").mkdir()
    (live / "d").symlink_to("real")
    assert workspace.canonical("d/new/er") == "/workspace/real/new/er"


@pytest.mark.parametrize(
    "target", ["/etc/hostname", "../outside", "a/../../outside", "/", "/workspace2/x", "/.."]
)
def test_links_out_are_refused(workspace, live, target):
    (live / "a").mkdir()
    (live / "l").symlink_to(target)
    for asked in ("l", "l/below"):
        assert refused(workspace, asked).reason == "InvalidRequest"
    assert workspace.canonical("l", follow=False) == "/workspace/l"
    assert refused(workspace, "l/below", follow=False).reason == "InvalidRequest"


@pytest.mark.parametrize("target", ["missing", "missing/deeper", "/workspace/missing", "file/below"])
def test_dangling_links_are_refused(workspace, live, target):
    (live / "file").write_text("x")
    (live / "l").symlink_to(target)
    error = refused(workspace, "l")
    assert error.reason == "InvalidRequest"
    assert "does not exist" in str(error)


def test_loops_of_links_end(workspace, live):
    (live / "a").symlink_to("b")
    (live / "b").symlink_to("a")
    (live / "me").symlink_to("me/me")
    assert "loop" in str(refused(workspace, "a"))
    assert "loop" in str(refused(workspace, "me/x"))


def test_a_link_that_appears_after_the_decision_is_not_followed(workspace, live, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "f").write_text("canary")
    (live / "d").mkdir()
    (live / "d/f").write_text("mine")
    path = workspace.canonical("d/f")
    (live / "d").rename(live / "gone")
    (live / "d").symlink_to(secret)
    for effect in (
        lambda: workspace.read(path),
        lambda: workspace.write(path, b"x"),
        lambda: workspace.append(path, b"x"),
        lambda: workspace.list("/workspace/d"),
        lambda: workspace.delete(path, recursive=False),
        lambda: workspace.delete("/workspace/d/f", recursive=True),
    ):
        with pytest.raises(WorkspaceError) as caught:
            effect()
        assert caught.value.reason in {"Conflict", "NoSuchResource", "InvalidRequest"}
    assert (secret / "f").read_text() == "canary"
    assert sorted(entry.name for entry in secret.iterdir()) == ["f"]


def test_a_link_that_replaces_the_file_is_replaced_itself_or_refused(workspace, live, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("canary")
    path = workspace.canonical("f")
    (live / "f").symlink_to(outside)
    for effect in (
        workspace.read,
        lambda each: workspace.write(each, b"x"),
        lambda each: workspace.append(each, b"x"),
    ):
        with pytest.raises(WorkspaceError) as caught:
            effect(path)
        assert caught.value.reason == "Conflict"
    assert outside.read_text() == "canary"


component = st.sampled_from(["a", "b", "c", "..", ".", "", "é", "e\u0301", "workspace"])
link_target = st.lists(component, min_size=1, max_size=4).map("/".join)


@settings(max_examples=150, deadline=None)
@given(
    links=st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", "a/b", "b/c"]), link_target, st.booleans()), max_size=6
    ),
    asked=st.lists(component, min_size=1, max_size=6).map("/".join),
    absolute=st.booleans(),
    follow=st.booleans(),
)
def test_canonical_never_escapes(tmp_path_factory, links, asked, absolute, follow):
    root = tmp_path_factory.mktemp("any") / "live"
    root.mkdir()
    for directory in ("a", "b"):
        (root / directory).mkdir()
    for name, written, from_root in links:
        place = root / name
        target = ("/workspace/" if from_root else "") + written
        if target and place.parent.is_dir() and not os.path.lexists(place):
            place.symlink_to(target)
    with Workspace(root) as workspace:
        try:
            path = workspace.canonical(("/workspace/" if absolute else "") + asked, follow=follow)
        except WorkspaceError:
            return
        assert names.beneath(path, "/workspace")
        assert ".." not in path.split("/")
        assert unicodedata.is_normalized("NFC", path)
        # Resolving again changes nothing: policy sees one name.
        assert workspace.canonical(path, follow=follow) == path
        real = os.path.realpath(root / path[len("/workspace/") :])
        if follow and os.path.lexists(root / path[len("/workspace/") :]):
            assert real == str(root / path[len("/workspace/") :]).rstrip("/")


def walk_and_syscall(root_fd, relative, flags):
    """What both ways of opening say: the inode, or the error's number."""
    answers = []
    for opener in (openat.open_beneath, openat.open_walk):
        try:
            fd = opener(root_fd, relative, flags)
        except OSError as error:
            answers.append(error.errno)
        else:
            answers.append((os.fstat(fd).st_ino, os.fstat(fd).st_mode))
            os.close(fd)
    return answers


@pytest.mark.parametrize("flags", [openat.PATH, openat.LOOK, openat.FILE, openat.DIRECTORY])
@pytest.mark.parametrize(
    "relative",
    [b".", b"f", b"d", b"d/f", b"l", b"ld", b"ld/f", b"d/out/f", b"f/x", b"none", b"none/x", b"lf/x"],
)
def test_the_walk_agrees_with_the_system_call(live, relative, flags):
    (live / "f").write_text("1")
    (live / "d").mkdir()
    (live / "d/f").write_text("2")
    (live / "l").symlink_to("f")
    (live / "ld").symlink_to("d")
    (live / "lf").symlink_to("f")
    (live / "d/out").symlink_to("/etc")
    root_fd = os.open(live, os.O_RDONLY | os.O_DIRECTORY)
    try:
        one, other = walk_and_syscall(root_fd, relative, flags)
        links = {errno.ELOOP, errno.ENOTDIR}  # a link asked for as a directory may be called either
        assert one == other or {one, other} <= links
    finally:
        os.close(root_fd)


def test_a_child_is_opened_as_it_stands_there_and_never_through_a_link(live):
    (live / "f").write_text("1")
    (live / "lf").symlink_to("f")
    root_fd = os.open(live, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fd = openat.open_child(root_fd, b"f", openat.FILE)
        assert os.read(fd, 9) == b"1"
        os.close(fd)
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            openat.open_child(root_fd, b"lf", openat.FILE)
    finally:
        os.close(root_fd)


@pytest.mark.parametrize("opener", [openat.open_beneath, openat.open_walk, openat.open_child])
@pytest.mark.parametrize("relative", [b"..", b"../x", b"d/../../x"])
def test_neither_way_climbs(live, opener, relative):
    (live / "d").mkdir()
    root_fd = os.open(live, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
            opener(root_fd, relative, openat.PATH)
    finally:
        os.close(root_fd)


def test_paths_longer_than_one_system_call_takes(workspace, live):
    names_ = ["x" * 200] * 30
    here = os.open(live, os.O_RDONLY | os.O_DIRECTORY)
    for name in names_:
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("f", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=here))
    os.close(here)
    deep = "/".join(["/workspace", *names_, "f"])
    assert workspace.stat(deep).kind == "file"
    assert sum(1 for _ in workspace.walk()) == 31
    assert workspace.delete(f"/workspace/{names_[0]}", recursive=True) == 31
    assert list(live.iterdir()) == []
