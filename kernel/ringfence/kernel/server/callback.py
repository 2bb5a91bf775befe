"""The callback: a small HTTP door where systems of people who may approve post what these people decide, and hooks their messages.

It does two things, `POST /v1/people/NAME/decisions` and `POST /v1/hooks/NAME/agents/AGENT`, and whoever posts has no right but that.
A body is looked at only after its signature: until then it is counted bytes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Literal

import h11
import msgspec
from ringfence.kernel.operations import deciding
from ringfence.kernel.problems import Problem, bad_usage
from ringfence.kernel.secrets import SecretsError
from ringfence.kernel.server.gate import Complaints
from ringfence.kernel.server.hooks import Hooks
from ringfence.kernel.server.operator_door import to_problem
from ringfence.kernel.server.posted import HttpProblem, Message
from ringfence.kernel.signing import BadKey, BadSignature, key_of, verify

if TYPE_CHECKING:
    from ringfence.kernel.operations.kernel import Kernel
    from ringfence.policy.outreach import CallbackDecl
    from ringfence.policy.resources import SecretRef

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 1 << 20
"""Longest body."""

HEAD_BYTES_MAX = 16 << 10
"""Longest request line with all headers."""

CONNECTIONS_MAX = 32
"""Connections at a time; one more is closed."""

REQUEST_S = 10.0
"""How long a request may take to come in, and its answer to be taken."""

LINGER_READS = 32
"""Parts of a request that are read and thrown away after its answer."""

STATUS_OF = {1: 409, 2: 422, 3: 403, 4: 404, 5: 409, 6: 503}
"""HTTP status by the exit code that a command would end with."""

_UNKNOWN_KEY = secrets.token_bytes(32)


class Decision(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is posted.

    Attributes:
        approval: its id.
        decision: what the person says.
        reason: why; needed to deny, and the answer to a question.
        digest: of the arguments that the person has seen; empty: not said.
        arguments: to run instead, an object.
        for_ms: for how long the same call asks nobody again; 0: once.
    """

    approval: str
    decision: Literal["approve", "deny"]
    reason: str = ""
    digest: str = ""
    arguments: dict[str, Any] | None = None
    for_ms: int = 0


class CallbackDoor:
    """Listens where the kernel file says, and not at all where it says nothing."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._declared: CallbackDecl | None = None
        self._server: asyncio.Server | None = None
        self._problem = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._handling: set[asyncio.Future[dict[str, Any]]] = set()
        self._complaints = Complaints(log, "callback")
        self._hooks = Hooks(kernel)

    async def apply(self) -> None:
        """Take over what the kernel file says now. An address that can't be had is told by `report`, and tried again then."""
        wanted = self._kernel.ownership.resources.file.callback
        at = None if self._declared is None else (self._declared.host, self._declared.port)
        if self._server is not None and wanted is not None and at == (wanted.host, wanted.port):
            self._declared = wanted
            return
        await self.close()
        self._declared, self._problem = wanted, ""
        if wanted is None:
            return
        try:
            self._server = await asyncio.start_server(
                self._accepted, wanted.host, wanted.port, limit=64 << 10, backlog=CONNECTIONS_MAX
            )
        except OSError as error:
            where = f"{wanted.host}:{wanted.port}"
            why = (error.strerror or str(error)).lower()
            self._problem = (
                f"the callback can't listen at `{where}`: {why}; free it, or change it, and reload"
            )
            log.warning("%s", self._problem)

    async def close(self) -> None:
        """Stop listening. Decisions that are being made are made to their end; whoever is still sending is cut off."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._handling, return_exceptions=True)
        await self._hooks.close()

    def report(self) -> dict[str, Any] | None:
        """Where it listens, for `status`; None: nowhere."""
        if self._declared is None:
            return None
        host = f"[{self._declared.host}]" if ":" in self._declared.host else self._declared.host
        return {
            "listen": f"http://{host}:{self._declared.port}",
            "people": sorted(self._declared.people),
            "hooks": sorted(self._declared.hooks),
            "problem": self._problem or None,
        }

    # -- one connection ---------------------------------------------------------------------------------------------

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs every connection in a task of its own
        if len(self._tasks) >= CONNECTIONS_MAX:
            self._complaints.say(f"more than {CONNECTIONS_MAX} connections; one was closed")
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, h11.ProtocolError):
            pass  # whoever sent it is gone or does not listen
        except asyncio.CancelledError:
            pass  # by `close`, and nobody is above: asyncio would write a traceback
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        again_s = 0
        connection = h11.Connection(our_role=h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        try:
            async with asyncio.timeout(REQUEST_S):
                message = await _read(connection, reader, writer)
            if message is None:
                return
            # Its own task: whoever goes away meanwhile, or a stop, must not leave a decision on record and not made.
            handling = asyncio.ensure_future(self._handled(message))
            self._handling.add(handling)
            handling.add_done_callback(self._handling.discard)
            status, document = 200, await asyncio.shield(handling)
        except TimeoutError:
            status, document = 408, _error("Timeout", f"the request did not come within {REQUEST_S:g} s")
        except HttpProblem as problem:
            status, document = problem.status, _error(problem.reason, str(problem))
            again_s = problem.retry_after_s
        except h11.RemoteProtocolError as error:
            status, document = error.error_status_hint, _error("BadRequest", "this is no HTTP request")
        async with asyncio.timeout(REQUEST_S):
            await _answer(connection, writer, status, document, again_s)
            # A connection that is closed before all that was sent is read takes the answer with it.
            for _ in range(LINGER_READS):
                if not await reader.read(64 << 10):
                    break

    async def _handled(self, message: Message) -> dict[str, Any]:
        """Check who says it, then carry it out.

        Raises:
            HttpProblem: it is refused.
        """
        kind, name, agent = _meant(message)
        if kind == "hooks":
            hook = None if self._declared is None else self._declared.hooks.get(name)
            self._authenticate(
                None if hook is None else hook.key, message, f"nobody is heard as hook `{name}`"
            )
            # INVARIANT: nobody can sign with the key of a hook that is not declared.
            assert hook is not None  # noqa: S101
            return await _answered(self._hooks.take(hook, agent, message))
        person = None if self._declared is None else self._declared.people.get(name)
        self._authenticate(None if person is None else person.key, message, f"nobody can decide as `{name}`")
        try:
            said = msgspec.json.decode(bytes(message.body), type=Decision)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            why = " ".join(str(error).split())[:200]
            if "truncated" in why and bytes(message.body).rstrip().endswith(b"}"):
                why = "it holds an escape that is half of a character"
            raise HttpProblem(400, "BadRequest", f"the body is no decision: {why}") from None
        return await _answered(self._decide(name, said, message.headers["webhook-id"]))

    async def _decide(self, name: str, said: Decision, message: str) -> dict[str, Any]:
        if said.decision == "deny":
            if said.arguments is not None or said.for_ms or said.digest:
                raise bad_usage("a denial has a `reason` and nothing else")
            return await deciding.deny(self._kernel, said.approval, said.reason, name, message=message)
        if not 0 <= said.for_ms < 1 << 53:
            raise bad_usage("`for_ms` is no number of milliseconds")
        return await deciding.approve(
            self._kernel,
            said.approval,
            b"" if said.arguments is None else msgspec.json.encode(said.arguments),
            said.reason,
            said.for_ms,
            name,
            message=message,
            digest=said.digest,
        )

    def _authenticate(self, ref: SecretRef | None, message: Message, without: str) -> None:
        """Check that a message is from whoever has a key, and from now.

        Args:
            ref: the key's secret; None: nobody is declared by that name, which answers as a wrong signature does.
            message: what came.
            without: what to complain of where the secret is not set.

        Raises:
            HttpProblem: it is not, or nobody can know.
        """
        key = _UNKNOWN_KEY
        if ref is not None:
            try:
                # Looked up each time: a key that was taken away or changed counts at once.
                key = key_of(self._kernel.secrets.get(ref.secret), ref.secret)
            except (SecretsError, BadKey) as error:
                # Whoever posts does not learn what the operator has not set.
                self._complaints.say(f"{without}: {error}")
        said = message.headers
        try:
            verify(
                key,
                said.get("webhook-id", ""),
                said.get("webhook-timestamp", ""),
                said.get("webhook-signature", ""),
                bytes(message.body),
                now=time.time(),
            )
        except BadSignature as error:
            self._complaints.say(f"a request was refused: {error}")
            raise HttpProblem(401, "BadSignature", f"{error}; nothing was done") from None


FORMS = ("POST /v1/people/NAME/decisions", "POST /v1/hooks/NAME/agents/AGENT")


def _meant(message: Message) -> tuple[str, str, str]:
    """Whether it is about `people` or `hooks`, the name in the path, and for a hook the agent.

    Raises:
        HttpProblem: another path or method.
    """
    forms = " and ".join(f"`{form}`" for form in FORMS)
    match message.target.split("/"):
        case ["", "v1", "people", name, "decisions"]:
            found = ("people", name, "")
        case ["", "v1", "hooks", name, "agents", agent]:
            found = ("hooks", name, agent)
        case _:
            raise HttpProblem(404, "NoSuchPath", f"there is nothing here but {forms}")
    if message.method != "POST":
        raise HttpProblem(405, "BadMethod", f"there is nothing here but {forms}")
    return found


async def _answered(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """What comes of a request of somebody who is known.

    Raises:
        HttpProblem: in place of every other error.
    """
    try:
        return await work
    except HttpProblem:
        raise
    except Exception as error:  # noqa: BLE001 - every error becomes one line for whoever posts
        problem: Problem = to_problem(error)
        status = 429 if problem.reason == "Full" else STATUS_OF[problem.exit_code]
        raise HttpProblem(status, problem.reason, problem.message) from None


async def _read(
    connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Message | None:
    """Read one request; None: whoever connected went away.

    Raises:
        HttpProblem: its body is too long.
        h11.RemoteProtocolError: it is no HTTP.
    """
    message = Message()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                writer.write(connection.send(go_on))
            data = await reader.read(64 << 10)
            connection.receive_data(data)
        elif isinstance(event, h11.Request):
            _take_head(message, event)
            _bounded(int(message.headers.get("content-length", "0")))
        elif isinstance(event, h11.Data):
            message.body += event.data
            _bounded(len(message.body))
        elif isinstance(event, h11.EndOfMessage):
            return message
        else:
            return None


def _take_head(message: Message, event: h11.Request) -> None:
    message.method, message.target = event.method.decode(), event.target.decode()
    # What came in one piece is not counted by the parser.
    if len(event.target) + sum(len(raw) + len(value) for raw, value in event.headers) > HEAD_BYTES_MAX:
        raise HttpProblem(431, "TooLong", f"the headers are longer than {HEAD_BYTES_MAX} bytes")
    for raw, value in event.headers:
        name = raw.decode()
        if name in message.headers and name.startswith("webhook-"):
            # Nobody may have to guess which one was signed.
            raise HttpProblem(400, "BadRequest", f"the header `{name}` is there twice")
        message.headers[name] = value.decode("latin-1")


def _bounded(size: int) -> None:
    if size > BODY_BYTES_MAX:
        raise HttpProblem(413, "TooLong", f"the body is longer than {BODY_BYTES_MAX} bytes")


def _error(reason: str, message: str) -> dict[str, Any]:
    return {"error": {"reason": reason, "message": message}}


async def _answer(
    connection: h11.Connection,
    writer: asyncio.StreamWriter,
    status: int,
    document: dict[str, Any],
    again_s: int,
) -> None:
    body = msgspec.json.encode(document)
    headers = [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
        ("connection", "close"),
    ]
    if status == 405:  # noqa: PLR2004 - that method
        headers.append(("allow", "POST"))
    if again_s:
        headers.append(("retry-after", str(again_s)))
    head = connection.send(h11.Response(status_code=status, headers=headers))
    data = connection.send(h11.Data(data=body))
    writer.write((head or b"") + (data or b"") + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    writer.write_eof()
