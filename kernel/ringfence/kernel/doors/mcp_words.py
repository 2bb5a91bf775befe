"""What the .proto files say about methods and fields: their comments, which generated classes don't have."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Final

PACKAGE: Final = "ringfence.v1"
_COMMENT = re.compile(r"\s*//\s?(.*)").fullmatch
_METHOD = re.compile(r"\s*rpc (\w+)\(.*").fullmatch
_MESSAGE = re.compile(r"message (\w+) \{.*").fullmatch
_FIELD = re.compile(r"\s+(?:repeated |optional )?[\w.<>, ]+ (\w+) = \d+;").fullmatch


@cache
def words() -> dict[str, str]:
    """The comment of each method and field of the table: `FsRead` and `FsReadRequest.path` are keys."""
    text = resources.files(PACKAGE).joinpath("syscalls.proto").read_text("utf-8")
    found: dict[str, str] = {}
    message, comment = "", list[str]()
    for line in text.splitlines():
        if said := _COMMENT(line):
            comment.append(said[1])
            continue
        if method := _METHOD(line):
            found[method[1]] = " ".join(comment)
        elif opened := _MESSAGE(line):
            message = opened[1]
        elif message and (field := _FIELD(line)):
            found[f"{message}.{field[1]}"] = " ".join(comment)
        comment = []
    return found
