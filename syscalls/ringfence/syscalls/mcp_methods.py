"""The protocol's methods that calls on servers are made of. Imported like `mcp_client`, when it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from mcp_types import CallToolRequest, CompleteRequest, GetPromptRequest, ReadResourceRequest, Request
from ringfence.syscalls.mcp_common import DEFINITIONS_MAX, LISTED_MAX


class _Listing(NamedTuple):
    """A list that servers give.

    Attributes:
        method: of the package's session.
        field: of its result.
        most: that is taken.
        optional: whether a server may have none at all.
    """

    method: str
    field: str
    most: int
    optional: bool = True


LISTS: Final = {
    "tools": _Listing("list_tools", "tools", DEFINITIONS_MAX, optional=False),
    "resources": _Listing("list_resources", "resources", LISTED_MAX),
    "templates": _Listing("list_resource_templates", "resource_templates", LISTED_MAX),
    "prompts": _Listing("list_prompts", "prompts", DEFINITIONS_MAX),
}
CALLS: Final = frozenset({"tools/call"})
"""Those of `REQUESTS` that do something."""
REQUESTS: Final[Mapping[str, type[Request[Any, Any]]]] = {
    "tools/call": CallToolRequest,
    "resources/read": ReadResourceRequest,
    "prompts/get": GetPromptRequest,
    "completion/complete": CompleteRequest,
}
"""Requests that calls are made of."""
