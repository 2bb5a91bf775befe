"""What clients say about where they are told of their tasks."""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Final

from a2a.server.context import ServerCallContext
from a2a.server.request_handlers.request_handler import RequestHandler
from a2a.types import a2a_pb2 as pb
from a2a.utils import errors
from ringfence.kernel.journal.store_pushes import PushConfig
from ringfence.policy.serving import may_push

if TYPE_CHECKING:
    from ringfence.kernel.journal.types import AgentRecord
    from ringfence.kernel.operations.kernel import Kernel

PUSHES_MAX: Final = 8
"""Places that are told of one task."""

URL_CHARS_MAX: Final = 2048
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_SCHEME: Final = re.compile(r"[A-Za-z0-9-]{0,32}", re.ASCII)
_HEADER: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,2046}[\x21-\x7e])?|", re.ASCII)


class PushHandler(RequestHandler):
    """The operations of A2A on these."""

    _kernel: Kernel
    _record: AgentRecord

    @abstractmethod
    async def look_for(self, context: ServerCallContext, task: str) -> None:
        """See that the task is this client's and this agent's.

        Raises:
            TaskNotFoundError: it is not.
        """

    def check(self, given: pb.TaskPushNotificationConfig) -> None:
        """Refuse what can't be told, before anything is done.

        Raises:
            PushNotificationNotSupportedError: nobody is told of anything here.
            InvalidParamsError: the operator does not allow the address, or a value is none that can be sent.
        """
        declared = self._kernel.ownership.resources.file.a2a
        if declared is None or not declared.push:
            raise errors.PushNotificationNotSupportedError
        if len(given.url) > URL_CHARS_MAX or not may_push(declared, given.url):
            raise errors.InvalidParamsError(message=f"the operator allows no push to `{given.url[:200]}`")
        if given.id and _ID.fullmatch(given.id) is None:
            raise errors.InvalidParamsError(message="`id` has 1 to 64 letters, digits, `.`, `-` and `_`")
        auth = given.authentication
        if not all(map(_HEADER.fullmatch, (given.token, auth.credentials))) or not _SCHEME.fullmatch(
            auth.scheme
        ):
            raise errors.InvalidParamsError(message="`token` or `authentication` can't stand in a header")

    async def keep(self, given: pb.TaskPushNotificationConfig, task: str, *, whole: bool) -> PushConfig:
        """Tell of a task there; what was refused before, by `check`, never comes here.

        Raises:
            InvalidParamsError: the task has as many places as it may.
        """
        auth = given.authentication
        one = PushConfig(
            id=given.id or secrets.token_hex(8), url=given.url, token=given.token, scheme=auth.scheme
        )
        store = self._kernel.core.store
        if not await store.push_set(task, one, auth.credentials, whole=whole, most=PUSHES_MAX):
            raise errors.InvalidParamsError(message=f"a task is told of in {PUSHES_MAX} places at most")
        return one

    async def on_create_task_push_notification_config(
        self, params: pb.TaskPushNotificationConfig, context: ServerCallContext
    ) -> pb.TaskPushNotificationConfig:
        """Tell of a task there from now on."""
        self.check(params)
        await self.look_for(context, params.task_id)
        return _shown(params.task_id, await self.keep(params, params.task_id, whole=False))

    async def on_get_task_push_notification_config(
        self, params: pb.GetTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> pb.TaskPushNotificationConfig:
        """One place."""
        for one in await self._listed(context, params.task_id):
            if one.id == params.id:
                return one
        raise errors.TaskNotFoundError(message=f"the task is not told of by `{params.id[:64]}`")

    async def on_list_task_push_notification_configs(
        self, params: pb.ListTaskPushNotificationConfigsRequest, context: ServerCallContext
    ) -> pb.ListTaskPushNotificationConfigsResponse:
        """All places."""
        configs = await self._listed(context, params.task_id)
        return pb.ListTaskPushNotificationConfigsResponse(configs=configs)

    async def on_delete_task_push_notification_config(
        self, params: pb.DeleteTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> None:
        """Tell nothing there any more."""
        await self._listed(context, params.task_id)
        if _ID.fullmatch(params.id):
            await self._kernel.core.store.push_delete(params.task_id, params.id)

    async def _listed(self, context: ServerCallContext, task: str) -> list[pb.TaskPushNotificationConfig]:
        declared = self._kernel.ownership.resources.file.a2a
        if declared is None or not declared.push:
            raise errors.PushNotificationNotSupportedError
        await self.look_for(context, task)
        return [_shown(task, one) for one in await self._kernel.core.store.pushes(task)]


def _shown(task: str, one: PushConfig) -> pb.TaskPushNotificationConfig:
    # What proves the kernel to the receiver is not given out again.
    auth: dict[str, Any] = {"authentication": pb.AuthenticationInfo(scheme=one.scheme)} if one.scheme else {}
    return pb.TaskPushNotificationConfig(id=one.id, task_id=task, url=one.url, token=one.token, **auth)
