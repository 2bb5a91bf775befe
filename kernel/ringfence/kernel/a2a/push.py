"""Tells clients of their tasks where they asked for it: entry by entry, in order, at least once, and each time with the same id.

What was taken is counted by one number for each place, in the database, so a kernel that dies loses nothing and the next one goes on.
INVARIANT: nothing is sent to a URL that the kernel file in force does not allow, whenever it was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec
from a2a.utils.proto_utils import to_stream_response
from google.protobuf.json_format import MessageToDict
from ringfence.kernel.a2a import shown
from ringfence.kernel.config import VERSION
from ringfence.kernel.journal.types import JournalError
from ringfence.kernel.webhooks import AGE_S_MAX, AT_ONCE, LEASE_S, POLL_S, Refused, delay_s, post
from ringfence.policy.serving import may_push
from ringfence.syscalls.redaction import redactor_for

if TYPE_CHECKING:
    from ringfence.kernel.journal.store_pushes import PushRecord
    from ringfence.kernel.journal.store_tasks import TaskRecord
    from ringfence.kernel.operations.kernel import Kernel

log = logging.getLogger(__name__)

EVENTS_AT_ONCE: Final = 16
"""Entries that are told one after the other before others have their turn."""


class Pushes:
    """The telling of this kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, with what an earlier kernel left too."""
        self._task = asyncio.create_task(self._serve(), name="ringfence a2a push")

    async def stop(self) -> None:
        """Send nothing any more; what is under way is sent again by the next kernel."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _serve(self) -> None:
        with contextlib.suppress(JournalError):
            await self._kernel.core.store.push_hurry()
        while True:
            due: list[PushRecord] = []
            declared = self._kernel.ownership.resources.file.a2a
            try:
                if declared is not None and declared.push:
                    due = await self._kernel.core.store.push_claim(AT_ONCE, LEASE_S)
                    await asyncio.gather(*(self._tell(one) for one in due))
            except JournalError as error:
                log.warning("clients of a2a can't be told now: %s", error)
                due = []
            except Exception:
                # One task that can't be told must not end the telling of all others.
                log.exception("a bug kept clients of a2a from being told")
                due = []
            if not due:
                await asyncio.sleep(POLL_S)

    async def _tell(self, one: PushRecord) -> None:
        store = self._kernel.core.store
        try:
            # Shorter than the lease: nobody else begins meanwhile.
            async with asyncio.timeout(LEASE_S * 0.75):
                await self._entries(one)
        except TimeoutError:
            await store.push_failed(one, 0.0, "it is slow", over=False)
        except Refused as refused:
            if one.attempts == 1:
                log.warning("a client was not told of the task %s: %s", one.task, refused)
            pause, late = delay_s(one.attempts, refused.retry_after_s), one.failing_s > AGE_S_MAX
            await store.push_failed(one, pause, str(refused)[:500], over=late)

    async def _entries(self, one: PushRecord) -> None:
        store = self._kernel.core.store
        task = next(iter(await store.tasks(one.client, ids=[one.task], limit=1)), None)
        if task is None:
            return
        events = await store.task_events(one.task, one.seen, EVENTS_AT_ONCE)
        for event in events:
            for number, said in enumerate(shown.told_of(task, event) if event.kind != "asked" else ()):
                await self._post(one, f"{one.task}.{event.seq}.{number}", said)
            await store.push_told(one, event.seq, over=event.state in shown.OVER)
        state, why = shown.now_state(task)
        if not events and why and state in shown.OVER:
            # Nobody wrote that down: its agent has ended.
            await self._post(one, f"{one.task}.end", self._ended(task))
            await store.push_told(one, one.seen, over=True)

    @staticmethod
    def _ended(task: TaskRecord) -> Any:
        status = shown.status_now(task, ())
        return shown.pb.TaskStatusUpdateEvent(task_id=task.id, context_id=task.context, status=status)

    async def _post(self, one: PushRecord, ident: str, said: Any) -> None:
        """Post one entry.

        Raises:
            Refused: it was not taken.
        """
        declared = self._kernel.ownership.resources.file.a2a
        if declared is None or not may_push(declared, one.url):
            raise Refused("the kernel file does not allow this address any more")
        hide = redactor_for(self._kernel.ownership.resources, ())
        headers = {
            "content-type": "application/json",
            "user-agent": f"ringfence/{VERSION}",
            "webhook-id": f"{ident}.{one.id}",
        }
        if one.token:
            headers["x-a2a-notification-token"] = one.token
        if one.scheme and one.credentials:
            headers["authorization"] = f"{one.scheme} {one.credentials}"
        # INVARIANT: no secret of the kernel leaves it, whatever an agent told its client.
        body = msgspec.json.encode(hide.value(MessageToDict(to_stream_response(said))))
        await post(httpx.Request("POST", one.url, headers=headers, content=body), "a2a push", (), hide)
