"""Resources of MCP servers that the operator declared, as resources of an agent's own door: each read is judged as `mcp.SERVER.@resource`.

They keep the URIs that their servers gave them. Which server is meant by one is known from the rules, else from what the servers list;
where that leaves two, the client has to say it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
from ringfence.kernel.doors.mcp_calls import Calls
from ringfence.kernel.doors.mcp_declared import listed_by
from ringfence.kernel.server.desk import Desk
from ringfence.policy.actions import RESOURCE
from ringfence.syscalls.base import Question
from ringfence.syscalls.errors import NoSuchResource
from ringfence.syscalls.mcp_common import action_of

if TYPE_CHECKING:
    from ringfence.syscalls.table import Row

READ: Final = "mcp.read"
LIST: Final = "mcp.resources"
SERVER: Final = "ringfence/server"
"""Key in `_meta`: which server something is of."""


class Listing(NamedTuple):
    """What all servers list, each with the name of its server in `_meta`."""

    resources: Sequence[dict[str, Any]]
    templates: Sequence[dict[str, Any]]


class _Listed(msgspec.Struct, frozen=True):
    resources: list[dict[str, Any]] = []
    templates: list[dict[str, Any]] = []


class OfServers:
    """What the servers of one agent have besides tools."""

    def __init__(self, desk: Desk, calls: Calls, table: Mapping[str, Row]) -> None:
        self._desk = desk
        self._calls = calls
        self._list = table.get(LIST)

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
        assert self._list is not None  # noqa: S101 - a kernel with servers has the row
        result = await listed_by(self._calls, self._list, server)
        return _Listed() if result is None else msgspec.json.decode(result, type=_Listed)

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
        several = f"several servers have it ({', '.join(able)})" if able else "none that you may read"
        raise NoSuchResource(
            f"there is no one resource `{uri[:256]}`: {several}; list the resources, and name its server as "
            f"`{SERVER}` in `_meta`"
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
