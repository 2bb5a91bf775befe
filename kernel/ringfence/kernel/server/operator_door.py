"""The operators' door: authenticates, calls the operation, turns problems into status."""

from __future__ import annotations

import json
import logging
import os
import pwd
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from google.protobuf import message_factory
from google.protobuf.message import Message
from ringfence.kernel.journal.types import JournalError
from ringfence.kernel.kernel_log import place
from ringfence.kernel.operations import (
    agents,
    approvals,
    budgets,
    deciding,
    diffs,
    exports,
    family,
    forks,
    history,
    house,
    imports,
    layers,
    learning,
    messages,
    peers,
    points,
    pools,
    pruning,
    removal,
    rights,
    rollbacks,
    schedules,
    servers,
    submit,
)
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.problems import Problem
from ringfence.kernel.server.status import abort_with_problem
from ringfence.kernel.server.wire import Context, aio, rpc
from ringfence.policy.keeping import PointsKept
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.sandbox.types import SandboxError
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls.errors import SyscallError
from ringfence.v1 import operator_pb2 as pb

log = logging.getLogger(__name__)

SERVICE = "ringfence.v1.OperatorService"
Unary = Callable[[Kernel, Any, str], Awaitable[dict[str, Any]]]
Many = Callable[[Kernel, Any, str], AsyncIterator[Any]]


async def _secret_list(kernel: Kernel, _request: Any, _operator: str) -> dict[str, Any]:
    return house.secret_list(kernel)


UNARY: dict[str, Unary] = {
    "Status": lambda k, _r, _o: house.status(k),
    "Reload": lambda k, _r, o: house.reload(k, o),
    "Shutdown": lambda k, r, o: house.shutdown(k, r.drain_ms, o),
    "Wait": lambda k, r, _o: agents.wait(k, r.agent, r.parked_for),
    "List": lambda k, r, _o: agents.list_agents(k, r.all),
    "Layers": lambda k, r, _o: layers.layers(k, r.agent),
    "Show": lambda k, r, _o: agents.show(k, r.agent),
    "Pause": lambda k, r, o: agents.pause(k, r.agent, o),
    "Resume": lambda k, r, o: agents.resume(k, r.agent, o),
    "Start": lambda k, r, o: agents.start(k, r.agent, o),
    "Kill": lambda k, r, o: agents.kill(k, r.agent, o, only=r.only),
    "Tree": lambda k, r, _o: family.tree(k, r.agent, everything=r.all),
    "Remove": lambda k, r, o: removal.remove(k, r.agent, o),
    "Send": lambda k, r, o: messages.send(
        k, r.agent, r.text if r.HasField("text") else None, r.json, operator=o
    ),
    "Budget": lambda k, r, o: (
        budgets.budget(k, r.agent, r.name, r.value, o)
        if r.agent
        else pools.pool(k, r.pool, r.name, r.value, o)
    ),
    "Grant": lambda k, r, o: rights.grant(
        k, r.agent, r.rule, expires_ms=r.expires_ms, uses=r.uses, operator=o, deny=r.deny
    ),
    "Revoke": lambda k, r, o: rights.revoke(
        k, r.agent, r.rule_or_grant, everything=r.all, purge=r.purge, operator=o
    ),
    "Points": lambda k, r, _o: points.points(k, r.agent, verify=r.verify),
    "PrunePoints": lambda k, r, o: points.prune_points(
        k,
        r.agent,
        PointsKept(
            age_s=r.older_than_ms / 1000 if r.HasField("older_than_ms") else None,
            count=r.keep if r.HasField("keep") else None,
            size_bytes=r.size_bytes if r.HasField("size_bytes") else None,
        ),
        operator=o,
    ),
    "Prune": lambda k, r, o: pruning.prune(
        k,
        r.agent,
        older_than_ms=r.older_than_ms if r.HasField("older_than_ms") else None,
        dry=r.dry_run,
        operator=o,
    ),
    "Rollback": lambda k, r, o: rollbacks.rollback(
        k, r.agent, r.to, preview=r.preview, path=r.path, start=r.start, operator=o
    ),
    "RollbackAll": lambda k, r, o: rollbacks.rollback_all(
        k, r.to, preview=r.preview, start=r.start, operator=o, skip_unreachable=r.skip_unreachable
    ),
    "Fork": lambda k, r, o: forks.fork(k, r.agent, r.at, new_name=r.name, start=r.start, operator=o),
    "Diff": lambda k, r, _o: diffs.diff(k, r.agent, getattr(r, "from"), r.to),
    "Resolve": lambda k, r, o: history.resolve(k, r.agent, r.step, r.outcome, r.result, o),
    "AuditVerify": lambda k, _r, _o: history.audit_verify(k),
    "PolicyShow": lambda k, r, _o: rights.policy_show(k, r.agent),
    "PolicyCanI": lambda k, r, _o: rights.can_i(k, r.agent, r.action, r.resource),
    "PolicyExplain": lambda k, r, _o: rights.explain(k, r.agent, r.step),
    "PolicyLearn": lambda k, r, _o: learning.learned(k, r.agent, denied=r.denied),
    "Approvals": lambda k, r, _o: approvals.approvals(k, r.agent, everything=r.all),
    "ApprovalShow": lambda k, r, _o: approvals.show(k, r.id),
    "Approve": lambda k, r, o: deciding.approve(k, r.id, r.arguments, r.reason, r.for_ms, o, digest=r.digest),
    "Deny": lambda k, r, o: deciding.deny(k, r.id, r.reason, o),
    "ApprovalEnd": lambda k, r, o: deciding.end(k, r.id, r.reason, o),
    "ScheduleList": lambda k, _r, _o: schedules.listing(k),
    "SchedulePause": lambda k, r, o: schedules.pause(k, r.agent, o),
    "ScheduleResume": lambda k, r, o: schedules.resume(k, r.agent, o),
    "ScheduleRun": lambda k, r, o: schedules.run(k, r.agent, o),
    "SecretSet": lambda k, r, o: house.secret_set(k, r.name, r.value, o),
    "SecretList": _secret_list,
    "SecretRemove": lambda k, r, o: house.secret_remove(k, r.name, o),
    "A2aPeers": lambda k, _r, _o: peers.listing(k),
    "A2aCard": lambda k, r, o: peers.card(k, r.peer, look=r.look, operator=o),
    "A2aAccept": lambda k, r, o: peers.accept(k, r.peer, r.hash, o),
    "McpServers": lambda k, _r, _o: servers.listing(k),
    "McpTools": lambda k, r, o: servers.tools(k, r.server, r.tool, look=r.look, operator=o),
    "McpAccept": lambda k, r, o: servers.accept(k, r.server, r.tool, r.hash, o),
}
"""One operation for each unary method; a test holds it against the descriptor."""

MANY: dict[str, Many] = {
    "Logs": lambda k, r, _o: agents.logs(k, r.agent, follow=r.follow, stderr=r.stderr),
    "Steps": lambda k, r, _o: agents.steps(k, r.agent, follow=r.follow),
    "Export": lambda k, r, o: exports.export(k, r.agent, o),
    "ExportLayer": lambda k, r, o: layers.export_layer(k, r.agent, r.layer, o),
    "Pull": lambda k, r, _o: agents.pull(k, r.agent, r.path),
    "Audit": lambda k, r, _o: history.audit(k, r.agent, r.since),
}
"""Operations whose answer is a stream: bytes become chunks, records become documents."""


FRAMED: dict[str, Unary] = {"Submit": submit.submit, "Import": imports.take_in}
"""Operations that take a stream: a header, then bytes."""


def document(value: dict[str, Any]) -> pb.Document:
    """A JSON document."""
    return pb.Document(json=json.dumps(value, separators=(",", ":")).encode())


def to_problem(error: Exception) -> Problem:
    """What an operator is told about an error of any layer."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, JournalError):
        text = f"the database can't be used: {error}; the kernel goes on by itself when it is back"
        return Problem(text, exit_code=6, reason="JournalUnavailable")
    if isinstance(error, SyscallError):
        return Problem(error.message, exit_code=5, reason=error.reason)
    if isinstance(error, WorkspaceError):
        return Problem(
            str(error), exit_code=4 if error.reason == "NoSuchResource" else 2, reason=error.reason
        )
    if isinstance(error, SnapshotError | SandboxError):
        return Problem(str(error), exit_code=1, reason=type(error).__name__)
    log.error("bug in an operator's request", exc_info=error)
    text = f"a bug in Ringfence stopped this request ({type(error).__name__}); report it with what {place()} says of it"
    return Problem(text, exit_code=1, reason="Internal")


def _serialize_part(message: Message) -> bytes:
    return message.SerializeToString()


class OperatorDoor:
    """Serves operators on a socket that only this kernel's own user can open."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._server: Any = None

    async def open(self, path: Path) -> None:
        """Listen; the socket has mode 0600."""
        server = aio.server(options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)))
        handlers: dict[str, Any] = {}
        for method in pb.DESCRIPTOR.services_by_name["OperatorService"].methods:
            handlers[method.name] = self._handler(
                method.name, message_factory.GetMessageClass(method.input_type)
            )
        server.add_generic_rpc_handlers((rpc.method_handlers_generic_handler(SERVICE, handlers),))
        before = os.umask(0o177)
        try:
            server.add_insecure_port(f"unix:{path}")
            await server.start()
        finally:
            os.umask(before)
        os.chmod(path, 0o600)  # noqa: PTH101 - nothing slow about it
        self._server = server

    async def close(self, grace_s: float = 1.0) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.stop(grace=grace_s)
            self._server = None

    def _operator(self) -> str:
        # The socket admits only this user, so whoever calls is this user.
        try:
            return pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            return f"uid {os.geteuid()}"

    def _handler(self, name: str, request_class: Any) -> Any:
        serialize = pb.Document.SerializeToString
        if name in FRAMED:
            return rpc.stream_unary_rpc_method_handler(
                self._framed(name), request_class.FromString, serialize
            )
        if name in MANY:
            return rpc.unary_stream_rpc_method_handler(
                self._many(name), request_class.FromString, _serialize_part
            )
        return rpc.unary_unary_rpc_method_handler(self._unary(name), request_class.FromString, serialize)

    def _unary(self, name: str) -> Callable[[Any, Context], Awaitable[pb.Document | None]]:
        operation = UNARY[name]

        async def serve(request: Any, context: Context) -> pb.Document | None:
            try:
                return document(await operation(self._kernel, request, self._operator()))
            except Exception as error:  # noqa: BLE001 - every error becomes one line for the operator
                await abort_with_problem(context, to_problem(error))
                return None

        return serve

    def _many(self, name: str) -> Callable[[Any, Context], AsyncIterator[pb.Document | pb.Chunk]]:
        operation = MANY[name]

        async def serve(request: Any, context: Context) -> AsyncIterator[pb.Document | pb.Chunk]:
            try:
                async for part in operation(self._kernel, request, self._operator()):
                    yield pb.Chunk(data=part) if isinstance(part, bytes) else document(part)
            except Exception as error:  # noqa: BLE001 - the same
                await abort_with_problem(context, to_problem(error))

        return serve

    def _framed(self, name: str) -> Callable[[AsyncIterator[Any], Context], Awaitable[pb.Document | None]]:
        operation = FRAMED[name]

        async def serve(frames: AsyncIterator[Any], context: Context) -> pb.Document | None:
            try:
                return document(await operation(self._kernel, frames, self._operator()))
            except Exception as error:  # noqa: BLE001 - the same
                await abort_with_problem(context, to_problem(error))
                return None

        return serve
