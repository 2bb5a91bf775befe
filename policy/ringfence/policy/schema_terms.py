"""What the JSON Schemas of both files are made of: texts, numbers with units, rules, references to secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ringfence.policy import vouching
from ringfence.policy.hearsay import VOUCHER

Schema = dict[str, Any]

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
TEXT: Final[Schema] = {"type": "string", "minLength": 1}
NAME: Final[Schema] = {"type": "string", "pattern": "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"}
NAMES: Final[Schema] = {"type": "array", "items": NAME, "uniqueItems": True}
WORD: Final[Schema] = {"type": ["string", "number", "boolean"]}
SIZE: Final[Schema] = {"type": ["string", "integer"], "description": "bytes, such as 256Mi or 1Gi"}
COUNT: Final[Schema] = {"type": ["string", "number"], "description": "a number, such as 10000 or 200k"}
DURATION: Final[Schema] = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(ms|s|m|h|d)$"}
CLOCK: Final[Schema] = {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"}
RATE: Final[Schema] = {"type": "string", "pattern": "^[0-9]+/[smhd]$"}
RULE: Final[Schema] = {
    "description": "one action with what it may be done to",
    "anyOf": [
        {"type": "string", "pattern": "^[a-z]+(\\.[a-z]+)?$"},
        {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": {
                "anyOf": [
                    TEXT,
                    {
                        "type": "object",
                        "properties": {
                            "database": TEXT,
                            "tables": {"type": "array", "items": TEXT, "minItems": 1},
                            "models": {"type": "array", "items": TEXT, "minItems": 1},
                            "peers": {"type": "array", "items": TEXT, "minItems": 1},
                            "agents": {"type": "array", "items": TEXT, "minItems": 1},
                            "names": {"type": "array", "items": TEXT, "minItems": 1},
                        },
                        "additionalProperties": False,
                    },
                ]
            },
        },
    ],
}
RULES: Final[Schema] = {"type": "array", "items": RULE}
SECRET: Final[Schema] = {
    "type": "object",
    "properties": {"secret": NAME},
    "required": ["secret"],
    "additionalProperties": False,
}


def words(*choices: str) -> Schema:
    """One of some words."""
    return {"enum": list(choices)}


def closed(keys: Sequence[str], properties: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    """An object with exactly the parser's keys; a key without a schema, or one the parser lacks, is a mistake here."""
    if set(keys) != set(properties):
        raise ValueError(f"the schema and the parser differ in {sorted(set(keys) ^ set(properties))}")
    made: Schema = {
        "type": "object",
        "properties": {key: properties[key] for key in keys},
        "additionalProperties": False,
    }
    return {**made, "required": list(required)} if required else made


def vouched() -> Schema:
    """Fields of an answer that a resource vouches for."""
    field: Schema = {"type": "string", "pattern": "^/"}
    fields: Schema = {"anyOf": [field, {"type": "array", "items": field, "minItems": 1}]}
    wanted: Schema = {"anyOf": [WORD, {"type": "array", "items": WORD, "minItems": 1}]}
    shape: dict[str, Schema] = {
        "of": field,
        "where": {"type": "object", "additionalProperties": wanted},
        "fields": fields,
        "names": fields,
        "as": {"type": "string", "pattern": f"^{VOUCHER.pattern}$"},
    }
    some: Schema = {
        **closed(vouching.KEYS, shape),
        "anyOf": [{"required": ["fields"]}, {"required": ["names"]}],
    }
    return {"anyOf": [field, some, {"type": "array", "items": {"anyOf": [field, some]}, "minItems": 1}]}
