"""What each tokenizer is counted with, and what a host puts around the texts. Constants, with where they come from.

OpenAI's chat format is known: 3 tokens and a role for each message, 3 for the reply to begin. What it writes around
calls and tools is not published; the constants are the least that are not below the usage that real requests got
(`tests/unit/test_llm_counting.py` has them). Anthropic publishes no vocabulary: its texts are counted with cl100k_base,
which leans on it least unevenly over scripts, times a margin that no kind of text measured was above.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How one family of models counts.

    Attributes:
        encoding: vocabulary; empty: none, texts are estimated.
        margin: what the count of texts is multiplied by before it is known how close it is.
        message: tokens around each message.
        call: around each call of a tool.
        result: around each result of a tool, beside those of its message.
        tools: around all tools, where there are any.
        tool: around each tool.
        image: for one image.
    """

    encoding: str
    margin: float = 1.0
    message: int = 4
    call: int = 8
    result: int = 0
    tools: int = 12
    tool: int = 8
    image: int = 2048


REPLY_TOKENS: Final = 3
"""What a chat format adds for the reply to begin."""
PROPERTY_TOKENS: Final = 3
"""Around each property of a tool's arguments."""

_CLAUDE: Final = Profile(
    encoding="cl100k_base", margin=1.3, message=8, call=25, result=25, tools=620, tool=24
)

PROFILES: Final = {
    "o200k_base": Profile(encoding="o200k_base"),
    "cl100k_base": Profile(encoding="cl100k_base"),
    "o200k_harmony": Profile(encoding="o200k_harmony", message=6),
    "qwen3.5": Profile(encoding="qwen3.5", message=6),
    "claude-3": _CLAUDE,
    "claude-4.7": replace(_CLAUDE, margin=1.9),
    "estimate": Profile(encoding=""),
}
