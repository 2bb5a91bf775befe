"""Searching a workspace by name and content, in time linear in what is read."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from ringfence.sandbox import openat
from ringfence.sandbox.content import CHUNK
from ringfence.sandbox.records import SearchMatch, WorkspaceError
from ringfence.sandbox.tree import Tree

MOST_MATCHES = 1000
"""Matches given where the request names no limit, and at most."""
_LONGEST_LINE = 400  # characters shown of one line
_LONGEST_GLOB = 1024
_MOST_BYTES = 1 << 30  # content read by one search


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What to look for. Empty `glob` and `text` are no condition; `limit` 0 is `MOST_MATCHES`."""

    glob: str
    text: str
    limit: int


def _name_matches(pattern: str, name: str) -> bool:
    """Match one name; `*` is any run of characters. Goes back to the last star only, so it takes no exponential time."""
    at = star = mark = 0
    have_star = False
    position = 0
    while position < len(name):
        if at < len(pattern) and pattern[at] == "*":
            have_star, star, mark = True, at, position
            at += 1
        elif at < len(pattern) and pattern[at] == name[position]:
            at += 1
            position += 1
        elif have_star:
            mark += 1
            at, position = star + 1, mark
        else:
            return False
    return not pattern[at:].strip("*")


def matches(pattern: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Match a path by its names against the names of a glob, where `**` is any number of names, none included."""
    reach: set[int] = {0}
    for name in (*names, None):
        # `**` may stand for nothing: whoever reaches it reaches what follows too.
        for at in range(len(pattern)):
            if at in reach and pattern[at] == "**":
                reach.add(at + 1)
        if name is None:
            break
        reach = {
            at if pattern[at] == "**" else at + 1
            for at in reach
            if at < len(pattern) and (pattern[at] == "**" or _name_matches(pattern[at], name))
        }
    return len(pattern) in reach


def _compile(glob: str) -> tuple[str, ...]:
    if len(glob) > _LONGEST_GLOB:
        raise WorkspaceError(
            "InvalidRequest", f"`glob` is longer than {_LONGEST_GLOB} characters; shorten it"
        )
    parts = tuple(glob.split("/"))
    if "" in parts or ".." in parts or "." in parts:
        raise WorkspaceError(
            "InvalidRequest", f"glob `{glob}` can't match; write it relative to the directory searched"
        )
    return parts


def _lines(fd: int, needle: bytes, count: Callable[[int], None]) -> Generator[tuple[int, bytes]]:
    """Lines of an open file that contain `needle`, with their number; one longer than a chunk counts in pieces."""
    number = 1
    offset = 0
    carry = b""
    while data := os.pread(fd, CHUNK, offset):
        offset += len(data)
        count(len(data))
        data = carry + data
        end = data.rfind(b"\n") + 1
        if not end and len(data) > CHUNK:
            if needle in data:
                yield number, data
            carry = data[len(data) - len(needle) + 1 :]
            continue
        block, carry = data[:end], data[end:]
        if needle not in block:
            number += block.count(b"\n")
            continue
        for line in block.split(b"\n")[:-1]:
            if needle in line:
                yield number, line
            number += 1
    if needle in carry:
        yield number, carry


def _shown(line: bytes, needle: bytes) -> str:
    at = line.find(needle)
    start = max(0, at - _LONGEST_LINE // 2) if len(line) > _LONGEST_LINE else 0
    text = line[start : start + 4 * _LONGEST_LINE].decode("utf-8", "replace").rstrip("\r\n")[:_LONGEST_LINE]
    return "".join(character if character.isprintable() or character == "\t" else "�" for character in text)


class _Search:
    def __init__(self, tree: Tree, query: Query, stop: Callable[[], bool]) -> None:
        if "\n" in query.text or "\0" in query.text:
            raise WorkspaceError("InvalidRequest", "`text` spans lines; give text of one line")
        if query.limit < 0:
            raise WorkspaceError("InvalidRequest", "`limit` can't be negative; give 0 or more")
        self._tree = tree
        self._stop = stop
        self._pattern = _compile(query.glob) if query.glob else None
        self._needle = query.text.encode("utf-8", "surrogateescape")
        self._limit = min(query.limit or MOST_MATCHES, MOST_MATCHES)
        self._bytes = 0
        self.matches: list[SearchMatch] = []
        self.withheld = 0

    def wants(self, below: str) -> bool:
        return self._pattern is None or matches(self._pattern, tuple(below.split("/")))

    def full(self) -> bool:
        return len(self.matches) >= self._limit or self._bytes > _MOST_BYTES or self._stop()

    def _count(self, size: int) -> None:
        self._bytes += size

    def look(self, path: str) -> bool:
        """Add the matches of one file; False: there would have been more."""
        if not self._needle:
            self.matches.append(SearchMatch(path=path, line=0, text=""))
            return True
        try:
            fd = self._tree.open(path, openat.FILE)
        except PermissionError:
            self.withheld += 1
            return True
        except OSError:  # a link, or gone meanwhile: nothing of it can match
            return True
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return True
            with contextlib.closing(_lines(fd, self._needle, self._count)) as lines:
                for number, line in lines:
                    if self.full():
                        return False
                    self.matches.append(SearchMatch(path=path, line=number, text=_shown(line, self._needle)))
        finally:
            os.close(fd)
        return True


def run(
    tree: Tree,
    names: Iterable[tuple[str, bool]],
    top: str,
    query: Query,
    visible: Callable[[str], bool],
    stop: Callable[[], bool],
) -> tuple[list[SearchMatch], int, bool]:
    """Search as `Workspace.search` says, over `names` beneath `top` as `Workspace.names` gives them."""
    search = _Search(tree, query, stop)
    for path, directory in names:
        if directory or not search.wants(path[len(top) + 1 :]):
            continue
        if not visible(path):
            search.withheld += 1
            continue
        if search.full() or not search.look(path):
            return search.matches, search.withheld, True
    return search.matches, search.withheld, False
