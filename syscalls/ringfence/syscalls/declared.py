"""Resources as the operator declares them, with their credentials filled in: what bodies send calls to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ringfence.policy.manifest_types import SandboxSpec

if TYPE_CHECKING:
    from ringfence.policy.mcp_servers import ToolDecl
    from ringfence.policy.units import Rate
    from ringfence.policy.vouching import Vouched
    from ringfence.syscalls.base import Effect
    from ringfence.syscalls.drivers.protocol import ObjectDriver


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpUndo:
    """How calls of one method on matching paths are undone: by what was kept before, or by a call that makes up for it.

    Paths are plain parts and holes by turns, see `policy.undoing`.

    Attributes:
        keep: path of the GET that reads what is destroyed or changed; empty: nothing is kept.
        put_back_method: how it is sent back.
        put_back: path of that.
        remove: path of the DELETE that puts back that nothing stood there; empty: such a call is refused.
        compensate_method: of the call that makes up for it; empty: there is none.
        compensate: path of that.
        body: JSON that it sends, with holes in its texts; None: nothing.
    """

    method: str
    path: str
    keep: Sequence[str] = ()
    put_back_method: str = ""
    put_back: Sequence[str] = ()
    remove: Sequence[str] = ()
    compensate_method: str = ""
    compensate: Sequence[str] = ()
    body: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResource:
    """An HTTP target declared by the operator.

    Attributes:
        base: URL without trailing slash, canonical.
        headers: added to every request; hold the credential.
        effects: `(method, path pattern) -> effect`, first match counts; method `*` is any.
        idempotency_header: header that carries the effect id; None: the target takes no key.
        untrusted: whether what it answers taints an agent.
        vouches: `(method, path pattern) -> fields` of its answers that are its own word; first match counts.
        undo: how calls are undone; first match counts. A destructive one that has none is always asked about.
        addresses: networks that the host may lead to besides public ones.
        rate: how often all agents together may ask it.
        secrets: values that must not appear in a recorded response.
        unavailable: why no call may use it, and what the operator does about it; empty: it can be used.
    """

    name: str
    base: str
    headers: Mapping[str, str]
    effects: Sequence[tuple[str, str, Effect]]
    idempotency_header: str | None
    untrusted: bool = False
    vouches: Sequence[tuple[str, str, tuple[Vouched, ...]]] = ()
    undo: Sequence[HttpUndo] = ()
    timeout_s: float = 30.0
    addresses: Sequence[str] = ()
    rate: Rate | None = None
    secrets: Sequence[str] = ()
    unavailable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmResource:
    """A language model's host declared by the operator.

    Attributes:
        base: URL without trailing slash, canonical.
        protocol: `openai` or `anthropic`.
        headers: added to every request; hold the credential.
        models: patterns of the model names it serves.
        price_input: US dollars for a million tokens read.
        price_output: the same for tokens written.
        max_output: most tokens of one reply.
        limit_key: the request's key that carries the limit of a reply.
        tokenizers: `(model pattern, tokenizer)`, first match counts; a model that none names is known by its name.
        external: whether a call counts as leaving the system.
        untrusted: whether what it answers taints an agent.
        timeout_s: longest wait for an answer, or for the next part of a streamed one.
        addresses: networks that the host may lead to besides public ones.
        rate: how often all agents together may ask it.
        secrets: values that must not appear in a recorded response.
        unavailable: why no call may use it, and what the operator does about it; empty: it can be used.
    """

    name: str
    base: str
    headers: Mapping[str, str]
    models: Sequence[str]
    protocol: str = "openai"
    price_input: float = 0.0
    price_output: float = 0.0
    max_output: int = 4096
    limit_key: str = "max_tokens"
    tokenizers: Sequence[tuple[str, str]] = ()
    external: bool = False
    untrusted: bool = False
    timeout_s: float = 30.0
    addresses: Sequence[str] = ()
    rate: Rate | None = None
    secrets: Sequence[str] = ()
    unavailable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectResource:
    """Objects that a driver reaches, declared by the operator.

    Attributes:
        driver: who does the work; None: the resource is unavailable.
        untrusted: whether what it holds taints an agent.
        keep_max: bytes of the largest object that is kept before a change; a larger one is not changed.
        timeout_s: longest wait for an answer that is no content.
        secrets: values that must not appear in what is recorded of its answers.
        unavailable: why no call may use it, and what the operator does about it; empty: it can be used.
    """

    name: str
    driver: ObjectDriver | None = None
    untrusted: bool = False
    keep_max: int = 1 << 30
    timeout_s: float = 30.0
    secrets: Sequence[str] = ()
    unavailable: str = ""

    def __repr__(self) -> str:
        return f"ObjectResource(name={self.name!r}, unavailable={self.unavailable!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class McpResource:
    """An MCP server declared by the operator.

    Attributes:
        base: URL of its endpoint; empty: `command` is started in a sandbox.
        headers: added to every request; hold the credential.
        command: program and arguments.
        files: directory of the host that the program sees as its working directory; empty: an empty one.
        env: the program's environment, credentials filled in.
        box: limits of its sandbox.
        tools: what the operator says of tools; the first whose pattern matches counts.
        untrusted: whether what it says taints an agent.
        timeout_s: longest wait for an answer.
        addresses: networks that the host may lead to besides public ones.
        rate: how often all agents together may call it.
        secrets: values that must not appear in a recorded answer.
        unavailable: why no call may use it, and what the operator does about it; empty: it can be used.
    """

    name: str
    base: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    command: Sequence[str] = ()
    files: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    box: SandboxSpec = field(default_factory=SandboxSpec)
    tools: Sequence[ToolDecl] = ()
    untrusted: bool = True
    timeout_s: float = 30.0
    addresses: Sequence[str] = ()
    rate: Rate | None = None
    secrets: Sequence[str] = ()
    unavailable: str = ""

    def __repr__(self) -> str:
        return f"McpResource(name={self.name!r}, unavailable={self.unavailable!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class A2aResource:
    """An agent elsewhere, declared by the operator.

    Attributes:
        base: URL of the agent, below which its card is.
        headers: added to every request; hold the credential.
        skills: ids of those that a message may be for, one of which it has to name; empty: any.
        repeat: whether it knows a message again by its id.
        card: hash of the only card that is taken; empty: the first that is seen.
        untrusted: whether what it says taints an agent.
        timeout_s: longest wait for an answer.
        addresses: networks that the host may lead to besides public ones.
        rate: how often all agents together may call it.
        secrets: values that must not appear in a recorded answer.
        unavailable: why no call may use it, and what the operator does about it; empty: it can be used.
    """

    name: str
    base: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    skills: Sequence[str] = ()
    repeat: bool = False
    card: str = ""
    untrusted: bool = True
    timeout_s: float = 30.0
    addresses: Sequence[str] = ()
    rate: Rate | None = None
    secrets: Sequence[str] = ()
    unavailable: str = ""

    def __repr__(self) -> str:
        return f"A2aResource(name={self.name!r}, unavailable={self.unavailable!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlResource:
    """A PostgreSQL target declared by the operator.

    Attributes:
        dsn: how to connect to it; holds the credential.
        untrusted: whether what it answers taints an agent.
        secrets: values that must not appear in what is recorded of its answers.
        unavailable: why no call may use it, and what the operator does about it; empty: it can be used.
    """

    name: str
    dsn: str
    untrusted: bool = False
    secrets: Sequence[str] = ()
    unavailable: str = ""

    def __repr__(self) -> str:
        return f"SqlResource(name={self.name!r}, unavailable={self.unavailable!r})"
