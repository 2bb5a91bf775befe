"""Reads a model's reply: a whole one, or one that comes in parts. No I/O.

Everything here comes from outside: what is missing or of another shape is left out, never an exception of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec
from ringfence.syscalls.llm_tokens import count_value

COUNT_MAX: Final = 1 << 40
TOOLS_MAX: Final = 1024
EVENT_LINES_MAX: Final = 64
"""Most lines of one event of a stream."""
_HEAD: Final = ("id", "created", "model", "system_fingerprint", "service_tier")
"""What of a part's document stands in that of the whole, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that a host says it read and wrote."""

    prompt: int
    completion: int


@dataclass(slots=True, kw_only=True)
class Reply:
    """What a host has answered so far.

    Attributes:
        message: role, content, tool calls and what else it sent.
        finish: why it ended; empty: it has not.
        usage: None where the host gave none.
        error: what a host said in the middle of a reply.
        document: the host's own, for whoever passes it on.
    """

    message: dict[str, Any] = field(default_factory=dict[str, Any])
    finish: str = ""
    model: str = ""
    usage: Usage | None = None
    error: str = ""
    document: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def text(self) -> str:
        """Its text; a refusal is one too."""
        return text_of(self.message.get("content")) or text_of(self.message.get("refusal"))

    @property
    def counted(self) -> int:
        """Its tokens by our own count."""
        return sum(count_value(value) for key, value in self.message.items() if key != "role")


def decode(data: bytes) -> dict[str, Any] | None:
    """A JSON object, or None for anything else."""
    try:
        value: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def text_of(content: object) -> str:
    """The text of a content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [mapping(part) for part in cast("Sequence[object]", content)]
        return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    return ""


def error_of(document: Mapping[str, Any] | None) -> tuple[str, str]:
    """Message and code of an error document; empty where there is none."""
    error: object = (document or {}).get("error")
    if isinstance(error, str):
        return error, ""
    fields = mapping(error)
    return word(fields.get("message")) or word((document or {}).get("message")), word(fields.get("code"))


def whole(document: Mapping[str, Any]) -> Reply | None:
    """A reply in one piece; None: this is no chat completion."""
    choices = document.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    choice = mapping(cast("list[object]", choices)[0])
    message = mapping(choice.get("message"))
    if not message:
        return None
    return Reply(
        message=message,
        finish=word(choice.get("finish_reason")),
        model=word(document.get("model")),
        usage=usage_of(document),
        document=dict(document),
    )


def usage_of(document: Mapping[str, Any]) -> Usage | None:
    """The usage of a reply or of a part."""
    usage = mapping(document.get("usage"))
    prompt, completion = count_of(usage.get("prompt_tokens")), count_of(usage.get("completion_tokens"))
    return None if prompt is None or completion is None else Usage(prompt=prompt, completion=completion)


class Events:
    """Takes a stream of events apart from the bytes as they come.

    Attributes:
        ended: whether the last event has come.
        broken: whether a part could not be read. What comes after it is not taken: text is missing in between.
        heard: told the data of each event that was taken.
    """

    heard: Callable[[bytes], None] | None = None

    def __init__(self) -> None:
        self.ended = self.broken = False
        self._line = bytearray()
        self._data: list[bytes] = []  # lines of an event that is not whole yet

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._line += data
        *lines, rest = bytes(self._line).split(b"\n")
        self._line = bytearray(rest)
        for line in lines:
            name, _, value = line.rstrip(b"\r").partition(b":")
            if self.ended or self.broken:
                return
            if name == b"data" and value.strip():
                self._data.append(value.strip())
                # Hosts that leave out the blank line between events are understood, too.
                data = b"\n".join(self._data)
                if self.event(data):
                    self._data = []
                    if self.heard is not None:
                        self.heard(data)
                self.broken = len(self._data) > EVENT_LINES_MAX
            elif not name:
                self.broken = bool(self._data)

    def event(self, data: bytes) -> bool:
        """Take an event; False: it is none, or not whole yet."""
        raise NotImplementedError


class Stream(Events):
    """Puts together the parts of a streamed chat completion."""

    def __init__(self) -> None:
        super().__init__()
        self.reply = Reply()
        self._head: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._pieces: dict[str, list[str]] = {}
        self._tools: dict[int, dict[str, Any]] = {}

    @property
    def complete(self) -> bool:
        """Whether the reply came to its end."""
        whole = not self.reply.error and not self.broken and not self._data
        return whole and (self.ended or bool(self.reply.finish))

    def assembled(self) -> Reply:
        """What has come so far, as one message."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message.update({key: "".join(pieces) for key, pieces in self._pieces.items()})
        if self._tools:
            message["tool_calls"] = [self._tools[index] for index in sorted(self._tools)]
        self.reply.message = message
        choice = {"index": 0, "message": message, "finish_reason": self.reply.finish or None}
        self.reply.document = {**self._head, "object": "chat.completion", "choices": [choice]}
        if self._usage:
            self.reply.document["usage"] = self._usage
        return self.reply

    def event(self, data: bytes) -> bool:
        """Take an event; False: it is none, or not whole yet."""
        if data == b"[DONE]":
            self.ended = True
            return True
        document = decode(data)
        if document is None:
            return False
        self.reply.usage = usage_of(document) or self.reply.usage
        self._usage = mapping(document.get("usage")) or self._usage
        self._head = self._head or {key: document[key] for key in _HEAD if key in document}
        self.reply.model = word(document.get("model")) or self.reply.model
        if document.get("error"):
            self.reply.error = error_of(document)[0] or "it gave no reason"
        choices = document.get("choices")
        if isinstance(choices, list) and choices:
            choice = mapping(cast("list[object]", choices)[0])
            self.reply.finish = word(choice.get("finish_reason")) or self.reply.finish
            self._delta(mapping(choice.get("delta")))
        return True

    def _delta(self, delta: Mapping[str, Any]) -> None:
        for key, value in delta.items():
            if key == "tool_calls" and isinstance(value, list):
                for call in cast("list[object]", value):
                    self._tool(mapping(call))
            elif key != "role" and isinstance(value, str) and value:
                self._pieces.setdefault(key, []).append(value)

    def _tool(self, call: Mapping[str, Any]) -> None:
        index = call.get("index", 0)
        if not isinstance(index, int) or not 0 <= index < TOOLS_MAX:
            return
        held = self._tools.setdefault(
            index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        held["id"] = word(call.get("id")) or held["id"]
        held["type"] = word(call.get("type")) or held["type"]
        for key, value in mapping(call.get("function")).items():
            if isinstance(value, str):
                held["function"][key] = held["function"].get(key, "") + value


def mapping(value: object) -> dict[str, Any]:
    """A JSON object, or an empty one for anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def word(value: object) -> str:
    """A text, or an empty one for anything else."""
    return value if isinstance(value, str) else ""


def count_of(value: object) -> int | None:
    """A number of tokens, or None for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= COUNT_MAX else None
