"""Messages between agents: each is received exactly once, in order, by whom it was sent to, whatever crashes or waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import psycopg
import pytest
from ringfence.kernel.mailboxes import CHANNEL, Mailboxes
from ringfence.kernel.operations import rights
from ringfence.kernel.thread import Thread
from ringfence.syscalls import messages_send
from ringfence.syscalls.errors import (
    Denied,
    InvalidRequest,
    Killed,
    NoSuchResource,
    QuotaExceeded,
    Revoked,
    SyscallError,
)
from ringfence.v1 import syscalls_pb2 as pb
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

ALL = ['messages.*: "*"']


class Post:
    """Agents that write to each other; each call is the next one of its agent's lane."""

    def __init__(self, heart: Heart) -> None:
        self.heart = heart
        self._steps: dict[tuple[int, str], int] = {}

    async def agent(self, name: str, allow: list[str] = ALL) -> Thread:
        return await self.heart.agent(allow=allow, name=name)

    def begin(self, thread: Thread, action: str, *, lane: str = "0", **arguments: Any) -> asyncio.Task[Any]:
        place = (thread.key, lane)
        step = self._steps.get(place, 0)
        self._steps[place] = step + 1
        return self.heart.begin(
            thread,
            step,
            f"messages.{action}",
            lane=lane,
            **({"from": ""} | arguments if action == "receive" else arguments),
        )

    async def send(self, thread: Thread, to: str, text: str) -> Any:
        answer = await self.begin(thread, "send", to=to, text=text)
        assert answer.failure is None, answer.failure
        return json.loads(answer.result)

    async def receive(self, thread: Thread, timeout_ms: int = 0, **arguments: Any) -> Any:
        answer = await self.begin(thread, "receive", timeout_ms=timeout_ms, **arguments)
        assert answer.failure is None, answer.failure
        return json.loads(answer.result)["message"]

    async def refused(self, thread: Thread, **arguments: Any) -> SyscallError:
        answer = await self.begin(thread, "send", **arguments)
        assert answer.failure is not None
        return answer.failure

    async def waits(self, thread: Thread) -> None:
        box = self.heart.core.mailboxes.of(thread.key)
        await until(lambda: box.awaited)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(15):
        while not true():
            await asyncio.sleep(0.001)


@pytest.fixture
async def post(dsn: str) -> AsyncIterator[Post]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield Post(heart)


async def test_a_message_comes_as_it_was_sent(post: Post) -> None:
    ann, bob = await post.agent("ann"), await post.agent("bob")
    sent = await post.send(ann, "bob", "ä 𝄞\n")
    assert sent == {"id": "m1", "to": bob.id}
    answer = await post.begin(ann, "send", to=bob.id, json={"n": [1, None, "x"]})
    assert answer.failure is None
    await post.begin(ann, "send", to="bob")  # null is a value, too
    first, second, third = [await post.receive(bob) for _ in range(3)]
    assert {name: first[name] for name in ("id", "from", "from_name", "text", "json")} == {
        "id": "m1",
        "from": ann.id,
        "from_name": "ann",
        "text": "ä 𝄞\n",
        "json": None,
    }
    assert first["sent_at"].endswith("Z")
    assert (second["text"], second["json"]) == (None, {"n": [1, None, "x"]})
    assert (third["text"], third["json"]) == (None, None)
    assert await post.receive(bob) is None


async def test_a_mailbox_gives_the_oldest_first_and_what_a_sender_sent_in_its_order(post: Post) -> None:
    ann, bob, eve = [await post.agent(name) for name in ("ann", "bob", "eve")]
    for number in range(4):
        await post.send(ann, "bob", f"ann {number}")
        await post.send(eve, "bob", f"eve {number}")
    assert (await post.receive(bob, **{"from": "eve"}))["text"] == "eve 0"
    assert (await post.receive(bob, **{"from": ann.id}))["text"] == "ann 0"
    rest = [(await post.receive(bob))["text"] for _ in range(6)]
    assert rest == ["ann 1", "eve 1", "ann 2", "eve 2", "ann 3", "eve 3"]
    assert await post.receive(ann) is None


async def test_who_receives_at_once_shares_the_messages(post: Post) -> None:
    ann, bob = await post.agent("ann"), await post.agent("bob")
    lanes = [post.begin(bob, "receive", lane=f"0.{n}") for n in range(5)]
    await post.waits(bob)
    for number in range(5):
        await post.send(ann, "bob", str(number))
    answers = await asyncio.gather(*lanes)
    assert sorted(json.loads(a.result)["message"]["text"] for a in answers) == list("01234")


async def test_one_that_waits_gets_what_comes_and_is_shown_as_sleeping(post: Post) -> None:
    ann, bob = await post.agent("ann"), await post.agent("bob")
    bob.state = "running"
    waiting = post.begin(bob, "receive", timeout_ms=60_000, **{"from": "ann"})
    await post.waits(bob)
    assert (bob.state, bob.waiting_for) == ("sleeping", "a message from ann")
    await post.send(ann, "bob", "here")
    assert json.loads((await waiting).result)["message"]["text"] == "here"
    assert (bob.state, bob.waiting_for) == ("running", "")


async def test_a_time_that_runs_out_gives_no_message_and_is_recorded(post: Post) -> None:
    bob = await post.agent("bob")
    assert await post.receive(bob, timeout_ms=20) is None
    await post.send(bob, "bob", "to myself")
    again = await post.heart.adopted_again(bob)
    replayed = await post.heart.call(again, 0, "messages.receive", timeout_ms=20)
    assert json.loads(replayed.result) == {"message": None}
    assert await post.heart.outcomes(bob) == [(1, "ok"), (2, "ok")]


async def test_another_kernel_wakes_by_notification_or_by_looking(post: Post) -> None:
    ann, bob = await post.agent("ann"), await post.agent("bob")
    mailboxes = post.heart.core.mailboxes
    await mailboxes.open()
    try:
        for by_looking in (False, True):
            waiting = post.begin(bob, "receive")
            await post.waits(bob)
            # As another kernel sends: its commit does not wake anybody here.
            mailboxes.announce, kept = lambda *_: None, mailboxes.announce
            await post.send(ann, "bob", "from afar")
            mailboxes.announce = kept
            if by_looking:
                await mailboxes.look()
            else:
                await post.heart.core.store.notify(CHANNEL, str(bob.key))
            assert json.loads((await waiting).result)["message"]["text"] == "from afar"
    finally:
        await mailboxes.close()


async def test_a_message_for_another_kernels_agent_is_announced_to_it(post: Post, dsn: str) -> None:
    ann, bob = await post.agent("ann"), await post.agent("bob")
    store = post.heart.core.store
    other, _ = await store.register_kernel(host="other", pid=1, boot_id="b", data_dir="/o", lease_s=600)
    await store.set_agent(bob.key, state="running")

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("update agents set owner = %s where key = %s", (other, bob.key))
    there = Mailboxes(store, other)
    box = there.of(bob.key)
    await there.open()
    try:
        seen = box.arrivals
        await post.send(ann, "bob", "x")
        assert await box.changed(seen, 30)
    finally:
        await there.close()


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"to": "nobody", "text": "x"}, NoSuchResource, "no agent `nobody`"),
        ({"to": "bob-zzzzz", "text": "x"}, NoSuchResource, "no agent `bob-zzzzz`"),
        ({"to": "twin", "text": "x"}, InvalidRequest, "several agents are named `twin`: twin-"),
        ({"to": "", "text": "x"}, InvalidRequest, "no name or id"),
        ({"to": "bob", "text": "x", "json": 1}, InvalidRequest, "either `text` or `json`"),
        ({"to": "bob", "text": "x" * (256 * 1024 + 1)}, InvalidRequest, "262145 bytes; at most 262144"),
        ({"to": "gone", "text": "x"}, NoSuchResource, "has ended (killed)"),
    ],
)
async def test_what_can_not_be_sent_says_why_and_leaves_nothing(
    post: Post, arguments: dict[str, Any], kind: type[SyscallError], said: str
) -> None:
    ann, gone = await post.agent("ann"), await post.agent("gone")
    for name in ("bob", "twin", "twin"):
        await post.agent(name)
    await post.heart.processes.kill(gone)
    failure = await post.refused(ann, **arguments)
    assert type(failure) is kind
    assert said in failure.message
    assert "\n" not in failure.message
    assert await post.heart.core.store.messages_waiting(list(post.heart.core.threads)) == {}


async def test_a_name_means_the_one_that_has_not_ended(post: Post) -> None:
    ann, old, new = await post.agent("ann"), await post.agent("bob"), await post.agent("bob")
    await post.heart.processes.kill(old)
    assert (await post.send(ann, "bob", "x"))["to"] == new.id


async def test_a_full_mailbox_takes_no_more_until_it_is_read(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_send, "MAILBOX_MESSAGES_MAX", 3)
    ann, bob = await post.agent("ann"), await post.agent("bob")
    for number in range(3):
        await post.send(ann, "bob", str(number))
    failure = await post.refused(ann, to="bob", text="too much")
    assert isinstance(failure, QuotaExceeded)
    assert f"the mailbox of `{bob.id}` holds 3 messages" in failure.message
    assert failure.metadata["retry_after_ms"] == "1000"
    assert (await post.receive(bob))["text"] == "0"
    await post.send(ann, "bob", "now")


async def test_rules_name_the_receiver_even_where_the_program_gives_an_id(post: Post) -> None:
    ann = await post.agent("ann", ['messages.send: "bo*"'])
    bob, eve = await post.agent("bob"), await post.agent("eve")
    await post.send(ann, bob.id, "x")
    await post.send(ann, "bob", "y")
    for to in (eve.id, "eve"):
        assert isinstance(await post.refused(ann, to=to, text="z"), Denied)
    refused = await post.begin(ann, "receive", timeout_ms=0)
    assert isinstance(refused.failure, Denied)


async def test_what_ends_a_wait_takes_no_message(post: Post) -> None:
    ann, bob, eve = await post.agent("ann"), await post.agent("bob"), await post.agent("eve")
    killed, revoked = post.begin(bob, "receive"), post.begin(eve, "receive")
    await post.waits(bob)
    await post.waits(eve)
    told = await rights.revoke(post.heart.kernel, eve.id, "", everything=True, purge=False, operator="tester")
    assert [one["fate"] for one in told["affected"]] == ["cancelled"]
    await post.heart.processes.kill(bob)
    assert isinstance((await killed).failure, Killed)
    assert isinstance((await revoked).failure, Revoked)
    await post.send(ann, "eve", "kept")
    assert await post.heart.core.store.messages_waiting([eve.key]) == {eve.key: (1, 1)}


async def test_a_program_that_is_started_again_finds_its_wait_and_gets_the_message_once(post: Post) -> None:
    ann, bob = await post.agent("ann"), await post.agent("bob")
    first = post.begin(bob, "receive")
    await post.waits(bob)
    bob.generation += 1
    bob.lanes.clear()
    second = post.heart.begin(bob, 0, "messages.receive", **{"from": ""})
    await post.send(ann, "bob", "once")
    answers = [await first, await second]
    assert [json.loads(a.result)["message"]["text"] for a in answers] == ["once", "once"]
    assert [a.step for a in answers] == [1, 1]
    assert await post.receive(bob) is None


async def test_callers_without_the_library_get_a_message_or_null(post: Post) -> None:
    bob = await post.heart.agent(allow=ALL, name="bob", started=True)
    path = post.heart.kernel.layout.socket_dir(bob.key) / "syscall.sock"
    metadata = (("authorization", f"Bearer {post.heart.hand.tokens[-1]}"),)
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:

        async def ask(method: str, request: Any, response: Any) -> Any:
            call: Any = channel.unary_unary(
                f"/ringfence.v1.SyscallService/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=response.FromString,
            )
            return await call(request, metadata=metadata)

        request = pb.MessagesReceiveRequest(timeout_ms=0)
        assert not (await ask("MessagesReceive", request, pb.MessagesReceiveResponse)).HasField("message")
        sent = pb.MessagesSendRequest(to="bob")
        sent.json.struct_value.fields["n"].number_value = 7
        await ask("MessagesSend", sent, pb.MessagesSendResponse)
        request = pb.MessagesReceiveRequest(timeout_ms=1)
        setattr(request, "from", "bob")
        message = (await ask("MessagesReceive", request, pb.MessagesReceiveResponse)).message
        assert (getattr(message, "from"), message.HasField("text")) == (bob.id, False)
        assert message.json.struct_value.fields["n"].number_value == 7


async def test_a_rollback_and_a_receiver_that_wait_for_each_other_both_come_through(
    post: Post, dsn: str
) -> None:
    """A deadlock ends one of the two; whoever it is, the rollback is tried again."""
    ann = await post.agent("ann")
    await post.agent("bob")
    for text in ("one", "two"):
        await post.send(ann, "bob", text)
    store = post.heart.core.store
    async with await psycopg.AsyncConnection.connect(dsn) as receiver:
        # As a flush that takes the newer message before the older one.
        await receiver.execute("set deadlock_timeout = '1h'")
        await receiver.execute("update messages set taken_step = 9 where key = 2")
        rewinding = asyncio.create_task(store.rewind_atoms(ann.key, [(0, 0)], dry=False))
        waiting = "select count(*) from pg_locks where not granted"
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as watcher:
            for _ in range(10_000):
                ((count,),) = await (await watcher.execute(waiting)).fetchall()
                if count:
                    break
                await asyncio.sleep(0.001)
        await receiver.execute("update messages set taken_step = 8 where key = 1")
        await receiver.commit()
    moved = await rewinding
    assert sorted((one.target, one.action) for one in moved) == [("m1", "taken"), ("m2", "taken")]
