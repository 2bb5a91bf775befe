"""Writes the manifest of an agent that another agent starts. It is read like any other: `parse_manifest` has the last word."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

from ringfence.policy.reader import API_VERSION
from ringfence.policy.rules import parse_rule

_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*", re.ASCII)
_VERDICTS: Final = ("allow", "ask", "deny")


class _Line(str):
    """A rule in its own one-line form, to be written as it stands."""

    __slots__ = ()


def write_manifest(name: str, labels: Mapping[str, str], spec: Mapping[str, Any]) -> str:
    """Write a manifest.

    Args:
        name: of the agent.
        labels: its labels.
        spec: sections by key; a rule is a mapping as in a manifest, or a text as `ringfence grant` takes it. What is None or
            empty is left out.

    Raises:
        ManifestError: a rule that is written as text is none.
    """
    sections = {key: value for key, value in spec.items() if value is not None and value not in ({}, [], "")}
    permissions: object = sections.get("permissions")
    if isinstance(permissions, dict):
        sections["permissions"] = _rules(cast("dict[str, Any]", permissions))
    metadata: dict[str, Any] = {"name": name}
    if labels:
        metadata["labels"] = dict(labels)
    whole = {"apiVersion": API_VERSION, "kind": "Agent", "metadata": metadata, "spec": sections}
    return "\n".join(_mapping(whole, 0)) + "\n"


def _rules(permissions: dict[str, Any]) -> dict[str, Any]:
    written = dict(permissions)
    for verdict in _VERDICTS:
        rules: object = written.get(verdict)
        if isinstance(rules, list):
            written[verdict] = [
                _Line(parse_rule(rule, verdict).text) if isinstance(rule, str) else rule
                for rule in cast("list[Any]", rules)
            ]
    return written


def _mapping(value: Mapping[str, Any], depth: int) -> list[str]:
    lines: list[str] = []
    for key, inner in value.items():
        head = "  " * depth + (key if _PLAIN.fullmatch(key) else json.dumps(key, ensure_ascii=False)) + ":"
        if isinstance(inner, dict) and inner:
            lines += [head, *_mapping(cast("dict[str, Any]", inner), depth + 1)]
        elif isinstance(inner, list) and inner:
            lines += [head, *(f"{'  ' * (depth + 1)}- {_flow(item)}" for item in cast("list[Any]", inner))]
        else:
            lines.append(f"{head} {_flow(inner)}")
    return lines


def _flow(value: Any) -> str:
    # JSON is YAML: what stands in quotes can't end a line or begin a key.
    return str(value) if isinstance(value, _Line) else json.dumps(value, ensure_ascii=False)
