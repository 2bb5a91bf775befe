"""`rf.mcp` for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfence.agent import mcp_operations as operations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ringfence.agent.aio_calls import AsyncCaller
    from ringfence.agent.mcp_operations import (
        McpAnswer,
        McpCompletion,
        McpContents,
        McpMessages,
        McpPrompt,
        McpResources,
        McpTool,
    )
    from ringfence.agent.values import Found


class AsyncMcp:
    """Tools, resources and prompts of declared MCP servers."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def tools(self, server: str) -> Found[McpTool]:
        """List the tools that the agent may call; `.withheld` counts the others.

        Args:
            server: its name in the kernel file.

        Raises:
            Denied: no rule lets it call any of them.
        """
        return await self._caller.run(operations.tools(server))

    async def call(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        can: Sequence[str] = (),
        responses: Mapping[str, Any] | None = None,
        state: str = "",
    ) -> McpAnswer:
        """Call a tool, once.

        Args:
            server: its name in the kernel file.
            tool: as `tools` lists it.
            arguments: JSON values by name.
            can: what the server may ask for before it answers: `elicitation`, `sampling`, `roots`.
            responses: what answers its `requests` of an earlier call, by their keys.
            state: that came with them.

        Raises:
            Denied: a rule or a person denies it, or nothing allows it.
            CallFailed: it failed; `metadata["sent"]` says whether it arrived: `no`, `refused`, `maybe` or `yes`.
            OutcomeUnknown: nobody can tell whether it was carried out.
        """
        return await self._caller.run(operations.call(server, tool, arguments, can, responses, state))

    async def resources(self, server: str) -> McpResources:
        """List the resources that the agent may read, and templates of more; `.withheld` counts the others.

        Args:
            server: its name in the kernel file.

        Raises:
            Denied: no rule lets it read any of them.
        """
        return await self._caller.run(operations.resources(server))

    async def read(self, server: str, uri: str) -> McpContents:
        """Read a resource.

        Args:
            server: its name in the kernel file.
            uri: as `resources` lists it, or one of its templates makes it.

        Raises:
            Denied: a rule or a person denies it, or nothing allows it.
            CallFailed: the server can't be reached, has no such resource, or gives none.
            InvalidRequest: the URI could be read in two ways.
        """
        return await self._caller.run(operations.read(server, uri))

    async def prompts(self, server: str) -> Found[McpPrompt]:
        """List the prompts that the agent may get; `.withheld` counts the others.

        Args:
            server: its name in the kernel file.

        Raises:
            Denied: no rule lets it get any of them.
        """
        return await self._caller.run(operations.prompts(server))

    async def prompt(self, server: str, name: str, arguments: Mapping[str, str] | None = None) -> McpMessages:
        """Get a prompt.

        Args:
            server: its name in the kernel file.
            name: as `prompts` lists it.
            arguments: texts by name.

        Raises:
            Denied: a rule or a person denies it, or nothing allows it.
            CallFailed: the server can't be reached, or gives none.
        """
        return await self._caller.run(operations.prompt(server, name, arguments))

    async def complete(
        self,
        server: str,
        argument: str,
        value: str = "",
        *,
        prompt: str = "",
        uri: str = "",
        context: Mapping[str, str] | None = None,
    ) -> McpCompletion:
        """Ask what an argument of a prompt, or a variable of a template of URIs, may be.

        Args:
            server: its name in the kernel file.
            argument: name of the argument or variable.
            value: what there is of it so far.
            prompt: name of the prompt; empty: `uri` is given.
            uri: the template, as `resources` lists it.
            context: the other arguments or variables so far.

        Raises:
            Denied: a rule or a person denies it, or nothing allows it.
            CallFailed: the server can't be reached, or says nothing of that.
        """
        return await self._caller.run(operations.complete(server, argument, value, prompt, uri, context))
