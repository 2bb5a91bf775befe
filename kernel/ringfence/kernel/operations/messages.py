"""What operators send to agents."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from ringfence.kernel.journal.types import AgentKey, Entry, Phase, Row
from ringfence.kernel.mailboxes import woken_by
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.problems import Problem, bad_usage
from ringfence.syscalls import messages_send
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import InvalidRequest, NoSuchResource


async def send(kernel: Kernel, agent: str, text: str | None, raw: bytes, *, operator: str) -> dict[str, Any]:
    """Put a message into an agent's mailbox, with its record in the audit chain of this kernel.

    Raises:
        Problem: no such agent, or the message can't be one.
    """
    value: Any = None
    if text is None:
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_usage(f"the message is no JSON: {error}; send one JSON value") from None
    if "\0" in (text or "") or "\0" in agent:
        raise bad_usage("a message can't hold a NUL character; send text without it")
    sender = f"operator:{operator}"
    row = Row(
        chain=-kernel.core.kernel,
        phase=Phase.EVENT,
        action="operator.send",
        resource=agent,
        started_us=time.time_ns() // 1000,
    )
    woken: list[tuple[int, int | None]] = []

    def finish(done: dict[str, Any]) -> bytes:
        sent = messages_send.check(agent, done)
        woken[:] = woken_by(sent)
        return canonical_json(
            {
                "operator": operator,
                "message": f"m{sent['message']}",
                "to": sent["to"],
                "text": text,
                "json": value,
            }
        )

    try:
        work = messages_send.work(agent, text, value, sender)
        sent = await kernel.core.append(Entry(row=row, atomic=work, finish=finish))
    except NoSuchResource as error:
        raise Problem(error.message, exit_code=4, reason="NoSuchAgent") from error
    except InvalidRequest as error:
        raise bad_usage(error.message) from error
    for key, owner in woken:
        kernel.core.mailboxes.announce(AgentKey(key), owner)
    return {"id": f"m{sent['message']}", "to": sent["to"], "from": sender}
