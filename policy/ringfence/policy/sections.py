"""Readers of the sections of a manifest; the kernel file shares some of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ringfence.policy import approving
from ringfence.policy.demands import read_mounts, read_require
from ringfence.policy.ignoring import read_ignore
from ringfence.policy.manifest_types import (
    Approvals,
    Budgets,
    Restart,
    Run,
    SandboxSpec,
    Schedule,
)
from ringfence.policy.reader import Fields, Numbers, Reader
from ringfence.policy.schedule import MISSED, OVERLAP, cron_problem, shortest_gap_s
from ringfence.policy.schedule import zone as find_zone
from ringfence.policy.strict_yaml import Node
from ringfence.policy.units import TOTALS, Rate

KEYS: Final = {
    "metadata": ("name", "labels"),
    "run": ("command", "workspace", "env"),
    "sandbox": (
        *("backend", "workspace", "memory", "pids", "cpu", "disk", "timeout", "mounts", "require", "doors"),
    ),
    "budgets": ("rate", "total", "context", "on_exhausted"),
    "context": ("max_tokens", "on_overflow"),
    "approvals": ("expire", "linger", *approving.KEYS),
    "restart": ("policy", "max", "resume", "ignore"),
    "schedule": ("cron", "every", "timezone", "missed", "overlap", "jitter"),
}
"""Keys of each section's mapping."""

BACKENDS: Final = ("native", "docker", "remote")
DOORS: Final = ("models", "mcp")
"""Doors on the loopback of a program's sandbox."""
PRIORITIES: Final = ("low", "normal", "high")
RESTARTS: Final = ("never", "on-failure", "always")
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_LABEL_KEY: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,125}[A-Za-z0-9])?", re.ASCII)
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_CRON_FIELD: Final = re.compile(r"[0-9A-Za-z*,/-]{1,64}", re.ASCII)
_CRON_FIELDS: Final = 5
EVERY_S_MIN: Final = 1.0
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,2}", re.ASCII)
_MAX_ENTRIES: Final = 256
_MIN_MEMORY: Final = 16 << 20
_MIN_DISK: Final = 1 << 20
_MAX_PIDS: Final = 32768
_MAX_CPU: Final = 1024
_MAX_RESTARTS: Final = 1000


def is_name(text: str) -> bool:
    """Whether a text may name an agent, a role, a resource or a secret: it is safe as a part of a path, too."""
    return _NAME.fullmatch(text) is not None


def read_name(reader: Reader, node: Node, what: str) -> str:
    """A name of an agent, role, resource or secret; empty on a problem."""
    name = reader.text(node, what)
    if name is None:
        return ""
    if not is_name(name):
        reader.wrong(
            node,
            f"`{name}` is no name",
            "write up to 63 letters, digits, `.`, `-` and `_`, with a letter or digit at its ends",
        )
        return ""
    return name


def read_names(reader: Reader, node: Node, what: str) -> tuple[str, ...]:
    """A list of names without repetition."""
    names: list[str] = []
    for item in reader.items(node, what):
        name = read_name(reader, item, what)
        if name in names and name:
            reader.wrong(item, f"`{name}` is there twice", "keep one")
        elif name:
            names.append(name)
    return tuple(names)


def read_metadata(reader: Reader, node: Node | None) -> tuple[str, Mapping[str, str]]:
    """Name and labels. A missing section was noted already."""
    if node is None:
        return "", {}
    fields = reader.mapping(node, "metadata", KEYS["metadata"])
    if "name" in fields:
        name = read_name(reader, fields["name"][1], "metadata.name")
    else:
        name = ""
        reader.wrong(node, "`metadata.name` is missing", "add `name: NAME`")
    labels: dict[str, str] = {}
    for key, value in (
        reader.free_mapping(fields["labels"][1], "metadata.labels") if "labels" in fields else ()
    ):
        if _LABEL_KEY.fullmatch(key.text) is None:
            reader.wrong(key, f"`{key.text}` is no label", "write letters, digits, `.`, `-`, `_` and `/`")
        text = reader.loose_text(value, f"metadata.labels.{key.text}")
        labels[key.text] = text or ""
    return name, labels


def read_run(reader: Reader, node: Node) -> Run:
    """What to start."""
    fields = reader.mapping(node, "spec.run", KEYS["run"])
    command: list[str] = []
    if "command" not in fields:
        reader.wrong(node, "`spec.run.command` is missing", "add `command: [PROGRAM, ARGUMENT]`")
    else:
        place = fields["command"][1]
        items = reader.items(place, "spec.run.command")
        for index, item in enumerate(items):
            text = reader.loose_text(item, f"spec.run.command[{index}]")
            command.append(text or "")
            if not index and text == "":
                reader.wrong(item, "the program is empty", "write a program, such as `python`")
        if not items:
            reader.wrong(place, "`spec.run.command` names no program", "write `command: [PROGRAM, ARGUMENT]`")
    workspace = reader.text(fields["workspace"][1], "spec.run.workspace") if "workspace" in fields else None
    return Run(
        command=tuple(command),
        workspace=workspace,
        env=_read_env(reader, fields["env"][1]) if "env" in fields else {},
    )


def _read_env(reader: Reader, node: Node) -> dict[str, str]:
    env: dict[str, str] = {}
    entries = reader.free_mapping(node, "spec.run.env")
    if len(entries) > _MAX_ENTRIES:
        reader.wrong(
            node, f"`spec.run.env` has {len(entries)} entries", f"at most {_MAX_ENTRIES} are accepted"
        )
    for key, value in entries:
        if _ENV_NAME.fullmatch(key.text) is None:
            reader.wrong(
                key, f"`{key.text}` is no name of an environment variable", "write letters, digits and `_`"
            )
        if key.text.upper().startswith("RINGFENCE_"):
            reader.wrong(
                key,
                f"`{key.text}` is set by the kernel",
                "choose a name that does not begin with `RINGFENCE_`",
            )
        text = reader.loose_text(value, f"spec.run.env.{key.text}")
        env[key.text] = text or ""
    return env


def read_sandbox(
    reader: Reader, node: Node, what: str = "spec.sandbox", keys: tuple[str, ...] = KEYS["sandbox"]
) -> SandboxSpec:
    """Walls and limits. `keys` may have more than this looks at."""
    fields = reader.mapping(node, what, keys)
    nodes = {key: value for key, (_, value) in fields.items()}
    base = SandboxSpec()
    backend = (
        reader.choice(nodes["backend"], f"{what}.backend", BACKENDS, "native") if "backend" in nodes else None
    )
    workspace = base.workspace
    if "workspace" in nodes:
        workspace = reader.choice(nodes["workspace"], f"{what}.workspace", ("mediated", "direct"), workspace)
    mounts = read_mounts(reader, nodes["mounts"], f"{what}.mounts") if "mounts" in nodes else ()
    require = read_require(reader, nodes["require"], f"{what}.require") if "require" in nodes else None
    doors = _read_doors(reader, nodes["doors"], f"{what}.doors") if "doors" in nodes else ()
    memory, disk, timeout = base.memory_bytes, base.disk_bytes, base.timeout_s
    if "memory" in nodes:
        memory = reader.size(nodes["memory"], f"{what}.memory", _MIN_MEMORY, memory)
    if "disk" in nodes:
        disk = reader.size(nodes["disk"], f"{what}.disk", _MIN_DISK, disk)
    if "timeout" in nodes:
        timeout = reader.duration(nodes["timeout"], f"{what}.timeout", timeout)
    pids = (
        reader.integer(nodes["pids"], f"{what}.pids", 1, _MAX_PIDS, base.pids)
        if "pids" in nodes
        else base.pids
    )
    cpu = reader.number(nodes["cpu"], f"{what}.cpu", 0.01, _MAX_CPU, base.cpu) if "cpu" in nodes else base.cpu
    return SandboxSpec(
        backend=backend,
        workspace=workspace,
        memory_bytes=memory,
        pids=pids,
        cpu=cpu,
        disk_bytes=disk,
        timeout_s=timeout,
        mounts=mounts,
        require=require,
        doors=doors,
    )


def _read_doors(reader: Reader, node: Node, what: str) -> tuple[str, ...]:
    """Doors on the loopback: servers that an unmodified program finds there."""
    found: list[str] = []
    for item in reader.items(node, what):
        door = reader.choice(item, what, DOORS, DOORS[0])
        if door in found:
            reader.wrong(item, f"`{door}` is named twice", "name each door once")
        found.append(door)
    return tuple(found)


def read_budgets(reader: Reader, node: Node, what: str = "spec.budgets") -> Budgets:
    """Quotas and budgets."""
    fields = reader.mapping(node, what, KEYS["budgets"])
    rates: dict[str, Rate] = {}
    for key, value in reader.free_mapping(fields["rate"][1], f"{what}.rate") if "rate" in fields else ():
        action = reader.action(key, f"{what}.rate")
        rate = reader.rate(value, f"{what}.rate.{key.text}")
        if action and rate is not None:
            rates[action] = rate
    totals: dict[str, float] = {}
    if "total" in fields:
        for key, (_, value) in reader.mapping(fields["total"][1], f"{what}.total", TOTALS).items():
            if key == "bytes":
                totals[key] = float(reader.size(value, f"{what}.total.{key}", 0, 0))
                continue
            totals[key] = reader.count(value, f"{what}.total.{key}", 0.0)
            if key != "usd" and totals[key] != int(totals[key]):
                reader.wrong(value, f"`{what}.total.{key}` is not a whole number", "write a whole number")
    tokens, overflow = _read_context(reader, fields, what)
    exhausted = "park"
    if "on_exhausted" in fields:
        exhausted = reader.choice(
            fields["on_exhausted"][1], f"{what}.on_exhausted", ("park", "refuse"), exhausted
        )
    return Budgets(
        rate=rates,
        total=totals,
        context_max_tokens=tokens,
        context_on_overflow=overflow,
        on_exhausted=exhausted,
    )


def _read_context(reader: Reader, fields: Fields, what: str) -> tuple[int | None, str]:
    tokens, overflow = None, "refuse"
    if "context" not in fields:
        return tokens, overflow
    context = fields["context"][1]
    inner = reader.mapping(context, f"{what}.context", KEYS["context"])
    if "max_tokens" in inner:
        tokens = int(reader.count(inner["max_tokens"][1], f"{what}.context.max_tokens", 1.0))
    else:
        reader.wrong(context, f"`{what}.context.max_tokens` is missing", "add `max_tokens: 128k`")
    if "on_overflow" in inner:
        choices = ("page", "refuse")
        overflow = reader.choice(inner["on_overflow"][1], f"{what}.context.on_overflow", choices, overflow)
    if overflow == "page" and "ceilings" in what:
        reader.wrong(
            inner["on_overflow"][1],
            "a ceiling can't say what a prompt that is too long becomes",
            "leave `on_overflow` out here: each manifest says it",
        )
    return tokens, overflow


def read_approvals(reader: Reader, node: Node) -> Approvals:
    """How long parked calls wait, and for whom."""
    fields = reader.mapping(node, "spec.approvals", KEYS["approvals"])
    base = Approvals()
    expire, linger = base.expire_s, base.linger_s
    if "expire" in fields:
        expire = reader.duration(fields["expire"][1], "spec.approvals.expire", expire)
    if "linger" in fields:
        linger = reader.duration(fields["linger"][1], "spec.approvals.linger", linger)
    people = approving.read_people(reader, fields, "spec.approvals", Numbers("manifest", "p"))
    return Approvals(expire_s=expire, linger_s=linger, people=people)


def read_restart(reader: Reader, node: Node) -> Restart:
    """When to start again."""
    fields = reader.mapping(node, "spec.restart", KEYS["restart"])
    base = Restart()
    policy, most, resume = base.policy, base.max, base.resume
    if "policy" in fields:
        policy = reader.choice(fields["policy"][1], "spec.restart.policy", RESTARTS, policy)
        if policy == "always":
            fix = "write `on-failure`: a program that ended well would only replay its recorded end"
            reader.unsupported(fields["policy"][1], "`policy: always`", fix)
    if "max" in fields:
        most = reader.integer(fields["max"][1], "spec.restart.max", 0, _MAX_RESTARTS, most)
    if "resume" in fields:
        resume = reader.choice(fields["resume"][1], "spec.restart.resume", ("replay", "own"), resume)
    ignore = read_ignore(reader, fields["ignore"][1], "spec.restart.ignore") if "ignore" in fields else ()
    return Restart(policy=policy, max=most, resume=resume, ignore=ignore)


def read_schedule(reader: Reader, node: Node) -> Schedule:
    """When to run."""
    fields = reader.mapping(node, "spec.schedule", KEYS["schedule"])
    known = len(reader.problems)
    cron, every, zone = "", None, "UTC"
    if "cron" in fields:
        cron = reader.text(fields["cron"][1], "spec.schedule.cron") or ""
        words = cron.split()
        if cron and (len(words) != _CRON_FIELDS or not all(map(_CRON_FIELD.fullmatch, words))):
            reader.wrong(
                fields["cron"][1], f"`{cron}` is no cron line", 'write five fields, such as `"30 2 * * *"`'
            )
        elif cron and (problem := cron_problem(cron)) is not None:
            reader.wrong(
                fields["cron"][1],
                f"the cron line `{cron}` {problem}",
                "its fields are minute, hour, day of month, month, day of week",
            )
    if "every" in fields:
        every = reader.duration(fields["every"][1], "spec.schedule.every", 60.0)
        if every < EVERY_S_MIN:
            reader.wrong(fields["every"][1], "`spec.schedule.every` is shorter than a second", "write `1m`")
    if "timezone" in fields:
        zone = reader.text(fields["timezone"][1], "spec.schedule.timezone") or "UTC"
        if _ZONE.fullmatch(zone) is None or find_zone(zone) is None:
            reader.wrong(
                fields["timezone"][1], f"`{zone}` is no time zone", "write one such as `Europe/Berlin`"
            )
    if "every" in fields and "timezone" in fields:
        reader.wrong(fields["timezone"][0], "an interval knows no time zone", "leave `timezone` out")
    if ("cron" in fields) == ("every" in fields):
        reader.wrong(node, "a schedule has either `cron` or `every`", 'write `cron: "30 2 * * *"`')
    schedule = Schedule(cron=cron, every_s=every, timezone=zone)
    return _read_behaviour(reader, fields, schedule, sound=len(reader.problems) == known)


def _read_behaviour(reader: Reader, fields: Fields, schedule: Schedule, *, sound: bool) -> Schedule:
    """What becomes of times that nobody saw or that find a run under way. `sound`: its times can be reckoned with."""
    missed, overlap, jitter = schedule.missed, schedule.overlap, schedule.jitter_s
    if "missed" in fields:
        missed = reader.choice(fields["missed"][1], "spec.schedule.missed", MISSED, missed)
    if "overlap" in fields:
        overlap = reader.choice(fields["overlap"][1], "spec.schedule.overlap", OVERLAP, overlap)
    if (missed, overlap) == ("all", "replace"):
        text = "`missed: all` and `overlap: replace` contradict each other: a run that is made up would be replaced"
        reader.wrong(fields["overlap"][0], text, "write `overlap: queue`")
    if "jitter" in fields:
        jitter = reader.duration(fields["jitter"][1], "spec.schedule.jitter", jitter)
        gap = shortest_gap_s(schedule) if sound else None
        if gap is not None and jitter >= gap:
            text = f"`spec.schedule.jitter` reaches the next time: the shortest time between two is {gap:g} s"
            reader.wrong(fields["jitter"][1], text, "write less")
    return replace(schedule, missed=missed, overlap=overlap, jitter_s=jitter)
