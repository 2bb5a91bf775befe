"""`agent.boot_async()`: the library for asyncio programs."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from ringfence.agent import family_operations, operations, wire
from ringfence.agent.aio_a2a import AsyncA2a
from ringfence.agent.aio_calls import AsyncCaller
from ringfence.agent.aio_exchange import AsyncArtifacts, AsyncMemory, AsyncMessages, AsyncTasks
from ringfence.agent.aio_mcp import AsyncMcp
from ringfence.agent.aio_namespaces import AsyncExec, AsyncFiles, AsyncHttp, AsyncSql
from ringfence.agent.aio_objects import AsyncObjects
from ringfence.agent.aio_session import AsyncSession
from ringfence.agent.aio_state import AsyncCheckpoint, AsyncState
from ringfence.agent.claims import AsyncClaim, take
from ringfence.agent.core import PATIENCE_S
from ringfence.agent.lanes import Lane, TaskLanes
from ringfence.agent.models import AsyncModels
from ringfence.agent.values import Answer, Identity

if TYPE_CHECKING:
    import uuid
    from collections.abc import AsyncGenerator, Mapping, Sequence
    from datetime import datetime

    from ringfence.agent.state import Upgrader


FLUSH_S: Final = 5.0


class AsyncRingfence:
    """The kernel, as an asyncio program sees it.

    Tasks of `asyncio.create_task`, `gather` and `TaskGroup` get lanes in the order in which they are created.

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

    def __init__(
        self, session: AsyncSession, lanes: TaskLanes, version: int, upgraders: Mapping[int, Upgrader] | None
    ) -> None:
        welcome = session.welcome
        self._caller = caller = AsyncCaller(session, lanes)
        self.fs = AsyncFiles(caller)
        self.exec = AsyncExec(caller)
        self.http = AsyncHttp(caller)
        self.sql = AsyncSql(caller)
        self.llm = AsyncModels(caller)
        self.state = AsyncState(caller)
        self.messages = AsyncMessages(caller)
        self.tasks = AsyncTasks(caller)
        self.memory = AsyncMemory(caller)
        self.artifacts = AsyncArtifacts(caller)
        self.objects = AsyncObjects(caller)
        self.mcp = AsyncMcp(caller)
        self.a2a = AsyncA2a(caller)
        self.checkpoint = AsyncCheckpoint(caller, welcome, version, upgraders)
        self.identity = Identity(agent=welcome.agent, thread=welcome.thread, branch=welcome.branch)

    async def call(self, action: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make any call of the table by name, arguments and result as JSON (bytes as base64)."""
        return await self._caller.run(operations.raw(action, arguments or {}))

    async def now(self) -> datetime:
        """Give the time in UTC; a replay sees the same."""
        return await self._caller.run(operations.now())

    async def spawn(
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
        return await self._caller.run(
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

    async def ask(self, question: str, details: Any = None) -> Answer:
        """Ask a person and wait for the answer, over restarts as well.

        Args:
            question: what they should decide.
            details: whatever JSON they should see beside it.

        Raises:
            Denied: nobody answered in time, or a rule denies asking.
        """
        return await self._caller.run(operations.ask(question, details))

    async def claim(self, key: str, ttl_s: float, *, wait_s: float | None = 0.0) -> AsyncClaim:
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
        fence, until = await self._caller.script(take(key, ttl_s, wait_s))
        return AsyncClaim(self._caller, key, ttl_s, fence, until)

    async def sleep(self, seconds: float) -> datetime:
        """Wait, over restarts as well; gives the time of waking."""
        return await self._caller.run(operations.sleep(seconds))

    async def random(self) -> float:
        """Give a random float in [0, 1); a replay sees the same."""
        return await self._caller.run(operations.random_float())

    async def random_bytes(self, size: int) -> bytes:
        """Give random bytes; a replay sees the same."""
        return await self._caller.script(operations.random_bytes(size))

    async def uuid(self) -> uuid.UUID:
        """Give a random UUID; a replay sees the same."""
        return await self._caller.run(operations.random_uuid())


@asynccontextmanager
async def boot_async(
    *,
    checkpoint_version: int = 1,
    upgraders: Mapping[int, Upgrader] | None = None,
    patience_s: float = PATIENCE_S,
) -> AsyncGenerator[AsyncRingfence]:
    """Connect to the kernel that started this program.

    The task that enters the block is the main one. Tasks still running at its end can't call any more.

    Args:
        checkpoint_version: version of the state this program saves and reads.
        upgraders: functions that make the state of version n + 1 from that of version n, by n.
        patience_s: how long to try when the kernel goes away, in seconds.

    Raises:
        KernelGone: not inside a sandbox, or nothing answers.
        BadCredential: the token isn't the one of this start.
        CheckpointUnreadable: the saved state is newer than the program, or an upgrader is missing.
        NoLane: not entered in a task.
    """
    session = await AsyncSession.open(wire.settings_from_environment(), patience_s=patience_s)
    try:
        welcome = session.welcome
        lanes = TaskLanes(Lane(next_step=welcome.next_step, next_child=welcome.next_child))
        session.busy = lanes.busy
        ringfence = AsyncRingfence(session, lanes, checkpoint_version, upgraders)
        lanes.install()
        try:
            yield ringfence
        finally:
            lanes.uninstall()
        await session.close(flush_s=FLUSH_S)
    finally:
        await session.close()
