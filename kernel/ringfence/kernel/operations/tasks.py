"""What A2A clients do with agents: give them tasks, answer in one, cancel one. Each message once, from `a2a:CLIENT`, and never trusted."""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from dataclasses import dataclass
from typing import Any, Final

from ringfence.kernel.journal.types import AgentKey, AgentRecord, BadRow, Entry, Phase, Row
from ringfence.kernel.mailboxes import woken_by
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.problems import Problem, bad_usage
from ringfence.kernel.thread import FINAL_STATES
from ringfence.policy.hooks import HookDecl
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.manifest_types import Serve
from ringfence.policy.problems import ManifestError
from ringfence.syscalls.base import Work
from ringfence.syscalls.codec import canonical_json, holds_nul
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.messages_send import MAILBOX_MESSAGES_MAX, body_of
from ringfence.syscalls.tasks_update import BYTES_MAX, EVENTS_MAX

OPEN_MAX: Final = 1000
"""Tasks of one agent that have not ended."""


class _Refused(Exception):
    """Nothing was done: what the database answered."""

    def __init__(self, done: dict[str, Any]) -> None:
        super().__init__()
        self.done = done


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One message of a client.

    Attributes:
        message_id: the client's id of it.
        task: which it goes on with; empty: it begins one.
        context: what several tasks belong to; empty: a new one.
        parts: as the client sent them, JSON.
        text: what of them is text.
    """

    message_id: str
    parts: list[dict[str, Any]]
    text: str
    task: str = ""
    context: str = ""


def served(record: AgentRecord) -> Serve | None:
    """What an agent's card says; None: it takes no tasks."""
    return _served(record.manifest, record.source)


@functools.lru_cache(maxsize=256)
def _served(manifest: str, source: str) -> Serve | None:
    # Asked with each request, of a text that never changes.
    try:
        return parse_manifest(manifest, source).serve
    except ManifestError:
        return None


async def agent_of(kernel: Kernel, name: str, client: HookDecl | None) -> tuple[AgentRecord, Serve]:
    """The agent that is meant, of those that take tasks and that this client reaches: of several with a name the one that has not ended.

    Args:
        kernel: this one.
        name: name or id.
        client: who asks; None: anybody, for the card.

    Raises:
        Problem: there is none, or there are several.
    """
    reached = [
        record
        for record in await kernel.core.store.agents_called(name)
        if client is None or client.reaches(record.name, record.labels)
    ]
    # Of those that have ended only the newest: a name may have had hundreds.
    meant = [record for record in reached if record.state not in FINAL_STATES] or reached[:1]
    found = [(record, serve) for record in meant if (serve := served(record)) is not None]
    if len(found) != 1:
        # INVARIANT: whoever has a client's key learns nothing of agents that it doesn't reach.
        text = f"no agent `{name[:128]}` takes tasks here, or several do"
        raise Problem(text, exit_code=4, reason="NoSuchAgent")
    return found[0]


async def ask(kernel: Kernel, client: HookDecl, record: AgentRecord, said: Ask) -> str:
    """Put a client's message into an agent's mailbox, once for each id that the client gave it; gives the task's id.

    Raises:
        Problem: the agent or the task has ended, is not there or takes no more, or the id was had with another message.
    """
    if holds_nul(said.parts):
        # Nothing that an agent could answer or store holds one: what it repeats of this would end it.
        raise bad_usage("the message holds a NUL character; send it without")
    task = said.task or f"{client.name}.{secrets.token_hex(12)}"
    context = said.context or secrets.token_hex(12)
    body = {"task": task, "context": context, "client": client.name, "text": said.text, "parts": said.parts}
    # By what the client said alone: ids that are made here differ with each try.
    about = canonical_json(
        {"agent": record.id, "task": said.task, "context": said.context, "parts": said.parts}
    )
    try:
        message = body_of(None, body)
    except InvalidRequest as error:
        raise bad_usage(error.message) from None
    values: dict[str, Any] = {
        "client": client.name,
        "to": record.id,
        "message_id": said.message_id,
        "digest": hashlib.sha256(about).hexdigest(),
        "task": task,
        "begins": not said.task,
        "context": context,
        "sender": f"a2a:{client.name}",
        "message": message,
        "is_json": True,
        "body": canonical_json(said.parts).decode(),
        "most": MAILBOX_MESSAGES_MAX,
        "open_most": OPEN_MAX,
        "events_most": EVENTS_MAX,
        "bytes_most": BYTES_MAX,
    }
    try:
        try:
            await _commit(kernel, "task_ask", "a2a.ask", record.id, values)
        except BadRow:
            # The same came twice at the same moment: then it is there now.
            await _commit(kernel, "task_ask", "a2a.ask", record.id, values)
    except _Refused as refused:
        if refused.done.get("had") == values["digest"]:
            return str(refused.done["task"])
        raise _problem(record.id, task, refused.done) from None
    return task


async def cancel(kernel: Kernel, client: HookDecl, task: str) -> None:
    """End a task for its client, and tell the agent.

    Raises:
        Problem: there is no such task of this client, or it has ended.
    """
    message = canonical_json({"task": task, "client": client.name, "cancel": True}).decode()
    values = {"client": client.name, "task": task, "sender": f"a2a:{client.name}", "message": message}
    try:
        await _commit(kernel, "task_cancel", "a2a.cancel", task, values)
    except _Refused as refused:
        raise _problem("", task, refused.done) from None


async def _commit(kernel: Kernel, statement: str, action: str, resource: str, values: dict[str, Any]) -> None:
    """Commit it, with its record on this kernel's chain."""
    row = Row(
        chain=-kernel.core.kernel,
        phase=Phase.EVENT,
        action=action,
        resource=resource,
        started_us=time.time_ns() // 1000,
    )
    told: dict[str, Any] = {}

    def finish(done: dict[str, Any]) -> bytes:
        if "task" not in done or "had" in done:
            raise _Refused(done)
        told.update(done)
        digest = hashlib.sha256(values["message"].encode()).hexdigest()
        return canonical_json({"client": values["client"], "task": done["task"], "sha256": digest})

    await kernel.core.append(Entry(row=row, atomic=Work(statement=statement, values=values), finish=finish))
    for key, owner in woken_by(told):
        kernel.core.mailboxes.announce(AgentKey(key), owner)


def _problem(agent: str, task: str, done: dict[str, Any]) -> Problem:
    if "had" in done:
        text = "the id of this message was had before, with another message; nothing was done"
        return Problem(text, exit_code=5, reason="Replayed")
    if "missing" in done:
        return Problem("the agent was removed meanwhile", exit_code=4, reason="NoSuchAgent")
    if "unknown" in done:
        return Problem(f"this client has no task `{task[:200]}` there", exit_code=4, reason="NoSuchTask")
    if "over" in done:
        return Problem(
            f"the task `{task}` has ended ({done['over']}); begin another one", exit_code=5, reason="Over"
        )
    if "ended" in done:
        text = f"the agent `{agent}` has ended ({done['state']}), and takes no tasks"
        return Problem(text, exit_code=5, reason="Ended")
    if "long" in done:
        return Problem(
            f"the task `{task}` holds {done['long']} entries; begin another one", exit_code=5, reason="Full"
        )
    if "busy" in done:
        text = f"`{agent}` has {done['busy']} tasks that have not ended; send it again later"
        return Problem(text, exit_code=5, reason="Full")
    text = f"the mailbox of `{agent}` holds {done.get('full')} messages; send it again later"
    return Problem(text, exit_code=5, reason="Full")


def part_text(parts: list[dict[str, Any]]) -> str:
    """What of a message's parts is text."""
    return "\n".join(str(part["text"]) for part in parts if "text" in part)
