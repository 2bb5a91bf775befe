"""What clients ask of one agent by A2A, answered from the database. The SDK speaks the protocol."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

from a2a.server.context import ServerCallContext
from a2a.types import a2a_pb2 as pb
from a2a.utils import errors
from a2a.utils.proto_utils import validate_proto_required_fields
from a2a.utils.task import apply_history_length, validate_history_length
from google.protobuf.json_format import SerializeToJsonError
from ringfence.kernel.a2a import shown
from ringfence.kernel.a2a.configs import PushHandler
from ringfence.kernel.journal.store_tasks import TaskEvent, TaskRecord
from ringfence.kernel.operations import tasks
from ringfence.kernel.problems import Problem
from ringfence.kernel.server.operator_door import to_problem
from ringfence.policy.hooks import HookDecl
from ringfence.syscalls.tasks_update import EVENTS_MAX

if TYPE_CHECKING:
    from ringfence.kernel.journal.types import AgentRecord
    from ringfence.kernel.operations.kernel import Kernel

log = logging.getLogger(__name__)

WAIT_S: Final = 600.0
"""How long a client that waits for the end of a task is kept; then it gets the task as it stands."""

LOOK_FIRST_S: Final = 0.1
LOOK_MAX_S: Final = 1.0
"""How often the database is looked at for who waits: at first, and when nothing comes."""

PAGE_MAX: Final = 100
PAGE_BYTES_MAX: Final = 16 << 20
"""What the tasks of one page say, after which it ends."""

MESSAGE_ID_MAX: Final = 256

Event = pb.Message | pb.Task | pb.TaskStatusUpdateEvent | pb.TaskArtifactUpdateEvent


class Handler(PushHandler):
    """The operations of A2A on one agent."""

    def __init__(self, kernel: Kernel, record: AgentRecord) -> None:
        self._kernel = kernel
        self._record = record

    # -- asking -----------------------------------------------------------------------------------------------------

    async def on_message_send(self, params: pb.SendMessageRequest, context: ServerCallContext) -> pb.Task:
        """Give the agent a task, or an answer in one; waits until it ends or asks, unless told not to."""
        validate_proto_required_fields(params)
        client = _client(context)
        validate_history_length(params.configuration)
        task = await self._asked(client, params)
        if params.configuration.return_immediately:
            return apply_history_length(await self._whole(client, task), params.configuration)
        try:
            async with asyncio.timeout(WAIT_S):
                async for _ in self._watch(client, task):
                    pass
        except TimeoutError:
            log.info("a client of the task %s waited for %g s", task, WAIT_S)
        return apply_history_length(await self._whole(client, task), params.configuration)

    async def on_message_send_stream(
        self, params: pb.SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event]:
        """The same, told as it comes."""
        validate_proto_required_fields(params)
        client = _client(context)
        task = await self._asked(client, params)
        async for event in self._watch(client, task):
            yield event

    async def on_subscribe_to_task(
        self, params: pb.SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event]:
        """Tell of a task that has not ended."""
        validate_proto_required_fields(params)
        client = _client(context)
        record, _ = await self._found(client, params.id)
        if shown.now_state(record)[0] in shown.OVER:
            raise errors.UnsupportedOperationError(message=f"the task `{params.id}` has ended")
        async for event in self._watch(client, params.id):
            yield event

    async def _asked(self, client: HookDecl, params: pb.SendMessageRequest) -> str:
        """Ask, and tell of the task where the client wants it. Whoever hears no answer sends the same again, and that is done then."""
        if not params.configuration.HasField("task_push_notification_config"):
            return await self._ask(client, params)
        told = params.configuration.task_push_notification_config
        self.check(told)
        task = await self._ask(client, params)
        await self.keep(told, task, whole=not params.message.task_id)
        return task

    async def _ask(self, client: HookDecl, params: pb.SendMessageRequest) -> str:
        message = params.message
        if message.role != pb.ROLE_USER:
            raise errors.InvalidParamsError(message="a client's message has the role `ROLE_USER`")
        if (
            not 0 < len(message.message_id) <= MESSAGE_ID_MAX
            or "\0" in message.message_id + message.context_id
        ):
            raise errors.InvalidParamsError(message=f"`messageId` has 1 to {MESSAGE_ID_MAX} characters")
        if len(message.context_id) > MESSAGE_ID_MAX:
            raise errors.InvalidParamsError(message=f"`contextId` is longer than {MESSAGE_ID_MAX} characters")
        if message.task_id:
            record, _ = await self._found(client, message.task_id)
            if message.context_id and message.context_id != record.context:
                raise errors.InvalidParamsError(message=f"the task `{message.task_id}` is of another context")
            if shown.now_state(record)[0] in shown.OVER:
                text = f"the task `{message.task_id}` has ended; begin another one"
                raise errors.UnsupportedOperationError(message=text)
        try:
            parts = shown.parts_of(message)
        except SerializeToJsonError:
            raise errors.InvalidParamsError(message="a part has a number that JSON doesn't have") from None
        ask = tasks.Ask(
            message_id=message.message_id,
            parts=parts,
            text=tasks.part_text(parts),
            task=message.task_id,
            context=message.context_id,
        )
        try:
            return await tasks.ask(self._kernel, client, self._record, ask)
        except Exception as error:  # noqa: BLE001 - every error becomes one of the protocol's
            _raise(error)

    # -- looking ----------------------------------------------------------------------------------------------------

    async def on_get_task(self, params: pb.GetTaskRequest, context: ServerCallContext) -> pb.Task:
        """One task."""
        validate_proto_required_fields(params)
        validate_history_length(params)
        return apply_history_length(await self._whole(_client(context), params.id), params)

    async def on_list_tasks(
        self, params: pb.ListTasksRequest, context: ServerCallContext
    ) -> pb.ListTasksResponse:
        """The client's own tasks of this agent, the one that changed last first."""
        validate_proto_required_fields(params)
        client = _client(context)
        validate_history_length(params)
        size = params.page_size if params.HasField("page_size") else 50
        if not 1 <= size <= PAGE_MAX:
            raise errors.InvalidParamsError(message=f"`pageSize` lies between 1 and {PAGE_MAX}")
        since = None
        if params.HasField("status_timestamp_after"):
            since = params.status_timestamp_after.ToDatetime(UTC)
        store, agent = self._kernel.core.store, self._record.id
        before = _from_token(params.page_token) if params.page_token else None
        if "\0" in params.context_id:
            raise errors.InvalidParamsError(message="`contextId` holds a NUL character")
        found: list[TaskRecord] = []
        more = True
        size_bytes = 0
        # What the state is comes out of several tables, so it is looked at here.
        while more and len(found) < size and size_bytes < PAGE_BYTES_MAX:
            page = await store.tasks(
                client.name, agent=agent, context=params.context_id, since=since, before=before, limit=size
            )
            more = len(page) == size
            for record in map(self._lacking, page):
                before = (record.updated_at, record.id)
                if not params.status or shown.STATES[shown.now_state(record)[0]] == params.status:
                    found.append(record)
                    size_bytes += record.bytes
                    if len(found) == size or size_bytes >= PAGE_BYTES_MAX:
                        more = more or record.id != page[-1].id
                        break
        response = pb.ListTasksResponse(
            page_size=size,
            total_size=await store.count_tasks(client.name, agent, params.context_id, since),
            next_page_token=_token(before) if more and before is not None else "",
        )
        for record in found:
            events = await store.task_events(record.id, 0, EVENTS_MAX + 1)
            task = shown.whole(record, events, artifacts=params.include_artifacts)
            response.tasks.append(apply_history_length(task, params))
        return response

    async def on_cancel_task(self, params: pb.CancelTaskRequest, context: ServerCallContext) -> pb.Task:
        """End a task; the agent is told."""
        validate_proto_required_fields(params)
        client = _client(context)
        record, _ = await self._found(client, params.id)
        if shown.now_state(record)[0] in shown.OVER:
            raise errors.TaskNotCancelableError(message=f"the task `{params.id}` has ended")
        try:
            await tasks.cancel(self._kernel, client, params.id)
        except Problem as problem:
            if problem.reason == "Over":
                raise errors.TaskNotCancelableError(message=str(problem)) from None
            _raise(problem)
        except Exception as error:  # noqa: BLE001 - as above
            _raise(error)
        return await self._whole(client, params.id)

    async def _found(self, client: HookDecl, task: str, after: int = 0) -> tuple[TaskRecord, list[TaskEvent]]:
        """A task of this client and agent, with its entries behind one.

        Raises:
            TaskNotFoundError: there is none.
        """
        store = self._kernel.core.store
        try:
            found = (
                []
                if "\0" in task
                else await store.tasks(client.name, ids=[task], agent=self._record.id, limit=1)
            )
            events = await store.task_events(task, after, EVENTS_MAX + 1) if found else []
        except Exception as error:  # noqa: BLE001 - as above
            _raise(error)
        if not found:
            raise errors.TaskNotFoundError(message=f"this client has no task `{task[:200]}` here")
        return self._lacking(shown.as_of(found[0], events)), events

    def _lacking(self, record: TaskRecord) -> TaskRecord:
        """The task of an agent that waits for a secret here, whatever else it does: the database knows what it waits for with all it does."""
        thread = self._kernel.core.threads.get(self._record.key)
        waits = () if thread is None else thread.waits.values()
        lacks = next((one.text for one in waits if one.kind == "credential"), "")
        return replace(record, agent_state="waiting", waits=lacks) if lacks else record

    async def look_for(self, context: ServerCallContext, task: str) -> None:
        """See that the task is this client's and this agent's."""
        await self._found(_client(context), task)

    async def _whole(self, client: HookDecl, task: str) -> pb.Task:
        return shown.whole(*await self._found(client, task))

    async def _watch(self, client: HookDecl, task: str) -> AsyncGenerator[Event]:
        """The task, then what comes of it, until it ends or its agent asks for something."""
        record, events = await self._found(client, task)
        yield shown.whole(record, events)
        seen, before = max([0, *(event.seq for event in events)]), shown.now_state(record)
        wait_s = LOOK_FIRST_S
        while not (before[0] in shown.OVER or record.state in shown.ASKS):
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 1.5, LOOK_MAX_S)
            record, events = await self._found(client, task, seen)
            now = shown.now_state(record)
            for event in events:
                if event.kind != "asked":
                    wait_s = LOOK_FIRST_S
                    for one in shown.told_of(record, event):
                        yield one
            if now != before and (now[1] or not events):
                # Not by what the agent said: it took the message, a call of it waits for a person, or it has ended.
                stands = shown.status_now(record, events)
                yield pb.TaskStatusUpdateEvent(task_id=task, context_id=record.context, status=stands)
            seen, before = max([seen, *(event.seq for event in events)]), now

    # -- what is not there ------------------------------------------------------------------------------------------

    async def on_get_extended_agent_card(
        self, params: pb.GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> pb.AgentCard:
        """Refused: the card says so."""
        del params, context
        raise errors.ExtendedAgentCardNotConfiguredError


def _client(context: ServerCallContext) -> HookDecl:
    """Who asks. The door has put it there, and nobody else can."""
    client: Any = context.state.get("client")
    if not isinstance(client, HookDecl):
        raise errors.InternalError(message="nobody was authenticated")
    return client


def _raise(error: Exception) -> NoReturn:
    """Raise the protocol's error for one of ours."""
    if isinstance(error, errors.A2AError):
        raise error
    problem = to_problem(error)
    if problem.reason in {"NoSuchTask", "NoSuchAgent"}:
        raise errors.TaskNotFoundError(message=problem.message) from None
    if problem.reason in {"Over", "Ended"}:
        raise errors.UnsupportedOperationError(message=problem.message) from None
    if problem.exit_code in {2, 5} and problem.reason != "Full":
        raise errors.InvalidParamsError(message=problem.message) from None
    raise errors.InternalError(message=problem.message) from None


def _token(place: tuple[datetime, str]) -> str:
    return base64.urlsafe_b64encode(f"{place[0].isoformat()} {place[1]}".encode()).decode()


def _from_token(token: str) -> tuple[datetime, str]:
    try:
        at, _, last = base64.urlsafe_b64decode(token.encode()).decode().partition(" ")
        moment = datetime.fromisoformat(at)
    except (ValueError, binascii.Error):
        moment, last = datetime.now(UTC), ""
    if moment.tzinfo is None or not last or "\0" in last:
        raise errors.InvalidParamsError(message="`pageToken` is none that was given out here")
    return moment, last
