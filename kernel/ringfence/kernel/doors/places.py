"""Where a program finds the doors on its loopback: light, since every start of a program looks here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

HOST: Final = "127.0.0.1"
PORT: Final = 7080
"""In the sandbox's own network namespace, so nobody else's."""

MODULES: Final = {
    "models": "ringfence.kernel.doors.gateway",
    "mcp": "ringfence.kernel.doors.mcp_http",
}
"""What serves each door: a module with `routes(desk) -> Sequence[Route]`. Imported when the first program has it."""


def environment(doors: Sequence[str], token: str) -> Mapping[str, str]:
    """Variables that programs know, where a manifest asks for doors; what it says itself comes over them.

    Args:
        doors: as the manifest names them.
        token: of this start; it stands where a program looks for a key, and is none of any host's.
    """
    base = f"http://{HOST}:{PORT}"
    found: dict[str, str] = {}
    if doors:
        found["RINGFENCE_DOORS"] = base
    if "models" in doors:
        found |= {
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_KEY": token,
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": token,
        }
    if "mcp" in doors:
        found["RINGFENCE_MCP_URL"] = f"{base}/mcp"
    return found
