"""`spec.scheduler` of the kernel file: how many agents live at once, and who goes first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Node

KEYS: Final = ("agents", "memory", "starts", "labels", "share_by")
STARTS: Final = 16
_MOST: Final = 1_000_000
_LEAST_MEMORY: Final = 16 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,125}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimits:
    """What bounds the live agents of one kernel.

    Attributes:
        agents: most that live at once; None: no bound.
        memory_bytes: most that `sandbox.memory` of live agents may come to; None: no bound.
        starts: most that are started at the same time.
        labels: most live agents that carry a label, by `(key, value)`.
        share_by: the label whose values share the slots evenly; empty: first come, first served.
    """

    agents: int | None = None
    memory_bytes: int | None = None
    starts: int = STARTS
    labels: Mapping[tuple[str, str], int] = field(default_factory=lambda: MappingProxyType({}))
    share_by: str = ""


def read_scheduler(reader: Reader, node: Node) -> SlotLimits:
    """Read the section."""
    what = "spec.scheduler"
    fields = reader.mapping(node, what, KEYS)
    nodes = {key: value for key, (_, value) in fields.items()}
    agents = reader.integer(nodes["agents"], f"{what}.agents", 1, _MOST, 1) if "agents" in nodes else None
    memory = None
    if "memory" in nodes:
        memory = reader.size(nodes["memory"], f"{what}.memory", _LEAST_MEMORY, _LEAST_MEMORY)
    starts = STARTS
    if "starts" in nodes:
        starts = reader.integer(nodes["starts"], f"{what}.starts", 1, 1000, STARTS)
    labels: dict[tuple[str, str], int] = {}
    for key, value in reader.free_mapping(nodes["labels"], f"{what}.labels") if "labels" in nodes else ():
        name, equals, wanted = key.text.partition("=")
        if not equals or not wanted or "=" in wanted or _NAME.fullmatch(name) is None:
            reader.wrong(key, f"`{key.text}` is no label with its value", "write `team=billing: 10`")
            continue
        labels[name, wanted] = reader.integer(value, f"{what}.labels.{key.text}", 1, _MOST, 1)
    share_by = ""
    if "share_by" in nodes:
        share_by = reader.text(nodes["share_by"], f"{what}.share_by") or ""
        if share_by and _NAME.fullmatch(share_by) is None:
            reader.wrong(nodes["share_by"], f"`{share_by}` is no name of a label", "write one such as `team`")
    return SlotLimits(
        agents=agents,
        memory_bytes=memory,
        starts=starts,
        labels=MappingProxyType(labels),
        share_by=share_by,
    )
