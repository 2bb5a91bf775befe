"""Runs in a sandbox: a graph that makes one and the same payment in tasks beside each other, in a loop, and around a subgraph.

Each is meant. What tells them apart is where the graph stands, and nothing in what they ask.
"""

import json
import operator
import os
import subprocess
from typing import Annotated, Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from ringfence.agent.langgraph import saver

model = ChatOpenAI(model="small-1")


class Books(TypedDict, total=False):
    """What the nodes hand on."""

    paid: Annotated[list[str], operator.add]


def pay(name: str) -> Books:
    """The same payment each time."""
    call = ["rf-call", "http.post", json.dumps({"url": f"{os.environ['BANK']}/pay"})]
    done = json.loads(subprocess.run(call, check=True, stdout=subprocess.PIPE).stdout)
    return {"paid": [f"{name} {done['status']}"]}


def left(_: Books) -> Books:
    """One of two tasks of a superstep."""
    return pay("left")


def right(_: Books) -> Books:
    """The other, which pays twice."""
    return {"paid": pay("right")["paid"] + pay("right")["paid"]}


def loop(_: Books) -> Books:
    """Asks the same and pays the same in each turn."""
    return pay(str(model.invoke("What next?").content))


def again(books: Books) -> str:
    """Three turns."""
    return "loop" if len(books["paid"]) < 6 else "outer"


def inner(_: Books) -> Books:
    """The node of the subgraph."""
    return pay("inner")


below = StateGraph(Books)
below.add_node("inner", inner)
below.add_node("second", inner)
for one, next_one in ((START, "inner"), ("inner", "second"), ("second", END)):
    below.add_edge(one, next_one)
subgraph = below.compile()


def outer(_: Books) -> Books:
    """Pays before the subgraph and behind it."""
    before = pay("outer")["paid"]
    within: Any = subgraph.invoke({"paid": []})
    return {"paid": before + within["paid"] + pay("outer")["paid"]}


builder = StateGraph(Books)
for node in (left, right, loop, outer):
    builder.add_node(node.__name__, node)
for one, next_one in ((START, "left"), (START, "right"), ("outer", END)):
    builder.add_edge(one, next_one)
builder.add_edge(["left", "right"], "loop")
builder.add_conditional_edges("loop", again, ["loop", "outer"])

with saver() as checkpointer:
    graph = builder.compile(checkpointer=checkpointer)
    config: Any = {"configurable": {"thread_id": "books"}}
    begun = checkpointer.get_tuple(config) is not None
    durability: Any = os.environ.get("DURABILITY", "sync")
    books = graph.invoke(None if begun else {"paid": []}, config, durability=durability)
    print(json.dumps(books["paid"]))
