"""JSON Schemas of the kernel file's parts about the world outside."""

from __future__ import annotations

from typing import Final

from ringfence.policy import a2a_peers, mcp_servers, outreach, serving
from ringfence.policy.schema_terms import (
    COUNT,
    DURATION,
    NAME,
    RATE,
    SECRET,
    SIZE,
    TEXT,
    WORD,
    Schema,
    closed,
    words,
)

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


def _reaching() -> Schema:
    """Somebody outside who reaches some agents."""
    labels: Schema = {"type": "object", "additionalProperties": WORD, "minProperties": 1}
    made = closed(
        outreach.KEYS["hook"],
        {
            "key": SECRET,
            "agents": {"type": "array", "items": TEXT, "minItems": 1},
            "labels": labels,
            "rate": RATE,
        },
        ("key",),
    )
    return {**made, "anyOf": _EITHER_TARGET}


def serve() -> Schema:
    """What a manifest says of an agent that takes tasks."""
    skill = closed(
        serving.KEYS["skill"],
        {"id": TEXT, "name": TEXT, "description": TEXT, "tags": {"type": "array", "items": TEXT}},
        ("id", "name", "description"),
    )
    card = closed(
        serving.KEYS["serve.a2a"],
        {"description": TEXT, "skills": {"type": "array", "items": skill, "maxItems": serving.SKILLS_MAX}},
        (),
    )
    return {"anyOf": [words("a2a"), closed(serving.KEYS["serve"], {"a2a": card}, ("a2a",))]}


def a2a() -> Schema:
    """Where clients give tasks to agents."""
    return closed(
        serving.KEYS["a2a"],
        {
            "listen": {"type": "string", "pattern": f"^{outreach.LISTEN_PATTERN}$"},
            "url": {"type": "string", "pattern": "^https?://"},
            "clients": {"type": "object", "additionalProperties": _reaching()},
            "push": {"type": "array", "items": {"type": "string", "pattern": "^https?://"}},
        },
        ("listen", "clients"),
    )


def callback() -> Schema:
    """Where people and hooks are heard."""
    person = closed(outreach.KEYS["person"], {"key": SECRET, "account": TEXT}, ("key",))
    made = closed(
        outreach.KEYS["callback"],
        {
            "listen": {"type": "string", "pattern": f"^{outreach.LISTEN_PATTERN}$"},
            "people": {"type": "object", "additionalProperties": person},
            "hooks": {"type": "object", "additionalProperties": _reaching()},
        },
        ("listen",),
    )
    return {**made, "anyOf": [{"required": ["people"]}, {"required": ["hooks"]}]}


def mcp_server(auth: Schema) -> Schema:
    """One server of MCP; `auth` is the schema of a credential."""
    key = closed(mcp_servers.KEYS["key"], {"argument": TEXT, "header": TEXT})
    tool = closed(
        mcp_servers.KEYS["tool"],
        {
            "effect": words(*mcp_servers.EFFECTS),
            "key": {**key, "minProperties": 1, "maxProperties": 1},
            "repeat": {"type": "boolean"},
            "subject": {"type": "string", "pattern": "^/"},
            "definition": {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
        },
    )
    box = closed(mcp_servers.KEYS["box"], {"memory": SIZE, "pids": COUNT, "cpu": COUNT, "disk": SIZE})
    made = closed(
        mcp_servers.KEYS["mcp"],
        {
            "type": {"const": "mcp"},
            "url": {"type": "string", "pattern": "^https?://"},
            "auth": auth,
            "addresses": {"type": "array", "items": TEXT, "minItems": 1},
            "rate": RATE,
            "command": {"type": "array", "items": WORD, "minItems": 1},
            "files": {"type": "string", "pattern": "^/"},
            "env": {"type": "object", "additionalProperties": {"anyOf": [WORD, SECRET]}},
            "sandbox": box,
            "tools": {"type": "object", "additionalProperties": {**tool, "minProperties": 1}},
            "trusted": {"type": "boolean"},
            "environment": NAME,
            "timeout": DURATION,
        },
        ("type",),
    )
    return {**made, "oneOf": [{"required": ["url"]}, {"required": ["command"]}]}


def a2a_peer(auth: Schema) -> Schema:
    """One agent elsewhere; `auth` is the schema of a credential."""
    return closed(
        a2a_peers.KEYS,
        {
            "type": {"const": "a2a"},
            "url": {"type": "string", "pattern": "^https?://"},
            "auth": auth,
            "addresses": {"type": "array", "items": TEXT, "minItems": 1},
            "rate": RATE,
            "skills": {"type": "array", "items": TEXT, "minItems": 1},
            "repeat": {"type": "boolean"},
            "card": {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
            "trusted": {"type": "boolean"},
            "environment": NAME,
            "timeout": DURATION,
        },
        ("type", "url"),
    )
