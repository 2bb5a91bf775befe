"""The wire formats of models' hosts as the gateway serves them: a request becomes a call, a recorded reply an answer. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import msgspec
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.llm_reply import mapping, word
from ringfence.syscalls.llm_wire import WIRES

LIMITS: Final[Mapping[str, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}
"""Keys that say how long a reply may be; the first that is there counts."""
_PIECE_CHARS: Final = 4096
"""Of a text that is sent in parts."""


def document_of(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object that a request holds.

    Raises:
        InvalidRequest: it holds none.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in ("application/json", ""):
        raise InvalidRequest(f"the content type is `{kind[:100]}`; send `application/json`")
    try:
        document: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is no JSON: {' '.join(str(error).split())[:200]}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply; make it flatter") from None
    if not isinstance(document, dict):
        raise InvalidRequest("the body is no JSON object; send one with `model` and the prompt")
    return cast("dict[str, Any]", document)


def arguments_of(api: str, document: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `llm.complete` for a request.

    Raises:
        InvalidRequest: it lacks something, or something is of the wrong type.
    """
    wire = WIRES[api]
    model, prompt = document.get("model"), document.get(wire.prompt)
    if not isinstance(model, str) or not model:
        raise InvalidRequest("`model` is missing; name one")
    if api == "responses" and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"`{wire.prompt}` is no list of messages, or an empty one; send at least one")
    limit = next((document[key] for key in LIMITS[api] if document.get(key) is not None), 0)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise InvalidRequest(f"`{LIMITS[api][0]}` is no number of tokens; give a whole one")
    tools: object = document.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("`tools` is no list; send one, or leave it out")
    rest = {key: value for key, value in document.items() if key not in wire.owned}
    found: dict[str, Any] = {
        "api": api,
        "model": model,
        "messages": prompt,
        "max_tokens": min(limit, (1 << 31) - 1),
        "stream": document.get("stream") is True,
        "tools": tools,
        "extra": rest or None,
        "headers": {name: headers[name] for name in wire.headers if headers.get(name)},
    }
    return {key: value for key, value in found.items() if value not in (None, 0, False, [], {})}


def wants_usage(document: Mapping[str, Any]) -> bool:
    """Whether a stream of a chat completion is to end with its usage."""
    return mapping(document.get("stream_options")).get("include_usage") is True


def event(data: object, name: str = "") -> bytes:
    """One event of a stream."""
    text = data if isinstance(data, bytes) else msgspec.json.encode(data)
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + text + b"\n\n"


def pieces(text: str) -> Iterator[str]:
    """A text in parts that are not too long; at least one."""
    for at in range(0, max(len(text), 1), _PIECE_CHARS):
        yield text[at : at + _PIECE_CHARS]


def chat_events(document: Mapping[str, Any], *, usage: bool) -> Iterator[bytes]:
    """A chat completion in parts."""
    head = _chat_head(document)
    choice = mapping(next(iter(document.get("choices") or []), None))
    message = mapping(choice.get("message"))

    def chunk(delta: Mapping[str, Any]) -> bytes:
        part = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return event({**head, "choices": [part], **({"usage": None} if usage else {})})

    yield chunk({"role": "assistant", "content": "" if isinstance(message.get("content"), str) else None})
    for key, value in message.items():
        if key == "tool_calls" and isinstance(value, list):
            for index, call in enumerate(cast("list[Any]", value)):
                yield chunk({"tool_calls": [{"index": index, **mapping(call)}]})
        elif key != "role" and isinstance(value, str) and value:
            for piece in pieces(value):
                yield chunk({key: piece})
        elif key not in ("role", "content") and value not in (None, [], {}):
            yield chunk({key: value})
    yield from chat_end(document, usage=usage)


def chat_end(document: Mapping[str, Any], *, usage: bool) -> Iterator[bytes]:
    """What ends a chat completion in parts."""
    head = _chat_head(document)
    choice = mapping(next(iter(document.get("choices") or []), None))
    why = word(choice.get("finish_reason")) or "stop"
    part: dict[str, Any] = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": why}
    yield event({**head, "choices": [part], **({"usage": None} if usage else {})})
    if usage:
        yield event({**head, "choices": [], "usage": document.get("usage")})
    yield event(b"[DONE]")


def _chat_head(document: Mapping[str, Any]) -> dict[str, Any]:
    head = {key: document[key] for key in document if key not in ("choices", "usage", "object")}
    return {**head, "object": "chat.completion.chunk"}


_BLOCKS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "text": (("text", "text_delta"),),
    "thinking": (("thinking", "thinking_delta"), ("signature", "signature_delta")),
}
"""What of a block comes in deltas, by its type."""


def message_events(document: Mapping[str, Any]) -> Iterator[bytes]:
    """A message in parts."""
    usage = mapping(document.get("usage"))
    start: dict[str, Any] = {**document, "content": [], "stop_reason": None, "stop_sequence": None}
    start["usage"] = {**usage, "output_tokens": 0}
    yield event({"type": "message_start", "message": start}, "message_start")
    content: object = document.get("content")
    for index, one in enumerate(cast("list[Any]", content) if isinstance(content, list) else []):
        yield from _block_events(index, mapping(one))
    yield from message_end(document)


def message_end(document: Mapping[str, Any]) -> Iterator[bytes]:
    """What ends a message in parts."""
    usage = mapping(document.get("usage"))
    delta = {key: document.get(key) for key in ("stop_reason", "stop_sequence")}
    yield event({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def _block_events(index: int, block: Mapping[str, Any]) -> Iterator[bytes]:
    kind = word(block.get("type"))
    parts = _BLOCKS.get(kind, ())
    start: dict[str, Any] = {**block, **{key: "" for key, _ in parts}}
    if kind == "tool_use":
        start["input"] = {}
    yield event(
        {"type": "content_block_start", "index": index, "content_block": start}, "content_block_start"
    )
    deltas: list[Mapping[str, Any]] = [
        {"type": name, key: piece} for key, name in parts for piece in pieces(word(block.get(key))) if piece
    ]
    if kind == "tool_use":
        text = msgspec.json.encode(block.get("input")).decode()
        deltas += [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(text)]
    for delta in deltas:
        yield event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
    yield event({"type": "content_block_stop", "index": index}, "content_block_stop")


class _Events:
    """Events of one response, numbered."""

    def __init__(self, first: int = 0) -> None:
        self._number = first - 1

    def say(self, kind: str, **fields: Any) -> bytes:
        """The next one."""
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def last(self, document: Mapping[str, Any]) -> bytes:
        """The one that holds all of it."""
        kind = "response.incomplete" if document.get("status") == "incomplete" else "response.completed"
        return self.say(kind, response=document)

    def item(self, index: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        """One item of its output."""
        kind = item.get("type")
        place = {"output_index": index, "item_id": word(item.get("id"))}
        bare = {**item, "status": "in_progress"} if "status" in item else dict(item)
        bare |= {"content": []} if kind == "message" else {}
        bare |= {"arguments": ""} if kind == "function_call" else {}
        yield self.say("response.output_item.added", output_index=index, item=bare)
        if kind == "message":
            for at, part in enumerate(item.get("content") or []):
                yield from self._text({**place, "content_index": at}, mapping(part))
        elif kind == "function_call":
            text = word(item.get("arguments"))
            for piece in pieces(text):
                yield self.say("response.function_call_arguments.delta", **place, delta=piece)
            name = word(item.get("name"))
            yield self.say("response.function_call_arguments.done", **place, arguments=text, name=name)
        yield self.say("response.output_item.done", output_index=index, item=item)

    def _text(self, here: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[bytes]:
        if part.get("type") != "output_text":
            return
        text = word(part.get("text"))
        yield self.say("response.content_part.added", **here, part={**part, "text": ""})
        for piece in pieces(text):
            yield self.say("response.output_text.delta", **here, delta=piece, logprobs=[])
        yield self.say("response.output_text.done", **here, text=text, logprobs=[])
        yield self.say("response.content_part.done", **here, part=part)


def response_events(document: Mapping[str, Any]) -> Iterator[bytes]:
    """A response in parts."""
    events = _Events()
    begun: dict[str, Any] = {**document, "status": "in_progress", "output": [], "usage": None}
    yield events.say("response.created", response=begun)
    yield events.say("response.in_progress", response=begun)
    output: object = document.get("output")
    for index, one in enumerate(cast("list[Any]", output) if isinstance(output, list) else []):
        yield from events.item(index, mapping(one))
    yield events.last(document)


def response_end(document: Mapping[str, Any], before: int) -> Iterator[bytes]:
    """What ends a response in parts, after so many."""
    yield _Events(before).last(document)


def failure_events(api: str, body: bytes, before: int) -> Iterator[bytes]:
    """What a stream ends with that fails after it has begun; `body` as `refusals` makes it."""
    if api == "messages":
        yield event(body, "error")
    elif api == "chat":
        yield event(body)
    else:
        error = mapping(mapping(msgspec.json.decode(body)).get("error"))
        facts = {"code": error.get("code"), "message": error.get("message"), "param": None}
        yield event({"type": "error", "sequence_number": before, **facts}, "error")
