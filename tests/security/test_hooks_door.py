"""Messages from outside: each delivery once, only by whoever has the hook's key, only to whom the hook reaches, and never trusted."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ringfence.kernel.operations import hooks
from ringfence.kernel.outreach import Outreach
from ringfence.kernel.server import hooks as door_of_hooks
from ringfence.kernel.thread import Thread
from ringfence.policy.kernel_file import parse_kernel_file
from support.heart import Heart, heart_on
from support.scenes import short_directory
from support.signed import free_port, new_key, signed

pytestmark = pytest.mark.postgres

CONFIG = """\
apiVersion: ringfence/v1
kind: Kernel
spec:
  callback:
    listen: "127.0.0.1:{port}"
    people: {{anna: {{key: {{secret: anna}}}}}}
    hooks:
      ci: {{key: {{secret: ci}}, agents: ["build", "ci-*"], rate: 1000/m}}
      team: {{key: {{secret: team}}, labels: {{team: billing}}}}
      slow: {{key: {{secret: slow}}, agents: ["*"], rate: 2/h}}
      unset: {{key: {{secret: nobody}}, agents: ["*"]}}
"""
PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
RECEIVES = ['messages.*: "*"']


@dataclass
class Door:
    heart: Heart
    port: int
    keys: dict[str, str]

    async def post(
        self, hook: str, agent: str, body: bytes, headers: dict[str, str], kind: str = "application/json"
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, document and headers of the answer."""

        def ask() -> tuple[int, dict[str, Any], dict[str, str]]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            try:
                path = f"/v1/hooks/{hook}/agents/{agent}"
                connection.request("POST", path, body, {"content-type": kind, **headers})
                answer = connection.getresponse()
                told = {name.lower(): value for name, value in answer.getheaders()}
                return answer.status, json.loads(answer.read()), told
            finally:
                connection.close()

        return await asyncio.to_thread(ask)

    async def send(
        self,
        hook: str,
        agent: str,
        body: bytes,
        *,
        key: str = "",
        kind: str = "application/json",
        **more: Any,
    ) -> tuple[int, dict[str, Any]]:
        headers = signed(self.keys[key or hook], body, **more)
        status, document, _ = await self.post(hook, agent, body, headers, kind)
        return status, document.get("error", document)

    async def messages(self, thread: Thread) -> int:
        found = await self.heart.core.store.messages_waiting([thread.key])
        return found.get(thread.key, (0, 0))[1]

    async def delivered(self) -> list[dict[str, Any]]:
        chain = -self.heart.core.kernel
        rows = [row async for row in self.heart.core.store.audit(chain)]
        return [json.loads(row.body) for row in rows if row.action == "hook.deliver"]


@pytest.fixture
async def door(dsn: str) -> AsyncIterator[Door]:
    port = free_port()
    with short_directory() as directory:
        async with heart_on(dsn, directory, CONFIG.format(port=port)) as heart:
            keys = {name: new_key() for name in ("ci", "team", "slow", "anna")}
            for name, key in keys.items():
                heart.kernel.secrets.set(name, key.encode())
            outreach = Outreach(heart.kernel)
            heart.kernel.outreach = outreach
            await outreach.open()
            try:
                yield Door(heart, port, keys)
            finally:
                await outreach.close()


async def test_a_delivery_is_a_message_once_and_taints_whoever_takes_it(door: Door) -> None:
    thread = await door.heart.agent(name="build", allow=RECEIVES)
    body = b'{"commit": "4f1c"}'
    status, first = await door.send("ci", "build", body, message="msg_1")
    assert (status, first["to"], first["repeated"]) == (200, thread.id, False)
    # Again with the same id, signed anew: the answer is that of before, and nothing is done.
    for at in (None, time.time() - 200):
        assert await door.send("ci", "build", body, message="msg_1", at=at) == (
            200,
            {**first, "repeated": True},
        )
    assert await door.messages(thread) == 1
    assert thread.facts.taint is None
    answer = await door.heart.call(thread, 0, "messages.receive", timeout_ms=9000)
    message = json.loads(answer.result)["message"]
    assert (message["from"], message["from_name"]) == ("hook:ci", "hook:ci")
    assert (message["json"], message["text"]) == ({"commit": "4f1c"}, None)
    assert thread.facts.taint is not None
    assert thread.facts.taint.source == "a message from `hook:ci`"
    # Taken or not, it comes no second time; and the taint stands in the journal.
    assert (await door.send("ci", "build", body, message="msg_1"))[1]["repeated"]
    assert await door.messages(thread) == 0
    assert (await door.heart.adopted_again(thread)).facts.taint is not None
    (told,) = await door.delivered()
    assert (told["hook"], told["id"], told["to"], told["bytes"]) == ("ci", "msg_1", thread.id, len(body) - 1)


async def test_an_id_is_for_one_message_to_one_agent(door: Door) -> None:
    one = await door.heart.agent(name="ci-1", allow=RECEIVES)
    two = await door.heart.agent(name="ci-2", allow=RECEIVES)
    assert (await door.send("ci", "ci-1", b"1", message="msg_1"))[0] == 200
    for agent, body in (("ci-1", b"2"), ("ci-2", b"1")):
        status, error = await door.send("ci", agent, body, message="msg_1")
        assert (status, error["reason"]) == (409, "Replayed")
    assert (await door.messages(one), await door.messages(two)) == (1, 0)
    # Ids are each hook's own.
    assert (await door.send("slow", "ci-2", b"1", message="msg_1"))[0] == 200
    assert await door.messages(two) == 1


async def test_the_same_at_the_same_moment_is_one_message(door: Door) -> None:
    thread = await door.heart.agent(name="build", allow=RECEIVES)
    answers = await asyncio.gather(*(door.send("ci", "build", b"{}", message="msg_1") for _ in range(12)))
    assert {status for status, _ in answers} == {200}
    assert len({document["id"] for _, document in answers}) == 1
    assert [document["repeated"] for _, document in answers].count(False) == 1
    assert await door.messages(thread) == 1


async def test_two_kernels_that_are_given_the_same_put_it_in_once(door: Door, dsn: str) -> None:
    thread = await door.heart.agent(name="build", allow=RECEIVES)
    hook = door.heart.ownership.resources.file.callback
    assert hook is not None
    with short_directory() as directory:
        async with heart_on(dsn, directory) as other:
            for number in range(12):
                answers = await asyncio.gather(
                    *(
                        hooks.deliver(kernel, hook.hooks["ci"], "build", f"msg_{number}", b"text", json=False)
                        for kernel in (door.heart.kernel, other.kernel)
                    )
                )
                assert sorted(answer["repeated"] for answer in answers) == [False, True]
    assert await door.messages(thread) == 12


async def test_who_has_not_the_key_is_answered_as_if_there_were_no_hook(door: Door) -> None:
    thread = await door.heart.agent(name="build", allow=RECEIVES)
    body = b"{}"
    good = signed(door.keys["ci"], body, message="msg_1")
    now = time.time()
    bad: list[tuple[str, str, bytes, dict[str, str]]] = [
        ("ci", "build", body, signed(new_key(), body, message="msg_1")),
        ("nosuch", "build", body, good),
        ("unset", "build", body, good),
        ("team", "build", body, good),
        ("..", "build", body, good),
        ("ci", "build", body, signed(door.keys["anna"], body, message="msg_1")),
        ("ci", "nosuch", body, signed(new_key(), body, message="msg_1")),
        ("ci", "build", b"[]", good),
        ("ci", "build", body, {**good, "webhook-id": "msg_2"}),
        ("ci", "build", body, {**good, "webhook-timestamp": str(int(now) + 1)}),
        ("ci", "build", body, {**good, "webhook-signature": "v1,"}),
        ("ci", "build", body, signed(new_key(), body, message="msg_1", at=now - 9000)),
    ]
    answers = [(status, json.dumps(said)) for status, said, _ in [await door.post(*one) for one in bad]]
    assert len(set(answers)) == 1
    assert answers[0][0] == 401
    # Nothing at all, and one of another day, which says so to whoever has the key.
    for headers in (
        {},
        signed(door.keys["ci"], body, at=now - 301),
        signed(door.keys["ci"], body, at=now + 330),
    ):
        status, said, _ = await door.post("ci", "build", body, headers)
        assert (status, said["error"]["reason"]) == (401, "BadSignature")
    assert await door.messages(thread) == 0
    assert await door.delivered() == []
    # Nor does the key of a hook decide anything as a person.
    decision = json.dumps({"approval": "x", "decision": "approve"}).encode()
    headers = signed(door.keys["ci"], decision)

    def decide() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=30)
        connection.request("POST", "/v1/people/anna/decisions", decision, headers)
        status = connection.getresponse().status
        connection.close()
        return status

    assert await asyncio.to_thread(decide) == 401


async def test_a_hook_reaches_whom_it_names_and_learns_of_nobody_else(door: Door) -> None:
    billing = await door.heart.agent(name="bill", labels={"team": "billing"}, allow=RECEIVES)
    other = await door.heart.agent(name="other", labels={"team": "sales"}, allow=RECEIVES)
    assert (await door.send("team", "bill", b"1"))[0] == 200
    assert (await door.send("team", billing.id, b"2"))[0] == 200
    refused = [
        await door.send("team", agent, b"3")
        for agent in ("other", other.id, "nosuch", "no%20name", "..", "a" * 500)
    ]
    assert {(status, said["reason"]) for status, said in refused} == {(404, "NoSuchAgent")}
    shapes = {said["message"].partition("reaches no agent")[0] for _, said in refused}
    assert shapes == {"the hook `team` "}
    assert (await door.messages(billing), await door.messages(other)) == (2, 0)


async def test_of_several_with_a_name_the_one_that_lives_gets_it(door: Door) -> None:
    old = await door.heart.agent(name="build", allow=RECEIVES)
    await door.heart.processes.kill(old)
    status, said = await door.send("ci", "build", b"1")
    assert (status, said["reason"]) == (409, "Ended")
    new = await door.heart.agent(name="build", allow=RECEIVES)
    assert (await door.send("ci", "build", b"1"))[1]["to"] == new.id
    await door.heart.agent(name="build", allow=RECEIVES)
    status, said = await door.send("ci", "build", b"1")
    assert (status, said["reason"]) == (404, "NoSuchAgent")


async def test_a_hook_takes_so_many_and_a_flood_without_its_key_takes_none_of_them(door: Door) -> None:
    thread = await door.heart.agent(name="build", allow=RECEIVES)
    for _ in range(5):
        assert (await door.post("slow", "build", b"1", signed(new_key(), b"1")))[0] == 401
    assert (await door.send("slow", "build", b"1"))[0] == 200
    assert (await door.send("slow", "build", b"2"))[0] == 200
    status, said, told = await door.post("slow", "build", b"3", signed(door.keys["slow"], b"3"))
    assert (status, said["error"]["reason"]) == (429, "TooMany")
    assert 0 < int(told["retry-after"]) <= 1800
    assert "takes 2/h" in said["error"]["message"]
    assert (await door.send("ci", "build", b"4"))[0] == 200
    assert await door.messages(thread) == 3


async def test_bodies_and_mailboxes_have_bounds(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = await door.heart.agent(name="build", allow=RECEIVES)
    bad: list[tuple[bytes, str]] = [
        (b"{", "application/json"),
        (b"\xff", "text/plain"),
        (b"a\0b", "text/plain"),
        (b'"' + b"a" * (256 << 10) + b'"', "application/json"),
        (b"[" * 100_000, "application/problem+json; charset=utf-8"),
    ]
    for body, kind in bad:
        status, said = await door.send("ci", "build", body, kind=kind)
        assert (status, said["reason"]) == (422, "BadUsage"), said
        assert "\n" not in said["message"]
    status, said = await door.send("ci", "build", b"a" * (1 << 20) + b"a")
    assert status == 413
    assert (await door.send("ci", "build", "grüße".encode(), kind="text/plain; charset=utf-8"))[0] == 200
    monkeypatch.setattr(hooks, "MAILBOX_MESSAGES_MAX", 1)
    status, said = await door.send("ci", "build", b"{}", message="msg_later")
    assert (status, said["reason"]) == (429, "Full")
    answer = await door.heart.call(thread, 0, "messages.receive", timeout_ms=9000)
    assert json.loads(answer.result)["message"]["text"] == "grüße"
    # What was refused was not delivered: the same id is taken later.
    assert (await door.send("ci", "build", b"{}", message="msg_later"))[1]["repeated"] is False


async def test_ids_are_forgotten_after_a_month_and_not_before(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    await door.heart.agent(name="build", allow=RECEIVES)
    monkeypatch.setattr(door_of_hooks, "SWEEP_EVERY_S", -1.0)
    assert not (await door.send("ci", "build", b"1", message="msg_1"))[1]["repeated"]
    assert (await door.send("ci", "build", b"1", message="msg_1"))[1]["repeated"]
    monkeypatch.setattr(door_of_hooks, "DELIVERIES_KEPT_S", 0)
    await door.send("ci", "build", b"2", message="msg_2")
    async with asyncio.timeout(30):
        while (await door.send("ci", "build", b"1", message="msg_1"))[1]["repeated"]:
            pass


async def test_a_message_taints_where_its_agent_is_moved_to_as_well(door: Door) -> None:
    """One from outside, and one of an agent that was tainted when it sent it, whose journal stays behind."""
    store = door.heart.core.store
    first = await door.heart.agent(name="build", allow=RECEIVES)
    second = await door.heart.agent(name="ci-2", allow=RECEIVES)
    await door.send("ci", "build", b"1")
    await door.heart.call(first, 0, "messages.receive", timeout_ms=9000)
    await door.heart.call(first, 1, "messages.send", to="ci-2", text="what I was told")
    await door.send("ci", "ci-2", b"2")
    clean = await door.heart.agent(name="clean", allow=RECEIVES)
    await door.heart.call(clean, 0, "messages.send", to="ci-2", text="of my own")
    rows = [row async for row in store.export_rows("messages", second.key)]
    assert [row["untrusted"] for row in rows] == [True, True, False]
    moved = await door.heart.agent(name="moved", allow=RECEIVES)
    for row in reversed(rows):
        await store.import_row("messages", moved.key, row)
    # A file of an earlier release says nothing of it.
    earlier = {key: value for key, value in rows[2].items() if key != "untrusted"}
    await store.import_row("messages", clean.key, earlier)
    await door.heart.call(clean, 1, "messages.receive", timeout_ms=9000)
    assert clean.facts.taint is None
    await door.heart.call(moved, 0, "messages.receive", timeout_ms=9000)
    assert moved.facts.taint is None
    await door.heart.call(moved, 1, "messages.receive", timeout_ms=9000)
    assert moved.facts.taint is not None


async def test_the_program_of_the_page_delivers(door: Door) -> None:
    thread = await door.heart.agent(name="build", allow=RECEIVES)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    url = f"http://127.0.0.1:{door.port}/v1/hooks/ci/agents/build"
    for body, code, said in (
        (b"[1]", 0, b'"repeated":false'),
        (b"[1]", 0, b'"repeated":true'),
        (b"[2]", 1, b'"reason":"Replayed"'),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, url, "build-4711"),
            env={"KEY": door.keys["ci"]},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        answer, _ = await process.communicate(body)
        assert (process.returncode, said in answer) == (code, True), answer
    assert await door.messages(thread) == 1


def test_the_kernel_file_of_the_page_is_read() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    found = parse_kernel_file(f"apiVersion: ringfence/v1\nkind: Kernel\n{text}").callback
    assert found is not None
    assert {name: hook.rate.text for name, hook in found.hooks.items()} == {"ci": "60/m", "shop": "600/m"}
    assert found.hooks["shop"].reaches("any", {"team": "billing"})
