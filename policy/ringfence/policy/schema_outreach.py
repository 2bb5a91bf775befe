"""JSON Schemas of the kernel file's parts about the world outside."""

from __future__ import annotations

from typing import Final

from ringfence.policy import outreach
from ringfence.policy.schema_terms import RATE, SECRET, TEXT, WORD, Schema, closed, words

_EITHER_TARGET: Final[list[Schema]] = [{"required": ["agents"]}, {"required": ["labels"]}]


def webhook() -> Schema:
    """One receiver."""
    return closed(
        outreach.KEYS["webhook"],
        {
            "url": {"type": "string", "pattern": "^https?://"},
            "key": SECRET,
            "events": {"type": "array", "items": words(*outreach.EVENTS), "minItems": 1},
            "addresses": {"type": "array", "items": TEXT, "minItems": 1},
        },
        ("url", "key"),
    )


def callback() -> Schema:
    """Where people and hooks are heard."""
    person = closed(outreach.KEYS["person"], {"key": SECRET, "account": TEXT}, ("key",))
    labels: Schema = {"type": "object", "additionalProperties": WORD, "minProperties": 1}
    hook = closed(
        outreach.KEYS["hook"],
        {
            "key": SECRET,
            "agents": {"type": "array", "items": TEXT, "minItems": 1},
            "labels": labels,
            "rate": RATE,
        },
        ("key",),
    )
    made = closed(
        outreach.KEYS["callback"],
        {
            "listen": {"type": "string", "pattern": f"^{outreach.LISTEN_PATTERN}$"},
            "people": {"type": "object", "additionalProperties": person},
            "hooks": {"type": "object", "additionalProperties": {**hook, "anyOf": _EITHER_TARGET}},
        },
        ("listen",),
    )
    return {**made, "anyOf": [{"required": ["people"]}, {"required": ["hooks"]}]}
