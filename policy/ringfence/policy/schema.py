"""JSON Schemas of both files, for editors. The parser decides; a schema only knows keys, shapes and words.

The committed files in `schemas/` are what these functions make; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ringfence.policy import (
    approving,
    demands,
    engines,
    ignoring,
    kernel_file,
    manifest,
    pools,
    resources,
    schedule,
    schema_outreach,
    sections,
    undoing,
    when,
)
from ringfence.policy.conditions import DAYS
from ringfence.policy.hearsay import SOURCES, VOUCHER
from ringfence.policy.reader import API_VERSION
from ringfence.policy.schema_keeping import retention_schema, scheduler_schema
from ringfence.policy.schema_terms import CLOCK as _CLOCK
from ringfence.policy.schema_terms import COUNT as _COUNT
from ringfence.policy.schema_terms import DRAFT as _DRAFT
from ringfence.policy.schema_terms import DURATION as _DURATION
from ringfence.policy.schema_terms import NAME as _NAME
from ringfence.policy.schema_terms import NAMES as _NAMES
from ringfence.policy.schema_terms import RATE as _RATE
from ringfence.policy.schema_terms import RULES as _RULES
from ringfence.policy.schema_terms import SECRET as _SECRET
from ringfence.policy.schema_terms import SIZE as _SIZE
from ringfence.policy.schema_terms import TEXT as _TEXT
from ringfence.policy.schema_terms import WORD as _WORD
from ringfence.policy.schema_terms import Schema
from ringfence.policy.schema_terms import closed as _object
from ringfence.policy.schema_terms import vouched as _vouched
from ringfence.policy.schema_terms import words as _words
from ringfence.policy.tokenizers import TOKENIZERS
from ringfence.policy.units import TOTALS

_PEOPLE: Final[dict[str, Schema]] = {
    "people": {"type": "integer", "minimum": 1, "maximum": approving.PEOPLE_MAX},
    "for": {**_RULES, "minItems": 1},
    "not_submitter": {"type": "boolean"},
}


def _sandbox(keys: Sequence[str] = sections.KEYS["sandbox"], **more: Schema) -> Schema:
    directory: Schema = {"type": "string", "pattern": "^/[^/]"}
    wall: Schema = {"type": "string", "pattern": f"^{demands.WALL_PATTERN}$"}
    walls: Schema = {"type": "array", "items": wall, "minItems": 1, "uniqueItems": True}
    return _object(
        keys,
        {
            "backend": _words(*sections.BACKENDS),
            "workspace": _words("mediated", "direct"),
            "memory": _SIZE,
            "pids": {"type": "integer", "minimum": 1},
            "cpu": {"type": "number", "exclusiveMinimum": 0},
            "disk": _SIZE,
            "timeout": _DURATION,
            "mounts": {"type": "array", "items": directory, "uniqueItems": True},
            "require": {"anyOf": [{"const": demands.ALL}, walls]},
            **more,
        },
    )


def _docker() -> Schema:
    return _object(
        engines.KEYS,
        {
            "image": {"type": "string", "pattern": f"^{engines.IMAGE_PATTERN}$"},
            "runtime": _words(*engines.RUNTIMES),
            "host": {"type": "string", "pattern": f"^{engines.HOST_PATTERN}$"},
        },
        ("image",),
    )


def _ignore() -> Schema:
    entry = _object(
        ignoring.KEYS,
        {
            "action": {"type": "string", "pattern": f"^{ignoring.ACTION}$"},
            "at": {"type": "string", "pattern": f"^{ignoring.POINTER}$"},
            "pattern": {"type": "string", "minLength": 1, "maxLength": ignoring.PATTERN_CHARS_MAX},
        },
    )
    either = [{"required": ["at"]}, {"required": ["pattern"]}]
    return {"type": "array", "items": {**entry, "anyOf": either}, "maxItems": ignoring.ENTRIES_MAX}


def _remote() -> Schema:
    return _object(
        engines.REMOTE_KEYS,
        {
            "address": {"type": "string", "pattern": f"^{engines.ADDRESS_PATTERN}$"},
            "certs": {"type": "string", "pattern": f"^{engines.DIRECTORY_PATTERN}$"},
        },
        engines.REMOTE_KEYS,
    )


def _budgets() -> Schema:
    return _object(
        sections.KEYS["budgets"],
        {
            "rate": {"type": "object", "additionalProperties": _RATE},
            "total": _object(TOTALS, {**dict.fromkeys(TOTALS, _COUNT), "bytes": _SIZE}),
            "context": _object(
                sections.KEYS["context"],
                {"max_tokens": _COUNT, "on_overflow": _words("page", "refuse")},
                ("max_tokens",),
            ),
            "on_exhausted": _words("park", "refuse"),
        },
    )


def _pools() -> Schema:
    limit: Schema = {
        "type": ["string", "number"],
        "description": "an amount, such as 50, or one for each window: 50/d, 10k/h, 1M/month",
    }
    size: Schema = {
        "type": ["string", "integer"],
        "description": "bytes, such as 10MiB, or as many for each window: 1GiB/d",
    }
    totals = _object(TOTALS, {**dict.fromkeys(TOTALS, limit), "bytes": size})
    pool = _object(pools.KEYS, {"total": totals, "timezone": _TEXT}, ("total",))
    names = {"pattern": f"^({pools.FLEET}|[^=]+=[^=]+)"}
    return {"type": "object", "propertyNames": names, "additionalProperties": pool}


def _schedule() -> Schema:
    return _object(
        sections.KEYS["schedule"],
        {
            "cron": _TEXT,
            "every": _DURATION,
            "timezone": _TEXT,
            "missed": _words(*schedule.MISSED),
            "overlap": _words(*schedule.OVERLAP),
            "jitter": _DURATION,
        },
    )


def _when() -> Schema:
    window = _object(
        when.KEYS["hours"],
        {
            "from": _CLOCK,
            "to": _CLOCK,
            "days": {"type": "array", "items": _words(*DAYS), "minItems": 1},
            "timezone": _TEXT,
        },
        ("from", "to", "timezone"),
    )
    amount = _object(
        when.KEYS["amount"],
        {"field": {"type": "string", "pattern": "^/"}, "over": _COUNT},
        when.KEYS["amount"],
    )
    share: Schema = {"type": "string", "pattern": r"^[0-9]{1,2}(\.[0-9]+)?%$"}
    asked = _object(
        when.KEYS["if"],
        {
            "tainted": {"const": True},
            "environment": {"anyOf": [_NAME, {"type": "array", "items": _NAME, "minItems": 1}]},
            "created": {"type": "boolean"},
            "hours": window,
            "outside": window,
            "amount": amount,
            "budget": _object(
                when.KEYS["share"],
                {"total": _words(*TOTALS), "over": share, "of": _TEXT},
                ("total", "over"),
            ),
            "hearsay": _hearsay(),
        },
    )
    require = _object(when.KEYS["require"], {"fresh": _DURATION, "of": _RULES}, ("fresh",))
    one = _object(
        when.KEYS["when"],
        {
            "action": _TEXT,
            "resource": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]},
            "if": {"anyOf": [_words(*when.FACTS), {**asked, "minProperties": 1}]},
            "then": _words("ask", "deny"),
            "require": require,
        },
        ("action",),
    )
    return {"type": "array", "items": one}


def _hearsay() -> Schema:
    field: Schema = {"type": "string", "pattern": "^/"}
    fields: Schema = {"type": "array", "items": field, "minItems": 1}
    source: Schema = {"anyOf": [_words(*SOURCES), {"type": "string", "pattern": f"^{VOUCHER.pattern}$"}]}
    sources: Schema = {"type": "array", "items": source, "minItems": 1}
    names: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
    shape = {"fields": {"anyOf": [field, fields]}, "vouched_by": sources, "names": names}
    return {"anyOf": [field, fields, _object(when.KEYS["hearsay"], shape, ("fields",))]}


def _file(
    kind: str, keys: Sequence[str], properties: Mapping[str, Schema], required: Sequence[str]
) -> Schema:
    head = {"apiVersion": {"const": API_VERSION}, "kind": {"const": kind}}
    made = _object(keys, {**head, **properties}, ("apiVersion", "kind", *required))
    return {"$schema": _DRAFT, "title": f"Ringfence {kind}", **made}


def manifest_schema() -> Schema:
    """The schema of an agent's manifest."""
    labels: Schema = {"type": "object", "additionalProperties": _WORD}
    run = _object(
        sections.KEYS["run"],
        {
            "command": {"type": "array", "items": _WORD, "minItems": 1},
            "workspace": _TEXT,
            "env": {"type": "object", "additionalProperties": _WORD},
        },
        ("command",),
    )
    permissions = _object(
        manifest.KEYS["permissions"], {"roles": _NAMES, "allow": _RULES, "ask": _RULES, "deny": _RULES}
    )
    spec = _object(
        manifest.KEYS["spec"],
        {
            "run": run,
            "sandbox": _sandbox(
                doors={"type": "array", "items": _words(*sections.DOORS), "uniqueItems": True}
            ),
            "permissions": permissions,
            "delegates": _NAMES,
            "serve": schema_outreach.serve(),
            "environment": _NAME,
            "when": _when(),
            "budgets": _budgets(),
            "approvals": _object(
                sections.KEYS["approvals"], {"expire": _DURATION, "linger": _DURATION, **_PEOPLE}
            ),
            "restart": _object(
                sections.KEYS["restart"],
                {
                    "policy": _words(*sections.RESTARTS),
                    "max": {"type": "integer", "minimum": 0},
                    "resume": _words("replay", "own"),
                    "ignore": _ignore(),
                },
            ),
            "schedule": _schedule(),
            "priority": _words(*sections.PRIORITIES),
        },
        ("run",),
    )
    metadata = _object(sections.KEYS["metadata"], {"name": _NAME, "labels": labels}, ("name",))
    return _file("Agent", manifest.KEYS[""], {"metadata": metadata, "spec": spec}, ("metadata", "spec"))


def _resource(kind: str, properties: Mapping[str, Schema], required: Sequence[str]) -> Schema:
    shared: dict[str, Schema] = {
        "type": {"const": kind},
        "environment": _NAME,
        "untrusted": {"type": "boolean"},
    }
    return _object(resources.KEYS[kind], {**shared, **properties}, ("type", *required))


def _auth() -> Schema:
    basic = _object(
        resources.KEYS["basic"], {"username": _TEXT, "password": _SECRET}, ("username", "password")
    )
    header = _object(resources.KEYS["header"], {"name": _TEXT, "value": _SECRET}, ("name", "value"))
    made = _object(resources.KEYS["auth"], {"bearer": _SECRET, "basic": basic, "header": header})
    return {**made, "minProperties": 1, "maxProperties": 1}


def _tokenizer() -> Schema:
    name = _words(*TOKENIZERS)
    return {"anyOf": [name, {"type": "object", "additionalProperties": name}]}


def _kinds() -> list[Schema]:
    web: dict[str, Schema] = {
        "base": {"type": "string", "pattern": "^https?://"},
        "auth": _auth(),
        "timeout": _DURATION,
        "addresses": {"type": "array", "items": _TEXT, "minItems": 1},
        "rate": _RATE,
    }
    number: Schema = {"type": "number", "minimum": 0}
    return [
        schema_outreach.mcp_server(_auth()),
        schema_outreach.a2a_peer(_auth()),
        _resource("postgres", {"dsn": {"anyOf": [_TEXT, _SECRET]}, "embedded": {"type": "boolean"}}, ()),
        _resource(
            "http",
            {
                **web,
                "effects": {"type": "object", "additionalProperties": _words(*resources.EFFECTS)},
                "idempotency_header": _TEXT,
                "vouches": {"type": "object", "additionalProperties": _vouched()},
                "undo": {
                    "type": "object",
                    "additionalProperties": {
                        **_object(undoing.KEYS, {**dict.fromkeys(undoing.KEYS, _TEXT), "body": {}}),
                        "anyOf": [{"required": ["compensate"]}, {"required": ["keep", "put_back"]}],
                    },
                },
            },
            ("base",),
        ),
        _resource(
            "object",
            {
                "driver": _TEXT,
                "options": {
                    "type": "object",
                    "additionalProperties": {"anyOf": [{"type": ["string", "integer", "boolean"]}, _SECRET]},
                },
                "keep_max": _SIZE,
                "timeout": _DURATION,
            },
            ("driver",),
        ),
        _resource(
            "llm",
            {
                **web,
                "protocol": _words(*resources.PROTOCOLS),
                "models": {"type": "array", "items": _TEXT, "minItems": 1},
                "price": _object(resources.KEYS["price"], {"input": number, "output": number}),
                "max_output": _COUNT,
                "limit_key": _words(*resources.LIMIT_KEYS),
                "tokenizer": _tokenizer(),
                "effect": _words(*resources.LLM_EFFECTS),
            },
            ("base",),
        ),
    ]


def kernel_schema() -> Schema:
    """The schema of the operator's file."""
    role = _object(
        kernel_file.KEYS["role"],
        {
            "roles": _NAMES,
            "environment": _NAME,
            "allow": _RULES,
            "ask": _RULES,
            "deny": _RULES,
            "when": _when(),
        },
    )
    ceilings = _object(
        kernel_file.KEYS["ceilings"],
        {
            "deny": _RULES,
            "ask": _RULES,
            "when": _when(),
            "budgets": _budgets(),
            "approvals": _object(approving.KEYS, _PEOPLE),
        },
    )
    spec = _object(
        kernel_file.KEYS["spec"],
        {
            "resources": {"type": "object", "additionalProperties": {"oneOf": _kinds()}},
            "ceilings": ceilings,
            "roles": {"type": "object", "additionalProperties": role},
            "untaint": _RULES,
            "sandbox": _sandbox(kernel_file.KEYS["sandbox"], docker=_docker(), remote=_remote()),
            "budgets": _pools(),
            "webhooks": {"type": "object", "additionalProperties": schema_outreach.webhook()},
            "callback": schema_outreach.callback(),
            "a2a": schema_outreach.a2a(),
            "scheduler": scheduler_schema(),
            "retention": retention_schema(),
        },
    )
    return _file("Kernel", kernel_file.KEYS[""], {"spec": spec}, ("spec",))
