"""Has a model summarise letters, one after the other, and keeps what it said."""

from __future__ import annotations

from ringfence import agent

with agent.boot() as rf:
    state = rf.checkpoint.restored
    if state is None:
        state = {"letters": sorted(entry.path for entry in rf.fs.list("letters")), "next": 0}
    for number in range(state["next"], len(state["letters"])):
        path = state["letters"][number]
        reply = rf.llm.complete(
            model="small-1",
            messages=[
                {"role": "system", "content": "Summarise the letter in one sentence."},
                {"role": "user", "content": rf.fs.read_text(path)},
            ],
            max_tokens=100,
        )
        rf.fs.append_text("out/summary.md", f"## {path.rpartition('/')[2]}\n\n{reply.text}\n\n")
        rf.memory.append(reply.text, tags=["letter"])
        rf.checkpoint.save({**state, "next": number + 1})
        print(f"{path}: {reply.prompt_tokens} + {reply.completion_tokens} tokens", flush=True)
