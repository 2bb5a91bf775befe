"""Speaking A2A to agents elsewhere: one request to one of them. The only module of the syscalls that knows the SDK.

It is imported when the first agent is spoken to (`a2a_common.client_module`). What the SDK would do by itself and the kernel must not is
prevented at the edge of it: requests go to addresses that were looked at, follow no redirect, carry the operator's credential and
nothing of the environment, and answers are bounded before they are read.

INVARIANT: an exchange is one request. Whether it began to leave, and what came of it, stands in its `Sent`.
INVARIANT: a credential goes to the origin that the operator declared, wherever a card says that the agent is.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

import httpx
from a2a.client import ClientConfig, ClientFactory
from a2a.client.card_resolver import parse_agent_card
from a2a.client.errors import A2AClientError
from a2a.types import a2a_pb2 as pb
from a2a.utils.constants import AGENT_CARD_WELL_KNOWN_PATH, TransportProtocol
from a2a.utils.errors import A2AError
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from ringfence.syscalls.a2a_common import is_id
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.http_reach import deliver, reachable
from ringfence.syscalls.mcp_common import ANSWER_BYTES_MAX, Lost, Refused, Sent

if TYPE_CHECKING:
    import ssl

    from a2a.client import Client
    from ringfence.syscalls.declared import A2aResource

Before = Callable[[], Awaitable[None]]
"""The last look before anything leaves."""

CARD_BYTES_MAX: Final = 1 << 20
_BINDINGS: Final = [TransportProtocol.JSONRPC, TransportProtocol.HTTP_JSON]
_READABLE: Final = frozenset({"", "identity"})
_PORTS: Final = {"http": 80, "https": 443}
_OK: Final = 200
_RPC_ERROR: Final = "JSON-RPC Error"
_STATE: Final = "TASK_STATE_"

# INVARIANT: the SDK logs what it is sent, and it may be sent a credential.
logging.getLogger("a2a").setLevel(logging.CRITICAL)


class _Edge(httpx.AsyncBaseTransport):
    """Where a request leaves: adds the credential, looks at the address, bounds the answer, and notes what became of it."""

    def __init__(self, resource: A2aResource, sent: Sent, before: Before, most: int) -> None:
        self._resource, self._sent, self._before, self._most = resource, sent, before, most
        self._gone = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the one request."""
        if self._gone:
            raise httpx.RequestError("asked for more than one request", request=request)
        self._gone = True
        addresses = await reachable(request.url, self._resource.name, self._resource.addresses)
        request.headers["accept-encoding"] = "identity"
        request.headers["user-agent"] = "ringfence"
        for name, value in self._resource.headers.items():
            request.headers[name] = value
        request.extensions = {**request.extensions, "trace": self._sent.trace}
        # Resolved before the last look at the rights: from there on nothing waits but for the connection.
        await self._before()
        try:
            async with httpx.AsyncClient(
                verify=_tls(), trust_env=False, timeout=_patience(self._resource)
            ) as once:
                response = await deliver(once, request, addresses)
                try:
                    return await self._taken(request, response)
                finally:
                    await response.aclose()
        except httpx.HTTPError as error:
            self._sent.lost = self._sent.lost or _said(error)
            raise

    async def _taken(self, request: httpx.Request, response: httpx.Response) -> httpx.Response:
        self._sent.status = response.status_code
        self._sent.headers = {name.lower(): value for name, value in response.headers.items()}
        if response.headers.get("content-encoding", "").strip().lower() not in _READABLE:
            self._sent.lost = "answered in an encoding that was not asked for"
            raise httpx.RequestError(self._sent.lost, request=request)
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_raw():
            size += len(part)
            if size > self._most:
                self._sent.lost = f"answered with more than {self._most} bytes"
                raise httpx.RequestError(self._sent.lost, request=request)
            parts.append(part)
        kept = {"content-type": response.headers.get("content-type", "")}
        whole = b"".join(parts)
        if not _answers(request.content, whole):
            self._sent.lost = "answered another request than was sent"
            raise httpx.RequestError(self._sent.lost, request=request)
        return httpx.Response(response.status_code, headers=kept, content=whole, request=request)


def _answers(asked: bytes, told: bytes) -> bool:
    """Whether an answer of JSON-RPC has the id of its request. The SDK takes any; what is no JSON-RPC it reads itself."""
    try:
        request: Any = json.loads(asked) if asked else None
        answer: Any = json.loads(told) if told else None
    except (ValueError, RecursionError):
        return True
    if not isinstance(request, dict) or "jsonrpc" not in request or not isinstance(answer, dict):
        return True
    of, ident = cast("dict[str, Any]", request).get("id"), cast("dict[str, Any]", answer).get("id")
    # An error may be of a request whose id could not be read.
    return (type(ident), ident) == (type(of), of) or (
        ident is None and "error" in answer and "result" not in answer
    )


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


def _patience(resource: A2aResource) -> httpx.Timeout:
    """Whoever calls has the whole exchange under a time; this only keeps connecting below it."""
    return httpx.Timeout(None, connect=resource.timeout_s)


def _said(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "can't be reached"
    return f"broke the connection ({type(error).__name__})"


def _http(
    resource: A2aResource, sent: Sent, before: Before, most: int = ANSWER_BYTES_MAX
) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=_Edge(resource, sent, before, most), trust_env=False, timeout=_patience(resource)
    )


async def _nothing() -> None:
    """Looks at nothing: a card is asked for where a rule may allow to write to its agent."""


async def fetch_card(resource: A2aResource, sent: Sent) -> Mapping[str, Any]:
    """The card that an agent shows now, all of it.

    Raises:
        CallFailed: no address of it may be used.
        Lost: it shows none.
    """
    async with _http(resource, sent, _nothing, CARD_BYTES_MAX) as http:
        try:
            answer = await http.get(resource.base + AGENT_CARD_WELL_KNOWN_PATH)
        except httpx.HTTPError:
            raise Lost(sent.lost) from None
    if answer.status_code != _OK:
        raise Lost(f"answered {answer.status_code} where its card should be")
    try:
        found: Any = json.loads(answer.content)
    except (ValueError, RecursionError):
        raise Lost("shows a card that is no JSON") from None
    _card(found)
    return cast("dict[str, Any]", found)


def _card(found: Any) -> pb.AgentCard:
    try:
        return parse_agent_card(copy.deepcopy(found))
    except (ParseError, TypeError, ValueError, AttributeError, RecursionError):
        raise Lost("shows a card that is none") from None


def skills_of(card: bytes) -> list[str]:
    """Ids of the skills that a card has."""
    return [skill.id for skill in _card(json.loads(card)).skills]


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or _PORTS.get(url.scheme)


def _usable(resource: A2aResource, card: pb.AgentCard) -> pb.AgentCard:
    """The card with the interfaces alone that are spoken to.

    Raises:
        Lost: there are none.
    """
    wanted = _origin(httpx.URL(resource.base))
    found = list[pb.AgentInterface]()
    for one in card.supported_interfaces:
        with contextlib.suppress(httpx.InvalidURL):
            url = httpx.URL(one.url)
            # A user in it would take the place of the operator's credential.
            ours = _origin(url) == wanted and not url.userinfo and one.protocol_binding in _BINDINGS
            if ours and one.protocol_version.partition(".")[0] == "1":
                found.append(one)
    if not found:
        scheme, host, port = wanted
        raise Lost(f"names no interface of A2A 1.0 at {scheme}://{host}:{port}, where it is declared")
    usable = pb.AgentCard()
    usable.CopyFrom(card)
    del usable.supported_interfaces[:]
    usable.supported_interfaces.extend(found)
    return usable


@asynccontextmanager
async def reach(resource: A2aResource, card: bytes, sent: Sent, before: Before) -> AsyncGenerator[Exchange]:
    """One exchange with an agent; its connection is closed behind it, however it ends."""
    usable = _usable(resource, _card(json.loads(card)))
    async with _http(resource, sent, before) as http:
        config = ClientConfig(
            streaming=False,
            polling=True,
            httpx_client=http,
            supported_protocol_bindings=[str(one.value) for one in _BINDINGS],
        )
        yield Exchange(ClientFactory(config).create(usable), sent)


class Exchange:
    """One request."""

    def __init__(self, client: Client, sent: Sent) -> None:
        self._client = client
        self._sent = sent

    async def send(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message, and don't wait for the end of the task.

        Raises:
            Lost, Refused: as they say.
        """
        try:
            request = pb.SendMessageRequest(message=ParseDict(dict(message), pb.Message()))
        except (ParseError, ValueError) as error:
            raise Lost(f"can't be sent that: {error}") from None
        with self._failing():
            async for event in self._client.send_message(request):
                return _answer(event.task) if event.HasField("task") else _reply(event.message)
        raise Lost("answered with nothing")

    async def get(self, task: str) -> Mapping[str, Any]:
        """Read a task.

        Raises:
            Lost, Refused: as they say.
        """
        with self._failing():
            return _answer(await self._client.get_task(pb.GetTaskRequest(id=task, history_length=0)))
        raise Lost("answered with nothing")

    async def cancel(self, task: str) -> Mapping[str, Any]:
        """End a task.

        Raises:
            Lost, Refused: as they say.
        """
        with self._failing():
            return _answer(await self._client.cancel_task(pb.CancelTaskRequest(id=task)))
        raise Lost("answered with nothing")

    @contextlib.contextmanager
    def _failing(self) -> Any:
        try:
            yield
        except A2AClientError as error:
            if not self._sent.lost and str(error).startswith(_RPC_ERROR):
                raise Refused(str(error), 0) from error
            raise Lost(self._sent.lost or self._unread()) from None
        except A2AError as error:
            raise Refused(str(error), 0) from error
        except CallFailed:
            raise
        except (ParseError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Lost(self._unread()) from None

    def _unread(self) -> str:
        return f"answered {self._sent.status} with what is no answer of A2A"


def _named(task: str, context: str, *, needed: bool) -> None:
    """Refuse ids that could not be said again, or that say something to a terminal.

    Raises:
        Lost: one is none.
    """
    if not (is_id(task, needed=needed) and is_id(context, needed=False)):
        raise Lost("named its task by what is no id")


def _answer(task: pb.Task) -> Mapping[str, Any]:
    _named(task.id, task.context_id, needed=True)
    said = task.status.message if task.status.HasField("message") else None
    return {
        "task": task.id,
        "context": task.context_id,
        "state": pb.TaskState.Name(task.status.state).removeprefix(_STATE).lower().replace("_", "-"),
        "message": None if said is None else MessageToDict(said),
        "artifacts": [MessageToDict(one) for one in task.artifacts],
    }


def _reply(message: pb.Message) -> Mapping[str, Any]:
    _named("", message.context_id, needed=False)
    return {
        "task": "",
        "context": message.context_id,
        "state": "",
        "message": MessageToDict(message),
        "artifacts": [],
    }
