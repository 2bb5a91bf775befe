"""pull: a tar that an agent chose can't write or point outside of the directory it goes to."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from ringfence.console.errors import ConsoleError
from ringfence.console.pack import pack
from ringfence.console.unpack import unpack


def tar_of(*members: tuple[str, str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.mode = 0o755 if kind == "dir" else 0o640
            info.mtime = 1_700_000_000
            info.type = {
                "dir": tarfile.DIRTYPE,
                "link": tarfile.SYMTYPE,
                "hard": tarfile.LNKTYPE,
                "fifo": tarfile.FIFOTYPE,
                "device": tarfile.CHRTYPE,
            }.get(kind, tarfile.REGTYPE)
            if kind in ("link", "hard"):
                info.linkname = str(content)
            data = content if isinstance(content, bytes) else b""
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def pull(data: bytes, target: Path, *, force: bool = False, step: int = 700):
    return unpack((data[at : at + step] for at in range(0, len(data), step)), target, force=force)


def tree(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        found[name] = (
            f"-> {path.readlink()}" if path.is_symlink() else "/" if path.is_dir() else path.read_text()
        )
    return found


def test_files_directories_and_links(tmp_path) -> None:
    data = tar_of(
        ("out", "dir", ""),
        ("out/a.md", "file", b"A"),
        ("out/here", "link", "a.md"),
        ("up", "link", "out/a.md"),
        ("out/top", "link", "../up"),
        ("b", "hard", "out/a.md"),
        ("empty", "dir", ""),
    )
    pulled = pull(data, tmp_path / "new" / "dir")
    assert tree(tmp_path / "new" / "dir") == {
        "out": "/",
        "out/a.md": "A",
        "out/here": "-> a.md",
        "up": "-> out/a.md",
        "out/top": "-> ../up",
        "b": "A",
        "empty": "/",
    }
    assert pulled.skipped == []
    assert (pulled.files, pulled.size_bytes) == (5, 2)
    facts = (tmp_path / "new" / "dir" / "out" / "a.md").stat()
    assert (facts.st_mode & 0o7777, facts.st_mtime) == (0o640, 1_700_000_000)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["dir"]


@pytest.mark.parametrize(
    "member",
    [
        ("../evil", "file", b"x"),
        ("a/../../evil", "file", b"x"),
        ("/etc/evil", "file", b"x"),
        ("l", "link", "/etc/passwd"),
        ("l", "link", "../outside"),
        ("a/l", "link", "../../outside"),
        ("l", "link", "a/../../outside"),
        ("l", "link", ""),
        ("h", "hard", "../outside"),
        ("h", "hard", "/etc/passwd"),
        ("h", "hard", "never-there"),
        ("p", "fifo", ""),
        ("d", "device", ""),
    ],
)
def test_hostile_members_are_left_behind_and_named(member, tmp_path) -> None:
    (tmp_path / "outside").write_text("secret")
    pulled = pull(tar_of(("ok", "file", b"1"), member), tmp_path / "in")
    assert tree(tmp_path / "in") in ({"ok": "1"}, {"ok": "1", "a": "/"})
    assert [name for name, _ in pulled.skipped] == [member[0]]
    assert tree(tmp_path)["outside"] == "secret"
    assert {path.name for path in tmp_path.iterdir()} == {"in", "outside"}


def test_nothing_is_written_through_a_link(tmp_path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "in").mkdir()
    data = tar_of(
        ("d", "link", "."),
        ("d/file", "file", b"x"),
        ("deep/er/l", "link", "../.."),
        ("deep/er/l/out", "link", "../../../outside"),
    )
    pulled = pull(data, tmp_path / "in")
    assert tree(tmp_path / "in") == {
        "d": "/",
        "d/file": "x",
        "deep": "/",
        "deep/er": "/",
        "deep/er/l": "-> ../..",
    }
    assert [name for name, _ in pulled.skipped] == ["d", "deep/er/l/out"]
    assert list((tmp_path / "outside").iterdir()) == []


def test_every_link_stays_inside(tmp_path) -> None:
    data = tar_of(
        ("a/b", "link", "."), ("x", "link", "a/b/../.."), ("y", "link", "a/b/b/b"), ("z/w", "link", "../y")
    )
    pull(data, tmp_path / "in")
    inside = (tmp_path / "in").resolve()
    for path in inside.rglob("*"):
        assert path.resolve().is_relative_to(inside), path
    assert "x" not in tree(inside)


def test_existing_files_are_refused_before_anything_moves(tmp_path) -> None:
    target = tmp_path / "in"
    target.mkdir()
    (target / "z").write_text("mine")
    data = tar_of(("a", "file", b"1"), ("z", "file", b"2"))
    with pytest.raises(ConsoleError, match=r"z` is there already") as caught:
        pull(data, target)
    assert caught.value.code == 5
    assert tree(target) == {"z": "mine"}
    pull(data, target, force=True)
    assert tree(target) == {"a": "1", "z": "2"}


def test_an_operators_link_is_not_followed(tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "in"
    target.mkdir()
    (target / "out").symlink_to("../elsewhere")
    with pytest.raises(ConsoleError, match="it is no directory") as caught:
        pull(tar_of(("out/a", "file", b"1")), target, force=True)
    assert caught.value.code == 5
    assert tree(tmp_path / "elsewhere") == {}
    (target / "d").mkdir()
    with pytest.raises(ConsoleError, match="it is a directory"):
        pull(tar_of(("d", "file", b"1")), target, force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConsoleError, match="is not a directory"):
        pull(tar_of(("d", "file", b"1")), tmp_path / "file")


def test_a_replaced_link_is_replaced_not_followed(tmp_path) -> None:
    (tmp_path / "outside").write_text("secret")
    target = tmp_path / "in"
    target.mkdir()
    (target / "a").symlink_to("../outside")
    pull(tar_of(("a", "file", b"1")), target, force=True)
    assert tree(tmp_path) == {"outside": "secret", "in": "/", "in/a": "1"}


@pytest.mark.parametrize("cut", [100, 600, 1100, 5000])
def test_a_broken_archive_leaves_nothing(cut, tmp_path) -> None:
    data = tar_of(("a", "file", os.urandom(9000)), ("b", "file", b"2"))
    with pytest.raises(ConsoleError, match="broken archive"):
        pull(data[:cut], tmp_path / "in")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_connection_leaves_nothing(door, run, refusal, tmp_path) -> None:
    data = tar_of(("a", "file", os.urandom(90_000)))
    door.answers["Pull"] = lambda _: [data[:50_000], refusal("no such path `x`", 4, "NoSuchResource")]
    result = run("pull", "bot", "--to", tmp_path / "in" / "deep")
    assert (result.exit_code, result.stderr) == (4, "ringfence: no such path `x`\n")
    assert not (tmp_path / "in" / "deep").exists()


def test_pull(door, run, tmp_path) -> None:
    data = tar_of(("a", "file", b"1234"), ("l\x1b", "link", "/etc/passwd"))
    door.answers["Pull"] = lambda _: [data]
    result = run("pull", "bot", "out", "--to", tmp_path / "in")
    assert (result.exit_code, result.stdout) == (0, f"1 file, 4 B in {tmp_path}/in\n")
    assert "left `l\\x1b` behind: it links to an absolute path" in result.stderr
    assert (door.asked("Pull").agent, door.asked("Pull").path) == ("bot", "out")
    report = json.loads(run("pull", "bot", "--to", tmp_path / "two", "--json").stdout)
    assert report == {
        "to": f"{tmp_path}/two",
        "files": 1,
        "size_bytes": 4,
        "skipped": [{"path": "l\x1b", "reason": "it links to an absolute path"}],
    }


def test_what_is_packed_comes_home(tmp_path) -> None:
    source = tmp_path / "source"
    (source / "a" / "empty").mkdir(parents=True)
    (source / "a" / "f").write_text("x" * 3_000_000)
    (source / "a" / "f").chmod(0o400)
    (source / "l").symlink_to("a/f")
    unpack(pack(source, left_out=lambda *_: None), tmp_path / "home", force=False)
    assert tree(tmp_path / "home") == tree(source)
    assert (tmp_path / "home" / "a" / "f").stat().st_mode & 0o777 == 0o400
