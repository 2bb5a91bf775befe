"""fs.* by the kernel and the agent's own eyes: the same verdict on every path of trees made to confuse one of them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.tree import Tree
from ringfence.sandbox.types import CommandSpec, Limits
from ringfence.syscalls import errors
from support.fs_world import World

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

UID = 247301
PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""
LOOK = """
import base64, errno, json, os, stat, sys
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
def kind(facts): return KINDS.get(stat.S_IFMT(facts.st_mode), "other")
def read(path):
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        facts = os.fstat(descriptor)
        if kind(facts) != "file": return kind(facts)
        real = os.path.realpath(path)
        return {"data": base64.b64encode(os.read(descriptor, 1 << 20)).decode(), "real": real, "names": facts.st_nlink}
    finally: os.close(descriptor)
def info(path):
    facts = os.lstat(path)
    target = os.readlink(path) if kind(facts) == "link" else ""
    size = facts.st_size if kind(facts) == "file" else 0
    return [kind(facts), size, stat.S_IMODE(facts.st_mode), target]
def entries(path): return sorted(os.listdir(path))
def attempt(what, path):
    try: return what(path)
    except OSError as error: return {"error": errno.errorcode[error.errno]}
print(json.dumps([[attempt(what, path) for what in (read, info, entries)] for path in json.load(sys.stdin)]))
"""

# Plain ones, and such that a shell, a terminal, a regular expression or a comparison takes for something else.
NAMES = [
    "a",
    "b",
    "c d",
    "*",
    "-rf",
    "~",
    ".env",
    "é",
    "e\u0301",
    "x\ny",
    "\udcff",
    "\u202e",
    "n" * 255,
    "%2e%2e",
]
OUT = [
    "/etc/passwd",
    "/proc/self/root/workspace/a",
    "/proc/self/environ",
    "/workspace/../etc/passwd",
    "../../etc/passwd",
    "/",
    "..",
    "/tmp",
    "/dev/zero",
]
IN = [
    "a",
    "b",
    "./a",
    "a/../b",
    "a/b",
    "/workspace/a",
    "/workspace//b/.",
    "self",
    "../a",
    "a/",
    ".",
    "é",
    "c d/a",
]


@dataclass(frozen=True, slots=True)
class Node:
    """One thing in a tree: what, under which name, in which of the directories made so far."""

    kind: str
    name: str
    where: int
    text: str
    mode: int


nodes = st.builds(
    Node,
    st.sampled_from(["file", "file", "directory", "directory", "in", "in", "out", "fifo", "socket", "hard"]),
    st.sampled_from([*NAMES, "self", "a", "b"]),
    st.integers(0, 5),
    st.one_of(st.sampled_from(IN + OUT), st.text(st.characters(codec="ascii"), max_size=8)),
    st.sampled_from([0o644, 0o600, 0o755, 0o4755, 0o444, 0o200]),
)


def build(live: Path, tree: list[Node]) -> list[str]:
    """Make a tree; gives every path to ask about: those that exist, and what could lie behind each."""
    directories = [live]
    made: list[Path] = []
    for node in tree:
        path = directories[node.where % len(directories)] / node.name
        with suppress(FileExistsError, FileNotFoundError, NotADirectoryError, OSError):
            if make(node, path, made):
                made.append(path)
                if node.kind == "directory":
                    directories.append(path)
    if os.geteuid() == 0:
        for path in (live, *made):
            os.lchown(path, UID, UID)
    for path, node in zip(made, tree, strict=False):
        if path.is_file() and not path.is_symlink():
            path.chmod(node.mode)
    known = [f"/workspace/{path.relative_to(live)}" for path in made]
    return known + [f"{path}/{name}" for path in known for name in ("a", "b", "none", "passwd", "é")]


def make(node: Node, path: Path, made: list[Path]) -> bool:
    if node.kind == "file":
        with path.open("x") as file:
            file.write(node.text.encode("ascii", "replace").decode())
    elif node.kind == "directory":
        path.mkdir()
    elif node.kind in ("in", "out"):
        choices = IN if node.kind == "in" else OUT
        path.symlink_to(choices[len(node.text) % len(choices)])
    elif node.kind == "fifo":
        os.mkfifo(path)
    elif node.kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            here = os.open(path.parent, os.O_PATH)
            try:
                server.bind(f"/proc/self/fd/{here}/{path.name}")
            finally:
                os.close(here)
    else:
        files = [other for other in made if other.is_file() and not other.is_symlink()]
        if not files:
            return False
        path.hardlink_to(files[0])
    return True


@contextmanager
def place() -> Iterator[Path]:
    top = Path(tempfile.mkdtemp(prefix="ringfence-view-"))
    try:
        top.chmod(0o755)
        yield top
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", str(top)], check=False)
        shutil.rmtree(top)


async def look(top: Path, paths: list[str]) -> list[Any]:
    """What a command of the agent sees."""
    box = NativeSandbox(top / "data")
    (top / "scratch").mkdir()
    spec = CommandSpec(
        agent="agent-1",
        argv=[PYTHON, "-I", "-S", "-c", LOOK],
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        lower=top / "live",
        scratch=top / "scratch",
        uid=UID if os.geteuid() == 0 else None,
        limits=Limits(timeout_s=60),
        stdin=json.dumps(paths).encode(),
    )
    try:
        done = await box.run_command(spec)
    finally:
        await box.close()
    assert done.exit.code == 0, done.stderr.read_text()
    return json.loads(done.stdout.read_text())


async def ask(world: World, action: str, path: str) -> Any:
    """What the kernel says: a result, or the refusal's text."""
    try:
        return await world.run(action, path=path)
    except errors.SyscallError as refusal:
        if isinstance(refusal, errors.Internal):
            raise
        return refusal.message


def compare_read(path: str, own: Any, kernel: Any) -> None:
    if not isinstance(kernel, str):
        # Whatever the kernel hands out, the agent could have read itself, byte by byte.
        assert isinstance(own, dict), (path, own)
        assert "data" in own, (path, own)
        assert base64.b64decode(own["data"]) == kernel.data, path
        return
    event(kernel.rpartition("`")[2][:40])
    if isinstance(own, dict) and "data" in own:
        # It refuses more, and says why: names that no rule can hold, second names, ways out.
        real = own["real"]
        odd = not real.isascii() or not path.isascii() or not (path + real).isprintable()
        leads_out = not real.startswith("/workspace/") or "leads out of" in kernel
        assert odd or leads_out or own["names"] > 1, (path, own, kernel)


def compare_info(path: str, own: Any, kernel: Any) -> None:
    if isinstance(kernel, str):
        # By a plain name without links on the way there is nothing that could be meant otherwise.
        odd = not path.isascii() or not path.isprintable()
        assert odd or isinstance(own, dict) or "link" in kernel or "leads out" in kernel, (path, own, kernel)
        return
    info = kernel.info
    assert own == [info.kind, info.size_bytes, info.mode, info.target], (path, own, info)


def compare_list(path: str, own: Any, kernel: Any) -> None:
    if isinstance(kernel, str):
        return
    assert isinstance(own, list), (path, own)
    listed = {entry.path.rpartition("/")[2] for entry in kernel.entries}
    assert listed <= set(own), path
    assert {name for name in own if name.isascii() and name.isprintable()} <= listed, path


async def check(tree: list[Node]) -> None:
    with place() as top:
        (top / "live").mkdir()
        paths = build(top / "live", tree)
        if not paths:
            return
        sayable = [path for path in paths if stat_safe(path)]
        own = await look(top, sayable)
        world = World(top, uid=UID if os.geteuid() == 0 else None)
        try:
            for path, (data, info, entries) in zip(sayable, own, strict=True):
                compare_read(path, data, await ask(world, "fs.read", path))
                compare_info(path, info, await ask(world, "fs.stat", path))
                compare_list(path, entries, await ask(world, "fs.list", path))
        finally:
            world.close()


def stat_safe(path: str) -> bool:
    return len(os.fsencode(path)) < 4096


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(nodes, min_size=4, max_size=24))
@example([Node("file", "a", 0, "secret", 0o200), Node("in", "self", 0, "a", 0o644)])
@example(
    [
        Node("directory", "a", 0, "", 0o755),
        Node("out", "b", 1, "xxxxxx", 0o644),
        Node("file", "passwd", 0, "x", 0o644),
    ]
)
def test_the_kernel_and_the_agent_see_the_same(tree: list[Node]) -> None:
    asyncio.run(check(tree))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights that an agent does not have")
async def test_root_looks_with_the_agents_rights() -> None:
    """What somebody else put into a workspace is the agent's only as far as its uid goes."""
    with place() as top:
        live = top / "live"
        (live / "closed").mkdir(parents=True)
        for name, owner, mode in (
            ("theirs", 0, 0o600),
            ("group", 0, 0o640),
            ("open", 0, 0o644),
            ("own", UID, 0o600),
            ("closed/inner", UID, 0o644),
        ):
            (live / name).write_text("canary")
            os.chown(live / name, owner, owner)
            (live / name).chmod(mode)
        (live / "closed").chmod(0o700)
        world = World(top, uid=UID)
        try:
            seen = {}
            for name in ("theirs", "group", "open", "own", "closed/inner"):
                found = await ask(world, "fs.read", name)
                seen[name] = found if isinstance(found, str) else found.data
            refused = {name for name, said in seen.items() if isinstance(said, str)}
            assert refused == {"theirs", "group", "closed/inner"}, seen
            assert "permission bits" in seen["theirs"]
            assert "permission bits" in await ask(world, "fs.stat", "closed/inner")
            assert "permission bits" in await ask(world, "fs.list", "closed")
            shutil.rmtree(live / "closed")
            found = await world.run("fs.search", path="/workspace", text="canary")
            assert [match.path for match in found.matches] == ["/workspace/open", "/workspace/own"]
            # The kernel has its own rights again, on this thread and on those of its pool.
            assert (live / "theirs").read_text() == "canary"
            status = Path("/proc/thread-self/status").read_text()
            assert "Uid:\t0\t0\t0\t0" in status
            assert "Gid:\t0\t0\t0\t0" in status
        finally:
            world.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights that an agent does not have")
async def test_an_owner_has_what_the_owners_bits_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at without taking an agent's rights is read exactly where those rights would read it."""
    directories = {"mine": (UID, 0o700), "shut": (UID, 0o655), "theirs": (0, 0o755), "closed": (0, 0o700)}
    files = {"own": (UID, 0o400), "unreadable": (UID, 0o044), "open": (0, 0o644), "hidden": (0, 0o600)}
    with place() as top:
        live = top / "live"
        live.mkdir()
        os.chown(live, UID, UID)
        for directory, (owner, mode) in {"": (UID, 0o755), **directories}.items():
            (live / directory).mkdir(exist_ok=True)
            for name, (uid, bits) in files.items():
                (live / directory / name).write_text("canary")
                os.chown(live / directory / name, uid, uid)
                (live / directory / name).chmod(bits)
            os.chown(live / directory, owner, owner)
            (live / directory).chmod(mode)
        world = World(top, uid=UID)

        async def readable() -> set[str]:
            paths = [f"{directory}/{name}".strip("/") for directory in ("", *directories) for name in files]
            return {path for path in paths if not isinstance(await ask(world, "fs.read", path), str)}

        try:
            expected = {f"{where}{name}" for where in ("", "mine/", "theirs/") for name in ("own", "open")}
            assert await readable() == expected
            # Nor does the workspace itself let an owner pass whom its own bits keep out.
            live.chmod(0o655)
            assert await readable() == set()
            live.chmod(0o755)
            monkeypatch.setattr(Tree, "_open_own", lambda *_: None)
            assert await readable() == expected
        finally:
            world.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root keeps the owner of a file that it replaces")
@pytest.mark.parametrize("action", ["fs.write", "fs.append"])
async def test_new_content_carries_no_set_id_bits(action: str) -> None:
    """A program of root's with its bit set would run what the agent wrote, as root, outside of any sandbox."""
    with place() as top:
        live = top / "live"
        live.mkdir()
        (live / "tool").write_text("theirs")
        (live / "tool").chmod(0o6755)
        world = World(top, uid=UID)
        try:
            await world.run(action, path="tool", data=b"mine")
        finally:
            world.close()
        facts = (live / "tool").stat()
        assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (0, 0o755)


async def test_a_name_in_two_unicode_forms_is_never_mixed_up(world: World) -> None:
    """Asked for by one form, the file of the other is not handed out, whichever of them stands there."""
    (world.live / "e\u0301").write_text("decomposed")
    for composed in (False, True):
        if composed:
            (world.live / "é").write_text("composed")
            assert (await world.run("fs.read", path="é")).data == b"composed"
        with pytest.raises(errors.InvalidRequest):
            await world.run("fs.read", path="e\u0301")
        with pytest.raises(errors.InvalidRequest):
            await world.run("fs.write", path="e\u0301", data=b"x")
    # Too long for a name in the form that was asked for, and not in the other.
    await world.run("fs.write", path="e\u0301" * 127, data=b"x")
    assert (world.live / ("é" * 127)).read_bytes() == b"x"


@pytest.mark.parametrize("way", ["e\u0301/a", "c\u0327/e\u0301/a", "link/e\u0301/a", "./e\u0301//a"])
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
async def test_a_directory_in_two_unicode_forms_is_never_mixed_up(world: World, way: str, kind: str) -> None:
    """Neither are those on the way: what lies below the one of another form is not what was asked for."""
    for top in ("", "\u00e7"):
        (world.live / top / "\u00e9").mkdir(parents=True)
        (world.live / top / "\u00e9" / "a").write_text("composed")
    (world.live / "link").symlink_to(".")
    assert (await world.run("fs.read", path=way)).data == b"composed"
    for top in ("", "\u00e7"):
        other = world.live / top / "e\u0301"
        if kind == "file":
            other.write_text("decomposed")
        elif kind == "directory":
            other.mkdir()
        else:
            other.symlink_to("\u00e9")
    for action, more in (("fs.read", {}), ("fs.stat", {}), ("fs.write", {"data": b"x"}), ("fs.delete", {})):
        with pytest.raises(errors.InvalidRequest, match="another Unicode form"):
            await world.run(action, path=way, **more)
    assert (world.live / "\u00e9" / "a").read_text() == "composed"
