"""Writes a press note with a model, sends it once a person agrees, then proofreads without end."""

from __future__ import annotations

import json
import sys

from ringfence import agent

PROOFS = 60


def main() -> None:
    """Write, send, proofread."""
    job = json.load(sys.stdin)
    with agent.boot() as rf:
        report = rf.fs.read_text("report.md")
        reply = rf.llm.complete(
            model="press-1",
            messages=[
                {"role": "system", "content": "You write short press notes about software inventories."},
                {"role": "user", "content": f"Write one about this report:\n\n{report}"},
            ],
            max_tokens=200,
        )
        rf.fs.write_text("note.md", reply.text)
        # A rule asks about this: the call waits for a person, over the death of this process and of the kernel.
        rf.http.post(f"{job['desk']}/press", json={"note": reply.text}).raise_for_status()
        # A loop that nobody meant to be so long; the budget stops it, and a person may let it go on.
        for number in range(PROOFS):
            rf.state.put("press/proofs", number + 1)


if __name__ == "__main__":
    main()
