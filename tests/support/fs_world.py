"""A workspace, a store and a policy as the kernel would lend them to a body: all real, only the journal is absent."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ringfence.policy.engine import AgentPolicy
from ringfence.policy.manifest import parse_rule
from ringfence.policy.types import Request, Verdict
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.usage import Meter
from ringfence.sandbox.workspace import Workspace
from ringfence.syscalls import errors

ALLOW_ALL = ('fs.*: "/workspace/**"', 'fs.*: "/workspace"')


@dataclass
class Env:
    workspace: Workspace
    snapshots: SnapshotStore
    policy: AgentPolicy
    agent: str = "a1"
    disk_bytes: int = 1 << 30
    direct: None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.meter = Meter(self.workspace, self.disk_bytes)

    def visible(self, action: str, path: str) -> bool:
        return self.policy.visible(action, path)

    def lock(self) -> asyncio.Lock:
        return self._lock


@dataclass
class Call:
    """One call in flight, with a failpoint that kills the process or runs something."""

    env: Env
    plan: Any
    step: int
    kill_at: str = ""
    hooks: dict[str, Any] = field(default_factory=dict)
    points: list[tuple[list[str], str, int]] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)

    async def judge(self, questions):
        return [decide(self.env.policy, question).verdict for question in questions]

    async def require(self, questions):
        for question in questions:
            decision = decide(self.env.policy, question)
            if decision.verdict is not Verdict.ALLOW:
                raise errors.Denied(decision.reason)

    def add_point(self, covers, kind, size_bytes):
        self.points.append((list(covers), kind, size_bytes))

    async def failpoint(self, name):
        self.reached.append(name)
        if self.kill_at == name:
            os.kill(os.getpid(), signal.SIGKILL)
        if name in self.hooks:
            self.hooks[name]()

    async def check_live(self):
        self.reached.append("check_live")
        if "check_live" in self.hooks:
            self.hooks["check_live"]()


def decide(policy: AgentPolicy, question):
    return policy.decide(Request(principal="a1", action=question.action, resource=question.resource))


class World:
    """One agent's files on `base`: `live` is the workspace, `points` the store."""

    def __init__(self, base: Path, *, allow=ALLOW_ALL, deny=(), uid: int | None = None):
        self.live = base / "live"
        self.live.mkdir(exist_ok=True)
        self.points = base / "points"
        grants = [(f"g{number}", parse_rule(rule)) for number, rule in enumerate(allow)]
        denies = [parse_rule(rule, "deny") for rule in deny]
        policy = AgentPolicy("a1", grants, denies, [])
        self.env = Env(Workspace(self.live, uid=uid), SnapshotStore(self.points), policy)
        self.step = 0

    @property
    def workspace(self) -> Workspace:
        return self.env.workspace

    @property
    def snapshots(self) -> SnapshotStore:
        return self.env.snapshots

    def close(self):
        self.workspace.close()

    def call(self, action: str, **arguments) -> tuple[Any, Any, Any]:
        """Plan a call: its body, its arguments and the call. Raises what the plan raises."""
        body = import_module(f"ringfence.syscalls.{action.replace('.', '_')}")
        given = body.Arguments(**arguments)
        self.step += 1
        return body, given, Call(self.env, body.plan(given, self.env), self.step)

    async def run(self, action: str, **arguments):
        """Plan, decide and run, as dispatch does."""
        body, given, call = self.call(action, **arguments)
        await call.require(call.plan.questions)
        return await body.run(call, given)

    async def recover(self, action: str, step: int, resource: str, **arguments):
        """Recover a step of an earlier process, which knows no more than its journal row."""
        from ringfence.syscalls.base import Plan

        body = import_module(f"ringfence.syscalls.{action.replace('.', '_')}")
        call = Call(self.env, Plan(resource=resource, questions=()), step)
        return await body.recover(call, body.Arguments(**arguments))

    def undo(self, down_to: int = 0, path: str | None = None):
        """Roll back every step after `down_to`; returns the plan that was carried out."""
        # As the journal does, which names the points that were taken: a refused call has none.
        taken = set(self.snapshots.points())
        newest_first = [p for step in range(self.step, down_to, -1) if (p := f"p{step}") in taken]
        plan = self.snapshots.plan_restore(self.workspace, newest_first, path)
        self.snapshots.restore(self.workspace, plan.items)
        return plan


def picture(root: Path, *, times: bool = True) -> dict[str, tuple]:
    """Everything about a tree that a rollback has to bring back, by path."""
    seen = {}
    for here, directories, files in os.walk(root):
        for name in [".", *directories, *files] if here == str(root) else [*directories, *files]:
            path = Path(here) / name
            facts = path.lstat()
            kind = stat.S_IFMT(facts.st_mode)
            what = None
            if stat.S_ISLNK(facts.st_mode):
                what = str(path.readlink())
            elif stat.S_ISREG(facts.st_mode):
                what = path.read_bytes()
            attributes = {}
            if not stat.S_ISLNK(facts.st_mode):
                attributes = {each: os.getxattr(path, each) for each in os.listxattr(path)}
            owner = (facts.st_uid, facts.st_gid)
            entry = (kind, stat.S_IMODE(facts.st_mode), owner, what, attributes)
            seen[os.path.relpath(path, root)] = (*entry, facts.st_mtime_ns) if times else entry
    return seen


__all__ = ["ALLOW_ALL", "Call", "Env", "World", "decide", "picture"]
