"""`rf.messages`, `rf.memory` and `rf.artifacts`: what is sent, and what comes back of the answers."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from typing import Any

import pytest
from ringfence import agent

AT = "2026-01-02T03:04:05.000006Z"
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


@pytest.fixture
def rf(kernel):
    with agent.boot() as rf:
        yield rf


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_messages_are_text_or_json(kernel, rf) -> None:
    kernel.bodies["messages.send"] = lambda _: {"id": "m1", "to": "bob-abcde"}
    assert rf.messages.send("bob", "hi") == "m1"
    assert kernel.arguments() == {"to": "bob", "text": "hi"}
    rf.messages.send("bob", json={"n": (1, 2)})
    assert kernel.arguments() == {"to": "bob", "json": {"n": [1, 2]}}
    rf.messages.send("bob", "")
    assert kernel.arguments() == {"to": "bob", "text": ""}
    for wrong in ({"text": "x", "json": 1}, {"json": {1: 2}}, {"json": object()}):
        with pytest.raises(agent.InvalidRequest):
            rf.messages.send("bob", **wrong)
    assert len(kernel.calls) == 3


def test_a_received_message_has_its_facts(kernel, rf) -> None:
    message: dict[str, Any] = {
        "id": "m1",
        "from": "ann-abcde",
        "from_name": "ann",
        "text": None,
        "json": [1],
        "sent_at": AT,
    }
    kernel.bodies["messages.receive"] = lambda _: {"message": message}
    got = rf.messages.receive(1.5, from_="ann")
    assert kernel.arguments() == {"timeout_ms": 1500, "from": "ann"}
    assert (got.id, got.sender, got.sender_name, got.text, got.json, got.sent_at) == (
        "m1",
        "ann-abcde",
        "ann",
        None,
        [1],
        MOMENT,
    )
    kernel.bodies["messages.receive"] = lambda _: {"message": None}
    assert rf.messages.receive() is None
    assert kernel.arguments() == {}
    rf.messages.receive(0)
    assert kernel.arguments() == {"timeout_ms": 0}
    rf.messages.receive(-5)
    assert kernel.arguments() == {"timeout_ms": 0}


def test_memory_sends_what_was_given_and_says_what_is_left_out(kernel, rf) -> None:
    kernel.bodies["memory.append"] = lambda _: {"id": "e1"}
    assert rf.memory.append("text", tags=("a",), metadata={"k": 1}, space="team") == "e1"
    assert kernel.arguments() == {
        "text": "text",
        "tags": ["a"],
        "metadata": {"k": 1},
        "space": "team",
        "language": "",
    }
    entry = {
        "id": "e1",
        "text": "text",
        "tags": ["a"],
        "metadata": {"k": 1},
        "score": 0.5,
        "created_at": AT,
        "agent": "x",
    }
    kernel.bodies["memory.search"] = lambda _: {"entries": [entry], "truncated": True}
    found = rf.memory.search("text", limit=1)
    assert found.truncated
    (one,) = found
    assert (one.id, one.text, one.tags, one.metadata, one.score, one.created_at) == (
        "e1",
        "text",
        ("a",),
        {"k": 1},
        0.5,
        MOMENT,
    )
    with pytest.raises(agent.InvalidRequest):
        rf.memory.append("x", metadata={"k": object()})


def artifact(data: bytes, part: int) -> Any:
    """artifacts.get of one artifact that gives at most `part` bytes a call."""
    ref = hashlib.sha256(data).hexdigest()

    def get(arguments: dict[str, Any]) -> dict[str, Any]:
        assert arguments.get("ref", ref) == ref
        start = arguments.get("offset", 0)
        end = start + min(arguments.get("limit") or part, part)
        facts = {"name": "n", "version": 2, "ref": ref, "media_type": "text/plain", "size_bytes": len(data)}
        return {"data": b64(data[start:end]), **facts}

    return get


@pytest.mark.parametrize(("offset", "limit"), [(0, 0), (3, 0), (2, 5), (9, 100), (10, 0), (50, 3)])
def test_an_artifact_is_read_in_parts_of_one_version(kernel, rf, offset: int, limit: int) -> None:
    data = b"0123456789"
    kernel.bodies["artifacts.get"] = artifact(data, 4)
    got = rf.artifacts.get("n", offset=offset, limit=limit)
    assert got == data[offset : offset + limit if limit else None]
    assert (got.version, got.size_bytes, got.media_type) == (2, 10, "text/plain")
    assert "name" in kernel.arguments(0)
    # What follows is asked for by reference: a new version meanwhile does not mix in.
    assert all("ref" in kernel.arguments(nr) for nr in range(1, len(kernel.calls)))


def test_a_reference_is_known_by_its_form(kernel, rf) -> None:
    kernel.bodies["artifacts.get"] = artifact(b"x", 4)
    ref = hashlib.sha256(b"x").hexdigest()
    rf.artifacts.get(ref)
    assert kernel.arguments() == {"ref": ref}
    rf.artifacts.get("name", version=3)
    assert kernel.arguments() == {"name": "name", "version": 3}


def test_text_is_put_as_utf_8(kernel, rf) -> None:
    kernel.bodies["artifacts.put"] = lambda _: {"ref": "f" * 64, "version": 1, "size_bytes": 2}
    assert rf.artifacts.put("n", "ä").version == 1
    assert kernel.arguments() == {
        "name": "n",
        "data": b64("ä".encode()),
        "media_type": "text/plain; charset=utf-8",
    }
    rf.artifacts.put("n", b"\0")
    assert kernel.arguments() == {"name": "n", "data": b64(b"\0")}
    with pytest.raises(agent.InvalidRequest, match="carries at most"):
        rf.artifacts.put("n", bytes(3 << 20))


async def test_the_asyncio_front_end_answers_alike(kernel) -> None:
    kernel.bodies["messages.send"] = lambda _: {"id": "m1", "to": "bob-abcde"}
    kernel.bodies["messages.receive"] = lambda _: {"message": None}
    kernel.bodies["memory.append"] = lambda _: {"id": "e1"}
    kernel.bodies["memory.search"] = lambda _: {"entries": [], "truncated": False}
    kernel.bodies["artifacts.put"] = lambda _: {"ref": "f" * 64, "version": 1, "size_bytes": 1}
    kernel.bodies["artifacts.get"] = artifact(b"0123456789", 4)
    async with agent.boot_async() as rf:
        assert await rf.messages.send("bob", "hi") == "m1"
        assert await rf.messages.receive() is None
        assert await rf.memory.append("x") == "e1"
        assert await rf.memory.search() == []
        assert (await rf.artifacts.put("n", b"x")).version == 1
        assert (await rf.artifacts.get("n")).text == "0123456789"
