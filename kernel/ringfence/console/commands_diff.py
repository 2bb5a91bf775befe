"""Shows what `diff` found: files line by line, rows column by column, keys by their values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ringfence.console import render
from ringfence.console.documents import as_record, records
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.console.session import Session


def show_diff(session: Session, document: Mapping[str, Any]) -> None:
    """Print it, or the document itself."""
    if session.as_json:
        render.emit(document)
        return
    changes, rows, keys = (records(document, name) for name in ("changes", "rows", "keys"))
    for change in changes:
        render.say(f"{render.coloured(safe(change.get('kind', '')))}  {safe(change.get('path', ''))}")
        text = str(change.get("diff") or "")
        for line in text.removesuffix("\n").split("\n") if text else ():
            render.say("    " + _diff_line(safe(line)))
    for row in rows:
        render.say(f"{render.coloured(safe(row.get('kind', '')))}  row {safe(row.get('target', ''))}")
        before, after = as_record(row.get("before")), as_record(row.get("after"))
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                _sides(name, before, after)
    for key in keys:
        render.say(f"{render.coloured(safe(key.get('kind', '')))}  state {safe(key.get('key', ''))}")
        _sides("value", {"value": key.get("before")}, {"value": key.get("after")})
    if not (changes or rows or keys):
        render.note("no changes")


def _sides(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for sign, side in (("-", before), ("+", after)):
        if side.get(name) is not None:
            render.say(
                "    " + _diff_line(safe(f"{sign}{name}: {json.dumps(side[name], ensure_ascii=False)}"))
            )


def _diff_line(line: str) -> str:
    meaning = {"+": "create", "-": "remove", "@": "modify"}.get(line[:1])
    return render.coloured(line, meaning) if meaning else line
