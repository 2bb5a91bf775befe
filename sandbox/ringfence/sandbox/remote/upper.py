"""What a command left, on its way back: the upper layer of its overlay and its output.

A row of frames, each an `Item`; behind that of a file comes its content. Whiteouts and opaque directories travel as what they
mean, since the two ends may write them in different ways.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from ringfence.sandbox import openat
from ringfence.sandbox.overlay_read import FORMAT_NAME, attributes, open_up, overlay_prefix
from ringfence.sandbox.remote import content, wire
from ringfence.sandbox.remote.channels import Bytes, Channel
from ringfence.sandbox.remote.store import Store

UPPER_NAME, STDOUT_NAME, STDERR_NAME = "upper", "stdout", "stderr"
_ITEM_BYTES_MAX = 1 << 20
_ITEM_COST_BYTES = 256
_ITEMS_MAX = 1_000_000
_NO_ATTRIBUTE = {errno.ENODATA, errno.ENOTSUP}
_OWNER = stat.S_IRWXU
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Item(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One path of an upper layer.

    Attributes:
        path: relative to the top, as bytes.
        kind: `stdout` and `stderr` are the output files, without a path; `end` comes last.
        target: of a link; of another name of a file, the path it had before.
        opaque: a directory that hides the lower one.
        attributes: `user.*` extended attributes that are not the overlay's.
    """

    path: bytes = b""
    kind: Literal[
        "file", "name", "directory", "link", "whiteout", "fifo", "socket", "stdout", "stderr", "end"
    ]
    mode: int = 0
    mtime_ns: int = 0
    atime_ns: int = 0
    target: bytes = b""
    opaque: bool = False
    attributes: dict[str, bytes] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Item)


# -- the host's side ----------------------------------------------------------------------------------------------


async def send(channel: Channel, scratch: Path, store: Store, *, layer: bool) -> None:
    """Send what a command left in `scratch`; files of its layer then go into the store, where the next tree finds them.

    Args:
        channel: to the kernel.
        scratch: with the upper layer and the output files. Nothing writes to it any more.
        store: of this kernel.
        layer: whether the upper layer is of use; otherwise only its top is sent.

    Raises:
        ChannelLostError: the kernel is gone.
        OSError: the layer can't be read.
    """
    upper = scratch / UPPER_NAME
    for path, item in _items(upper, layer=layer):
        await _frame(channel, item)
        if item.kind == "file":
            fd = os.open(path, openat.FILE)
            try:
                digest = await content.send(channel, fd)
            finally:
                os.close(fd)
            store.harvest(path, digest)
    for item, name in ((Item(kind="stdout"), STDOUT_NAME), (Item(kind="stderr"), STDERR_NAME)):
        await _frame(channel, item)
        fd = os.open(scratch / name, openat.FILE)
        try:
            await content.send(channel, fd)
        finally:
            os.close(fd)
    await _frame(channel, Item(kind="end"))


async def _frame(channel: Channel, item: Item) -> None:
    body = _encoder.encode(item)
    await channel.send(len(body).to_bytes(4, "big") + body)


def _items(upper: Path, *, layer: bool) -> Iterator[tuple[Path, Item]]:
    prefix = overlay_prefix(upper)
    names: dict[int, bytes] = {}
    pending = [upper]
    while pending:
        path = pending.pop()
        facts = path.lstat()
        where = b"" if path == upper else os.fsencode(path.relative_to(upper))
        yield path, _item(path, where, facts, prefix, names)
        if layer and stat.S_ISDIR(facts.st_mode):
            pending += sorted(path.iterdir(), reverse=True)


def _item(path: Path, where: bytes, facts: os.stat_result, prefix: str, names: dict[int, bytes]) -> Item:
    if _is_whiteout(path, facts, prefix):
        return Item(path=where, kind="whiteout")
    found = Item(
        path=where,
        kind="file",
        mode=stat.S_IMODE(facts.st_mode),
        mtime_ns=facts.st_mtime_ns,
        atime_ns=facts.st_atime_ns,
    )
    if stat.S_ISLNK(facts.st_mode):
        target = os.readlink(os.fsencode(path))  # noqa: PTH115 - bytes
        return msgspec.structs.replace(found, kind="link", target=target)
    if stat.S_ISFIFO(facts.st_mode) or stat.S_ISSOCK(facts.st_mode):
        return msgspec.structs.replace(found, kind="fifo" if stat.S_ISFIFO(facts.st_mode) else "socket")
    if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
        raise OSError(errno.EINVAL, "a device that no command can make", str(path))
    if stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1:
        first = names.setdefault(facts.st_ino, where)
        if first != where:
            return Item(path=where, kind="name", target=first)
    open_up(path, facts)
    directory = stat.S_ISDIR(facts.st_mode)
    fd = os.open(path, openat.DIRECTORY if directory else openat.FILE)
    try:
        own = attributes(fd)
    finally:
        os.close(fd)
    opaque = directory and _attribute(path, f"{prefix}opaque") == b"y"
    kind = "directory" if directory else "file"
    return msgspec.structs.replace(found, kind=kind, opaque=opaque, attributes=own)


def _is_whiteout(path: Path, facts: os.stat_result, prefix: str) -> bool:
    if stat.S_ISCHR(facts.st_mode):
        return facts.st_rdev == 0
    empty = stat.S_ISREG(facts.st_mode) and facts.st_size == 0
    return empty and _attribute(path, f"{prefix}whiteout") is not None


def _attribute(path: Path, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_ATTRIBUTE:
            return None
        raise


# -- the kernel's side --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Receiver:
    """Makes on the kernel's host what the command left on the other.

    Args:
        scratch: empty directory of the call.
        uid: owner of the layer's files; None: this process.
        limit_bytes: how much may come.
    """

    scratch: Path
    uid: int | None
    limit_bytes: int
    _prefix: str = ""
    _kinds: dict[bytes, str] = field(default_factory=dict[bytes, str])
    _directories: list[Item] = field(default_factory=list[Item])

    async def run(self, channel: Channel) -> None:
        """Take everything in.

        Raises:
            WireError: it makes no sense, or is more than was agreed.
            ChannelLostError: the host is gone.
            OSError: there is no room.
        """
        kind = "trusted" if os.geteuid() == 0 else "user"
        self._prefix = f"{kind}.overlay."
        (self.scratch / FORMAT_NAME).write_text(kind, encoding="ascii")
        stream, budget = Bytes(channel), content.Budget(self.limit_bytes)
        seen: set[str] = set()
        while True:
            item = await self._next(stream, budget)
            if item.kind == "end":
                break
            if item.kind in {"stdout", "stderr"}:
                if item.kind in seen:
                    raise wire.WireError("an output came twice")
                seen.add(item.kind)
                await _content(stream, self.scratch / item.kind, budget)
            else:
                await self._make(stream, item, budget)
        if seen != {"stdout", "stderr"} or b"" not in self._kinds:
            raise wire.WireError("a command's output or layer did not come")
        # Bits and times of directories come last, the innermost first: they may forbid what came before.
        for item in reversed(self._directories):
            self._dress(self._at(item.path), item)

    async def _next(self, stream: Bytes, budget: content.Budget) -> Item:
        body = await stream.frame(_ITEM_BYTES_MAX)
        if body is None:
            raise wire.WireError("a layer was cut off")
        budget.take(_ITEM_COST_BYTES)
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise wire.WireError(f"an entry of a layer makes no sense: {error}") from error

    def _at(self, path: bytes) -> Path:
        upper = self.scratch / UPPER_NAME
        return upper / os.fsdecode(path) if path else upper

    async def _make(self, stream: Bytes, item: Item, budget: content.Budget) -> None:
        self._check(item)
        self._kinds[item.path] = item.kind
        path = self._at(item.path)
        match item.kind:
            case "directory":
                path.mkdir(mode=_OWNER)
                if item.opaque:
                    os.setxattr(path, f"{self._prefix}opaque", b"y")
                self._directories.append(item)
            case "file":
                await _content(stream, path, budget)
                self._dress(path, item)
            case "name":
                os.link(self._at(item.target), path, follow_symlinks=False)
            case "link":
                os.symlink(item.target, os.fsencode(path))  # noqa: PTH211 - bytes
                self._own(path)
                os.utime(path, ns=(item.atime_ns, item.mtime_ns), follow_symlinks=False)
            case "whiteout":
                self._whiteout(path)
            case _:
                os.mknod(path, (stat.S_IFIFO if item.kind == "fifo" else stat.S_IFSOCK) | 0o600)
                self._own(path)
                path.chmod(item.mode & 0o777)

    def _check(self, item: Item) -> None:
        """INVARIANT: every path lies below a directory that this stream made, so nothing leads out of the layer."""
        if len(self._kinds) >= _ITEMS_MAX:
            raise wire.WireError(f"a layer holds more than {_ITEMS_MAX} paths")
        path = item.path
        if path in self._kinds:
            raise wire.WireError("a path of a layer came twice")
        if not path:
            if item.kind != "directory":
                raise wire.WireError("the top of a layer is no directory")
            return
        if b"\0" in path or any(part in {b"", b".", b".."} for part in path.split(b"/")):
            raise wire.WireError("a path of a layer is not plain")
        if self._kinds.get(path.rpartition(b"/")[0]) != "directory":
            raise wire.WireError("a path of a layer lies below no directory")
        if item.kind == "name" and self._kinds.get(item.target) not in {"file", "name"}:
            raise wire.WireError("a second name of a layer is that of no file")

    def _whiteout(self, path: Path) -> None:
        try:
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        except PermissionError:
            # An overlay knows this form too where devices can't be made at all.
            path.touch(mode=0o600, exist_ok=False)
            os.setxattr(path, f"{self._prefix}whiteout", b"y")

    def _dress(self, path: Path, item: Item) -> None:
        fd = os.open(path, openat.DIRECTORY if item.kind == "directory" else openat.FILE)
        try:
            for name, value in item.attributes.items():
                if not name.startswith("user.") or name.startswith("user.overlay."):
                    raise wire.WireError("an attribute of a layer is not a user's")
                os.setxattr(fd, name, value)
            if self.uid is not None:
                os.fchown(fd, self.uid, self.uid)
            os.fchmod(fd, item.mode & 0o7777)
            os.utime(fd, ns=(item.atime_ns, item.mtime_ns))
        finally:
            os.close(fd)

    def _own(self, path: Path) -> None:
        if self.uid is not None:
            os.lchown(path, self.uid, self.uid)


async def _content(stream: Bytes, path: Path, budget: content.Budget) -> None:
    fd = os.open(path, _FLAGS, 0o600)
    try:
        await content.receive(stream, fd, budget)
    finally:
        os.close(fd)
