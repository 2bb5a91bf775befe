"""One exec.run call outside a kernel: real sandbox, workspace, points and policy; the journal is a file.

As a script it runs one call and kills itself with SIGKILL at a failpoint, as a crash would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from backends import UIDS_ON
from ringfence.kernel.journal.blobs import Blobs
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.rules import parse_rule
from ringfence.policy.types import Request, Verdict
from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.types import Limits
from ringfence.sandbox.usage import Meter
from ringfence.sandbox.workspace import Workspace
from ringfence.syscalls import errors, exec_run
from ringfence.syscalls.base import Effect, Question

AGENT_UID = 247111 + UIDS_ON
BACKENDS: list[NativeSandbox] = []
"""All that were made here; `exec_place` closes them."""
ALLOW_ALL = ['exec.run: "*"', 'fs.*: "/workspace/**"']


class Outputs:
    """Keeps what commands write in a real store; names and sizes can be looked at."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs
        self.kept: list[tuple[str, int, str]] = []

    async def keep_output(self, path: Path, name: str, size_bytes: int, _step: int) -> str:
        ref = await asyncio.to_thread(self.blobs.put_file, path)
        self.kept.append((name, size_bytes, ref))
        return ref


class Environment:
    """One agent's environment below a directory."""

    agent = "agent-1"
    readonly: Sequence[Path] = ()
    mounts: Mapping[Path, Path] = MappingProxyType({})
    require: Sequence[str] = ()
    http: Mapping[str, Any] = MappingProxyType({})
    sql: Mapping[str, Any] = MappingProxyType({})
    llm: Mapping[str, Any] = MappingProxyType({})
    objects: Mapping[str, Any] = MappingProxyType({})
    mcp: Mapping[str, Any] = MappingProxyType({})
    a2a: Mapping[str, Any] = MappingProxyType({})
    direct = None

    def __init__(self, place: Path, allow: Sequence[str] = ALLOW_ALL, deny: Sequence[str] = ()) -> None:
        self.uid = AGENT_UID if os.geteuid() == 0 else None
        self.place = place
        self.workspace = Workspace(place / "workspace", uid=self.uid)
        self.snapshots = SnapshotStore(place / "points")
        self.artifacts = Outputs(Blobs(place / "artifacts"))
        self.sandbox = NativeSandbox(place / "data")
        BACKENDS.append(self.sandbox)
        self.limits = Limits(timeout_s=60, disk_bytes=32 << 20)
        self.command_env = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
        self.scratch_root = place / "scratch"
        grants = [(f"g{number}", parse_rule(text)) for number, text in enumerate(allow)]
        self.policy = AgentPolicy(self.agent, grants, [parse_rule(text, "deny") for text in deny])
        self.meter = Meter(self.workspace, 1 << 30)
        self._lock = asyncio.Lock()

    def visible(self, action: str, path: str) -> bool:
        return self.policy.visible(action, path)

    def masked(self) -> list[str]:
        return self.policy.masks(info.path for info in self.workspace.walk())

    def lock(self) -> asyncio.Lock:
        return self._lock


class RecordedCall:
    """One call; what it records and declares can be looked at."""

    def __init__(self, env: Environment, step: int = 1, *, deadline_s: float = 120.0) -> None:
        self.env = env
        self.step = step
        self.effect_id = f"effect-{step}"
        self.deadline_s = deadline_s
        self.answer_max: int | None = None
        self.effect = Effect.WRITE
        self.point: tuple[list[str], str, int] | None = None
        self.asked: list[Question] = []
        self.reached: list[str] = []
        self.plan: Any = None
        self.at: dict[str, Callable[[], object]] = {}

    @property
    def journal(self) -> Path:
        return self.env.place / f"progress-{self.step}"

    @property
    def progress(self) -> bytes | None:
        return self.journal.read_bytes() if self.journal.exists() else None

    async def judge(self, questions: Sequence[Question]) -> list[Verdict]:
        self.asked += questions
        return [self._decide(question).verdict for question in questions]

    def _decide(self, question: Question) -> Any:
        request = Request(principal=self.env.agent, action=question.action, resource=question.resource)
        return self.env.policy.decide(request)

    async def require(self, questions: Sequence[Question]) -> None:
        for question, verdict in zip(questions, await self.judge(questions), strict=True):
            if verdict is not Verdict.ALLOW:
                raise errors.Denied(self._decide(question).reason)

    async def record(self, progress: bytes) -> None:
        with self.journal.open("xb") as file:
            file.write(progress)
            os.fsync(file.fileno())
        self._reach("recorded")

    def add_point(self, covers: Sequence[str], kind: str, size_bytes: int) -> None:
        self.point = (list(covers), kind, size_bytes)

    def raise_effect(self, effect: Effect) -> None:
        self.effect = max(self.effect, effect, key=lambda each: each.value)

    async def failpoint(self, name: str) -> None:
        self._reach(name)

    async def check_live(self) -> None:
        self._reach("check_live")

    def _reach(self, name: str) -> None:
        self.reached.append(name)
        self.at.get(name, lambda: None)()


async def run(call: RecordedCall, *argv: str, **more: Any) -> exec_run.Result:
    """Plan, ask and run, as the kernel does."""
    arguments = exec_run.Arguments(argv=list(argv), **more)
    call.plan = exec_run.plan(arguments, call.env)
    await call.require(call.plan.questions)
    return await exec_run.run(call, arguments)


async def recover(call: RecordedCall, *argv: str) -> Any:
    arguments = exec_run.Arguments(argv=list(argv))
    call.plan = exec_run.plan(arguments, call.env)
    return await exec_run.recover(call, arguments)


def tree(top: Path) -> dict[str, tuple[int, int, bytes]]:
    found: dict[str, tuple[int, int, bytes]] = {}
    for path in sorted(top.rglob("*")):
        facts = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
        found[str(path.relative_to(top))] = (facts.st_mode, facts.st_uid, data)
    return found


def with_rules(place: Path, *deny: str, allow: list[str] | None = None) -> Environment:
    return Environment(place, ALLOW_ALL if allow is None else allow, deny)


def left_over(env: Environment) -> list[Path]:
    return list(env.scratch_root.iterdir()) if env.scratch_root.exists() else []


async def crash(place: Path, where: str, argv: list[str]) -> None:
    call = RecordedCall(Environment(place))
    call.at[where] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(asyncio.CancelledError):
        result = await run(call, *argv)
        print(json.dumps(msgspec.to_builtins(result)))


if __name__ == "__main__":
    asyncio.run(crash(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
