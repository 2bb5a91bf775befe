"""What a sandbox host may and may not make a kernel write, whatever it sends."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ringfence.sandbox.remote import content, upper, wire
from ringfence.sandbox.remote.channels import Bytes
from ringfence.sandbox.remote.store import Store
from ringfence.sandbox.remote.upper import Item, Receiver

EMPTY = struct.pack(">cQQ", b"E", 0, 0)
TOP = Item(kind="directory", mode=0o755)
OUTPUTS = [Item(kind="stdout"), Item(kind="stderr"), Item(kind="end")]


class Tape:
    """A channel that was recorded."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    async def send(self, data: bytes) -> None:
        self.data += data

    async def read(self) -> bytes:
        part, self.data = self.data[:1000], self.data[1000:]
        return part


def tape(*items: Item | bytes) -> Any:
    """Items, each file with no content but what follows it as bytes."""
    found = bytearray()
    for place, item in enumerate(items):
        if isinstance(item, bytes):
            found += item
            continue
        body = msgspec.msgpack.encode(item)
        found += len(body).to_bytes(4, "big") + body
        following = items[place + 1] if place + 1 < len(items) else None
        if item.kind in {"file", "stdout", "stderr"} and not isinstance(following, bytes):
            found += EMPTY
    return Tape(bytes(found))


async def receive(scratch: Path, channel: Any, limit: int = 1 << 20) -> None:
    await Receiver(scratch, None, limit).run(channel)


@pytest.mark.parametrize(
    ("items", "what"),
    [
        ([TOP, Item(path=b"../out", kind="file")], "not plain"),
        ([TOP, Item(path=b"/etc/x", kind="file")], "not plain"),
        ([TOP, Item(path=b"a/../../x", kind="file")], "not plain"),
        ([TOP, Item(path=b"a\0b", kind="file")], "not plain"),
        ([TOP, Item(path=b"a/b", kind="file")], "below no directory"),
        (
            [TOP, Item(path=b"a", kind="link", target=b"/etc"), Item(path=b"a/x", kind="file")],
            "below no directory",
        ),
        ([TOP, Item(path=b"a", kind="whiteout"), Item(path=b"a/x", kind="file")], "below no directory"),
        ([TOP, Item(path=b"a", kind="file"), Item(path=b"a", kind="file")], "twice"),
        ([TOP, TOP], "twice"),
        ([Item(kind="file")], "no directory"),
        ([Item(kind="link", target=b"/")], "no directory"),
        ([Item(path=b"a", kind="file")], "below no directory"),
        ([TOP, Item(path=b"a", kind="name", target=b"/etc/passwd")], "that of no file"),
        (
            [TOP, Item(path=b"l", kind="link", target=b"x"), Item(path=b"a", kind="name", target=b"l")],
            "of no file",
        ),
        ([TOP, Item(path=b"a", kind="file", attributes={"trusted.overlay.opaque": b"y"})], "not a user's"),
        ([TOP, Item(path=b"a", kind="file", attributes={"user.overlay.opaque": b"y"})], "not a user's"),
        ([TOP, Item(kind="stdout"), Item(kind="stdout")], "twice"),
        ([TOP, Item(kind="end")], "did not come"),
        ([*OUTPUTS], "did not come"),
        ([TOP], "cut off"),
        ([TOP, b"\xff\xff\xff\xff"], "too large"),
        ([TOP, b"\0\0\0\5hello"], "no sense"),
        ([TOP, Item(path=b"a", kind="file"), struct.pack(">cQQ", b"D", 0, 1 << 40)], "more came than"),
        ([TOP, Item(path=b"a", kind="file"), struct.pack(">cQQ", b"D", 1 << 62, 1)], "no sense"),
        ([TOP, Item(path=b"a", kind="file"), struct.pack(">cQQ", b"E", 1 << 63, 0)], "no sense"),
        ([TOP, Item(path=b"a", kind="file"), struct.pack(">cQQ", b"D", 0, 9) + b"12"], "cut off"),
    ],
)
async def test_a_layer_that_makes_no_sense_is_refused(tmp_path: Path, items: list[Any], what: str) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(wire.WireError, match=what):
        await receive(scratch, tape(*items))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scratch"]


async def test_paths_without_number_are_refused(tmp_path: Path) -> None:
    items = [TOP, *(Item(path=b"%d" % number, kind="fifo") for number in range(5000))]
    with pytest.raises(wire.WireError, match="more came than the limit allows"):
        await receive(tmp_path, tape(*items))


async def test_a_layer_comes_back_as_it_was(tmp_path: Path) -> None:
    """Sent by the host's side and made by the kernel's."""
    there, here = tmp_path / "there", tmp_path / "here"
    top = there / "upper"
    (top / "d").mkdir(parents=True)
    here.mkdir()
    (there / "format").write_text("user")
    for name in ("stdout", "stderr"):
        (there / name).write_text(name)
    (top / "d/f").write_text("content")
    os.link(top / "d/f", top / "second")
    (top / "link").symlink_to("/nowhere")
    with (top / "sparse").open("wb") as file:
        file.seek(1 << 30)
        file.write(b"end")
    os.mkfifo(top / "fifo")
    (top / "d/f").chmod(0o4751)
    (top / "d").chmod(0o1750)
    os.utime(top / "d", ns=(1, 2))
    os.setxattr(top / "d/f", "user.own", b"value")
    os.setxattr(top / "d", "user.overlay.opaque", b"y")
    (top / "gone").touch()
    os.setxattr(top / "gone", "user.overlay.whiteout", b"y")
    record: Any = Tape()
    await upper.send(record, there, Store(tmp_path / "store", 1 << 30), layer=True)
    assert len(record.data) < 100_000
    await receive(here, record)
    made = here / "upper"
    assert (here / "stdout").read_text() + (here / "stderr").read_text() == "stdoutstderr"
    assert (made / "d/f").read_text() == "content"
    assert (made / "d/f").stat().st_ino == (made / "second").stat().st_ino
    assert stat.S_IMODE((made / "d/f").stat().st_mode) == 0o4751
    assert stat.S_IMODE((made / "d").stat().st_mode) == 0o1750
    assert (made / "d").stat().st_mtime_ns == 2
    assert os.getxattr(made / "d/f", "user.own") == b"value"
    prefix = (here / "format").read_text()
    assert os.getxattr(made / "d", f"{prefix}.overlay.opaque") == b"y"
    assert (made / "link").readlink() == Path("/nowhere")
    assert ((made / "sparse").stat().st_size, (made / "sparse").stat().st_blocks < 100) == (
        (1 << 30) + 3,
        True,
    )
    assert stat.S_ISFIFO((made / "fifo").stat().st_mode)
    gone = (made / "gone").lstat()
    assert stat.S_ISCHR(gone.st_mode) or gone.st_size == 0


async def test_a_file_that_is_not_what_was_named_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 200_000)
    fd = os.open(path, os.O_RDONLY)
    name = content.digest(fd)
    record: Any = Tape()
    assert await content.send(record, fd) == name
    os.close(fd)
    forged = bytearray(record.data)
    forged[1000] ^= 1
    target = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    tampered: Any = Tape(bytes(forged))
    assert await content.receive(Bytes(tampered), target, content.Budget(1 << 20)) != name
    assert hashlib.sha256(path.read_bytes()).digest() != name
    os.close(target)
