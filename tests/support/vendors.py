"""Hosts of models as two vendors have them, over real HTTP: chat completions, responses and messages, whole or in parts.

What `support.model` scripts is said in each protocol's words; what reaches the host is kept there.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

from support.model import Call, ModelHost, Turn

SEARCH = "tool_search"
"""A tool of the responses protocol that has a kind of item of its own: the program searches among its tools."""


def message(turn: Turn, model: Any) -> dict[str, Any]:
    """A whole reply of the messages protocol."""
    text = {"type": "text", "text": "".join(turn.words)}
    thought = {"type": "thinking", "thinking": "let me see", "signature": "c2ln"}
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in turn.called
    ]
    prompt, completion = turn.usage or (0, 0)
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [thought, text, *calls] if turn.tool else [text, *calls],
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": prompt, "output_tokens": completion, "cache_read_input_tokens": 0},
    }


def response(turn: Turn, model: Any) -> dict[str, Any]:
    """A whole reply of the responses protocol."""
    part: dict[str, Any] = {
        "type": "output_text",
        "text": "".join(turn.words),
        "annotations": [],
        "logprobs": [],
    }
    said: dict[str, Any] = {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    prompt, completion = turn.usage or (0, 0)
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": model,
        "output": [said, *(_item(number, call) for number, call in enumerate(turn.called, 1))],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {**usage, **details},
    }


def _item(number: int, call: Call) -> dict[str, Any]:
    """A call as an item of a response: of a tool with a schema, or of one that takes a text."""
    item: dict[str, Any] = {
        "id": f"f{number}",
        "call_id": call.id,
        "name": call.name,
        "status": "completed",
        **({"namespace": call.namespace} if call.namespace else {}),
    }
    if call.name == SEARCH:
        return {**item, "type": "tool_search_call", "execution": "client", "arguments": call.arguments}
    if isinstance(call.arguments, str):
        return {**item, "type": "custom_tool_call", "input": call.arguments}
    return {**item, "type": "function_call", "arguments": call.text}


class VendorHost(ModelHost):
    """Answers by the path that is asked."""

    def _answer(self, handler: BaseHTTPRequestHandler, turn: Turn, body: dict[str, Any]) -> None:
        kind = handler.path.rpartition("/")[2]
        if turn.status != 200 or turn.body is not None or kind not in ("messages", "responses"):
            super()._answer(handler, turn, body)
        elif body.get("stream"):
            self._send_events(handler, turn, body, kind)
        else:
            self._wait(turn)
            make = message if kind == "messages" else response
            self._send(handler, turn, json.dumps(make(turn, body["model"])).encode(), "application/json")

    def _send_events(
        self, handler: BaseHTTPRequestHandler, turn: Turn, body: dict[str, Any], kind: str
    ) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        make = message_parts if kind == "messages" else response_parts
        waited = False
        for part, torn in make(turn, body["model"]):
            if torn and turn.cut_after is not None:
                self._tear(handler)
                return
            self._event(handler, json.dumps(part))
            if "delta" in part and not waited:
                waited = True
                self._wait(turn)
        handler.wfile.write(b"0\r\n\r\n")


def message_parts(turn: Turn, model: Any) -> list[tuple[dict[str, Any], bool]]:
    """The same in parts, each with whether a cut stream ends before it."""
    whole = message(turn, model)
    usage = whole["usage"]
    begun: dict[str, Any] = {
        **whole,
        "content": [],
        "stop_reason": None,
        "usage": {**usage, "output_tokens": 1},
    }
    parts: list[tuple[dict[str, Any], bool]] = [({"type": "message_start", "message": begun}, False)]
    for index, block in enumerate(whole["content"]):
        bare: dict[str, Any] = {
            "text": {"text": ""},
            "thinking": {"thinking": "", "signature": ""},
            "tool_use": {"input": {}},
        }
        start: dict[str, Any] = {**block, **bare[block["type"]]}
        parts.append(({"type": "content_block_start", "index": index, "content_block": start}, False))
        deltas: list[dict[str, Any]] = [{"type": "text_delta", "text": word} for word in turn.words]
        if block["type"] == "thinking":
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        elif block["type"] == "tool_use":
            text = json.dumps(block["input"], separators=(",", ":"))
            pieces = (text[: len(text) // 2], text[len(text) // 2 :])
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
        parts += [({"type": "content_block_delta", "index": index, "delta": d}, False) for d in deltas]
        parts.append(({"type": "content_block_stop", "index": index}, True))
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    parts.append(
        ({"type": "message_delta", "delta": ended, "usage": {"output_tokens": usage["output_tokens"]}}, True)
    )
    parts.append(({"type": "message_stop"}, True))
    return parts


def response_parts(turn: Turn, model: Any) -> list[tuple[dict[str, Any], bool]]:
    """The same of the responses protocol."""
    whole = response(turn, model)
    begun: dict[str, Any] = {**whole, "status": "in_progress", "output": [], "usage": None}
    parts: list[tuple[dict[str, Any], bool]] = [({"type": "response.created", "response": begun}, False)]
    for index, item in enumerate(whole["output"]):
        bare: dict[str, Any] = {**item, "status": "in_progress"}
        field = {"custom_tool_call": "input", "function_call": "arguments"}.get(item["type"], "")
        bare |= {"content": []} if not index else {field: ""} if field else {}
        parts.append(({"type": "response.output_item.added", "output_index": index, "item": bare}, index > 0))
        here = {"item_id": item["id"], "output_index": index}
        if index and field:
            kind = f"response.{'custom_tool_call_input' if field == 'input' else 'function_call_arguments'}"
            parts.append(({"type": f"{kind}.delta", **here, "delta": item[field]}, True))
            parts.append(({"type": f"{kind}.done", **here, field: item[field]}, True))
        elif not index:
            (part,) = item["content"]
            here["content_index"] = 0
            parts.append(
                ({"type": "response.content_part.added", **here, "part": {**part, "text": ""}}, False)
            )
            deltas = [{"type": "response.output_text.delta", **here, "delta": word} for word in turn.words]
            parts += [({**delta, "logprobs": []}, False) for delta in deltas]
            parts.append(({"type": "response.output_text.done", **here, "text": part["text"]}, True))
            parts.append(({"type": "response.content_part.done", **here, "part": part}, True))
        parts.append(({"type": "response.output_item.done", "output_index": index, "item": item}, True))
    parts.append(({"type": "response.completed", "response": whole}, True))
    return [({**part, "sequence_number": number}, torn) for number, (part, torn) in enumerate(parts)]


class Talker(VendorHost):
    """Answers by what a request holds, not by when it comes: whoever asks the same again is told the same.

    After N results of tools in the conversation comes turn N of the script; the last one stays. A request without
    tools, such as for a title, is answered in passing.
    """

    def _next(self, body: dict[str, Any]) -> Turn:
        if not body.get("tools"):
            return Turn(words=("All right.",))
        number = len(results(body))
        turn = self.turns[min(number, len(self.turns) - 1)]
        # No two calls of a conversation have one id: clients take the second for the first.
        calls = tuple(replace(call, id=f"call_{number}_{at}") for at, call in enumerate(turn.called))
        return replace(turn, calls=calls, tool=False)

    def talks(self) -> list[dict[str, Any]]:
        """Requests of the conversation itself."""
        return [asked.body for asked in self.asked if asked.body.get("tools")]

    def twice(self) -> list[int]:
        """Which turns of the script were asked for more than once: requests that the host was sent again."""
        counts = Counter(len(results(body)) for body in self.talks())
        return sorted(turn for turn, count in counts.items() if count > 1)


def results(body: dict[str, Any]) -> list[str]:
    """What tools gave, as the conversation of a request holds it, in any of the three protocols."""
    found: list[str] = []
    said: list[dict[str, Any]] = body.get("messages") or body.get("input") or []
    for one in said:
        content: Any = one.get("content")
        if one.get("role") == "tool":
            found.append(_words(content))
        elif one.get("type") in ("function_call_output", "custom_tool_call_output"):
            found.append(_words(one.get("output")))
        elif one.get("type") == "tool_search_output":
            found.append(json.dumps(one.get("tools")))
        elif isinstance(content, list):
            blocks = cast("list[dict[str, Any]]", content)
            found += [_words(b.get("content")) for b in blocks if b.get("type") == "tool_result"]
    return found


def _words(content: Any) -> str:
    if isinstance(content, list):
        parts = cast("list[dict[str, Any]]", content)
        return "".join(str(part.get("text", "")) for part in parts)
    return str(content)
