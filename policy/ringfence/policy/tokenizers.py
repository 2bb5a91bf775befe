"""Tokenizers that a model's host may be declared to have, and how that is read. What they count is in `syscalls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ringfence.policy.matcher import compile_pattern, match_name
from ringfence.policy.problems import PatternError
from ringfence.policy.strict_yaml import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.policy.reader import Reader
    from ringfence.policy.strict_yaml import Node

AUTO: Final = "auto"
"""By the model's name."""
TOKENIZERS: Final = (
    *(AUTO, "o200k_base", "cl100k_base", "o200k_harmony", "qwen3.5", "claude-3", "claude-4.7"),
    "estimate",
)
"""Names that a kernel file may write."""

_BY_NAME: Final = (
    ("gpt-oss*", "o200k_harmony"),
    ("gpt-4o*", "o200k_base"),
    ("gpt-4.*", "o200k_base"),
    ("gpt-4*", "cl100k_base"),
    ("gpt-3.5*", "cl100k_base"),
    ("gpt-*", "o200k_base"),
    ("chatgpt-*", "o200k_base"),
    *((f"o{number}{rest}", "o200k_base") for number in (1, 3, 4) for rest in ("", "-*")),
    ("qwen3.5*", "qwen3.5"),
    *((f"claude-{one}*", "claude-3") for one in ("2", "3", "instant")),
    *((f"claude-{size}-4", "claude-3") for size in ("opus", "sonnet", "haiku")),
    *((f"claude-{size}-4-20*", "claude-3") for size in ("opus", "sonnet", "haiku")),
    *(
        (f"claude-{size}-4{mark}{minor}{rest}", "claude-3")
        for size in ("opus", "sonnet", "haiku")
        for mark in ("-", ".")
        for minor in (0, 1, 5, 6)
        for rest in ("", "-*")
    ),
    ("claude-*", "claude-4.7"),
)


def read_tokenizers(reader: Reader, node: Node, what: str) -> tuple[tuple[str, str], ...]:
    """Read `tokenizer: NAME` or `tokenizer: {MODEL PATTERN: NAME}`; gives `(model pattern, name)`, first match counts."""
    if not isinstance(node, Table):
        return (("*", reader.choice(node, what, TOKENIZERS, AUTO)),)
    found: list[tuple[str, str]] = []
    for key, value in reader.free_mapping(node, what):
        try:
            pattern = compile_pattern("name", key.text).text
        except PatternError as error:
            reader.wrong(key, error.message, error.fix)
            continue
        found.append((pattern, reader.choice(value, what, TOKENIZERS, AUTO)))
    return tuple(found)


def tokenizer_of(model: str, declared: Sequence[tuple[str, str]]) -> str:
    """The tokenizer of a model: as declared, else by its name, else `estimate`."""
    name = next((name for pattern, name in declared if match_name(pattern, model)), AUTO)
    if name != AUTO:
        return name
    # Gateways put the provider before the name: `anthropic/claude-opus-5`.
    bare = model.lower().rpartition("/")[2].removeprefix("anthropic.")
    return next((name for pattern, name in _BY_NAME if match_name(pattern, bare)), "estimate")
