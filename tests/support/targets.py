"""Calls of `sql.*` and others as the kernel would make them, over real parts: policy, snapshot store, database."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.rules import parse_rule
from ringfence.policy.types import Request, Verdict
from ringfence.syscalls import sql_read, sql_write
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import Denied

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ringfence.policy.types import Decision
    from ringfence.sandbox.snapshots import SnapshotStore
    from ringfence.syscalls.base import Plan, Question


class Killed(BaseException):
    """Stands for the end of the kernel at a failpoint: nothing may catch it but the test."""


@dataclass
class Call:
    """One call, as its body sees it."""

    env: Any
    plan: Plan
    policy: AgentPolicy
    step: int = 7
    effect_id: str = "effect-7"
    deadline_s: float = 30.0
    answer_max: int | None = None
    kill_at: str = ""
    on_failpoint: Callable[[str], Any] | None = None
    live_error: Exception | None = None
    progress: bytes | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)
    points: list[tuple[list[str], str, int]] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)

    def _decide(self, question: Question) -> Decision:
        return self.policy.decide(
            Request(principal="agent", action=question.action, resource=question.resource)
        )

    async def judge(self, questions: Sequence[Question]) -> Sequence[Verdict]:
        self.asked += [(question.action, str(question.resource)) for question in questions]
        return [self._decide(question).verdict for question in questions]

    async def require(self, questions: Sequence[Question]) -> None:
        for question, verdict in zip(questions, await self.judge(questions), strict=True):
            if verdict is not Verdict.ALLOW:
                raise Denied(self._decide(question).reason)

    async def record(self, progress: bytes) -> None:
        self.progress = progress

    def add_point(self, covers: Sequence[str], kind: str, size_bytes: int) -> None:
        self.points.append((list(covers), kind, size_bytes))

    def raise_effect(self, effect: Any) -> None:
        raise AssertionError(effect)

    async def failpoint(self, name: str) -> None:
        self.passed.append(name)
        if self.on_failpoint is not None:
            outcome = self.on_failpoint(name)
            if outcome is not None:
                await outcome
        if name == self.kill_at:
            raise Killed(name)

    asks_what_it_made: bool = False

    async def judge_made(self, touched: Any) -> None:
        raise AssertionError(touched)

    async def check_live(self) -> None:
        self.passed.append("check_live")
        if self.live_error is not None:
            raise self.live_error


def policy_of(*rules: str, deny: Sequence[str] = ()) -> AgentPolicy:
    """A policy that allows some rules and denies others."""
    grants = [(f"g{number}", parse_rule(rule)) for number, rule in enumerate(rules)]
    return AgentPolicy("agent", grants, [parse_rule(rule, "deny") for rule in deny], [])


class Database:
    """A declared database and an agent that may use it."""

    def __init__(self, dsn: str, store: SnapshotStore) -> None:
        self.dsn = dsn
        self.store = store
        self.resource = SqlResource(name="crm", dsn=dsn)
        self.env: Any = SimpleNamespace(
            agent="agent",
            snapshots=store,
            sql={"crm": self.resource},
            http={},
            llm={},
            objects={},
            mcp={},
            a2a={},
        )
        self.policy = policy_of("sql.read: {database: crm}", "sql.write: {database: crm}")
        self.step = 0

    def run(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run something as the operator would, outside of any call."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(sql.SQL(text), parameters or None)  # pyright: ignore[reportArgumentType]
            return cursor.fetchall() if cursor.description else []

    def dump(self, table: str) -> list[str]:
        """Every row of a table as its text, in a fixed order."""
        return sorted(
            str(row[0]) for row in self.run(f'select ("every row".*)::text from {table} as "every row"')
        )

    def call(self, body: Any, arguments: Any, **more: Any) -> Call:
        """A call that policy has decided on the questions of its plan."""
        self.step += 1
        plan = body.plan(arguments, self.env)
        call = Call(env=self.env, plan=plan, policy=self.policy, step=self.step, **more)
        for question in plan.questions:
            decision = call._decide(question)
            if decision.verdict is not Verdict.ALLOW:
                raise Denied(decision.reason)
        return call

    async def read(self, statement: str, *parameters: Any, limit: int = 0, **more: Any) -> sql_read.Result:
        arguments = sql_read.Arguments(
            database="crm", statement=statement, parameters=list(parameters), limit=limit
        )
        return await sql_read.run(self.call(sql_read, arguments, **more), arguments)

    def prepare_write(
        self, statement: str, *parameters: Any, **more: Any
    ) -> tuple[Call, sql_write.Arguments]:
        arguments = sql_write.Arguments(database="crm", statement=statement, parameters=list(parameters))
        return self.call(sql_write, arguments, **more), arguments

    async def write(self, statement: str, *parameters: Any, **more: Any) -> sql_write.Result:
        return await sql_write.run(*self.prepare_write(statement, *parameters, **more))

    async def crash(self, statement: str, at: str) -> tuple[Call, sql_write.Arguments]:
        """Run a write up to a failpoint, and hand back the call as recovery gets it."""
        call, arguments = self.prepare_write(statement, kill_at=at)
        with pytest.raises(Killed):
            await sql_write.run(call, arguments)
        again, _ = self.prepare_write(statement)
        again.step = call.step
        return again, arguments

    def record(self, step: int | None = None) -> dict[str, Any]:
        """The record of a step's write."""
        manifest = self.store.load(f"p{step or self.step}")
        assert manifest is not None
        found = dict(manifest.extra)
        rows = {"before": json.loads, "after": json.loads}
        found["changes"] = [
            {**change, **{name: read(change[name]) for name, read in rows.items()}}
            for change in found["changes"]
        ]
        return found
