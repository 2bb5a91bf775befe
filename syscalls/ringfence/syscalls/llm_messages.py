"""Reads replies of the Anthropic messages protocol: whole ones, and those that come in parts. No I/O.

As in `llm_reply`, what is missing or of another shape is left out, never an exception of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from ringfence.syscalls.llm_reply import Events, Reply, Usage, count_of, decode, error_of, mapping, word

BLOCKS_MAX: Final = 1024
_READ: Final = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_TEXTS: Final = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


def usage_of(usage: Mapping[str, Any]) -> Usage | None:
    """Tokens read, with those written to and read from a cache, and tokens written; None: they are not said."""
    counts = [count_of(usage.get(name)) for name in _READ]
    written = count_of(usage.get("output_tokens"))
    if counts[0] is None or written is None:
        return None
    return Usage(prompt=sum(count or 0 for count in counts), completion=written)


def message_of(document: Mapping[str, Any]) -> Reply | None:
    """A reply in one piece; None: this is no message."""
    if document.get("type") != "message" or not isinstance(document.get("content"), list):
        return None
    return Reply(
        message={"role": "assistant", "content": document["content"]},
        finish=word(document.get("stop_reason")),
        model=word(document.get("model")),
        usage=usage_of(mapping(document.get("usage"))),
        document=dict(document),
    )


class MessageStream(Events):
    """Puts together the parts of a streamed reply."""

    def __init__(self) -> None:
        super().__init__()
        self.reply = Reply()
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[tuple[int, str], list[str]] = {}
        self._usage: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        """Whether the reply came to its end."""
        return self.ended and not self.reply.error and not self.broken

    def event(self, data: bytes) -> bool:
        """Take an event; False: it is none, or not whole yet."""
        document = decode(data)
        if document is None:
            return False
        match document.get("type"):
            case "message_start":
                self._message = mapping(document.get("message"))
                self._usage |= mapping(self._message.get("usage"))
                self.reply.model = word(self._message.get("model"))
            case "content_block_start":
                index = self._index(document)
                if index is not None:
                    self._blocks[index] = mapping(document.get("content_block"))
            case "content_block_delta":
                self._delta(document)
            case "message_delta":
                self._message |= mapping(document.get("delta"))
                self._usage |= {k: v for k, v in mapping(document.get("usage")).items() if v is not None}
                self.reply.finish = word(self._message.get("stop_reason"))
            case "message_stop":
                self.ended = True
            case "error":
                self.reply.error = error_of(document)[0] or "it gave no reason"
            case _:
                pass
        self.reply.usage = usage_of(self._usage) if self.reply.finish else None
        return True

    def _index(self, document: Mapping[str, Any]) -> int | None:
        index = document.get("index")
        return index if isinstance(index, int) and 0 <= index < BLOCKS_MAX else None

    def _delta(self, document: Mapping[str, Any]) -> None:
        index, delta = self._index(document), mapping(document.get("delta"))
        if index is None or index not in self._blocks:
            return
        kind = delta.get("type")
        key = _TEXTS.get(kind) if isinstance(kind, str) else None
        if key is not None and isinstance(delta.get(key), str):
            self._pieces.setdefault((index, key), []).append(delta[key])
        elif kind == "citations_delta":
            held = self._blocks[index]
            cited: object = held.get("citations")
            held["citations"] = [
                *cast("list[Any]", cited if isinstance(cited, list) else []),
                delta.get("citation"),
            ]

    def assembled(self) -> Reply:
        """What has come so far, as one message."""
        blocks: list[dict[str, Any]] = []
        for index in sorted(self._blocks):
            block = dict(self._blocks[index])
            for key in _TEXTS.values():
                pieces = self._pieces.get((index, key))
                if not pieces:
                    continue
                text = "".join(pieces)
                if key == "partial_json":
                    # Half of an input is shown as the text that it is.
                    block["input"] = decode(text.encode("utf-8", "replace")) if text else {}
                    if block["input"] is None:
                        block["input"], block["partial_json"] = {}, text
                else:
                    block[key] = word(block.get(key)) + text
            blocks.append(block)
        self.reply.message = {"role": "assistant", "content": blocks}
        self.reply.document = {**self._message, "content": blocks, "usage": self._usage}
        return self.reply
