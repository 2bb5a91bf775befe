"""As the documentation of Pydantic AI has it: an agent with a typed answer, a tool of its own and those of an MCP server."""

import os

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset


class Stock(BaseModel):
    """What the shop has."""

    kettles: int
    written: bool


files = MCPToolset(
    os.environ["RINGFENCE_MCP_URL"], headers={"Authorization": f"Bearer {os.environ['RINGFENCE_TOKEN']}"}
)
clerk = Agent(
    "openai-chat:small-1",
    toolsets=[files],
    output_type=Stock,
    instructions="You keep the books of a shop, in the files of the workspace.",
)


@clerk.tool_plain
def add(numbers: list[int]) -> int:
    """Add whole numbers."""
    return sum(numbers)


result = clerk.run_sync("Add up the kettles in sales.csv and note the sum in books/stock.md.")
print(result.output)
