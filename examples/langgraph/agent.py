"""As the documentation of LangGraph has it: a graph of three nodes, whose checkpointer is the kernel's."""

import base64
import json
import subprocess
from pathlib import Path
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from ringfence.agent.langgraph import saver

model = ChatOpenAI(model="small-1")


class Letter(TypedDict, total=False):
    """What the nodes hand on."""

    text: str
    draft: str
    answer: str


def write(letter: Letter) -> Letter:
    """Have an answer drafted."""
    return {"draft": str(model.invoke(f"Answer this letter:\n\n{letter['text']}").content)}


def polish(letter: Letter) -> Letter:
    """Have it made shorter."""
    return {"answer": str(model.invoke(f"Say it in one sentence:\n\n{letter['draft']}").content)}


def file(letter: Letter) -> Letter:
    """Add it to the outgoing letters: an effect, so it is a call of the kernel."""
    line = base64.b64encode(f"{letter['answer']}\n".encode()).decode()
    arguments = {"path": "out/letters.md", "data": line}
    subprocess.run(["rf-call", "fs.append", json.dumps(arguments)], check=True, stdout=subprocess.DEVNULL)
    return {}


builder = StateGraph(Letter)
for node in (write, polish, file):
    builder.add_node(node.__name__, node)
for one, next_one in ((START, "write"), ("write", "polish"), ("polish", "file"), ("file", END)):
    builder.add_edge(one, next_one)

with saver() as checkpointer:
    graph = builder.compile(checkpointer=checkpointer)
    config: Any = {"configurable": {"thread_id": "quince"}}
    begun = checkpointer.get_tuple(config) is not None
    given: Letter | None = None if begun else {"text": Path("letters/quince.txt").read_text()}
    for update in graph.stream(given, config, stream_mode="updates", durability="sync"):
        print(json.dumps(update), flush=True)
