"""The JSON Schemas for editors say what the parser says."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
from ringfence.policy import kernel_file, manifest
from ringfence.policy.schema import _object, kernel_schema, manifest_schema


@pytest.mark.parametrize(("name", "made"), [("manifest", manifest_schema()), ("kernel", kernel_schema())])
def test_the_committed_schema_is_what_the_parser_makes(name: str, made: dict[str, Any]) -> None:
    text = (files("ringfence.policy") / "schemas" / f"{name}.json").read_text(encoding="utf-8")
    assert text == json.dumps(made, indent=2) + "\n"


def test_a_key_that_only_one_of_them_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="new"):
        _object(("old", "new"), {"old": {}})
    with pytest.raises(ValueError, match="extra"):
        _object(("old",), {"old": {}, "extra": {}})


def closed(schema: dict[str, Any]) -> set[tuple[str, ...]]:
    """The keys of every object in a schema that accepts no others."""
    found: set[tuple[str, ...]] = set()
    if schema.get("additionalProperties") is False:
        found.add(tuple(schema["properties"]))
    for value in schema.values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                found |= closed(inner)
    return found


@pytest.mark.parametrize(
    ("keys", "made"), [(manifest.KEYS, manifest_schema()), (kernel_file.KEYS, kernel_schema())]
)
def test_every_mapping_of_the_parser_is_in_the_schema(
    keys: dict[str, tuple[str, ...]], made: dict[str, Any]
) -> None:
    for name, wanted in keys.items():
        expected = (
            wanted
            if name
            else ("apiVersion", "kind", *(key for key in wanted if key not in {"apiVersion", "kind"}))
        )
        assert expected in closed(made), name
