"""Writes down what changed in a directory since its last run; runs by a schedule."""

from __future__ import annotations

from ringfence import agent

with agent.boot() as rf:
    known: dict[str, int] = rf.state.get("nightly/known", {})
    found = {entry.path: entry.size_bytes for entry in rf.fs.list("inbox")}
    fresh = sorted(path for path in found if known.get(path) != found[path])
    gone = sorted(path for path in known if path not in found)
    when = f"{rf.now():%Y-%m-%d %H:%M} UTC"
    rf.fs.append_text("out/log.md", f"- {when}: {len(fresh)} new or changed, {len(gone)} gone\n")
    rf.state.put("nightly/known", found)
    print(f"{when}: {fresh or 'nothing new'}", flush=True)
