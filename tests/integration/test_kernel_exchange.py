"""Messages, memory and artifacts as programs use them, on a real kernel: with the library, the command line, and kill -9."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import InvalidRequest, NoSuchResource
from support.kernels import eventually
from support.scenes import Scene, console, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

ALL = ['messages.*: "*"', 'memory.*: "**"', 'artifacts.*: "*"', 'exec.run: "*"', 'fs.*: "/workspace/**"']

ECHO = """
import asyncio
from ringfence import agent

async def main():
    async with agent.boot_async() as rf:
        while True:
            message = await rf.messages.receive()
            if message.text == "end":
                break
            await rf.memory.append(f"{message.sender_name} said {message.text}", tags=["said"])
            await rf.messages.send(message.sender, json={"echo": message.text, "of": message.id})
        found = await rf.memory.search("said", limit=100, tags=["said"])
        kept = await rf.artifacts.put("heard", "\\n".join(entry.text for entry in reversed(found)))
        print((await rf.artifacts.get(kept.ref)).text, flush=True)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def name_of(scene: Scene, agent: str) -> str:
    return scene.show(agent)["name"]


def asleep(scene: Scene, agent: str) -> bool:
    shown = scene.show(agent)
    return (shown["state"], shown["waiting_for"]) == ("sleeping", "a message")


def test_two_programs_talk_while_one_is_killed_and_nothing_is_lost_or_said_twice(scene: Scene) -> None:
    echo = scene.submit(ECHO, name="echo", allow=ALL)
    held = scene.hold(name="caller", allow=ALL)
    for number in range(6):
        assert held.rf.messages.send(name_of(scene, echo), str(number)).startswith("m")
        if number % 3 == 1:
            eventually(lambda: scene.show(echo)["pid"] is not None, "it does not run")
            restarts = scene.show(echo)["restarts"]
            os.kill(scene.show(echo)["pid"], signal.SIGKILL)
            eventually(lambda n=restarts: scene.show(echo)["restarts"] > n, "it was not started again")
    answers = [held.rf.messages.receive(timeout_s=60) for _ in range(6)]
    assert [answer.json["echo"] for answer in answers if answer is not None] == list("012345")
    assert held.rf.messages.receive(timeout_s=0) is None
    eventually(lambda: asleep(scene, echo), "it does not wait")
    sent = console("send", echo, "end", "--json", "--data", str(scene.kernel.data))
    assert sent.returncode == 0, sent.stderr
    assert json.loads(sent.stdout)["to"] == echo
    scene.await_end(echo)
    name = name_of(scene, held.id)
    assert scene.output(echo).splitlines() == [f"{name} said {number}" for number in range(6)]


def test_a_message_reaches_one_that_waited_when_the_kernel_was_killed(scene: Scene) -> None:
    program = """
from ringfence import agent
with agent.boot() as rf:
    print(rf.messages.receive().text, flush=True)
    print(rf.messages.receive(timeout_s=0), flush=True)
"""
    agent = scene.submit(program, name="waiter", allow=ALL)
    eventually(lambda: asleep(scene, agent), "it does not wait")
    scene.kernel.kill()
    scene.kernel.start()
    scene.operator.ask("Send", agent=agent, text="after the crash")
    scene.await_end(agent)
    assert scene.output(agent).splitlines() == ["after the crash", "None"]


def test_operators_write_texts_and_json_and_are_told_what_can_not_be(scene: Scene, tmp_path: Path) -> None:
    held = scene.hold(name="reader", allow=ALL)
    data = str(scene.kernel.data)
    file = tmp_path / "order.json"
    file.write_text('{"n": 1.0, "ä": [null]}')
    assert console("send", held.id, "hello", "--data", data).stdout.startswith("m")
    assert console("send", held.id, "--json", str(file), "--data", data).returncode == 0
    first, second = held.rf.messages.receive(0), held.rf.messages.receive(0, from_="operator")
    assert first is not None
    assert second is not None
    assert (first.text, first.sender_name) == ("hello", "operator")
    assert first.sender.startswith("operator:")
    assert second.json == {"n": 1.0, "ä": [None]}
    file.write_text("{broken")
    large = tmp_path / "large.json"
    large.write_text(json.dumps("x" * 300_000))
    for words, code, said in (
        (("nobody", "x"), 4, "no agent `nobody`"),
        ((held.id, "--json", str(file)), 2, "no JSON"),
        ((held.id, "--json", str(large)), 2, "larger than 256 KiB"),
    ):
        result = console("send", *words, "--data", data)
        assert (result.returncode, result.stderr.count("\n")) == (code, 1), result.stderr
        assert said in result.stderr
    records = [r for r in scene.operator.stream("Audit") if r["action"] == "operator.send"]
    assert [r["resource"] for r in records].count(held.id) == 2
    scene.operator.ask("Kill", agent=held.id)
    ended = console("send", held.id, "x", "--data", data)
    assert ended.returncode == 4
    assert "has ended (killed)" in ended.stderr


def test_the_library_reads_artifacts_in_parts_and_refuses_what_is_too_large(scene: Scene) -> None:
    rf = scene.hold(allow=ALL).rf
    put = rf.artifacts.put("notes.txt", "größe")
    content = rf.artifacts.get("notes.txt")
    assert (content, content.text, content.version) == ("größe".encode(), "größe", 1)
    assert content.media_type == "text/plain; charset=utf-8"
    assert content.ref == put.ref == hashlib.sha256(content).hexdigest()
    with pytest.raises(InvalidRequest, match="one call carries at most"):
        rf.artifacts.put("big", bytes(4 << 20))
    with pytest.raises(NoSuchResource, match="no artifact `absent`"):
        rf.artifacts.get("absent")
    result = rf.exec.run(["sh", "-c", "yes 0123456789 | head -c 9000000"])
    data = (b"0123456789\n" * 900_000)[:9_000_000]
    assert (result.stdout_bytes, result.stderr_ref) == (9_000_000, "")
    assert rf.artifacts.get(result.stdout_ref) == data
    assert rf.artifacts.get(result.stdout_ref, offset=8_999_990) == data[-10:]
    assert rf.artifacts.get(result.stdout_ref, offset=5, limit=20) == data[5:25]


def test_huge_output_is_kept_without_filling_the_kernels_memory(scene: Scene) -> None:
    """C55: head and tail in the result, all of it as an artifact with its size."""
    rf = scene.hold(allow=ALL, more="sandbox: {disk: 1Gi, memory: 256Mi}").rf
    assert scene.kernel.process is not None
    pid = scene.kernel.process.pid
    before = peak_bytes(pid)
    size = 200_000_000
    result = rf.exec.run(
        ["sh", "-c", f"yes | head -c {size}; echo; echo the end; echo failed: the cause >&2; exit 3"]
    )
    assert (result.exit_code, result.stdout_bytes) == (3, size + 9)
    assert result.stdout.startswith("y\ny\n")
    assert result.stdout.endswith("y\n\nthe end\n")
    assert result.stderr == "failed: the cause\n"
    tail = rf.artifacts.get(result.stdout_ref, offset=size - 2)
    assert (bytes(tail), tail.size_bytes) == (b"y\n\nthe end\n", size + 9)
    assert peak_bytes(pid) - before < 100 << 20


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) * 1024
