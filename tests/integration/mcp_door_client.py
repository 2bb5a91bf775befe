"""A program that knows nothing of Ringfence but where its server is: the official MCP client, as an agent in a sandbox."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import mcp_types as types
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError


@asynccontextmanager
async def server() -> AsyncGenerator[Any]:
    """What the client is told to connect to."""
    if "http" not in sys.argv:
        yield StdioServerParameters(command="rf-mcp")
        return
    headers = {"authorization": f"Bearer {os.environ['RINGFENCE_TOKEN']}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as client:
        yield streamable_http_client(os.environ["RINGFENCE_MCP_URL"], http_client=client)


def say(what: str, found: Any) -> None:
    print(json.dumps({what: found}), flush=True)


def plain(result: types.CallToolResult) -> dict[str, Any]:
    shown = result.model_dump(by_alias=True, exclude_none=True)
    return {name: shown.get(name) for name in ("content", "structuredContent", "isError", "_meta")}


async def tour(client: Client, changed: asyncio.Queue[str]) -> None:
    """Lists, reads, writes, is denied, waits for a person, and sees its tools change."""
    tools = (await client.list_tools()).tools
    say("tools", {tool.name: tool.model_dump(by_alias=True, exclude_none=True) for tool in tools})
    say("version", client.protocol_version)

    async def call(what: str, tool: str, **arguments: Any) -> types.CallToolResult:
        found = await client.call_tool(tool, arguments)
        say(what, plain(found))
        return found

    await call("read", "fs_read", path="a.txt")
    await call("written", "fs_write", path="out/b.txt", data_text="é\n")
    await call("denied", "fs_read", path=".env")
    await call("wrong", "fs_read", file="a.txt")
    long = await call("long", "fs_read", path="long.txt")
    (uri,) = [block.uri for block in long.content if isinstance(block, types.ResourceLink)]
    rest = await client.read_resource(f"{uri}?offset=2048")
    say("rest", [part.text for part in rest.contents if isinstance(part, types.TextResourceContents)])
    asked = await call("parked", "fs_append", path="asked/c.txt", data_text="once\n")
    while asked.meta is not None and asked.meta.get("ringfence/reason") == "Parked":
        asked = await client.call_tool("fs_append", {"path": "asked/c.txt", "data_text": "once\n"})
    say("approved", plain(asked))
    for _ in range(2):
        say("changed", await changed.get())
        say("names", sorted(tool.name for tool in (await client.list_tools()).tools))
    await call("revoked", "fs_write", path="out/b.txt", data_text="late\n")


async def walk(mode: str) -> None:
    changed: asyncio.Queue[str] = asyncio.Queue()

    async def heard(message: Any) -> None:
        # Of a subscription it is told as well; that is counted where it is listened to.
        if mode == "legacy" and isinstance(message, types.ToolListChangedNotification):
            changed.put_nowait("notified")

    async with server() as there, Client(there, mode=mode, message_handler=heard, cache=None) as client:
        if mode == "legacy":
            await tour(client, changed)
            return
        async with client.listen(tools_list_changed=True) as events, asyncio.TaskGroup() as group:

            async def follow() -> None:
                async for _ in events:
                    changed.put_nowait("subscribed")

            following = group.create_task(follow())
            await tour(client, changed)
            following.cancel()


async def lent(mode: str) -> None:
    """Calls tools of a server that somebody else declared."""
    async with server() as there, Client(there, mode=mode) as client:
        tools = (await client.list_tools()).tools
        say("tools", {tool.name: tool.model_dump(by_alias=True, exclude_none=True) for tool in tools})
        say("added", plain(await client.call_tool("mcp_shop_add", {"a": 40, "b": 2})))
        say("wiped", plain(await client.call_tool("mcp_shop_wipe", {"item": "all"})))


async def reads(mode: str, *uris: str) -> None:
    """Reads resources of a server that somebody else declared, after it has heard that there are others."""
    changed = asyncio.Event()

    async def heard(message: Any) -> None:
        if isinstance(message, types.ResourceListChangedNotification):
            changed.set()

    async with server() as there, Client(there, mode=mode, message_handler=heard, cache=None) as client:
        say("before", [one.uri for one in (await client.list_resources()).resources])
        if mode == "legacy":
            await changed.wait()
        else:
            async with client.listen(resources_list_changed=True) as events:
                say("listens", True)
                await anext(aiter(events))
        found = (await client.list_resources()).resources
        say("resources", {one.uri: one.model_dump(by_alias=True, exclude_none=True) for one in found})
        templates = (await client.list_resource_templates()).resource_templates
        say("templates", [one.uri_template for one in templates])
        for uri in uris:
            try:
                say(uri, (await client.read_resource(uri)).model_dump(by_alias=True, exclude_none=True))
            except MCPError as error:
                say(uri, error.error.model_dump())


async def prompts(mode: str) -> None:
    """Gets prompts of a server that somebody else declared."""
    async with server() as there, Client(there, mode=mode, cache=None) as client:
        say(
            "prompts",
            [
                one.model_dump(by_alias=True, exclude_none=True)
                for one in (await client.list_prompts()).prompts
            ],
        )
        found = await client.get_prompt("mcp_shop_greet", {"who": "Ada"})
        say("got", found.model_dump(by_alias=True, exclude_none=True))
        ref = types.PromptReference(name="mcp_shop_greet")
        say("completed", (await client.complete(ref, {"name": "who", "value": "g"})).completion.values)
        for name in ("mcp_shop_secret_plan", "greet"):
            try:
                await client.get_prompt(name)
            except MCPError as error:
                say(name, error.error.model_dump())


async def sell(mode: str, action: str) -> None:
    """Calls a tool of a declared server that asks its user."""

    async def asked(_: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        say("question", params.message)
        return types.ElicitResult(action=action, content={"sure": True} if action == "accept" else None)

    async with server() as there, Client(there, mode=mode, elicitation_callback=asked) as client:
        say("sold", plain(await client.call_tool("mcp_shop_confirm", {"item": "vase"})))
        say("lured", plain(await client.call_tool("mcp_shop_lure", {})))


async def once(mode: str) -> None:
    """Makes a call, and lives on until it is killed."""
    async with server() as there, Client(there, mode=mode) as client:
        say("appended", plain(await client.call_tool("fs_append", {"path": "out/log", "data_text": "x\n"})))
        await asyncio.Event().wait()


async def elicit(mode: str, action: str) -> None:
    """Makes a call that is asked, with a user who says whether to wait."""

    async def asked(_: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        say("question", params.message)
        content = {"wait": True} if action == "accept" else None
        return types.ElicitResult(action=action, content=content)

    async with server() as there, Client(there, mode=mode, elicitation_callback=asked) as client:
        found = await client.call_tool("fs_write", {"path": "asked/d.txt", "data_text": f"{mode} {action}"})
        say("result", plain(found))


WAYS = {
    "walk": walk,
    "lent": lent,
    "reads": reads,
    "prompts": prompts,
    "sell": sell,
    "once": once,
    "elicit": elicit,
}
asyncio.run(WAYS[sys.argv[1]](*(word for word in sys.argv[2:] if word not in ("stdio", "http"))))
