"""What the kernel file's JSON Schema says of `retention` and `scheduler`."""

from __future__ import annotations

from ringfence.policy import keeping, scheduling
from ringfence.policy.schema_terms import DURATION, SIZE, TEXT, Schema, closed


def retention_schema() -> Schema:
    """`retention`."""
    keep = closed(keeping.KEYS["retention.keep"], {"keep": DURATION}, ("keep",))
    steps: Schema = {"type": "integer", "minimum": 0}
    journals = closed(
        keeping.KEYS["retention.journals"],
        {"keep": DURATION, "steps": steps, "archive": DURATION},
        ("keep",),
    )
    points = closed(keeping.KEYS["retention.points"], {"keep": DURATION, "count": steps, "size": SIZE})
    parts: dict[str, Schema] = {
        "journals": journals,
        "messages": keep,
        "ended": keep,
        "logs": keep,
        "points": points,
    }
    labels: Schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[^=]+=[^=]+$"},
        "additionalProperties": closed(keeping.KEYS["retention.label"], parts),
    }
    archive: Schema = {"type": "string", "pattern": "^/"}
    return closed(
        keeping.KEYS["retention"],
        {"archive": archive, **parts, "webhooks": keep, "artifacts": keep, "labels": labels},
    )


def scheduler_schema() -> Schema:
    """`scheduler`."""
    number: Schema = {"type": "integer", "minimum": 1}
    labels: Schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[^=]+=[^=]+$"},
        "additionalProperties": number,
    }
    return closed(
        scheduling.KEYS,
        {"agents": number, "memory": SIZE, "starts": number, "labels": labels, "share_by": TEXT},
    )
