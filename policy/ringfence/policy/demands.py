"""Readers of what a sandbox has to have (`sandbox.require`) and may see of the host (`sandbox.mounts`)."""

from __future__ import annotations

import re
from typing import Final

from ringfence.policy.manifest_types import Demand, Mount
from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Items, Node, Scalar, kind

ALL: Final = "all"
WALL_PATTERN: Final = "[a-z][a-z0-9_ -]{0,62}(:[a-z0-9][a-z0-9-]{0,62})?"
_WALL: Final = re.compile(WALL_PATTERN, re.ASCII)
_ENTRIES_MAX: Final = 64
TREES_OF_THE_SYSTEM: Final = ("proc", "sys", "dev", "run", "etc", "boot", "program", "workspace")
"""What lies at the top of a sandbox by itself, and of the host what no agent is shown."""


def read_require(reader: Reader, node: Node, what: str) -> tuple[Demand, ...]:
    """Walls that have to stand."""
    if isinstance(node, Scalar) and node.text == ALL:
        return (Demand(wall=ALL, line=node.line, column=node.column),)
    if not isinstance(node, Items) or not node.items:
        shown = f"`{node.text}`" if isinstance(node, Scalar) else kind(node)
        reader.wrong(node, f"`{what}` is {shown}", "write `all`, or a list of walls such as `[seccomp]`")
        return ()
    found: list[Demand] = []
    items = node.items
    for item in items:
        text = reader.text(item, what)
        if text is None:
            continue
        if _WALL.fullmatch(text) is None:
            reader.wrong(item, f"`{text}` is no wall", "write a name from `ringfence doctor`, or `NAME:FORM`")
        elif text in [demand.text for demand in found]:
            reader.wrong(item, f"`{text}` is there twice", "keep one")
        else:
            wall, _, form = text.partition(":")
            found.append(Demand(wall=wall, form=form, line=item.line, column=item.column))
    return tuple(found)


def read_mounts(reader: Reader, node: Node, what: str) -> tuple[Mount, ...]:
    """Directories of the host."""
    found: list[Mount] = []
    items = reader.items(node, what)
    if len(items) > _ENTRIES_MAX:
        reader.wrong(
            node, f"`{what}` names {len(items)} directories", f"name at most {_ENTRIES_MAX}; name a parent"
        )
        return ()
    for item in items:
        path = reader.text(item, what)
        if path is None:
            continue
        words = path.split("/")[1:]
        if not path.startswith("/") or any(word in {"", ".", ".."} for word in words):
            reader.wrong(
                item,
                f"`{path}` is no plain absolute path",
                "write it from `/`, without `.`, `..` and a last `/`",
            )
        elif words[0] in TREES_OF_THE_SYSTEM:
            reader.wrong(
                item, f"`/{words[0]}` is never shown to an agent, so `{path}` can't be", "leave it out"
            )
        elif path in [mount.path for mount in found]:
            reader.wrong(item, f"`{path}` is there twice", "keep one")
        else:
            found.append(Mount(path=path, line=item.line, column=item.column))
    return tuple(found)
