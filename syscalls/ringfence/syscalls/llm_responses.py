"""Reads replies of the OpenAI responses protocol: whole ones, and those that come in parts. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from ringfence.syscalls.llm_reply import Events, Reply, Usage, count_of, decode, error_of, mapping, word

_LAST: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


def _usage_of(usage: Mapping[str, Any]) -> Usage | None:
    prompt, completion = count_of(usage.get("input_tokens")), count_of(usage.get("output_tokens"))
    return None if prompt is None or completion is None else Usage(prompt=prompt, completion=completion)


def _text_of(output: object) -> str:
    found: list[str] = []
    for item in cast("list[object]", output) if isinstance(output, list) else []:
        content: object = mapping(item).get("content")
        parts = cast("list[object]", content) if isinstance(content, list) else []
        found += [word(mapping(part).get("text")) for part in parts]
    return "".join(found)


def response_of(document: Mapping[str, Any]) -> Reply | None:
    """A reply in one piece; None: this is no response."""
    if document.get("object") != "response" or not isinstance(document.get("output"), list):
        return None
    status = word(document.get("status"))
    why = word(mapping(document.get("incomplete_details")).get("reason"))
    return Reply(
        message={"role": "assistant", "content": _text_of(document["output"]), "output": document["output"]},
        finish=why or status,
        model=word(document.get("model")),
        usage=_usage_of(mapping(document.get("usage"))),
        document=dict(document),
    )


class ResponseStream(Events):
    """Waits for the last event, which holds the whole response; of one that is cut it keeps the items so far."""

    def __init__(self) -> None:
        super().__init__()
        self.reply = Reply()
        self._response: dict[str, Any] = {}
        self._items: list[Any] = []
        self._texts: list[str] = []

    @property
    def complete(self) -> bool:
        """Whether the reply came to its end."""
        return self.ended and not self.reply.error and not self.broken

    def event(self, data: bytes) -> bool:
        """Take an event; False: it is none, or not whole yet."""
        if data == b"[DONE]":
            return True
        document = decode(data)
        if document is None:
            return False
        kind = word(document.get("type"))
        if kind in ("response.created", "response.in_progress"):
            self._response = mapping(document.get("response"))
            self.reply.model = word(self._response.get("model"))
        elif kind == "response.output_item.done":
            self._items.append(document.get("item"))
            self._texts.clear()
        elif kind.endswith(".delta"):
            self._texts.append(word(document.get("delta")))
        elif kind == "error":
            self.reply.error = word(document.get("message")) or error_of(document)[0] or "it gave no reason"
        elif kind in _LAST:
            response = mapping(document.get("response"))
            found = response_of(response)
            if kind == "response.failed":
                self.reply.error = error_of(response)[0] or "it gave no reason"
            elif found is not None:
                self.reply, self.ended = found, True
        return True

    def assembled(self) -> Reply:
        """What has come so far, as one message."""
        if self.ended:
            return self.reply
        text = _text_of(self._items) + "".join(self._texts)
        self.reply.message = {"role": "assistant", "content": text, "output": self._items}
        self.reply.document = {**self._response, "output": self._items}
        return self.reply
