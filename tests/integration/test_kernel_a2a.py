"""A2A with the official client: cards, tasks, streams, cancel, what a person has to approve, and who is not heard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
import pytest
from a2a.client import A2ACardResolver, Client, ClientConfig, create_client
from a2a.types import a2a_pb2 as pb
from a2a.utils import errors
from ringfence.agent import Conflict, NoSuchResource, QuotaExceeded
from ringfence.kernel.a2a.web import CLIENT_REQUESTS_MAX, CONNECTIONS_MAX
from ringfence.syscalls.tasks_update import BYTES_MAX
from support.kernels import eventually
from support.scenes import Held, Scene, scene_of_its_own
from support.signed import free_port

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CONFIG = """\
apiVersion: ringfence/v1
kind: Kernel
spec:
  a2a:
    listen: "127.0.0.1:{port}"
    clients:
      shop: {{key: {{secret: shop-key}}, agents: ["clerk-*"], rate: 1000/m}}
      bank: {{key: {{secret: bank-key}}, agents: ["clerk-*"]}}
      slow: {{key: {{secret: slow-key}}, agents: ["clerk-*"], rate: 1/m}}
      far: {{key: {{secret: far-key}}, agents: ["other"]}}
"""
KEYS = {name: f"{name}-{uuid.uuid4().hex}" for name in ("shop", "bank", "slow", "far")}
SERVE = "serve: {a2a: {description: Does sums., skills: [{id: sum, name: Sums, description: Adds numbers., tags: [math]}]}}"
ALLOW = ['tasks.update: "*"', 'messages.receive: "*"']
BINDINGS = ("JSONRPC", "HTTP+JSON")


@dataclass
class World:
    scene: Scene
    base: str

    def clerk(self, **manifest: Any) -> Held:
        return self.scene.hold(name="clerk-a", allow=ALLOW, more=SERVE, **manifest)

    @contextlib.asynccontextmanager
    async def client(
        self, agent: str, who: str = "shop", binding: str = "JSONRPC", *, streaming: bool = True
    ) -> AsyncGenerator[Client]:
        """The official client, which reads the card first."""
        headers = {"authorization": f"Bearer {KEYS[who]}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            config = ClientConfig(
                streaming=streaming,
                httpx_client=http,
                supported_protocol_bindings=[binding],
                use_client_preference=True,
            )
            yield await create_client(f"{self.base}/agents/{agent}", config)


@pytest.fixture(scope="module")
def world(postgres_server: Any, template_database: str) -> Iterator[World]:
    port = free_port()
    with scene_of_its_own(postgres_server, template_database, config=CONFIG.format(port=port)) as scene:
        for name, key in KEYS.items():
            scene.operator.ask("SecretSet", name=f"{name}-key", value=key.encode())
        yield World(scene, f"http://127.0.0.1:{port}")


def request(text: str, task: str = "", *, now: bool = False, ident: str = "") -> pb.SendMessageRequest:
    message = pb.Message(
        message_id=ident or uuid.uuid4().hex, role=pb.ROLE_USER, parts=[pb.Part(text=text)], task_id=task
    )
    return pb.SendMessageRequest(
        message=message, configuration=pb.SendMessageConfiguration(return_immediately=now)
    )


async def begin(client: Client, text: str = "2 and 3", **more: Any) -> pb.Task:
    """Give a task, and don't wait for it."""
    async with contextlib.aclosing(
        cast("Any", client.send_message(request(text, now=True, **more)))
    ) as events:
        first = await anext(events)
    return first.task


def status_of(event: Any) -> Any:
    """What an event tells; the first one is the whole task."""
    return (event.task if event.HasField("task") else event.status_update).status


def state_of(event: Any) -> int:
    """State that an event tells."""
    return status_of(event).state


def work(held: Held, *updates: dict[str, Any]) -> Any:
    """Has the agent take a message, and say these things of its task."""

    def run() -> None:
        message = held.rf.messages.receive(timeout_s=60)
        assert message is not None
        for one in updates:
            held.rf.tasks.update(message.json["task"], **one)

    return held.rf.thread(run)


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_task_is_done_by_the_agent_and_told_by_both_bindings(world: World, binding: str) -> None:
    held = world.clerk()
    async with world.client(held.id, binding=binding, streaming=False) as client:
        at_work = work(
            held,
            {"state": "working", "text": "adding"},
            {"artifact": "sum", "json": 5},
            {"state": "completed"},
        )
        (done,) = [event async for event in client.send_message(request("2 and 3"))]
        at_work.result(30)
        task = done.task
        assert task.status.state == pb.TASK_STATE_COMPLETED
        assert [(a.name, a.parts[0].data.number_value) for a in task.artifacts] == [("sum", 5)]
        assert [(m.role, m.parts[0].text) for m in task.history] == [
            (pb.ROLE_USER, "2 and 3"),
            (pb.ROLE_AGENT, "adding"),
        ]
        assert (await client.get_task(pb.GetTaskRequest(id=task.id))).status.state == pb.TASK_STATE_COMPLETED
        listed = await client.list_tasks(pb.ListTasksRequest(include_artifacts=True))
        assert [one.id for one in listed.tasks] == [task.id]
        assert listed.total_size == 1
        with pytest.raises(errors.TaskNotCancelableError):
            await client.cancel_task(pb.CancelTaskRequest(id=task.id))
    steps = {step["action"]: step for step in world.scene.operator.steps(held.id)}
    assert steps["tasks.update"]["effect"] == "EXTERNAL"
    held.end()


async def test_a_stream_tells_what_comes_and_goes_on_after_a_question(world: World) -> None:
    held = world.clerk()
    async with world.client(held.id) as client:
        at_work = work(
            held, {"artifact": "draft", "text": "5?"}, {"state": "input-required", "text": "sure?"}
        )
        events = [event async for event in client.send_message(request("2 and 3"))]
        at_work.result(30)
        task = events[0].task.id
        kinds = [event.WhichOneof("payload") for event in events]
        assert kinds[0] == "task"
        # An agent that is quick has said it before the task is told of first.
        assert len(events[0].task.artifacts) + kinds.count("artifact_update") == 1
        assert status_of(events[-1]).state == pb.TASK_STATE_INPUT_REQUIRED
        assert status_of(events[-1]).message.parts[0].text == "sure?"
        at_work = work(held, {"state": "completed", "text": "sure"})
        (*_, last) = [event async for event in client.send_message(request("yes", task))]
        at_work.result(30)
        assert status_of(last).state == pb.TASK_STATE_COMPLETED
        with pytest.raises(errors.UnsupportedOperationError):
            _ = [event async for event in client.send_message(request("more", task))]
        with pytest.raises(errors.UnsupportedOperationError):
            _ = [event async for event in client.subscribe(pb.SubscribeToTaskRequest(id=task))]
    held.end()


async def test_cancel_is_told_to_the_agent_whose_later_word_counts_for_nothing(world: World) -> None:
    held = world.clerk()
    async with world.client(held.id) as client:
        task = await begin(client)
        assert task.status.state == pb.TASK_STATE_SUBMITTED
        message = held.rf.messages.receive(timeout_s=10)
        assert message is not None
        assert message.sender == "a2a:shop"
        assert message.json["text"] == "2 and 3"
        taken = await client.get_task(pb.GetTaskRequest(id=task.id))
        assert taken.status.state == pb.TASK_STATE_WORKING
        canceled = await client.cancel_task(pb.CancelTaskRequest(id=task.id))
        assert canceled.status.state == pb.TASK_STATE_CANCELED
    told = held.rf.messages.receive(timeout_s=10)
    assert told is not None
    assert told.json == {"task": task.id, "client": "shop", "cancel": True}
    with pytest.raises(Conflict, match="has ended \\(canceled\\)"):
        held.rf.tasks.update(task.id, "completed")
    held.end()


async def test_a_call_that_a_person_has_to_approve_is_told_as_input_required(world: World) -> None:
    held = world.clerk(ask=['fs.write: "/workspace/secret-name"'])
    async with world.client(held.id) as client:
        task = await begin(client)
        assert held.rf.messages.receive(timeout_s=10) is not None
        writing = held.rf.thread(held.rf.fs.write_text, "secret-name", "x")

        async def state() -> pb.TaskStatus:
            return (await client.get_task(pb.GetTaskRequest(id=task.id))).status

        eventually(
            lambda: bool(world.scene.operator.ask("Approvals", agent=held.id)["approvals"]), "nobody is asked"
        )
        stands = await state()
        assert stands.state == pb.TASK_STATE_INPUT_REQUIRED
        assert "`fs.write`" in stands.message.parts[0].text
        assert "secret-name" not in str(stands)
        (approval,) = world.scene.operator.ask("Approvals", agent=held.id)["approvals"]
        world.scene.operator.ask("Approve", id=approval["id"])
        writing.result(30)
        assert (await state()).state == pb.TASK_STATE_WORKING
        world.scene.operator.ask("Kill", agent=held.id)
        assert (await state()).state == pb.TASK_STATE_FAILED


async def test_a_task_that_says_too_much_can_only_be_ended(world: World) -> None:
    held = world.clerk()
    async with world.client(held.id) as client:
        task = await begin(client)
        text = "x" * (256 << 10)
        for _ in range(BYTES_MAX // len(text)):
            held.rf.tasks.update(task.id, text=text)
        with pytest.raises(QuotaExceeded, match="takes no more"):
            held.rf.tasks.update(task.id, text="more")
        assert held.rf.tasks.update(task.id, "failed", "said too much") == "failed"
        listed = await client.list_tasks(pb.ListTasksRequest(history_length=1, page_size=1))
        assert [one.history[0].parts[0].text for one in listed.tasks] == ["said too much"]
    held.end()
    assert world.scene.operator.ask("Remove", agent=held.id)["forgotten"]["tasks"] == 1
    for table in ("tasks where id", "task_events where task", "task_messages where task"):
        assert world.scene.sql(f"select count(*) from {table} = %s", task.id) == [(0,)]


async def test_nobody_reaches_what_is_another_ones(world: World) -> None:
    held, other = world.clerk(), world.clerk()
    async with world.client(held.id) as shop, world.client(held.id, "bank") as bank:
        ident = uuid.uuid4().hex
        task = await begin(shop, ident=ident)
        assert (await begin(shop, ident=ident)).id == task.id
        with pytest.raises(errors.InvalidParamsError, match="had before"):
            await begin(shop, text="another", ident=ident)
        for call in (
            bank.get_task(pb.GetTaskRequest(id=task.id)),
            bank.cancel_task(pb.CancelTaskRequest(id=task.id)),
        ):
            with pytest.raises(errors.TaskNotFoundError):
                await call
        assert not (await bank.list_tasks(pb.ListTasksRequest())).tasks
    with pytest.raises(NoSuchResource):
        other.rf.tasks.update(task.id, "completed")
    url = f"{world.base}/agents/{held.id}"
    async with httpx.AsyncClient() as http:
        card = await A2ACardResolver(http, url).get_agent_card()
        assert (card.description, card.skills[0].id) == ("Does sums.", "sum")
        body = json.dumps({"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "x"}]}})
        for bearer, content, status in (
            ("", body, 401),
            ("Bearer nobody", body, 401),
            (f"Bearer {KEYS['far']}", body, 404),
            (f"Bearer {KEYS['shop']}", " " * (2 << 20), 413),
        ):
            answer = await http.post(
                f"{url}/message:send", headers={"authorization": bearer}, content=content
            )
            assert answer.status_code == status, answer.text
        slow = {"authorization": f"Bearer {KEYS['slow']}", "a2a-version": "1.0"}
        assert (await http.get(f"{url}/tasks", headers=slow)).status_code == 200
        refused = await http.get(f"{url}/tasks", headers=slow)
        assert (refused.status_code, refused.headers["retry-after"] > "0") == (429, True)
        assert (await http.get(f"{world.base}/agents/nobody/.well-known/agent-card.json")).status_code == 404
    held.end()
    other.end()


async def test_tasks_survive_the_kernel_and_its_clients_go_on(world: World) -> None:
    held = world.clerk()
    async with world.client(held.id) as client:
        task = await begin(client)
        world.scene.kernel.kill()
        world.scene.kernel.start()
        eventually(lambda: world.scene.show(held.id)["state"] == "running", "the agent isn't back")
        assert world.scene.operator.ask("Status")["a2a"]["problem"] is None
        again = world.scene.held(held.id)
        at_work = work(again, {"state": "completed"})
        events = [event async for event in client.subscribe(pb.SubscribeToTaskRequest(id=task.id))]
        at_work.result(30)
        assert state_of(events[-1]) == pb.TASK_STATE_COMPLETED
    again.end()


async def test_what_agents_could_not_repeat_or_is_no_json_is_refused_at_the_door(world: World) -> None:
    held = world.clerk()
    url = f"{world.base}/agents/{held.id}"
    rpc = '{"jsonrpc":"2.0","id":%s,"method":"SendMessage","params":{"message":{"messageId":"n","role":"ROLE_USER","parts":[%s]}}}'
    log = world.scene.kernel.data / "kernel.log"
    async with httpx.AsyncClient(
        headers={"authorization": f"Bearer {KEYS['shop']}", "a2a-version": "1.0"}
    ) as http:
        for body, code in (
            (rpc % (1, r'{"text":"a\u0000b"}'), -32602),
            (rpc % (1, r'{"data":{"a":["\u0000"]}}'), -32602),
            (rpc % (1, '{"data":NaN}'), -32700),
            (rpc % (1, '{"data":1e999}'), -32700),
            (rpc % (r'"\ud800"', '{"text":"a"}'), -32700),
            ('{"jsonrpc":"2.0","id":1,"method":"ListTasks","params":{"contextId":"\\u0000"}}', -32602),
        ):
            answer = await http.post(f"{url}/", content=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (200, code), answer.text
        # What is too long is not repeated, whoever refuses it.
        long = "x" * 70_000
        said: dict[str, Any] = {"messageId": "n", "parts": [{"text": "a"}]}
        refused: tuple[tuple[str, dict[str, Any]], ...] = (
            ("SendMessage", {"message": {**said, "role": [long]}}),
            ("SendMessage", {"message": {**said, "role": "ROLE_USER", "metadata": long}}),
            ("SendMessage", {"message": {**said, "parts": [{"raw": long + "!"}]}}),
            ("SendMessage", {"message": {**said, "role": "ROLE_USER", "taskId": long}}),
            ("GetTask", {"id": "a", "historyLength": long}),
            ("ListTasks", {"statusTimestampAfter": long}),
            ("CreateTaskPushNotificationConfig", {"taskId": long, "url": f"https://a.example/{long}"}),
            (long, {}),
        )
        for method, params in refused:
            body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
            answer = await http.post(f"{url}/", content=body)
            assert "error" in answer.json(), answer.text[:400]
            assert len(answer.content) < 4096, (method[:40], answer.text[:400])
        answer = await http.post(f"{url}/message:send", json={"message": {**said, "metadata": long}})
        assert (answer.status_code, len(answer.content) < 4096) == (400, True), answer.text[:400]
        assert (await http.get(f"{url}/tasks?contextId=%00")).status_code == 400
        assert (await http.get(f"{url}/tasks")).json().get("tasks", []) == []
    assert not log.exists() or "Traceback" not in log.read_text()
    held.end()


async def test_whoever_sends_no_request_is_cut_off(world: World) -> None:
    """Before, 64 of them kept everybody out for as long as they liked."""
    held = world.clerk()
    port = int(world.base.rpartition(":")[2])
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
    for place, (_, writer) in enumerate(silent):
        writer.write(b"GET / HTTP/1.1\r\n" if place % 2 else b"")
    async with httpx.AsyncClient() as http:
        card = f"{world.base}/agents/{held.id}/.well-known/agent-card.json"
        assert (await http.get(card)).status_code == 503
        for reader, writer in silent:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        assert (await http.get(card)).status_code == 200
    held.end()


async def test_one_client_leaves_room_for_others(world: World) -> None:
    held = world.clerk()
    url = f"{world.base}/agents/{held.id}"
    keys = {"authorization": f"Bearer {KEYS['shop']}", "a2a-version": "1.0"}
    async with world.client(held.id, "bank") as bank, httpx.AsyncClient(timeout=60) as http:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(CLIENT_REQUESTS_MAX):
                said = {"messageId": f"r{number}", "role": "ROLE_USER", "parts": [{"text": "x"}]}
                answer = await stack.enter_async_context(
                    http.stream("POST", f"{url}/message:stream", headers=keys, json={"message": said})
                )
                assert answer.status_code == 200
            assert (await http.get(f"{url}/tasks", headers=keys)).status_code == 429
            assert (await begin(bank)).status.state == pb.TASK_STATE_SUBMITTED

        async def over() -> bool:
            return (await http.get(f"{url}/tasks", headers=keys)).status_code == 200

        async with asyncio.timeout(60):
            while not await over():
                await asyncio.sleep(0.2)
    held.end()
