"""What calls on MCP servers have in common: sizes, errors, definitions of tools and what they say of an effect."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from ringfence.policy.actions import PROMPT
from ringfence.policy.matcher import match_name
from ringfence.syscalls.base import Effect
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import NoSuchResource
from ringfence.syscalls.refusals import refuse_unavailable

if TYPE_CHECKING:
    from ringfence.policy.mcp_servers import ToolDecl
    from ringfence.syscalls.base import Env
    from ringfence.syscalls.declared import McpResource

ANSWER_BYTES_MAX: Final = 8 << 20
"""Largest answer of a server, also of one that lists its tools or resources."""

DEFINITIONS_MAX: Final = 1000
"""Most tools of one server, and most prompts."""

LISTED_MAX: Final = 10_000
"""Most resources, or templates of them, of one server that are listed."""

PROMPT_KEPT: Final = f"{PROMPT}/"
"""What the name of a prompt follows where its definition is kept beside those of tools."""

EFFECT_ID: Final = "ringfence/effect-id"
"""Key in `_meta` of a request: its effect id, the same however often it is made again."""

MISSING_CAPABILITY: Final = -32021
"""Error code of the protocol: the caller of a call can't do what its server needs."""

CLIENT_CAPABILITIES: Final = "io.modelcontextprotocol/clientCapabilities"
"""Key in `_meta` of a request of versions without a handshake. In those with one nothing is declared: such a server would ask in mid-call."""

_NAME: Final = re.compile(r"[A-Za-z0-9_/-]+(\.[A-Za-z0-9_/-]+)*", re.ASCII)
_NAME_MAX: Final = 128


class Lost(Exception):
    """The session ended, or what came is no answer. The text is for people, after the server's name."""


class Refused(Exception):
    """The server answered with an error of the protocol."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, kw_only=True)
class Sent:
    """How far one call came.

    Attributes:
        carry: headers of this call alone.
        able: what its caller can do for the server, as the protocol declares it; empty: nothing.
        begun: whether it has begun to leave this process.
        status: of HTTP; 0: none came, or there is none.
        headers: of that answer, names in lower case.
        lost: what broke it; empty: nothing did.
        code: of an error of the protocol that came with an error of HTTP; 0: none did.
        needs: what that says that the caller has to be able to do, with commas between; empty: it says nothing.
    """

    carry: Mapping[str, str] = field(default_factory=dict[str, str])
    able: Mapping[str, Any] = field(default_factory=dict[str, Any])
    begun: bool = False
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    lost: str = ""
    code: int = 0
    needs: str = ""

    def declare(self, meta: dict[str, Any]) -> bool:
        """Put into the `_meta` of the request what its caller can do; gives whether there was something to put, and a place for it."""
        if not self.able or CLIENT_CAPABILITIES not in meta:
            return False
        meta[CLIENT_CAPABILITIES] = {**meta[CLIENT_CAPABILITIES], **self.able}
        return True

    async def trace(self, name: str, info: Mapping[str, Any]) -> None:
        """Called by the transport at each stage."""
        del info
        if name.endswith("send_request_headers.started"):
            self.begun = True


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """One tool or prompt: the definition that was taken, and the one that the server gives now where that is another.

    Attributes:
        tool: its name; of a prompt after `PROMPT_KEPT`.
        taken: canonical JSON of what agents are shown.
        taken_hash: `sha256:…` of that.
        offered: canonical JSON of what the server says now; empty: the same.
        offered_hash: of that.
    """

    tool: str
    taken: bytes
    taken_hash: str
    offered: bytes = b""
    offered_hash: str = ""

    @property
    def changed(self) -> bool:
        """Whether calls wait for an operator."""
        return bool(self.offered_hash)


class McpSession(Protocol):
    """A session of one agent with one server."""

    async def ask(
        self, method: str, params: Mapping[str, Any], effect_id: str, sent: Sent
    ) -> Mapping[str, Any]:
        """Send one request, once; gives the result as it came.

        Args:
            method: of the protocol, `tools/call` or `resources/read`.
            params: of it, without `_meta`.
            effect_id: sent along in that.
            sent: told how far it comes.

        Raises:
            Lost, Refused: as they say.
        """
        ...


def server_of(name: str, env: Env) -> McpResource:
    """The declared server of a name.

    Raises:
        NoSuchResource: there is none, or it is unavailable.
    """
    resource = env.mcp.get(name)
    if resource is None:
        declared = ", ".join(f"`{one}`" for one in sorted(env.mcp)) or "none"
        raise NoSuchResource(
            f"`{name[:80]}` is no declared MCP server; declared: {declared}; the operator can declare it in the kernel file"
        )
    refuse_unavailable(resource)
    return resource


def nameable(prompt: str) -> bool:
    """Whether a prompt of that name can be got."""
    return 0 < len(prompt) <= _NAME_MAX and prompt.isprintable()


def sayable(tool: str) -> bool:
    """Whether a rule can name a tool."""
    return len(tool) <= _NAME_MAX and _NAME.fullmatch(tool) is not None


def action_of(server: str, tool: str) -> str:
    """What rules call a tool."""
    return f"mcp.{server}.{tool}"


def definition_bytes(definition: Mapping[str, Any]) -> bytes:
    """What is kept, compared and hashed of a definition: all of it."""
    return canonical_json(definition)


def definition_hash(data: bytes) -> str:
    """The hash of a definition."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def declared_tool(resource: McpResource, tool: str) -> ToolDecl | None:
    """What the operator says of a tool."""
    return next((one for one in resource.tools if match_name(one.pattern, tool)), None)


def effect_of(declared: ToolDecl | None, definitions: Sequence[bytes]) -> Effect:
    """What a call does: the operator's word, else no less than leaving the system.

    Args:
        declared: the operator's word.
        definitions: of the server, all that are in question: the strictest counts.
    """
    # INVARIANT: what a server says of its own tools makes a call stricter, and nothing else.
    if declared is not None and declared.effect:
        return Effect[declared.effect.upper()]
    return Effect.DESTROY if any(map(_destroys, definitions)) else Effect.EXTERNAL


class _Hints(msgspec.Struct):
    destructiveHint: Any = None  # noqa: N815 - the protocol's name


class _Hinting(msgspec.Struct):
    annotations: _Hints | None = None


def _destroys(definition: bytes) -> bool:
    try:
        hints = msgspec.json.decode(definition, type=_Hinting).annotations
    except msgspec.DecodeError:
        return True
    return hints is not None and hints.destructiveHint not in (None, False)
