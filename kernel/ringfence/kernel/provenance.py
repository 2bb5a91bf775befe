"""Where the arguments of a call come from: earlier results of the thread in which they stand word for word.

It is looked up when a person asks, from the journal alone: a call pays nothing for it. What a program composed by itself
is found nowhere, and says so by its absence.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from ringfence.kernel.facts import marks_of
from ringfence.kernel.journal.blobs import BlobError
from ringfence.policy.when import READS

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.journal.types import AgentKey, StoredRow

CHARS_MIN: Final = 6
"""Shortest argument that is looked for: shorter ones stand everywhere."""

STRINGS_MAX: Final = 64
ROWS_MAX: Final = 5000
BLOB_BYTES_MAX: Final = 1 << 20
SHOWN_CHARS: Final = 80

_SOURCES: Final = READS | {"messages.receive", "artifacts.get", "llm.complete", "exec.run", "ask"}
_OTHERS: Final = frozenset({"http.post", "http.put", "http.patch", "http.delete", "sql.write"})
_BYTES: Final = frozenset({"data", "body", "stdout", "stderr"})


async def provenance(
    core: Core, chain: AgentKey, lineage: Sequence[tuple[int, int]], before: int, arguments: bytes
) -> list[dict[str, Any]]:
    """For each argument that an earlier result holds: where it stands, and the first step that read it.

    Args:
        core: the kernel.
        chain: the agent's.
        lineage: (branch, last step that counts) of the call's branch and its ancestors.
        before: step of the call.
        arguments: canonical JSON.

    Returns:
        Dicts with `argument` (a JSON pointer), `text`, `step`, `action`, `resource` and `untrusted`.

    Raises:
        Unavailable: the database is away.
    """
    wanted = dict(_wanted(arguments))
    found: dict[str, dict[str, Any]] = {}
    if not wanted:
        return []
    # INVARIANT: bounded: of a long past only the newest part is looked through.
    async for row in core.store.lineage_outcomes(chain, lineage, max(0, before - ROWS_MAX)):
        if row.step >= before or len(found) == len(wanted):
            break
        if row.outcome != "ok" or row.action not in _SOURCES | _OTHERS:
            continue
        texts = list(_texts(_result(core, row)))
        marks = marks_of(row.body)
        for pointer, text in wanted.items():
            if pointer not in found and any(text in held for held in texts):
                found[pointer] = {
                    "argument": pointer,
                    "text": text[:SHOWN_CHARS],
                    "step": row.step,
                    "action": row.action,
                    "resource": row.resource,
                    "untrusted": marks is not None and bool(marks.taints or marks.tainted),
                }
    return [found[pointer] for pointer in wanted if pointer in found]


def _wanted(arguments: bytes) -> Iterator[tuple[str, str]]:
    """Arguments that are looked for, by where they stand; a request's JSON body is looked into."""
    given: dict[str, Any] = json.loads(arguments)
    body = given.get("body")
    if isinstance(body, str):
        given["body"] = _unpacked(body)
        try:
            given["json"] = json.loads(given["body"])
            del given["body"]
        except ValueError:
            pass
    if isinstance(given.get("data"), str):
        given["data"] = _unpacked(given["data"])
    for nr, (pointer, text) in enumerate(_strings(given, "")):
        if nr == STRINGS_MAX:
            return
        yield pointer, text


def _strings(value: object, pointer: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if len(value.strip()) >= CHARS_MIN:
            yield pointer, value.strip()
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, object]", value).items():
            yield from _strings(inner, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(value, list):
        for nr, inner in enumerate(cast("list[object]", value)):
            yield from _strings(inner, f"{pointer}/{nr}")


def _result(core: Core, row: StoredRow) -> object:
    body: dict[str, Any] = json.loads(row.body)
    if "artifact" not in body:
        return body.get("result")
    try:
        return (
            json.loads(core.blobs.get(body["artifact"])) if body["result_bytes"] <= BLOB_BYTES_MAX else None
        )
    except (BlobError, ValueError):
        return None


def _texts(result: object) -> Iterator[str]:
    """Every text in a result; bytes as the text they are, and JSON in them as its texts too."""
    if isinstance(result, str):
        yield result
    elif isinstance(result, Mapping):
        for key, inner in cast("Mapping[str, object]", result).items():
            if key in _BYTES and isinstance(inner, str):
                text = _unpacked(inner)
                yield text
                try:
                    parsed: object = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                yield from _texts(parsed)
            else:
                yield from _texts(inner)
    elif isinstance(result, list):
        for inner in cast("list[object]", result):
            yield from _texts(inner)


def _unpacked(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return text
