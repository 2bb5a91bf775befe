"""`spec.retention` of the kernel file: what is kept, how long, and where what leaves the journal goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final

from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Node

KEYS: Final = {
    "retention": (
        "archive",
        "journals",
        "messages",
        "ended",
        "logs",
        "webhooks",
        "artifacts",
        "points",
        "labels",
    ),
    "retention.journals": ("keep", "steps", "archive"),
    "retention.keep": ("keep",),
    "retention.points": ("keep", "count", "size"),
    "retention.label": ("journals", "messages", "ended", "logs", "points"),
}
"""Keys of the section, by the mapping they stand in."""

STEPS: Final = 1000
"""Newest steps of an agent that stay in the database, where a file says nothing else."""

_MOST: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PointsKept:
    """Which rollback points of an agent stay, the newest; each bound holds. None: no such bound.

    Attributes:
        age_s: seconds after which they go.
        count: how many stay.
        size_bytes: how many bytes they and their content may take.
    """

    age_s: float | None = None
    count: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How long things of one agent are kept. None: for ever.

    Attributes:
        journal_s: seconds after which steps behind a checkpoint leave the database.
        journal_steps: newest steps that stay there whatever their age.
        archive_s: seconds after which archived parts of agents that ended are given up.
        messages_s: seconds after which messages that were taken or voided are forgotten.
        ended_s: seconds after which an agent that ended is removed.
        logs_s: seconds after which output that nobody added to is removed.
        points: which rollback points stay; None: all of agents that have not ended, and as the kernel does of those that have.
    """

    journal_s: float | None = None
    journal_steps: int = STEPS
    archive_s: float | None = None
    messages_s: float | None = None
    ended_s: float | None = None
    logs_s: float | None = None
    points: PointsKept | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The section.

    Attributes:
        archive: directory of archived journals; empty: `archive` in the data directory.
        every: what holds for agents without a label below.
        labels: what holds instead for agents with `(key, value)`; of several the longest time counts.
        webhooks_s: seconds after which an event that nobody took is dropped; None: as the kernel does.
        artifacts_s: seconds after which bytes of artifacts are removed that nothing names any more; None: never.
    """

    archive: str = ""
    every: Keeping = field(default_factory=Keeping)
    labels: Mapping[tuple[str, str], Keeping] = field(default_factory=lambda: MappingProxyType({}))
    webhooks_s: float | None = None
    artifacts_s: float | None = None

    def of(self, labels: Mapping[str, str]) -> Keeping:
        """What holds for an agent with these labels."""
        found = [keeping for (key, value), keeping in sorted(self.labels.items()) if labels.get(key) == value]
        if not found:
            return self.every
        return Keeping(
            journal_s=_longest([one.journal_s for one in found]),
            journal_steps=max(one.journal_steps for one in found),
            archive_s=_longest([one.archive_s for one in found]),
            messages_s=_longest([one.messages_s for one in found]),
            ended_s=_longest([one.ended_s for one in found]),
            logs_s=_longest([one.logs_s for one in found]),
            points=_most([one.points for one in found]),
        )


def _longest(times: list[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return max(known) if len(known) == len(times) else None


def _most(kept: list[PointsKept | None]) -> PointsKept | None:
    """The most of several: a bound holds where all have it, the largest one."""
    known = [one for one in kept if one is not None]
    if len(known) < len(kept):
        return None
    counts = [one.count for one in known if one.count is not None]
    sizes = [one.size_bytes for one in known if one.size_bytes is not None]
    return PointsKept(
        age_s=_longest([one.age_s for one in known]),
        count=max(counts) if len(counts) == len(known) else None,
        size_bytes=max(sizes) if len(sizes) == len(known) else None,
    )


def read_retention(reader: Reader, node: Node) -> RetentionPolicy:
    """Read the section."""
    what = "spec.retention"
    fields = reader.mapping(node, what, KEYS["retention"])
    nodes = {key: value for key, (_, value) in fields.items()}
    archive = (reader.text(nodes["archive"], f"{what}.archive") or "") if "archive" in nodes else ""
    if archive and not PurePosixPath(archive).is_absolute():
        reader.wrong(nodes["archive"], f"`{archive}` is no absolute path", "write it from the root on")
    every = _read_keeping(reader, nodes, what, Keeping())
    labels: dict[tuple[str, str], Keeping] = {}
    for key, value in reader.free_mapping(nodes["labels"], f"{what}.labels") if "labels" in nodes else ():
        name, equals, wanted = key.text.partition("=")
        if not equals or not name or not wanted or "=" in wanted:
            reader.wrong(key, f"`{key.text}` is no label with its value", "write `team=billing: {…}`")
            continue
        inner = reader.mapping(value, f"{what}.labels.{key.text}", KEYS["retention.label"])
        own = {key: node for key, (_, node) in inner.items()}
        labels[name, wanted] = _read_keeping(reader, own, f"{what}.labels.{key.text}", every)
    webhooks = _keep(reader, nodes["webhooks"], f"{what}.webhooks") if "webhooks" in nodes else None
    artifacts = _keep(reader, nodes["artifacts"], f"{what}.artifacts") if "artifacts" in nodes else None
    return RetentionPolicy(
        archive=archive,
        every=every,
        labels=MappingProxyType(labels),
        webhooks_s=webhooks,
        artifacts_s=artifacts,
    )


def _read_keeping(reader: Reader, nodes: Mapping[str, Node], what: str, base: Keeping) -> Keeping:
    found = base
    if "journals" in nodes:
        found = _read_journals(reader, nodes["journals"], f"{what}.journals", found)
    if "messages" in nodes:
        found = replace(found, messages_s=_keep(reader, nodes["messages"], f"{what}.messages"))
    if "ended" in nodes:
        found = replace(found, ended_s=_keep(reader, nodes["ended"], f"{what}.ended"))
    if "logs" in nodes:
        found = replace(found, logs_s=_keep(reader, nodes["logs"], f"{what}.logs"))
    if "points" in nodes:
        found = replace(found, points=_read_points(reader, nodes["points"], f"{what}.points"))
    return found


def _read_points(reader: Reader, node: Node, what: str) -> PointsKept:
    fields = reader.mapping(node, what, KEYS["retention.points"])
    found = PointsKept()
    if not fields:
        reader.wrong(
            node, f"`{what}` says nothing", "write for example `{keep: 30d, count: 1000, size: 10Gi}`"
        )
    if "keep" in fields:
        found = replace(found, age_s=reader.duration(fields["keep"][1], f"{what}.keep", 0.0))
    if "count" in fields:
        found = replace(found, count=reader.integer(fields["count"][1], f"{what}.count", 0, _MOST, 0))
    if "size" in fields:
        found = replace(found, size_bytes=reader.size(fields["size"][1], f"{what}.size", 0, 0))
    return found


def _read_journals(reader: Reader, node: Node, what: str, base: Keeping) -> Keeping:
    fields = reader.mapping(node, what, KEYS["retention.journals"])
    found = base
    if "keep" in fields:
        found = replace(found, journal_s=reader.duration(fields["keep"][1], f"{what}.keep", 0.0))
    else:
        reader.wrong(node, f"`{what}` lacks `keep`", "write for example `keep: 30d`")
    if "steps" in fields:
        steps = reader.integer(fields["steps"][1], f"{what}.steps", 0, _MOST, STEPS)
        found = replace(found, journal_steps=steps)
    if "archive" in fields:
        found = replace(found, archive_s=reader.duration(fields["archive"][1], f"{what}.archive", 0.0))
    return found


def _keep(reader: Reader, node: Node, what: str) -> float | None:
    fields = reader.mapping(node, what, KEYS["retention.keep"])
    if "keep" in fields:
        return reader.duration(fields["keep"][1], f"{what}.keep", 0.0)
    reader.wrong(node, f"`{what}` lacks `keep`", "write for example `keep: 30d`")
    return None
