"""Resources, prompts and completions as clients of the door ask for them: each a call of the agent, told in the words of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mcp_types as types
from ringfence.kernel.doors import mcp_results, mcp_tools
from ringfence.kernel.doors.mcp_asking import Context, Made, ask, told
from ringfence.kernel.doors.mcp_calls import Calls, Parked
from ringfence.kernel.doors.mcp_rounds import given_by, in_rounds
from ringfence.kernel.doors.mcp_servers import COMPLETE, GET, READ, OfServers, named
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.settled import Answer
from ringfence.syscalls.errors import SyscallError


class Offers:
    """What clients of one agent are offered besides tools."""

    def __init__(self, desk: Desk, calls: Calls, there: OfServers) -> None:
        self._desk = desk
        self._calls = calls
        self._there = there
        self._results = mcp_results.Results(desk)

    async def resources(
        self, _: Context, __: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """List resources."""
        await self._desk.thread.current_rights()
        found = mcp_results.valid(types.Resource, (await self._there.resources()).resources)
        return types.ListResourcesResult(resources=found, ttl_ms=0, cache_scope="private")

    async def templates(
        self, _: Context, __: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        """List templates of URIs."""
        await self._desk.thread.current_rights()
        found = mcp_results.valid(types.ResourceTemplate, (await self._there.resources()).templates)
        return types.ListResourceTemplatesResult(
            resource_templates=[mcp_results.template(), *found], ttl_ms=0, cache_scope="private"
        )

    async def read(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult | types.InputRequiredResult:
        """Read a resource, or on in a result that was too long."""
        uri = str(params.uri)
        about = {"uri": uri[:256]}
        try:
            if uri.startswith(mcp_results.OWN):
                contents = await self._results.read(uri)
                return types.ReadResourceResult(contents=[contents], ttl_ms=0, cache_scope="private")
            server = await self._there.server_of(uri, named(params.meta))
        except SyscallError as error:
            raise mcp_results.refusal(context.protocol_version, error, about) from None
        given = {"server": server, "uri": uri}
        made = await self._made(context, READ, given, f"reading {uri[:256]}", params.input_responses, about)
        if isinstance(made, types.InputRequiredResult):
            return made
        return mcp_results.contents(uri, *made)

    async def prompts(self, _: Context, __: types.PaginatedRequestParams | None) -> types.ListPromptsResult:
        """List prompts."""
        await self._desk.thread.current_rights()
        found = mcp_results.valid(types.Prompt, await self._there.prompts())
        return types.ListPromptsResult(prompts=found, ttl_ms=0, cache_scope="private")

    async def prompt(
        self, context: Context, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult | types.InputRequiredResult:
        """Get a prompt."""
        about = {"name": params.name[:256]}
        try:
            server, name = await self._there.prompt_of(params.name)
        except SyscallError as error:
            raise mcp_results.refusal(context.protocol_version, error, about) from None
        given = {"server": server, "prompt": name, "arguments": params.arguments or {}}
        given |= given_by(context, params)
        made = await self._made(
            context, GET, given, f"the prompt {params.name[:256]}", params.input_responses, about
        )
        if isinstance(made, types.InputRequiredResult):
            return made
        return mcp_results.messages(*made)

    async def complete(self, context: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        """Say what an argument may be."""
        ref, said = params.ref, params.argument
        given: dict[str, Any] = {"argument": said.name, "value": said.value}
        try:
            if isinstance(ref, types.PromptReference):
                given["server"], given["prompt"] = await self._there.prompt_of(ref.name)
            else:
                given["server"] = await self._there.server_of_template(ref.uri, named(params.meta))
                given["uri"] = ref.uri
        except SyscallError as error:
            raise mcp_results.refusal(context.protocol_version, error, {}) from None
        if params.context is not None and params.context.arguments:
            given["context"] = params.context.arguments
        made = await self._made(context, COMPLETE, given, f"completing {said.name[:256]}", {}, {})
        assert not isinstance(made, types.InputRequiredResult)  # noqa: S101 - nobody was asked to wait
        return mcp_results.completion(made[0])

    async def _made(
        self,
        context: Context,
        action: str,
        given: Mapping[str, Any],
        name: str,
        said: Mapping[str, Any] | None,
        about: dict[str, Any],
    ) -> tuple[Answer, tuple[str, int]] | types.InputRequiredResult:
        """Make a call, and give its answer and place.

        Raises:
            MCPError: it was refused, or waits for a person.
        """
        row = self._desk.dispatcher.table[action]

        async def make(given: Mapping[str, Any]) -> Made | Parked | types.InputRequiredResult:
            return await ask(self._calls, context, name, said, row, mcp_tools.arguments(row, given))

        try:
            made = await in_rounds(context, given["server"], given, make)
            if isinstance(made, types.InputRequiredResult):
                return made
            if isinstance(made, Parked):
                raise mcp_results.parked_error(name, made)
            answer = await told(self._desk, made)
            if answer.failure is not None:
                raise answer.failure
        except SyscallError as error:
            raise mcp_results.refusal(context.protocol_version, error, about) from None
        return answer, made.place
