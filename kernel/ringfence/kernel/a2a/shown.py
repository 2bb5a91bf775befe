"""Tasks, events and cards as A2A has them, made of what the database knows. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from a2a.types import a2a_pb2 as pb
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Value
from ringfence.kernel.journal.store_tasks import TaskEvent, TaskRecord
from ringfence.kernel.thread import FINAL_STATES
from ringfence.kernel.waits import CREDENTIAL
from ringfence.policy.manifest_types import Serve

STATES: Final[dict[str, pb.TaskState]] = {
    "submitted": pb.TASK_STATE_SUBMITTED,
    "working": pb.TASK_STATE_WORKING,
    "input-required": pb.TASK_STATE_INPUT_REQUIRED,
    "auth-required": pb.TASK_STATE_AUTH_REQUIRED,
    "completed": pb.TASK_STATE_COMPLETED,
    "failed": pb.TASK_STATE_FAILED,
    "canceled": pb.TASK_STATE_CANCELED,
    "rejected": pb.TASK_STATE_REJECTED,
}
OVER: Final = frozenset({"completed", "failed", "canceled", "rejected"})
ASKS: Final = frozenset({"input-required", "auth-required"})
_MODES: Final = ("text/plain", "application/json")


def parts_of(message: pb.Message) -> list[dict[str, Any]]:
    """A message's parts as JSON."""
    return [MessageToDict(part) for part in message.parts]


def now_state(task: TaskRecord) -> tuple[str, str]:
    """The state that a client is shown, and why where it isn't what the agent said last."""
    if task.state in OVER:
        return task.state, ""
    if task.agent_state in FINAL_STATES:
        return "failed", f"the agent has ended ({task.agent_state}); ask its operator"
    if task.approval is not None and task.state not in ASKS:
        # What the call is about is the operator's to know.
        return (
            "input-required",
            f"a person on the agent's side has to approve a call (`{task.approval['action']}`)",
        )
    if task.agent_state == "waiting" and task.waits.startswith(CREDENTIAL) and task.state not in ASKS:
        # The secret's name is the operator's to know.
        lacks = task.waits.removeprefix(CREDENTIAL)
        return (
            "auth-required",
            f"the agent's side lacks a credential for `{lacks}`; its operator has to set it",
        )
    return task.state, ""


def as_of(task: TaskRecord, events: Sequence[TaskEvent]) -> TaskRecord:
    """The task as it stood after these entries, which were read after it: what they say is not told once more as a change of it."""
    if events and events[-1].seq > task.events:
        return replace(task, state=events[-1].state, events=events[-1].seq)
    return task


def _part(event: TaskEvent) -> pb.Part:
    if event.is_json:
        value = ParseDict(msgspec.json.decode(event.body or "null"), Value())
        return pb.Part(data=value, media_type="application/json")
    return pb.Part(text=event.body or "", media_type="text/plain")


def said(task: TaskRecord, event: TaskEvent) -> pb.Message | None:
    """What an entry says as a message; None: nothing."""
    if event.kind == "asked":
        parts = [ParseDict(part, pb.Part()) for part in msgspec.json.decode(event.body or "[]")]
        role = pb.ROLE_USER
    elif event.kind == "told" and event.body is not None:
        parts, role = [_part(event)], pb.ROLE_AGENT
    else:
        return None
    return pb.Message(
        message_id=f"{task.id}-{event.seq}", task_id=task.id, context_id=task.context, role=role, parts=parts
    )


def artifact(task: TaskRecord, event: TaskEvent) -> pb.Artifact:
    """A result."""
    del task
    return pb.Artifact(artifact_id=f"{event.seq}", name=event.artifact, parts=[_part(event)])


def status(task: TaskRecord, state: str, message: pb.Message | None, at: Any = None) -> pb.TaskStatus:
    """How it stands."""
    made = pb.TaskStatus(state=STATES[state])
    if message is not None:
        made.message.CopyFrom(message)
    made.timestamp.FromDatetime(at or task.updated_at)
    return made


def status_now(task: TaskRecord, events: Sequence[TaskEvent]) -> pb.TaskStatus:
    """How it stands now, with what was said to it last."""
    state, why = now_state(task)
    if why:
        note = pb.Message(
            message_id=f"{task.id}-{task.events}-{state}",
            task_id=task.id,
            context_id=task.context,
            role=pb.ROLE_AGENT,
            parts=[pb.Part(text=why, media_type="text/plain")],
        )
        return status(task, state, note)
    last = next((event for event in reversed(events) if event.kind != "result"), None)
    told = said(task, last) if last is not None and last.kind == "told" else None
    return status(task, state, told)


def whole(task: TaskRecord, events: Sequence[TaskEvent], *, artifacts: bool = True) -> pb.Task:
    """A task with its history and results."""
    history = [message for event in events if (message := said(task, event)) is not None]
    return pb.Task(
        id=task.id,
        context_id=task.context,
        status=status_now(task, events),
        history=history,
        artifacts=[artifact(task, event) for event in events if event.kind == "result"] if artifacts else [],
    )


def told_of(
    task: TaskRecord, event: TaskEvent
) -> list[pb.TaskStatusUpdateEvent | pb.TaskArtifactUpdateEvent]:
    """What a stream says of one entry."""
    found: list[pb.TaskStatusUpdateEvent | pb.TaskArtifactUpdateEvent] = []
    if event.kind == "result":
        result = artifact(task, event)
        found.append(
            pb.TaskArtifactUpdateEvent(
                task_id=task.id, context_id=task.context, artifact=result, append=False, last_chunk=True
            )
        )
    if event.kind != "result" or event.state in OVER | ASKS:
        message = said(task, event) if event.kind == "told" else None
        found.append(
            pb.TaskStatusUpdateEvent(
                task_id=task.id, context_id=task.context, status=status(task, event.state, message, event.at)
            )
        )
    return found


def card(name: str, serve: Serve, url: str, version: str, *, push: bool) -> pb.AgentCard:
    """What an agent says of itself."""
    about = serve.description or f"The agent {name}."
    skills = [
        pb.AgentSkill(id=one.id, name=one.name, description=one.description, tags=one.tags or (name,))
        for one in serve.skills
    ] or [pb.AgentSkill(id=name, name=name, description=about, tags=(name,))]
    bearer = pb.SecurityScheme(http_auth_security_scheme=pb.HTTPAuthSecurityScheme(scheme="bearer"))
    return pb.AgentCard(
        name=name,
        description=about,
        version=version,
        supported_interfaces=[
            pb.AgentInterface(url=url, protocol_binding=binding, protocol_version="1.0")
            for binding in ("JSONRPC", "HTTP+JSON")
        ],
        capabilities=pb.AgentCapabilities(streaming=True, push_notifications=push, extended_agent_card=False),
        security_schemes={"bearer": bearer},
        security_requirements=[pb.SecurityRequirement(schemes={"bearer": pb.StringList()})],
        default_input_modes=_MODES,
        default_output_modes=_MODES,
        skills=skills,
    )
