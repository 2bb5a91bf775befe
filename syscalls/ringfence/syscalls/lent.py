"""What the kernel lends to the bodies of messages, memory and artifacts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ringfence.policy.manifest_types import Manifest
from ringfence.syscalls.declared import A2aResource, McpResource, ObjectResource

if TYPE_CHECKING:
    from ringfence.syscalls.base import Question
    from ringfence.syscalls.mcp_common import Definition, McpSession


class AsyncLock(Protocol):
    """An async context manager."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *exc: object) -> object: ...


class Mailbox(Protocol):
    """Says when something may have come into the agent's mailbox; it is looked into by atomic work."""

    @property
    def arrivals(self) -> int:
        """Grows with everything that may have come. Read it before looking, so that nothing is missed."""
        ...

    async def changed(self, seen: int, timeout_s: float | None) -> bool:
        """Wait until `arrivals` is no longer `seen`; False: the time ran out first."""
        ...


class Peers(Protocol):
    """Knows other agents."""

    async def name_of(self, agent: str) -> str | None:
        """Name of the agent with this id; None: no agent has it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFound:
    """One entry of a memory that fits a query. `metadata` is JSON, `created_at` RFC 3339; `tainted`: whether who kept it was."""

    id: str
    text: str
    tags: Sequence[str]
    metadata: str
    score: float
    created_at: str
    agent: str
    tainted: bool = False


class Memory(Protocol):
    """Reads memories."""

    async def search(
        self, space: str, query: str, tags: Sequence[str], language: str, *, limit: int, offset: int
    ) -> Sequence[MemoryFound]:
        """Find entries, best first; an empty query gives the newest. An empty space is the agent's own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFound:
    """One version of a named artifact. `tainted`: whether who kept it was."""

    name: str
    version: int
    ref: str
    media_type: str
    size_bytes: int
    tainted: bool = False


class Artifacts(Protocol):
    """Keeps and reads the artifacts of one agent."""

    async def keep(self, data: bytes) -> str:
        """Store bytes; when it returns they survive a power cut. Gives their reference.

        Raises:
            CallFailed: they can't be kept.
        """
        ...

    async def keep_output(self, path: Path, name: str, size_bytes: int, step: int) -> str:
        """Store what a command wrote as the next version of a name; gives its reference.

        Raises:
            CallFailed: it can't be kept.
        """
        ...

    async def keep_page(self, data: bytes, page: ArtifactFound, step: int) -> None:
        """Store bytes under a name that is theirs alone, where they are not kept under it already.

        Raises:
            CallFailed: they can't be kept.
        """
        ...

    def room(self, size: int) -> AbstractAsyncContextManager[None]:
        """Wait until contents of so many bytes may be held in memory, and count them while the block is entered."""
        ...

    async def find(self, name: str, ref: str, version: int) -> ArtifactFound | None:
        """Find an artifact of this agent by name, or by reference where one is given. Version 0: the newest."""
        ...

    async def read(self, ref: str, offset: int, limit: int) -> bytes:
        """Read a part.

        Raises:
            CallFailed: it is damaged or gone.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Newborn:
    """An agent that is to be spawned: its manifest as text, and read."""

    text: str
    manifest: Manifest


class Nursery(Protocol):
    """Brings children of one agent into the world."""

    def check(self, text: str) -> Newborn:
        """Read a manifest and hold it against what this kernel has and what the parent may pass on.

        Raises:
            ManifestError: it is wrong.
            InvalidRequest: it names what isn't there, or asks for more than its parent has.
        """
        ...

    async def lay_out(self, step: int, newborn: Newborn, workspace: str) -> Mapping[str, Any]:
        """Make the child's files where no agent is yet, and reserve its totals. Doing it again begins anew.

        Args:
            step: of the call that spawns it.
            newborn: who.
            workspace: path in the parent's workspace of what is copied; empty: nothing.

        Returns:
            Values of the statement `spawn`.

        Raises:
            InvalidRequest, NoSuchResource, BudgetExhausted: it can't be had.
        """
        ...

    async def settle(self, step: int, *, born: bool) -> None:
        """Put the files in place and start the child; or, where it was not born, take back what was made for it."""
        ...


class Doubt(Protocol):
    """Why a call waits for a person whatever rules say, for as long as it does."""

    @property
    def about(self) -> str:
        """What a person approves: an approval holds for the same alone."""
        ...

    async def why(self) -> str:
        """In words for people; empty: nothing is in the way any more.

        Raises:
            Unavailable: the database is away, which knows.
        """
        ...

    def detail(self) -> Mapping[str, Any]:
        """What the person is shown."""
        ...


class McpServers(Protocol):
    """Reaches the declared MCP servers for one agent."""

    @property
    def declared(self) -> Mapping[str, McpResource]:
        """The servers by name."""
        ...

    async def look(self, server: str) -> Mapping[str, Definition]:
        """The tools of a server by name, as it defines them now, held against what was taken; what is new is taken.

        Raises:
            CallFailed: it can't be reached, or does not say.
        """
        ...

    async def look_at_prompts(self, server: str) -> Mapping[str, Definition]:
        """The same of its prompts."""
        ...

    async def listed(self, server: str, kind: str) -> Sequence[Mapping[str, Any]]:
        """What a server lists now, each as the protocol has it.

        Args:
            server: its name.
            kind: `resources` or `templates`.

        Raises:
            CallFailed: it can't be reached, or does not say.
        """
        ...

    async def session(self, server: str) -> McpSession:
        """The agent's session with a server, a fresh one where there is none.

        Raises:
            CallFailed: it can't be reached.
        """
        ...

    def doubt(self, server: str, definition: Definition) -> Doubt:
        """Whether a changed definition still waits for an operator, asked whenever the call is judged."""
        ...


class A2aCards(Protocol):
    """Knows the cards of the declared agents elsewhere."""

    @property
    def declared(self) -> Mapping[str, A2aResource]:
        """The agents by name."""
        ...

    async def look(self, peer: str) -> Definition:
        """The card that an agent shows now, held against what was taken; the first is taken.

        Raises:
            CallFailed: it can't be reached, or shows none.
        """
        ...

    async def taken(self, peer: str) -> Definition:
        """The card that was taken; it is looked at where none was.

        Raises:
            CallFailed: none was, and it can't be had.
        """
        ...

    def doubt(self, peer: str, card: Definition) -> Doubt:
        """Whether a changed card still waits for an operator, asked whenever the call is judged."""
        ...


class Lent(Protocol):
    """The part of an agent's environment that these bodies use."""

    @property
    def name(self) -> str:
        """Name of the agent."""
        ...

    @property
    def mailbox(self) -> Mailbox:
        """Its mailbox."""
        ...

    @property
    def objects(self) -> Mapping[str, ObjectResource]:
        """Resources of objects by name."""
        ...

    @property
    def mcp(self) -> Mapping[str, McpResource]:
        """MCP servers by name."""
        ...

    @property
    def servers(self) -> McpServers:
        """Reaches them."""
        ...

    @property
    def a2a(self) -> Mapping[str, A2aResource]:
        """Agents elsewhere by name."""
        ...

    @property
    def cards(self) -> A2aCards:
        """Knows their cards."""
        ...

    def may(self, question: Question) -> bool:
        """Whether no rule stands against a question, or somebody only has to be asked."""
        ...

    def may_any(self, family: str) -> bool:
        """Whether a rule speaks for some action of a family, such as `mcp.github`, or of that name."""
        ...

    @property
    def peers(self) -> Peers:
        """Other agents."""
        ...

    @property
    def nursery(self) -> Nursery:
        """Where its children come from."""
        ...

    @property
    def memory(self) -> Memory:
        """What agents keep to find again."""
        ...

    @property
    def artifacts(self) -> Artifacts:
        """Its artifacts."""
        ...
