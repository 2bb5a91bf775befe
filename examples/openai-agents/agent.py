"""As the documentation of openai-agents has it: an agent with a function of its own and the tools of an MCP server."""

import asyncio

from agents import Agent, Runner, function_tool
from agents.mcp import MCPServerStdio


@function_tool
def count_words(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


async def main() -> None:
    async with MCPServerStdio(params={"command": "rf-mcp"}, client_session_timeout_seconds=600) as files:
        clerk = Agent(
            name="Clerk",
            instructions="You keep a shop's letters in order. Work with the files of the workspace.",
            model="small-1",
            tools=[count_words],
            mcp_servers=[files],
        )
        result = await Runner.run(
            clerk, "Write into out/reply.md what to answer to letters/quince.txt, in at most 20 words."
        )
        print(result.final_output)


asyncio.run(main())
