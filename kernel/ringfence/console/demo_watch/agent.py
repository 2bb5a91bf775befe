"""Looks at something once, whenever its schedule says so."""

from __future__ import annotations

from ringfence import agent

with agent.boot() as rf:
    with rf.state.transaction() as tx:
        tx.put("watch/runs", tx.get("watch/runs", 0) + 1)
    rf.fs.append_text("log.txt", f"looked at {rf.now():%H:%M:%S}\n")
