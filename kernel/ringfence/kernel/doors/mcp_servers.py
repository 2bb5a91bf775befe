"""Resources and prompts of MCP servers that the operator declared, as those of an agent's own door.

Each is judged as `mcp.SERVER.@resource` or `mcp.SERVER.@prompt`.

Prompts have names as tools have. Resources keep the URIs that their servers gave them. Which server is meant by one is known from the rules, else from what the servers list;
where that leaves two, the client has to say it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
from ringfence.kernel.doors.mcp_calls import Calls
from ringfence.kernel.doors.mcp_declared import lent_name, listed_by
from ringfence.kernel.server.desk import Desk
from ringfence.policy.actions import PROMPT, RESOURCE
from ringfence.syscalls.base import Question
from ringfence.syscalls.errors import NoSuchResource
from ringfence.syscalls.mcp_common import action_of

if TYPE_CHECKING:
    from ringfence.syscalls.table import Row

READ: Final = "mcp.read"
LIST: Final = "mcp.resources"
PROMPTS: Final = "mcp.prompts"
GET: Final = "mcp.prompt"
COMPLETE: Final = "mcp.complete"
SERVER: Final = "ringfence/server"
"""Key in `_meta`: which server something is of."""


class Listing(NamedTuple):
    """What all servers list, each with the name of its server in `_meta`."""

    resources: Sequence[dict[str, Any]]
    templates: Sequence[dict[str, Any]]


class _Listed(msgspec.Struct, frozen=True):
    resources: list[dict[str, Any]] = []
    templates: list[dict[str, Any]] = []


class _Prompts(msgspec.Struct, frozen=True):
    prompts: list[dict[str, Any]] = []


class OfServers:
    """What the servers of one agent have besides tools."""

    def __init__(self, desk: Desk, calls: Calls, table: Mapping[str, Row]) -> None:
        self._desk = desk
        self._calls = calls
        self._table = table
        self._prompts: dict[str, tuple[str, str]] = {}

    def _servers(self, name: str) -> Sequence[str]:
        """Those of which rules let the agent have something that goes by a name."""
        environment = self._desk.thread.environment
        return [one for one in sorted(environment.mcp) if environment.may_any(action_of(one, name))]

    async def resources(self) -> Listing:
        """All that the agent may read or ask for. A server that can't be asked now has none."""
        servers = self._servers(RESOURCE)
        found = await asyncio.gather(*(self._of(server) for server in servers))
        pairs = list(zip(servers, found, strict=True))
        return Listing(
            [_marked(server, one) for server, listed in pairs for one in listed.resources],
            [_marked(server, one) for server, listed in pairs for one in listed.templates],
        )

    async def _of(self, server: str) -> _Listed:
        result = await listed_by(self._calls, self._table[LIST], server)
        return _Listed() if result is None else msgspec.json.decode(result, type=_Listed)

    async def prompts(self) -> Sequence[dict[str, Any]]:
        """All prompts that the agent may get or ask for, under the names that clients here know them by."""
        servers = self._servers(PROMPT)
        found = await asyncio.gather(*(self._prompts_of(server) for server in servers))
        shown = [
            (lent_name(server, str(one.get("name", ""))), server, one)
            for server, listed in zip(servers, found, strict=True)
            for one in listed.prompts
        ]
        self._prompts = {name: (server, str(one.get("name", ""))) for name, server, one in shown}
        return [{**_marked(server, one), "name": name} for name, server, one in shown]

    async def _prompts_of(self, server: str) -> _Prompts:
        result = await listed_by(self._calls, self._table[PROMPTS], server)
        return _Prompts() if result is None else msgspec.json.decode(result, type=_Prompts)

    async def prompt_of(self, name: str) -> tuple[str, str]:
        """Server and name of a prompt that clients here know by a name.

        Raises:
            NoSuchResource: there is none.
        """
        if name not in self._prompts:
            # Of a client that listed them over another connection.
            await self.prompts()
        if name not in self._prompts:
            raise NoSuchResource(
                f"there is no prompt `{name[:64]}`; list the prompts to see those that there are"
            )
        return self._prompts[name]

    async def server_of_template(self, template: str, said: str | None) -> str:
        """The server that lists a template; `said` and what is raised are as for `server_of`."""
        if said is not None:
            return said
        listed = (await self.resources()).templates
        having = sorted({_server(one) for one in listed if one.get("uriTemplate") == template})
        if len(having) == 1:
            return having[0]
        raise _no_one(f"template `{template[:256]}`", having)

    async def server_of(self, uri: str, said: str | None) -> str:
        """The server that a URI is to be read of.

        Args:
            uri: of the resource.
            said: which server the client says; None: it says none.

        Raises:
            NoSuchResource: there is none, or there are several.
        """
        if said is not None:
            return said
        servers = self._servers(RESOURCE)
        may = self._desk.thread.environment.may
        able = [one for one in servers if may(Question(action=action_of(one, RESOURCE), resource=uri))]
        # A lone server is asked, so that a refusal is on record and says by which rule.
        able = able or servers
        if len(able) > 1:
            listing = await self.resources()
            having = {_server(one) for one in listing.resources if one.get("uri") == uri}
            having = having or {
                _server(one) for one in listing.templates if _made_by(str(one.get("uriTemplate", "")), uri)
            }
            able = sorted(having.intersection(able))
        if len(able) == 1:
            return able[0]
        raise _no_one(f"resource `{uri[:256]}`", able)


def _no_one(what: str, having: Sequence[str]) -> NoSuchResource:
    several = f"several servers have it ({', '.join(having)})" if having else "none that you may read"
    return NoSuchResource(
        f"there is no one {what}: {several}; list them, and name its server as `{SERVER}` in `_meta`"
    )


def named(meta: Any) -> str | None:
    """The server that a client says."""
    said = cast("Mapping[str, Any]", meta or {}).get(SERVER)
    return said if isinstance(said, str) and said else None


def _marked(server: str, one: dict[str, Any]) -> dict[str, Any]:
    meta: Any = one.get("_meta")
    return {**one, "_meta": {**(meta if isinstance(meta, dict) else {}), SERVER: server}}


def _server(one: Mapping[str, Any]) -> str:
    return str(one["_meta"][SERVER])


def _made_by(template: str, uri: str) -> bool:
    """Whether a template may have made a URI, by what it begins and ends with: it is a server's word, so no pattern is made of it."""
    return uri.startswith(template.partition("{")[0]) and uri.endswith(template.rpartition("}")[2])
