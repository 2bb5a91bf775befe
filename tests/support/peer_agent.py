"""An agent of the official A2A package for tests, over HTTP. Every message leaves a line in a file; what it does follows from the text."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvicorn
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes.agent_card_routes import create_agent_card_routes
from a2a.server.routes.jsonrpc_routes import create_jsonrpc_routes
from a2a.server.routes.rest_routes import create_rest_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import a2a_pb2 as pb
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Value
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

PLACE, PORT = Path(sys.argv[1]), int(sys.argv[2])
BASE = f"http://127.0.0.1:{PORT}"


def interface(url: str, binding: str = "JSONRPC", version: str = "1.0") -> pb.AgentInterface:
    return pb.AgentInterface(url=url, protocol_binding=binding, protocol_version=version)


CARD = pb.AgentCard(
    name="Oracle",
    description="Knows things.",
    version="1",
    supported_interfaces=[interface("http://127.0.0.1:9/elsewhere"), interface(f"{BASE}/rpc")],
    capabilities=pb.AgentCapabilities(streaming=True),
    default_input_modes=["text/plain"],
    default_output_modes=["text/plain"],
    skills=[
        pb.AgentSkill(id=one, name=one.title(), description=f"Does {one}.", tags=["test"])
        for one in ("lookup", "erase")
    ],
)


class Oracle(AgentExecutor):
    """Does what it is told."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Work on a message."""
        message = context.message
        assert message is not None
        assert context.task_id is not None
        assert context.context_id is not None
        word = context.get_user_input().partition(" ")[0]
        said = MessageToDict(message)
        with (PLACE / "deliveries").open("a") as file:
            file.write(json.dumps(said) + "\n")
        if word == "hang":
            await asyncio.Event().wait()
        if word == "hello":
            reply = pb.Message(message_id="r", role=pb.ROLE_AGENT, parts=[pb.Part(text="hello yourself")])
            await event_queue.enqueue_event(reply)
            return
        if context.current_task is None:
            task = pb.Task(id=context.task_id, context_id=context.context_id)
            task.status.state = pb.TASK_STATE_SUBMITTED
            task.history.append(message)
            await event_queue.enqueue_event(task)
        at = TaskUpdater(event_queue, context.task_id, context.context_id)
        await at.start_work()
        await self._work(word, at, context)

    async def _work(self, word: str, at: TaskUpdater, context: RequestContext) -> None:
        if word == "ask":
            await at.requires_input(at.new_agent_message([pb.Part(text="which one?")]))
            return
        if word == "auth":
            await at.requires_auth(at.new_agent_message([pb.Part(text="log in")]))
            return
        while word == "wait" and not (PLACE / "go").exists():
            await asyncio.sleep(0.02)
        headers = {str(k): str(v) for k, v in context.call_context.state.get("headers", {}).items()}
        data: dict[str, Any] = {"headers": headers, "said": context.get_user_input()}
        await at.add_artifact([pb.Part(data=ParseDict(data, Value()))], name="answer")
        await at.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """End a task."""
        assert context.task_id is not None
        assert context.context_id is not None
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


async def shown(card: pb.AgentCard) -> pb.AgentCard:
    """The card, with a description that tests can change."""
    file = PLACE / "description"
    if file.exists():
        now = pb.AgentCard()
        now.CopyFrom(card)
        now.description = file.read_text()
        return now
    return card


async def away(request: Request) -> Response:
    """Sends whoever comes elsewhere."""
    del request
    return RedirectResponse(f"{BASE}/rpc", status_code=307)


async def told(request: Request) -> Response:
    """Is told of a task of somebody else; hears nothing while a file says so."""
    if (PLACE / "deaf").exists():
        (PLACE / "deaf").write_text("asked")
        return Response(status_code=503)
    with (PLACE / "told").open("a") as file:
        file.write(json.dumps({"headers": dict(request.headers), "body": await request.json()}) + "\n")
    return Response(status_code=204)


def main() -> None:
    """Serve."""
    handler = DefaultRequestHandler(Oracle(), InMemoryTaskStore(), CARD)
    other = pb.AgentCard()
    other.CopyFrom(CARD)
    del other.supported_interfaces[:]
    other.supported_interfaces.append(interface(f"{BASE}/rest", "HTTP+JSON"))
    moved = pb.AgentCard()
    moved.CopyFrom(CARD)
    del moved.supported_interfaces[:]
    moved.supported_interfaces.append(interface(f"{BASE}/away"))
    old = pb.AgentCard()
    old.CopyFrom(CARD)
    del old.supported_interfaces[:]
    old.supported_interfaces.append(interface(f"{BASE}/rpc", version="0.3"))
    path = "/.well-known/agent-card.json"
    routes = [
        *create_agent_card_routes(CARD, shown, f"/oracle{path}"),
        *create_agent_card_routes(other, None, f"/rest{path}"),
        *create_agent_card_routes(moved, None, f"/moved{path}"),
        *create_agent_card_routes(old, None, f"/old{path}"),
        *create_jsonrpc_routes(handler, "/rpc"),
        *create_rest_routes(handler, path_prefix="/rest"),
        Route("/away", away, methods=["POST"]),
        Route("/told", told, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=PORT, log_level="critical")


main()
