"""Replies that go on while they come, and those of hosts that speak other protocols than chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ringfence.syscalls.llm_live import Live
from ringfence.syscalls.llm_wire import WIRES, Parts
from ringfence.syscalls.redaction import Redactor
from support.model import Turn
from support.vendors import message_parts, response_parts

SECRET = "s3cret-model-key"


class Heard:
    """Keeps what went on."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.spoiled = False

    def part(self, data: bytes, kind: str) -> None:
        document = json.loads(data)
        assert kind == document.get("type", "")
        self.parts.append(document)

    def spoil(self) -> None:
        self.spoiled = True


def chunk(content: str | None, finish: str | None = None) -> dict[str, Any]:
    delta = {} if content is None else {"content": content}
    return {"id": "r", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def live(parts: list[Any], *secrets: str) -> Heard:
    heard = Heard()
    one = Live(heard, Redactor(secrets))
    for part in parts:
        one.take(json.dumps(part).encode())
    one.take(b"[DONE]")
    return heard


def text(heard: Heard) -> str:
    return "".join(part["choices"][0]["delta"].get("content", "") for part in heard.parts)


def test_all_goes_on_but_the_end() -> None:
    usage: Any = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    whole = [chunk("a"), chunk("b"), chunk(None, "stop"), usage]
    assert live(whole).parts == whole[:2]
    # The last words may come with the end.
    assert live([chunk("a"), chunk("b", "stop")]).parts == [chunk("a"), chunk("b")]
    turn = Turn(tool=True)
    for make, held in ((message_parts, 2), (response_parts, 1)):
        parts = [part for part, _ in make(turn, "m")]
        assert live(parts).parts == parts[:-held]


@pytest.mark.parametrize("size", [1, 3, 7, 16, 100])
def test_no_secret_goes_through_however_it_is_torn(size: int) -> None:
    words = "x" * 150 + SECRET + "y" * 150
    parts = [chunk(words[at : at + size]) for at in range(0, len(words), size)]
    heard = live([*parts, chunk(None, "stop")], SECRET)
    if size == 100:
        assert SECRET not in text(heard)
    else:
        assert heard.spoiled
        assert set(text(heard)) <= {"x"}
        # What can't be the beginning of one does not wait.
        assert len(text(heard)) > 150 - size
    harmless = [chunk(part) for part in words.replace(SECRET, "")]
    heard = live([*harmless, chunk(None, "stop")], SECRET)
    assert (heard.spoiled, text(heard)) == (False, "x" * 150 + "y" * 150)


def fed(api: str, parts: list[Any]) -> Parts:
    stream = WIRES[api].stream()
    for part in parts:
        data = json.dumps(part).encode()
        for at in range(0, len(data), 17):
            stream.feed(b"event: some\ndata: "[: 18 * (at == 0)] + data[at : at + 17])
        stream.feed(b"\n\n")
    return stream


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_parts_come_to_what_the_whole_is(api: str) -> None:
    from support.vendors import message, response

    make, whole = (message_parts, message) if api == "messages" else (response_parts, response)
    for turn in (Turn(), Turn(tool=True, usage=(3, 4))):
        stream = fed(api, [part for part, _ in make(turn, "m")])
        assert (stream.complete, stream.broken) == (True, False)
        found = stream.assembled()
        assert found.document == whole(turn, "m")
        assert found.usage is not None
        assert (found.usage.prompt, found.usage.completion) == turn.usage
        assert found.text == "Good day."


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_of_a_cut_one_what_came_is_kept(api: str) -> None:
    make = message_parts if api == "messages" else response_parts
    stream = fed(api, [part for part, torn in make(Turn(), "m") if not torn])
    assert not stream.complete
    found = stream.assembled()
    assert (found.text, found.usage) == ("Good day.", None)
    assert found.counted > 0
    error = {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "too much"},
        "message": "too much",
    }
    stream = fed(api, [make(Turn(), "m")[0][0], error])
    assert (stream.complete, stream.reply.error) == (False, "too much")
