"""Searching a workspace by name and content, in time linear in what is read."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Generator, Iterable

from ringfence.sandbox import openat
from ringfence.sandbox.content import CHUNK
from ringfence.sandbox.records import SearchMatch, WorkspaceError
from ringfence.sandbox.tree import Tree

MOST_MATCHES = 1000
"""Matches given where the request names no limit, and at most."""
_LONGEST_LINE = 400  # characters shown of one line
_LONGEST_GLOB = 1024
_MOST_BYTES = 1 << 30  # content read by one search


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


class Search:
    """One search below a directory.

    Args:
        tree: the workspace.
        top: canonical path of the directory.
        glob: on the path below it; empty: all.
        text: literal text that a line has to contain; empty: names only.
        limit: most matches; 0: `MOST_MATCHES`.
        stop: asked now and then; True ends the search early.

    Raises:
        WorkspaceError: a glob, text or limit that can't be meant.
    """

    def __init__(
        self, tree: Tree, top: str, *, glob: str, text: str, limit: int, stop: Callable[[], bool]
    ) -> None:
        if "\n" in text or "\0" in text:
            raise WorkspaceError("InvalidRequest", "`text` spans lines; give text of one line")
        if limit < 0:
            raise WorkspaceError("InvalidRequest", "`limit` can't be negative; give 0 or more")
        self._tree = tree
        self._top = top
        self._stop = stop
        self._pattern = _compile(glob) if glob else None
        self._needle = text.encode("utf-8", "surrogateescape")
        self._limit = min(limit or MOST_MATCHES, MOST_MATCHES)
        self._bytes = 0
        self._matches: list[SearchMatch] = []
        self._withheld = 0

    def names(self, names: Iterable[tuple[str, bool]]) -> list[str]:
        """Those of the paths beneath the directory, as `Workspace.names` gives them, that the glob wants."""
        found: list[str] = []
        for path, directory in names:
            if self._stop():
                break
            if not directory and self._wants(path):
                found.append(path)
        return found

    def run(
        self, names: Iterable[tuple[str, bool]], visible: Callable[[str], bool]
    ) -> tuple[list[SearchMatch], int, bool]:
        """Search as `Workspace.search` says."""
        for path, directory in names:
            if directory or not self._wants(path):
                continue
            if not visible(path):
                self._withheld += 1
            elif self._over() or not self._look(path):
                return self._matches, self._withheld, True
        return self._matches, self._withheld, False

    def _wants(self, path: str) -> bool:
        if self._pattern is None:
            return True
        return matches(self._pattern, tuple(path[len(self._top) + 1 :].split("/")))

    def _over(self) -> bool:
        return self._bytes > _MOST_BYTES or self._stop()

    def _add(self, match: SearchMatch) -> bool:
        """Add one match; False: the limit leaves it out."""
        if len(self._matches) >= self._limit:
            return False
        self._matches.append(match)
        return True

    def _count(self, size: int) -> None:
        self._bytes += size

    def _look(self, path: str) -> bool:
        """Add the matches of one file; False: there would have been more."""
        if not self._needle:
            return self._add(SearchMatch(path=path, line=0, text=""))
        try:
            fd = self._tree.open_as_agent(path, openat.FILE)
        except PermissionError:
            self._withheld += 1
            return True
        except OSError:  # a link, or gone meanwhile: nothing of it can match
            return True
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                return True
            if facts.st_nlink > 1:  # what it names may lie outside
                self._withheld += 1
                return True
            with contextlib.closing(_lines(fd, self._needle, self._count)) as lines:
                for number, line in lines:
                    shown = _shown(line, self._needle)
                    if self._over() or not self._add(SearchMatch(path=path, line=number, text=shown)):
                        return False
        finally:
            os.close(fd)
        return True
