"""`agent.boot()`: the library for programs with threads, or with none."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ringfence.agent import family_operations, operations, wire
from ringfence.agent.a2a import A2a
from ringfence.agent.calls import Caller
from ringfence.agent.claims import Claim, take
from ringfence.agent.core import PATIENCE_S
from ringfence.agent.exchange import Artifacts, Memory, Messages, Tasks
from ringfence.agent.lanes import Lane, ThreadLanes
from ringfence.agent.mcp import Mcp
from ringfence.agent.models import Models
from ringfence.agent.namespaces import Exec, Files, Http, Sql
from ringfence.agent.objects import Objects
from ringfence.agent.session import Session
from ringfence.agent.state import Checkpoint, State, Upgrader
from ringfence.agent.threads import WORKERS, Threads, Worker
from ringfence.agent.values import Answer, Identity

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from datetime import datetime

T = TypeVar("T")
Params = ParamSpec("Params")


class Ringfence:
    """The kernel, as a program with threads sees it.

    Attributes:
        fs: the live workspace.
        exec: commands in a sandbox.
        http: declared HTTP resources.
        sql: declared databases.
        llm: language models of declared hosts.
        state: versioned values shared between agents.
        messages: messages to and from other agents.
        memory: texts to find again.
        artifacts: bytes under names.
        objects: objects in declared buckets.
        mcp: tools of declared MCP servers.
        a2a: declared agents elsewhere.
        checkpoint: the program's own state, from which a restart continues.
        identity: who this program is to the kernel.
    """

    def __init__(self, session: Session, version: int, upgraders: Mapping[int, Upgrader] | None) -> None:
        welcome = session.welcome
        self._lanes = ThreadLanes(Lane(next_step=welcome.next_step, next_child=welcome.next_child))
        self._caller = caller = Caller(session, self._lanes)
        self._lanes.on_change = session.lanes_changed
        session.lanes_changed(1)
        self._threads = Threads(self._lanes)
        self.fs = Files(caller)
        self.exec = Exec(caller)
        self.http = Http(caller)
        self.sql = Sql(caller)
        self.llm = Models(caller)
        self.state = State(caller)
        self.messages = Messages(caller)
        self.tasks = Tasks(caller)
        self.memory = Memory(caller)
        self.artifacts = Artifacts(caller)
        self.objects = Objects(caller)
        self.mcp = Mcp(caller)
        self.a2a = A2a(caller)
        self.checkpoint = Checkpoint(caller, welcome, version, upgraders)
        self.identity = Identity(agent=welcome.agent, thread=welcome.thread, branch=welcome.branch)

    def call(self, action: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make any call of the table by name, arguments and result as JSON (bytes as base64)."""
        return self._caller.run(operations.raw(action, arguments or {}))

    def thread(self, function: Callable[Params, T], *args: Params.args, **kwargs: Params.kwargs) -> Worker[T]:
        """Run a function in a thread with a lane of its own. The end of the `boot` block waits for it."""
        return self._threads.thread(functools.partial(function, *args, **kwargs))

    def parallel(self, functions: Iterable[Callable[[], T]], *, limit: int = WORKERS) -> list[T]:
        """Run functions side by side and give their results in order.

        Where some raise, all others are waited for, then the first error in order is raised with notes on
        the rest.

        Args:
            functions: callables without arguments; each has a lane of its own.
            limit: how many threads at most; they count towards the sandbox's processes.
        """
        return self._threads.parallel(functions, limit)

    def now(self) -> datetime:
        """Give the time in UTC; a replay sees the same."""
        return self._caller.run(operations.now())

    def spawn(
        self,
        name: str,
        command: Sequence[operations.StrPath],
        *,
        workspace: operations.StrPath = "",
        permissions: family_operations.Section | None = None,
        roles: Sequence[str] = (),
        delegates: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        input: str | bytes = b"",  # noqa: A002 - as a manifest's reader knows it
        budgets: family_operations.Section | None = None,
        sandbox: family_operations.Section | None = None,
        approvals: family_operations.Section | None = None,
        restart: family_operations.Section | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> family_operations.Child:
        """Start another agent, whose rights end at those of this one.

        Args:
            name: what people call it.
            command: program and arguments, found in its workspace or on the sandbox's PATH.
            workspace: path of what it gets a copy of, at the same path and without what this agent may not read; empty: nothing.
            permissions: `allow`, `ask` and `deny` with rules as in a manifest, or as texts such as `fs.read: "/workspace/**"`.
            roles: roles of the kernel file that it takes.
            delegates: roles that it may delegate in its turn, of those that this agent may.
            env: environment of its program.
            input: its standard input.
            budgets: as in a manifest; a total that this agent has a limit on has to be there, and is taken from what is left.
            sandbox: as in a manifest; it is never larger than this agent's.
            approvals: as in a manifest.
            restart: as in a manifest.
            labels: its labels.

        Raises:
            InvalidRequest: the manifest that this makes is wrong, or the workspace can't be copied.
            BudgetExhausted: there are too many agents, or its totals are more than is left.
        """
        return self._caller.run(
            family_operations.spawn(
                name,
                command,
                workspace=workspace,
                permissions=permissions,
                roles=roles,
                delegates=delegates,
                env=env,
                input=input,
                budgets=budgets,
                sandbox=sandbox,
                approvals=approvals,
                restart=restart,
                labels=labels,
            )
        )

    def ask(self, question: str, details: Any = None) -> Answer:
        """Ask a person and wait for the answer, over restarts as well.

        Args:
            question: what they should decide.
            details: whatever JSON they should see beside it.

        Raises:
            Denied: nobody answered in time, or a rule denies asking.
        """
        return self._caller.run(operations.ask(question, details))

    def claim(self, key: str, ttl_s: float, *, wait_s: float | None = 0.0) -> Claim:
        """Claim a piece of work, so that no other agent and no other lane of this one works at it meanwhile.

        What is written under it says so: `rf.state.put(key, value, claim=claim)` is refused once it is lost. Whoever doesn't
        renew it loses it when it runs out; so does an agent that ends. A program that starts again takes its own anew.

        Args:
            key: what is claimed, as a key of the state.
            ttl_s: for how long in seconds, 1 to 604 800; `renew` holds it longer.
            wait_s: how long to wait for whoever holds it; None: as long as it takes.

        Raises:
            Conflict: somebody holds it; says who, since which step and until when.
        """
        fence, until = self._caller.script(take(key, ttl_s, wait_s))
        return Claim(self._caller, key, ttl_s, fence, until)

    def sleep(self, seconds: float) -> datetime:
        """Wait, over restarts as well; gives the time of waking."""
        return self._caller.run(operations.sleep(seconds))

    def random(self) -> float:
        """Give a random float in [0, 1); a replay sees the same."""
        return self._caller.run(operations.random_float())

    def random_bytes(self, size: int) -> bytes:
        """Give random bytes; a replay sees the same."""
        return self._caller.script(operations.random_bytes(size))

    def uuid(self) -> uuid.UUID:
        """Give a random UUID; a replay sees the same."""
        return self._caller.run(operations.random_uuid())

    def join(self) -> None:
        """Wait for all that `thread` started."""
        self._threads.join()


@contextmanager
def boot(
    *,
    checkpoint_version: int = 1,
    upgraders: Mapping[int, Upgrader] | None = None,
    patience_s: float = PATIENCE_S,
) -> Generator[Ringfence]:
    """Connect to the kernel that started this program.

    The thread that enters the block is the main one. The end of the block waits for threads of `rf.thread`,
    unless it is left by an exception.

    Args:
        checkpoint_version: version of the state this program saves and reads.
        upgraders: functions that make the state of version n + 1 from that of version n, by n.
        patience_s: how long to try when the kernel goes away, in seconds.

    Raises:
        KernelGone: not inside a sandbox, or nothing answers.
        BadCredential: the token isn't the one of this start.
        CheckpointUnreadable: the saved state is newer than the program, or an upgrader is missing.
    """
    session = Session(wire.settings_from_environment(), patience_s=patience_s)
    try:
        ringfence = Ringfence(session, checkpoint_version, upgraders)
        yield ringfence
        ringfence.join()
    finally:
        session.close()
