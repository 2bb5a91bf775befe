"""Attacks on the callback: forged, altered, late and replayed decisions, other people's names, and bodies without end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ringfence.kernel.operations import approvals, house
from ringfence.kernel.outreach import Outreach
from ringfence.kernel.server import callback
from support.heart import URL, Heart, heart_on
from support.scenes import short_directory
from support.signed import free_port, new_key, post, signed

pytestmark = pytest.mark.postgres

POST = 'http.post: "http://pay.test/**"'
CONFIG = """\
apiVersion: ringfence/v1
kind: Kernel
spec:
  callback: {{listen: "127.0.0.1:{port}", people: {{anna: {{key: {{secret: anna}}}}, bert: {{key: {{secret: bert}}}}, unset: {{key: {{secret: nobody}}}}}}}}
"""


@dataclass
class Door:
    heart: Heart
    port: int
    keys: dict[str, str] = field(default_factory=dict[str, str])

    async def send(self, who: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
        status, document = await asyncio.to_thread(post, self.port, who, body, headers)
        return status, document["error"]["reason"] if "error" in document else document["state"]

    async def say(self, who: str, said: Any, **more: Any) -> tuple[int, str]:
        body = json.dumps(said).encode()
        return await self.send(who, body, signed(self.keys[who], body, **more))

    async def raw(self, data: bytes) -> bytes:
        """What the door answers to bytes, until it closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            writer.write_eof()
            return await reader.read()
        finally:
            writer.close()

    async def states(self) -> list[tuple[str, list[str]]]:
        found = (await approvals.approvals(self.heart.kernel, "", everything=True))["approvals"]
        return [(a["state"], a["approved_by"]) for a in found]


@pytest.fixture
async def door(dsn: str) -> AsyncIterator[Door]:
    port = free_port()
    with short_directory() as directory:
        async with heart_on(dsn, directory, CONFIG.format(port=port)) as heart:
            door = Door(heart, port, {name: new_key() for name in ("anna", "bert")})
            for name, key in door.keys.items():
                heart.kernel.secrets.set(name, key.encode())
            outreach = Outreach(heart.kernel)
            heart.kernel.outreach = outreach
            await outreach.open()
            try:
                yield door
            finally:
                await outreach.close()


async def waiting(door: Door, count: int = 1, more: str = "") -> list[str]:
    """Ids of calls that wait for a person."""
    thread = await door.heart.agent(ask=[POST], more=more)
    for step in range(count):
        door.heart.begin(thread, 0, lane=f"0.{step}" if step else "0", url=f"{URL}/{step}")
    async with asyncio.timeout(20):
        while True:
            found = (await approvals.approvals(door.heart.kernel, thread.id, everything=False))["approvals"]
            if len(found) == count:
                return [a["id"] for a in found]
            await asyncio.sleep(0)


async def test_only_what_a_person_signed_now_counts(door: Door) -> None:
    (id_,) = await waiting(door)
    said = {"approval": id_, "decision": "approve"}
    body = json.dumps(said).encode()
    good = signed(door.keys["anna"], body)
    now = time.time()
    bad: list[tuple[str, bytes, dict[str, str]]] = [
        ("anna", body, {}),
        ("anna", body, signed(new_key(), body)),  # forged
        ("anna", body, signed(door.keys["bert"], body)),  # by somebody else
        ("bert", body, good),  # in somebody else's name
        ("carl", body, signed(door.keys["anna"], body)),
        ("unset", body, good),
        ("..", body, good),
        ("anna", body.replace(b"approve", b"deny   "), good),  # altered on its way
        ("anna", body, {**good, "webhook-id": "msg_other"}),
        ("anna", body, {**good, "webhook-timestamp": str(int(now) + 1)}),
        ("anna", body, {**good, "webhook-signature": "v1,"}),
        ("anna", body, signed(door.keys["anna"], body, at=now - 301)),  # late
        ("anna", body, signed(door.keys["anna"], body, at=now + 330)),  # early, also where this takes a while
    ]
    answers = [await door.send(*one) for one in bad]
    assert set(answers) == {(401, "BadSignature")}
    assert await door.states() == [("pending", [])]
    assert door.heart.post.effects == []
    assert await door.send("anna", body, good) == (200, "approved")


async def test_a_message_counts_once(door: Door) -> None:
    (id_,) = await waiting(door, more="approvals: {people: 2}")
    body = json.dumps({"approval": id_, "decision": "approve"}).encode()
    once = signed(door.keys["anna"], body)
    assert await door.send("anna", body, once) == (200, "pending")
    assert await door.send("anna", body, once) == (409, "Replayed")
    # Voided by another's edit, it does not come to life again.
    edited = {"approval": id_, "decision": "approve", "arguments": {"url": f"{URL}/less"}}
    assert await door.say("bert", edited) == (200, "pending")
    assert await door.send("anna", body, once) == (409, "Replayed")
    assert await door.states() == [("pending", ["bert"])]
    # Many at once are one.
    fresh = signed(door.keys["anna"], body)
    answers = await asyncio.gather(*(door.send("anna", body, fresh) for _ in range(8)))
    assert sorted(answers) == [(200, "pending"), *[(409, "Replayed")] * 7]
    assert await door.states() == [("pending", ["anna"])]


async def test_a_key_that_is_taken_away_or_changed_counts_no_more(door: Door) -> None:
    (id_,) = await waiting(door)
    said = {"approval": id_, "decision": "approve"}
    door.heart.kernel.secrets.set("anna", new_key().encode())
    assert await door.say("anna", said) == (401, "BadSignature")
    door.heart.kernel.secrets.set("anna", b"no key at all")
    assert await door.say("anna", said) == (401, "BadSignature")
    # A person that the file names no more is nobody.
    path = door.heart.kernel.ownership.resources.path
    assert path is not None
    path.write_text(CONFIG.format(port=door.port).replace("bert: {key: {secret: bert}}, ", ""))
    await house.reload(door.heart.kernel, "root")
    assert await door.say("bert", said) == (401, "BadSignature")
    assert await door.states() == [("pending", [])]


async def test_it_decides_approvals_and_nothing_else(door: Door) -> None:
    one, two = await waiting(door, 2)
    wrong: list[tuple[Any, tuple[int, str]]] = [
        ({"approval": "a999999", "decision": "approve"}, (404, "NoSuchApproval")),
        ({"approval": "g1", "decision": "approve"}, (404, "NoSuchApproval")),
        ({"approval": one, "decision": "deny"}, (422, "BadUsage")),
        ({"approval": one, "decision": "deny", "reason": "x", "for_ms": 1}, (422, "BadUsage")),
        ({"approval": one, "decision": "grant"}, (400, "BadRequest")),
        ({"approval": one, "decision": "approve", "agent": "x"}, (400, "BadRequest")),
        ({"approval": one}, (400, "BadRequest")),
        ([one], (400, "BadRequest")),
        ({"approval": one, "decision": "approve", "reason": "a\0b"}, (422, "BadUsage")),
        ({"approval": one, "decision": "approve", "reason": "x" * 2001}, (422, "BadUsage")),
        ({"approval": one, "decision": "approve", "for_ms": -1}, (422, "BadUsage")),
        ({"approval": one, "decision": "approve", "for_ms": 2**80}, (422, "BadUsage")),
        ({"approval": one, "decision": "approve", "arguments": {"uri": 1}}, (422, "BadUsage")),
        ({"approval": one, "decision": "approve", "digest": "0" * 64}, (409, "Conflict")),
        (
            {"approval": one, "decision": "approve", "arguments": {"url": "http://else.test/"}},
            (403, "Denied"),
        ),
    ]
    for said, answer in wrong:
        assert await door.say("anna", said) == answer, said
    deep = b"[" * 100_000
    assert await door.send("anna", deep, signed(door.keys["anna"], deep)) == (400, "BadRequest")
    assert await door.states() == [("pending", [])] * 2
    assert await door.say("anna", {"approval": one, "decision": "approve"}) == (200, "approved")
    assert await door.say("bert", {"approval": one, "decision": "deny", "reason": "no"}) == (409, "Conflict")
    assert await door.say("bert", {"approval": two, "decision": "deny", "reason": "no"}) == (200, "denied")


async def test_what_is_no_request_gets_one_answer(door: Door) -> None:
    for data, status in (
        (b"GET /v1/people/anna/decisions HTTP/1.1\r\nhost: x\r\n\r\n", b"405"),
        (b"POST /v1/people/anna/approvals HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", b"404"),
        (b"POST http://x/v1/people/anna/decisions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", b"404"),
        (b"\x16\x03\x01\x00\xa5\x01\x00\x00" * 4 + b"\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\nwebhook-id: a\r\nwebhook-id: b\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * (callback.HEAD_BYTES_MAX + 1) + b"\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1048577\r\n\r\n", b"413"),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"10000\r\n" * 1
            + (b"x" * 0x10000 + b"\r\n10000\r\n") * 17,
            b"413",
        ),
    ):
        answer = await door.raw(data)
        assert answer.startswith(b"HTTP/1.1 " + status), (data[:60], answer[:200])
        assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])
    assert await door.raw(b"") == b""


async def test_connections_and_time_are_bounded(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    (id_,) = await waiting(door)
    idle = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(callback.CONNECTIONS_MAX)]
    try:
        async with asyncio.timeout(20):
            # One more is closed at once, whether by an end or by a reset.
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
    finally:
        for _, writer in idle:
            writer.close()
    # Who sends a byte now and then is answered and cut off.
    monkeypatch.setattr(callback, "REQUEST_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(b"POST /v1")
    async with asyncio.timeout(20):
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
    writer.close()
    monkeypatch.undo()
    answer = None
    async with asyncio.timeout(20):
        while answer is None:
            # The kernel may not have seen yet that the idle ones are gone.
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                answer = await door.say("anna", {"approval": id_, "decision": "approve"})
    assert answer == (200, "approved")


async def test_the_program_of_the_page_decides(door: Door) -> None:
    (id_,) = await waiting(door)
    page = Path(__file__).parents[2] / "docs" / "approvals.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    url = f"http://127.0.0.1:{door.port}/v1/people/anna/decisions"
    for code, state in ((0, b'"state":"denied"'), (1, b'"reason":"Conflict"')):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, url, id_, "deny", "not that"),
            env={"KEY": door.keys["anna"]},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == code
        assert state in said
