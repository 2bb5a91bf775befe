"""Where the files of a child are made before its row is committed, and how it comes into the world afterwards.

A child's files lie in `agents/.spawn-KERNEL-PARENTKEY-ID` until its row is there; KERNEL is the id under which the database
knows who makes them. Then the directory gets its place, `agents/ID`, and the child is started. Whoever adopts the child after a
crash does the same; whoever adopts the parent takes away what was not committed. A maker that stood still meanwhile lays files
out after that: they are looked for again and again, and go once the database says that their maker is fenced and the child was
never born.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.kernel.config import AGENT_UID_BASE, Layout
from ringfence.kernel.journal.store_kernels import short_id
from ringfence.kernel.journal.types import AgentKey, AgentRecord
from ringfence.kernel.kinship import CHILDREN_MAX, DEPTH_MAX, TREE_MAX
from ringfence.kernel.resources import Resources
from ringfence.kernel.rights import effective_rules
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.types import Verdict
from ringfence.sandbox.trees import copy_tree
from ringfence.sandbox.usage import Meter
from ringfence.sandbox.workspace import Workspace, WorkspaceError
from ringfence.syscalls.errors import BudgetExhausted, InvalidRequest
from ringfence.syscalls.fs_common import refusal
from ringfence.syscalls.lent import Newborn

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.thread import Thread

log = logging.getLogger(__name__)

WORKSPACE_BYTES_MAX = 1 << 30
TICK_NS = 2_000_000_000
"""Two changes of a directory that lie no further apart may have one time of change: some file systems know whole seconds."""
STAGED = ".spawn-"
_STAGED_NAME = re.compile(rf"{re.escape(STAGED)}(?:(k-[a-z2-7]+)-)?([0-9]+)-(.+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Files of a child that have not got their place.

    Attributes:
        maker: id of the kernel that made them; empty: a release that did not note it.
    """

    path: Path
    maker: str
    parent: AgentKey
    child: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What the directory of all agents held of them, and how the directory stood before it was read."""

    stood: tuple[int, int, int]
    found: tuple[Staged, ...]


@dataclass(slots=True, kw_only=True)
class Cradle:
    """What was made for one call that has not been settled."""

    child: str
    key: AgentKey
    reserved: dict[str, float]


@dataclass(slots=True, kw_only=True)
class Nurseries:
    """All nurseries of a kernel.

    Attributes:
        begin: takes up an agent whose row is committed: adopts and starts it.
        maker: this kernel's id in the database, once it has made a child's files.
    """

    core: Core
    layout: Layout
    resources: Callable[[], Resources]
    begin: Callable[[AgentRecord], None] = lambda _record: None
    maker: str = ""
    looked: Looked | None = None

    def of(self, key: AgentKey) -> AgentNursery:
        """The nursery of one agent."""
        return AgentNursery(house=self, key=key)

    def staged(self, parent: AgentKey, child: str) -> Path:
        """Where the files of a child lie before its row is committed."""
        return self.layout.data / "agents" / f"{STAGED}{self.maker}-{parent}-{child}"

    def place(self, child: str) -> None:
        """Put the files of a committed child where they belong; nothing where they are there already."""
        if self.layout.agent(child).exists():
            return
        found = [staged for staged in self._all() if staged.child == child]
        if found:
            found[0].path.rename(self.layout.agent(child))

    def here(self) -> list[str]:
        """Ids of children, committed or not, whose files have not got their place."""
        return [staged.child for staged in self._all()]

    async def sweep(self, parent: AgentKey) -> None:
        """Settle what a dead kernel left of an agent's spawning. Called once this kernel owns the parent.

        Raises:
            Unavailable: the database is away.
        """
        for staged in self._all():
            if staged.parent == parent:
                await self._settle(staged, born=await self.core.store.agent(staged.child) is not None)

    async def sweep_late(self) -> None:
        """Settle what was laid out by a kernel that had lost the parent, and did not know it yet.

        INVARIANT: nothing goes that a kernel makes which can still commit the child: its maker is fenced in the database first.

        Raises:
            Unavailable: the database is away.
        """
        for staged in await asyncio.to_thread(self._all):
            if not staged.maker or staged.maker == self.maker:
                continue
            fate = await self.core.store.was_born(
                self.core.kernel, self.core.fence, staged.maker, staged.parent, staged.child
            )
            if fate is not None:
                await self._settle(staged, born=fate)

    async def _settle(self, staged: Staged, *, born: bool) -> None:
        if born:
            self.place(staged.child)
        else:
            await asyncio.to_thread(shutil.rmtree, staged.path, ignore_errors=True)

    def _all(self) -> Sequence[Staged]:
        """All of them. Whoever takes over a thousand agents asks as often, so the directory is read when it has changed."""
        top = self.layout.data / "agents"
        try:
            facts, now_ns = top.stat(), time.time_ns()
        except FileNotFoundError:
            return ()
        stood = (facts.st_dev, facts.st_ino, facts.st_mtime_ns)
        looked = self.looked
        if looked is not None and looked.stood == stood:
            return looked.found
        found = [_staged(path) for path in sorted(top.glob(f"{STAGED}*"))]
        known = tuple(staged for staged in found if staged is not None)
        # INVARIANT: what came after the look shows in the time of change, so one that may be of the same tick is not kept.
        old = now_ns - facts.st_mtime_ns > TICK_NS
        self.looked = Looked(stood=stood, found=known) if old else None
        return known


def _staged(path: Path) -> Staged | None:
    named = _STAGED_NAME.fullmatch(path.name)
    if named is None:
        return None
    maker, parent, child = named.groups(default="")
    return Staged(path=path, maker=maker, parent=AgentKey(int(parent)), child=child)


@dataclass(slots=True, kw_only=True)
class AgentNursery:
    """The nursery of one agent, as the body of `spawn` sees it."""

    house: Nurseries
    key: AgentKey
    thread: Thread | None = None  # set once there is one; no call is made before
    cradles: dict[int, Cradle] = field(default_factory=dict[int, Cradle])

    @property
    def _parent(self) -> Thread:
        assert self.thread is not None  # noqa: S101 - set by whoever adopts the agent
        return self.thread

    def check(self, text: str) -> Newborn:
        """Read a manifest and hold it against what this kernel has and what the parent may pass on."""
        manifest = parse_manifest(text, "spawn")
        if problems := manifest.unsupported():
            raise InvalidRequest("; ".join(f"{p.message}; {p.fix}" for p in problems))
        file = self.house.resources().file
        for role in (*manifest.roles, *manifest.delegates):
            if role not in file.roles:
                known = ", ".join(sorted(file.roles)) or "none"
                raise InvalidRequest(f"the kernel file declares no role `{role}`; it has: {known}")
        parent = self._parent.manifest
        for role in manifest.delegates:
            if role not in parent.delegates:
                raise InvalidRequest(
                    f"`delegates` names `{role}`, which the manifest of `{self._parent.id}` doesn't delegate; leave it out"
                )
        for mount in manifest.sandbox.mounts:
            if mount not in parent.sandbox.mounts:
                raise InvalidRequest(
                    f"`sandbox.mounts` names `{mount.path}`, which `{self._parent.id}` doesn't see itself; leave it out"
                )
        for total in self._parent.budgets.limited:
            if total not in manifest.budgets.total:
                raise InvalidRequest(
                    f"`{self._parent.id}` has a limit on `{total}`, so its child needs one: give it a part with "
                    f"budgets={{'total': {{'{total}': …}}}}"
                )
        return Newborn(text=text, manifest=manifest)

    async def lay_out(self, step: int, newborn: Newborn, workspace: str) -> Mapping[str, Any]:
        """Make the child's files where no agent is yet, and reserve its totals."""
        await self.settle(step, born=False)
        core, parent, manifest = self.house.core, self._parent, newborn.manifest
        box = manifest.sandbox
        key, self.house.maker = await core.store.new_agent_key(core.kernel)
        cradle = Cradle(child=f"{manifest.name}-{short_id()}", key=key, reserved={})
        self.cradles[step] = cradle
        for total in parent.budgets.limited:
            amount = manifest.budgets.total[total]
            self._reserve(parent, total, amount)
            cradle.reserved[total] = amount
        uid = AGENT_UID_BASE + key if os.geteuid() == 0 else None
        home = self.house.staged(self.key, cradle.child)
        file = self.house.resources().file
        rules = effective_rules(manifest, file)
        denies = [rule for rule in rules if rule.verdict is Verdict.DENY]
        policy = AgentPolicy("image", [], denies, file.ceilings.rules)
        async with parent.environment.lock():
            try:
                source = parent.environment.workspace.canonical(workspace) if workspace else None
                await asyncio.to_thread(_fill, parent, source, home, policy, uid, box.disk_bytes)
            except WorkspaceError as error:
                raise refusal(error) from error
            except OSError as error:
                raise InvalidRequest(f"the child's files can't be made: {error.strerror or error}") from error
        return {
            "key": key,
            "id": cradle.child,
            "name": manifest.name,
            "thread": f"t-{cradle.child}",
            "labels": dict(manifest.labels),
            "manifest": newborn.text,
            "source": f"spawned by {parent.id}",
            "uid": uid,
            "grants": [[r.verdict.value, r.text] for r in rules if r.verdict is not Verdict.DENY],
            "reserved": cradle.reserved,
            "depth_most": DEPTH_MAX,
            "own_most": CHILDREN_MAX,
            "tree_most": TREE_MAX,
        }

    @staticmethod
    def _reserve(parent: Thread, total: str, amount: float) -> None:
        try:
            parent.budgets.reserve(total, amount)
        except BudgetExhausted as error:
            text = f"a child's totals come out of its parent's: {error.message}"
            raise BudgetExhausted(text, **error.metadata) from error

    async def settle(self, step: int, *, born: bool) -> None:
        """Put the files in place and start the child; or, where it was not born, take back what was made for it."""
        cradle = self.cradles.pop(step, None)
        if cradle is None:
            return
        if born:
            self._parent.budgets.settle(cradle.reserved, cradle.reserved)
            self.house.place(cradle.child)
            record = await self.house.core.store.agent_by_key(cradle.key)
            if record is not None:
                self.house.begin(record)
            return
        for total, amount in cradle.reserved.items():
            self._parent.budgets.release(total, amount)
        home = self.house.staged(self.key, cradle.child)
        await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)


def _fill(
    parent: Thread, source: str | None, home: Path, policy: AgentPolicy, uid: int | None, disk_bytes: int
) -> None:
    """Copy what the parent may read of a part of its workspace, to the same paths, and make the program image of it."""
    home.mkdir(mode=0o700, parents=True)
    live = home / "live"
    live.mkdir(mode=0o755)
    if uid is not None:
        os.chown(live, uid, uid)
    if source is not None:
        kept = _kept(parent, source, disk_bytes)
        copy_tree(_live(parent), live, skip=lambda path: path not in kept, uid=uid)
        Meter(Workspace(live), disk_bytes).check()
    (home / "scratch").mkdir(mode=0o711)
    (home / "logs").mkdir(mode=0o700)
    hidden = set(policy.masks(info.path for info in Workspace(live).walk()))
    copy_tree(live, home / "image", skip=lambda path: path in hidden, uid=uid)


def _live(parent: Thread) -> Path:
    return parent.environment.scratch_root.parent / "live"


def _kept(parent: Thread, source: str, disk_bytes: int) -> set[str]:
    """Paths to copy: what the parent may read at or beneath `source`, and the directories that lead there."""
    environment = parent.environment
    top = environment.workspace.stat(source)
    found = [top, *environment.workspace.walk(source)] if top.kind == "directory" else [top]
    readable = [info for info in found if environment.visible("fs.read", info.path)]
    if not readable:
        raise WorkspaceError("NoSuchResource", f"nothing of `{source}` may be read by `{parent.id}`")
    most = min(WORKSPACE_BYTES_MAX, disk_bytes, environment.limits.disk_bytes)
    if sum(info.size_bytes for info in readable) > most:
        raise WorkspaceError(
            "InvalidRequest",
            f"`{source}` has more than the {most} bytes that a child's workspace may hold; name a part of it, or give "
            "the child a larger `sandbox.disk`",
        )
    kept = {info.path for info in readable}
    for path in list(kept):
        while (path := path.rpartition("/")[0]) and path not in kept:
            kept.add(path)
    return kept
