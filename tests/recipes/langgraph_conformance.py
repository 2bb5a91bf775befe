"""Runs in a sandbox: LangGraph's own conformance tests of savers, against the kernel's, by way of what is saved.

Before each look the saver forgets all, and takes what was saved last: so it is what a restart gets that is tested.
"""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from typing import Any, TypedDict

from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.graph import START, StateGraph
from ringfence.agent.langgraph import RingfenceSaver, saver


class Sums(TypedDict, total=False):
    """What a small graph hands on."""

    total: int
    old: int


class Forgetful(RingfenceSaver):
    """A saver that is restarted before each look."""

    def get_tuple(self, config: Any) -> Any:
        self.load(json.loads(json.dumps(self.dump())))
        return super().get_tuple(config)

    def list(self, config: Any, **more: Any) -> Any:
        self.load(json.loads(json.dumps(self.dump())))
        return super().list(config, **more)


def shortened(first: RingfenceSaver) -> list[Any]:
    """What a saver keeps of five runs that keeps two checkpoints, and the state that it gives back."""
    made = Forgetful(first._session, history=2, each_change=True)
    made._lane = first._lane
    made.load({"checkpoints": [], "writes": [], "blobs": []})
    builder = StateGraph(Sums)
    builder.add_node("add", lambda sums: {"total": sums["total"] + 1, "old": sums.get("old", 0)})
    builder.add_edge(START, "add")
    graph, config = builder.compile(checkpointer=made), {"configurable": {"thread_id": "t"}}
    for old in range(5):
        graph.invoke({"total": old, "old": old}, config)
    kept = made.dump()
    return ["kept", graph.get_state(config).values, len(kept["checkpoints"]), len(kept["blobs"]) < 20]


def beside(first: RingfenceSaver) -> list[Any]:
    """How often it is saved by a graph that runs while another is in the middle of a superstep, and by one after that."""
    saves: list[int] = []

    class Counting(RingfenceSaver):
        def _save(self) -> None:
            saves.append(1)
            super()._save()

    made = Counting(first._session)
    made._lane = first._lane
    begun, go = threading.Event(), threading.Event()

    def wait(sums: Sums) -> Sums:
        if sums.get("old"):
            begun.set()
            go.wait(60)
        return {}

    builder = StateGraph(Sums)
    builder.add_node("wait", wait)
    builder.add_edge(START, "wait")
    graph = builder.compile(checkpointer=made)

    def run(name: str, old: int) -> int:
        before = len(saves)
        graph.invoke({"old": old}, {"configurable": {"thread_id": name}}, durability="sync")
        return len(saves) - before

    other = threading.Thread(target=run, args=("a", 1))
    other.start()
    begun.wait(60)
    meanwhile = run("b", 0)
    go.set()
    other.join()
    return ["beside", meanwhile, run("c", 0)]


async def main() -> None:
    with saver(history=None) as first:

        @checkpointer_test(name="ringfence")
        async def tested() -> AsyncGenerator[RingfenceSaver, None]:
            made = Forgetful(first._session, history=None)
            made._lane = first._lane  # one program has one lane
            made.load({"checkpoints": [], "writes": [], "blobs": []})
            yield made

        report = await validate(tested)
        print(json.dumps(shortened(first)))
        print(json.dumps(beside(first)))
    for name, result in report.results.items():
        print(json.dumps([name, result.passed, result.tests_passed, result.failures]))


asyncio.run(main())
