"""The model gateway: endpoints that clients of OpenAI and Anthropic know. Every request for a reply is a call of `llm.complete`.

So it is decided, reserved and settled, recorded, and answered from the record when the program is started again. A stream goes
on as it comes, but its end is said when the reply is recorded: whoever waits for that can't have read what a crash loses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from ringfence.kernel.doors import formats, refusals
from ringfence.kernel.doors.bridge import Route, Withheld
from ringfence.kernel.doors.hearing import Parts
from ringfence.kernel.doors.http import Gone, Reply, Request
from ringfence.policy.matcher import match_name
from ringfence.policy.tokenizers import tokenizer_of
from ringfence.syscalls.errors import CallFailed, InvalidRequest, NoSuchResource, SyscallError
from ringfence.syscalls.llm_counting import counting
from ringfence.syscalls.llm_paging import Request as Prompt

if TYPE_CHECKING:
    from ringfence.kernel.server.desk import Desk
    from ringfence.kernel.settled import Answer

ACTION: Final = "llm.complete"
_APIS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
_COUNT: Final = "/v1/messages/count_tokens"
_MODELS: Final = "/v1/models"
_JSON: Final = {"content-type": "application/json"}
_STREAM: Final = {"content-type": "text/event-stream; charset=utf-8"}
_OK, _NO_PATH, _NO_METHOD = 200, 404, 405
_encode: Final = msgspec.json.Encoder(order="sorted").encode


def routes(desk: Desk) -> Sequence[Route]:
    """What the gateway answers."""
    return [Route(prefix="/v1/", handle=Gateway(desk).handle, refuse=refuse)]


def refuse(path: str, status: int, message: str) -> tuple[bytes, Mapping[str, str]]:
    """Word an error as the protocol of the path does."""
    return refusals.of_status(status, message, anthropic=_is_anthropic(path, {}))


def _is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    return path.startswith("/v1/messages") or "anthropic-version" in headers


class Gateway:
    """Answers for one program."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._counting = asyncio.Lock()  # all agents share the process that counts

    async def handle(self, request: Request, reply: Reply) -> None:
        """Answer one request.

        Raises:
            Gone: nobody takes the answer.
        """
        anthropic = _is_anthropic(request.path, request.headers)
        try:
            await self._take(request, reply)
        except SyscallError as error:
            status, body, headers = refusals.of_error(error, anthropic=anthropic)
            await reply.whole(status, body, headers)

    async def _take(self, request: Request, reply: Reply) -> None:
        path = request.path.rstrip("/")
        listing = path == _MODELS or path.startswith(f"{_MODELS}/")
        if path in _APIS or path == _COUNT or listing:
            wanted = "GET" if listing else "POST"
            if request.method != wanted:
                text = f"`{path[:200]}` takes {wanted}"
                body, headers = refuse(path, _NO_METHOD, text)
                await reply.whole(_NO_METHOD, body, {**headers, "allow": wanted})
            elif listing:
                await self._models(path, request, reply)
            elif path == _COUNT:
                await self._count(request, reply)
            else:
                await self._complete(_APIS[path], request, reply)
            return
        known = ", ".join([*_APIS, _COUNT, _MODELS])
        body, headers = refuse(path, _NO_PATH, f"there is nothing at `{path[:200]}`; there are {known}")
        await reply.whole(_NO_PATH, body, headers)

    # -- replies of models --------------------------------------------------------------------------------------------

    async def _complete(self, api: str, request: Request, reply: Reply) -> None:
        """Have a model answer.

        Raises:
            SyscallError: the call is refused, or fails.
            Withheld: nobody is to hear of it.
        """
        document = formats.document_of(request.body, request.headers.get("content-type", ""))
        arguments = formats.arguments_of(api, document, request.headers)
        try:
            raw = _encode(arguments)
        except (UnicodeEncodeError, RecursionError):
            raise InvalidRequest("the request holds what is no text; send whole characters") from None
        # What a client sent may be long, and the call may wait for long.
        del arguments
        document = {name: document[name] for name in ("stream", "stream_options") if name in document}
        parts = Parts() if document.get("stream") is True else None
        call = asyncio.ensure_future(self._desk.posted(ACTION, raw, lambda: reply.lost, parts))
        if parts is not None:
            with contextlib.suppress(Gone):  # it goes on, and is recorded
                await _pass_on(call, parts, reply)
        answer, unheard = await call
        if answer.park:
            self._desk.park(answer)
        if answer.withheld:
            raise Withheld
        try:
            await self._say(api, document, answer, parts, reply)
        except Gone:
            unheard()
            raise

    async def _say(
        self, api: str, document: Mapping[str, Any], answer: Answer, parts: Parts | None, reply: Reply
    ) -> None:
        """Say what came of a call, or the end of what was said of it while it ran."""
        told = {"x-ringfence-step": str(answer.step)} if answer.step else {}
        failure = answer.failure
        if parts is not None and reply.begun and parts.spoiled and failure is None:
            text = "the reply holds what may not be shown; ask without `stream`, where it is taken out"
            failure = CallFailed(text)
        if failure is not None:
            status, body, headers = refusals.of_error(failure, anthropic=api == "messages")
            if parts is None or not reply.begun:
                await reply.whole(status, body, {**headers, **told})
                return
            await _send(formats.failure_events(api, body, parts.count), reply)
            return
        found: dict[str, Any] = msgspec.json.decode(answer.result or b"{}")["reply"]
        if parts is None:
            await reply.whole(_OK, msgspec.json.encode(found), {**_JSON, **told})
        elif reply.begun:
            await _send(_end(api, found, document, parts.count), reply)
        else:
            await reply.begin(_OK, {**_STREAM, **told})
            await _send(_events(api, found, document), reply)

    # -- what asks no model -------------------------------------------------------------------------------------------

    async def _count(self, request: Request, reply: Reply) -> None:
        """Count a prompt here: no host is asked, nothing is charged, and the same prompt has the same count."""
        document = formats.document_of(request.body, request.headers.get("content-type", ""))
        arguments = formats.arguments_of("messages", document, {})
        hosts = self._desk.thread.environment.llm.values()
        model = arguments["model"]
        serving = [one for one in hosts if any(match_name(pattern, model) for pattern in one.models)]
        if not serving:
            raise NoSuchResource(f"no declared host serves the model `{model}`")
        if not all(isinstance(message, dict) for message in arguments["messages"]):
            raise InvalidRequest("each of `messages` has to be an object with `role` and `content`")
        prompt = Prompt(
            tokenizer=tokenizer_of(model, serving[0].tokenizers),
            messages=arguments["messages"],
            tools=arguments.get("tools", []),
            response_format=arguments.get("extra"),
        )
        async with self._counting:
            counted = await counting().count(prompt)
        await reply.whole(_OK, msgspec.json.encode({"input_tokens": counted.raw}), _JSON)

    async def _models(self, path: str, request: Request, reply: Reply) -> None:
        """Those that hosts are declared for by their whole names, and that the program may ask."""
        environment = self._desk.thread.environment
        anthropic = _is_anthropic("", request.headers)
        spoken = "anthropic" if anthropic else "openai"
        hosts = [host for host in environment.llm.values() if host.protocol == spoken]
        declared = {name for host in hosts for name in host.models if "*" not in name}
        names = sorted(name for name in declared if environment.visible(ACTION, name))
        one = path.removeprefix(_MODELS).strip("/")
        if one:
            if one not in names:
                raise NoSuchResource(f"the model `{one[:200]}` is not listed; it may be served all the same")
            await reply.whole(_OK, msgspec.json.encode(_model(one, anthropic=anthropic)), _JSON)
            return
        found: dict[str, Any] = {"data": [_model(name, anthropic=anthropic) for name in names]}
        if anthropic:
            ends = (
                {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
            )
            found |= {"has_more": False, **ends}
        else:
            found["object"] = "list"
        await reply.whole(_OK, msgspec.json.encode(found), _JSON)


async def _pass_on(call: asyncio.Future[Any], parts: Parts, reply: Reply) -> None:
    """Send parts as they come, until the call has come to its end.

    Raises:
        Gone: nobody takes them any more.
    """
    while True:
        while (part := parts.take()) is not None:
            if not reply.begun:
                await reply.begin(_OK, _STREAM)
            await reply.part(formats.event(*part))
        if call.done():
            return
        bell = asyncio.ensure_future(parts.wait())
        await asyncio.wait([call, bell], return_when=asyncio.FIRST_COMPLETED)
        bell.cancel()


async def _send(events: Iterator[bytes], reply: Reply) -> None:
    for part in events:
        await reply.part(part)
    await reply.end()


def _end(api: str, found: Mapping[str, Any], document: Mapping[str, Any], before: int) -> Iterator[bytes]:
    match api:
        case "chat":
            return formats.chat_end(found, usage=formats.wants_usage(document))
        case "messages":
            return formats.message_end(found)
        case _:
            return formats.response_end(found, before)


def _model(name: str, *, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "ringfence"}


def _events(api: str, found: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[bytes]:
    match api:
        case "chat":
            return formats.chat_events(found, usage=formats.wants_usage(document))
        case "messages":
            return formats.message_events(found)
        case _:
            return formats.response_events(found)
