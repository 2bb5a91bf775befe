"""A graph of LangGraph with its PostgreSQL saver: each step adds a message to the state, which is saved. Imports nothing of ours."""

from __future__ import annotations

import argparse
import hashlib
import json
import operator
import sys
import time
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import END, START, StateGraph


class State(TypedDict):
    """What is saved after each step."""

    messages: Annotated[list[dict[str, Any]], operator.add]


def note(number: int) -> dict[str, Any]:
    """What a step brings: 400 characters that no packing makes much shorter."""
    return {"role": "tool", "page": number, "text": hashlib.shake_256(b"%d" % number).hexdigest(200)}


def main() -> None:
    """Parse the command line, make some steps, wait for a word, and make the steps that are measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--behind", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    took: list[float] = []
    last = 0.0

    def work(state: State) -> dict[str, Any]:
        nonlocal last
        now = time.perf_counter()
        if last:
            took.append(now - last)
        last = now
        return {"messages": [note(len(state["messages"]))]}

    end_at = options.behind + options.count
    graph: Any = StateGraph(State)
    graph.add_node("work", work)
    graph.add_edge(START, "work")
    graph.add_conditional_edges("work", lambda state: END if len(state["messages"]) >= end_at else "work")
    with PostgresSaver.from_conn_string(options.dsn) as saver:
        saver.setup()
        app = graph.compile(checkpointer=saver)
        config = {"configurable": {"thread_id": f"b{options.behind}"}, "recursion_limit": end_at + 10}
        # The history is there from the start: only what is measured runs.
        app.update_state(config, {"messages": [note(number) for number in range(options.behind)]})
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        app.invoke({"messages": []}, config, durability="sync")
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "p50_ms": sorted(took)[len(took) // 2] * 1e3}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
