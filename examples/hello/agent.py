"""Greets everybody in names.txt, each once, however often it is killed on the way."""

from ringfence import agent

with agent.boot() as rf:
    state = rf.checkpoint.restored
    if state is None:  # set-up: after a restart only those calls may come that followed the save
        state = {"next": 0, "names": rf.fs.read_text("names.txt").splitlines()}
    for number in range(state["next"], len(state["names"])):
        greeting = f"Hello {state['names'][number]}, it is {rf.now():%H:%M} UTC.\n"
        rf.fs.append_text("out/greetings.md", greeting)
        with rf.state.transaction() as tx:
            tx.put("hello/greeted", tx.get("hello/greeted", 0) + 1)
        rf.checkpoint.save({**state, "next": number + 1})
        print(greeting, end="", flush=True)
    print(f"{rf.state.get('hello/greeted')} greeted in all")
