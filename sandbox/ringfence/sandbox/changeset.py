"""What a command changed, as records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, cast

Kind = Literal["create", "modify", "remove", "metadata"]
Node = Literal["file", "directory", "link", "device", "socket", "fifo"]

_VERSION = 1


class ChangesError(Exception):
    """The changes can't be read or applied; `str()` is one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One path that is no longer as it was.

    Attributes:
        path: below `/workspace`.
        kind: `modify` is other content (or another link target, or a link for a file), `metadata` other permission bits
            or attributes only. A file in place of a directory, or the other way round, is a `remove` and a `create`.
        node: what is there now; for `remove`, what was there.
        mode: permission bits of what is there now; for `remove`, of what was there.
        setid: a file with the set-user-id or set-group-id bit.
    """

    path: str
    kind: Kind
    node: Node
    mode: int
    setid: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSet:
    """All changes of one command, in the order of the tree: a directory before what it holds.

    A directory that was removed, or removed and made anew, has every path it held listed, hidden ones too.
    """

    changes: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changes)

    @property
    def removed(self) -> tuple[str, ...]:
        """Paths that are gone."""
        return tuple(change.path for change in self.changes if change.kind == "remove")

    @property
    def written(self) -> tuple[str, ...]:
        """Paths that are new or different."""
        return tuple(change.path for change in self.changes if change.kind != "remove")

    def paths(self) -> tuple[str, ...]:
        """Every path once."""
        return tuple(dict.fromkeys(change.path for change in self.changes))

    def to_json(self) -> str:
        """The same text for the same changes."""
        rows = [[change.path, change.kind, change.node, change.mode, change.setid] for change in self.changes]
        return json.dumps({"version": _VERSION, "changes": rows}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ChangeSet:
        """Read `to_json` back.

        Raises:
            ChangesError: it was written by another version, or is no change set.
        """
        try:
            document = cast("dict[str, Any]", json.loads(text))
            if document["version"] != _VERSION:
                raise ChangesError(
                    f"a change set of version `{document['version']}` can't be read; use the Ringfence that wrote it"
                )
            rows = cast("list[tuple[str, Kind, Node, int, bool]]", document["changes"])
            changes = [
                Change(path=path, kind=kind, node=node, mode=mode, setid=setid)
                for path, kind, node, mode, setid in rows
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ChangesError("the change set can't be read; its record is damaged") from error
        return cls(changes=tuple(changes))
