"""What systems outside put into agents' mailboxes: each delivery once, from `hook:NAME`, and never trusted."""

from __future__ import annotations

import hashlib
import re
import time
from typing import Any, Final

import msgspec
from ringfence.kernel.journal.types import AgentKey, AgentRecord, BadRow, Entry, Phase, Row
from ringfence.kernel.mailboxes import woken_by
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.problems import Problem, bad_usage
from ringfence.kernel.thread import FINAL_STATES
from ringfence.policy.hooks import HookDecl
from ringfence.syscalls.base import Work
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.messages_send import MAILBOX_MESSAGES_MAX, body_of

_AGENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class _Had(Exception):
    """This delivery is in a mailbox already: what was begun for it is undone."""

    def __init__(self, done: dict[str, Any]) -> None:
        super().__init__()
        self.done = done


async def deliver(
    kernel: Kernel, hook: HookDecl, agent: str, delivery: str, body: bytes, *, json: bool
) -> dict[str, Any]:
    """Put a message into an agent's mailbox, once for each id that its sender gave it, and wake who waits for it.

    Args:
        kernel: this one.
        hook: who sends it.
        agent: name or id of the agent.
        delivery: the sender's id of it.
        body: as it came.
        json: whether the sender calls it JSON.

    Returns:
        `{id, to, repeated}`.

    Raises:
        Problem: there is no such agent for this hook, its mailbox is full, it has ended, or the id was had with another
            message.
    """
    text, value = _read(body, json=json)
    try:
        stored = body_of(text, value)
    except InvalidRequest as error:
        raise bad_usage(error.message) from None
    record = await _receiver(kernel, hook, agent)
    digest = hashlib.sha256(agent.encode() + b"\0" + body).hexdigest()
    values = {
        "hook": hook.name,
        "id": delivery,
        "digest": digest,
        "to": record.id,
        "sender": f"hook:{hook.name}",
        "is_json": text is None,
        "body": stored,
        "most": MAILBOX_MESSAGES_MAX,
    }
    try:
        try:
            sent = await _put(kernel, record, values)
        except BadRow:
            # Another kernel was given the same at the same moment: then it is there now.
            sent = await _put(kernel, record, values)
    except _Had as had:
        if had.done["had"] != digest:
            text = f"the id `{delivery}` was had before, with another message; nothing was done"
            raise Problem(text, exit_code=5, reason="Replayed") from None
        return {"id": f"m{had.done['message']}", "to": had.done["to"], "repeated": True}
    return {"id": f"m{sent['message']}", "to": sent["to"], "repeated": False}


def _read(body: bytes, *, json: bool) -> tuple[str | None, Any]:
    """The body as text, or as a JSON value."""
    try:
        if json:
            return None, msgspec.json.decode(body)
        text = body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        what = "JSON" if json else "UTF-8"
        raise bad_usage(f"the body is no {what}; send what `content-type` says") from None
    if "\0" in text:
        raise bad_usage("a message can't hold a NUL character; send text without it")
    return text, None


async def _receiver(kernel: Kernel, hook: HookDecl, agent: str) -> AgentRecord:
    """The agent that is meant, of those that this hook reaches: of several with a name the one that has not ended.

    Raises:
        Problem: there is none, or there are several.
    """
    found = await kernel.core.store.agents_called(agent) if _AGENT.fullmatch(agent) is not None else []
    reached = [one for one in found if hook.reaches(one.name, one.labels)]
    live = [one for one in reached if one.state not in FINAL_STATES]
    if not reached or (len(reached) > 1 and len(live) != 1):
        # INVARIANT: whoever has a hook's key learns nothing of agents that it doesn't reach.
        text = f"the hook `{hook.name}` reaches no agent `{agent[:128]}`, or several; see who it names in the kernel file"
        raise Problem(text, exit_code=4, reason="NoSuchAgent")
    return live[0] if live else reached[0]


async def _put(kernel: Kernel, record: AgentRecord, values: dict[str, Any]) -> dict[str, Any]:
    """Commit it, with its record on this kernel's chain."""
    row = Row(
        chain=-kernel.core.kernel,
        phase=Phase.EVENT,
        action="hook.deliver",
        resource=record.id,
        started_us=time.time_ns() // 1000,
    )
    told: dict[str, Any] = {}

    def finish(done: dict[str, Any]) -> bytes:
        _check(done)
        told.update(done)
        about = {key: values[key] for key in ("hook", "id", "to")}
        size, digest = len(values["body"].encode()), hashlib.sha256(values["body"].encode()).hexdigest()
        return canonical_json({**about, "message": f"m{done['message']}", "bytes": size, "sha256": digest})

    await kernel.core.append(
        Entry(row=row, atomic=Work(statement="hook_deliver", values=values), finish=finish)
    )
    for key, owner in woken_by(told):
        kernel.core.mailboxes.announce(AgentKey(key), owner)
    return told


def _check(done: dict[str, Any]) -> None:
    if "had" in done:
        raise _Had(done)
    if "missing" in done:
        raise Problem("the agent was removed meanwhile", exit_code=4, reason="NoSuchAgent")
    if "ended" in done:
        text = f"the agent `{done['ended']}` has ended ({done['state']}), so its mailbox takes no messages"
        raise Problem(text, exit_code=5, reason="Ended")
    if "full" in done:
        text = f"the mailbox of `{done['to']}` holds {done['full']} messages; send it again later"
        raise Problem(text, exit_code=5, reason="Full")
