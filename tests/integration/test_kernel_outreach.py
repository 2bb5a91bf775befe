"""Webhooks out and decisions in, with a receiver that is a process of its own and a kernel that is killed in between."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from ringfence.agent import Denied
from support.kernels import eventually
from support.scenes import Scene, console, scene_of_its_own, short_directory
from support.signed import decide, free_port, genuine, new_key, post_to, signed
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

WRITE = 'fs.write: "/workspace/data/**"'
TWO = "approvals: {people: 2}"
ACCOUNT = pwd.getpwuid(os.geteuid()).pw_name
CONFIG = """\
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    api: {{type: http, base: "http://127.0.0.1:9/x", auth: {{bearer: {{secret: api-token}}}}}}
  webhooks:
    chat: {{url: "{base}/chat", key: {{secret: chat-key}}}}
    slow: {{url: "{base}/hold", key: {{secret: chat-key}}, events: [agent.failed]}}
    dead: {{url: "http://127.0.0.1:{dead}/x", key: {{secret: chat-key}}, events: [approval.asked]}}
  callback:
    listen: "127.0.0.1:{port}"
    people: {{anna: {{key: {{secret: anna-key}}, account: {account}}}, bert: {{key: {{secret: bert-key}}}}}}
    hooks: {{ci: {{key: {{secret: ci-key}}, agents: ["deploy-*"]}}}}
"""
TOKEN = "sk-live-0123456789abcdef"


@dataclass
class Outside:
    scene: Scene
    target: Target
    port: int
    keys: dict[str, str]

    def told(self, approval: str) -> list[dict[str, Any]]:
        """What the chat was told of an approval, in the order of arrival; each with a right signature."""
        found = [d for d in self.target.deliveries("/chat") if genuine(self.keys["chat-key"], d)]
        bodies = [json.loads(d["body"]) for d in found]
        return [b for b in bodies if b["data"].get("approval") == approval]

    def types(self, approval: str) -> list[str]:
        return [b["type"] for b in self.told(approval)]

    def status(self) -> dict[str, dict[str, Any]]:
        return {hook["name"]: hook for hook in self.scene.operator.ask("Status")["webhooks"]}

    def waits(self, agent: str) -> str:
        found: list[str] = []

        def there() -> bool:
            found[:] = [a["id"] for a in self.scene.operator.ask("Approvals", agent=agent)["approvals"]]
            return bool(found)

        eventually(there, "nobody is asked")
        return found[0]


@pytest.fixture(scope="module")
def outside(postgres_server: Any, template_database: str) -> Iterator[Outside]:
    port, dead = free_port(), free_port()
    keys = {name: new_key() for name in ("chat-key", "anna-key", "bert-key", "ci-key")}
    with short_directory() as directory:
        target = Target(directory / "arrived")
        try:
            config = CONFIG.format(base=target.base, dead=dead, port=port, account=ACCOUNT)
            with scene_of_its_own(postgres_server, template_database, config=config) as scene:
                for name, key in {**keys, "api-token": TOKEN}.items():
                    scene.operator.ask("SecretSet", name=name, value=key.encode())
                yield Outside(scene, target, port, keys)
        finally:
            target.close()


def test_two_people_decide_over_a_killed_kernel_and_outside_hears_of_each(outside: Outside) -> None:
    scene = outside.scene
    held = scene.hold(ask=[WRITE], files={"data/a": "old"}, more=TWO)
    making = held.rf.thread(lambda: held.rf.fs.write_text("data/a", "the new text"))
    id_ = outside.waits(held.id)
    shown = console("approvals", "approve", id_, "--data", str(scene.kernel.data))
    assert "approved by anna; one more person has to" in shown.stdout, shown.stderr
    scene.kernel.kill()
    del making
    scene.kernel.start()
    # She is the same person by her key.
    status, document = decide(
        outside.port, "anna", outside.keys["anna-key"], approval=id_, decision="approve"
    )
    assert (status, document["error"]["reason"]) == (409, "Conflict"), document
    assert "counts once" in document["error"]["message"]
    listed = console("approvals", "--data", str(scene.kernel.data))
    assert "pending 1/2" in listed.stdout
    eventually(lambda: "approval.voted" in outside.types(id_), "nobody was told of the first")
    digest = outside.told(id_)[0]["data"]["digest"]
    said = {"approval": id_, "decision": "approve", "reason": "seen", "digest": digest}
    status, document = decide(outside.port, "bert", outside.keys["bert-key"], **said)
    assert (status, document["state"], document["approved_by"]) == (200, "approved", ["anna", "bert"])
    eventually(lambda: (held.live / "data/a").read_text() == "the new text", "the approved call did not run")
    eventually(lambda: "approval.decided" in outside.types(id_), "nobody was told of the end")
    # What was cut off by the kill is told again, and so perhaps last.
    eventually(lambda: "approval.asked" in outside.types(id_), "nobody was told that it waits")
    assert set(outside.types(id_)) == {"approval.asked", "approval.voted", "approval.decided"}
    last = next(t["data"] for t in outside.told(id_) if t["type"] == "approval.decided")
    assert (last["state"], last["approved_by"], last["reason"]) == ("approved", ["anna", "bert"], "seen")
    assert "the new text" not in json.dumps(outside.told(id_))
    assert scene.operator.ask("AuditVerify")["ok"]


def test_a_denial_by_callback_is_the_agents_answer(outside: Outside) -> None:
    held = outside.scene.hold(ask=[WRITE])
    making = held.rf.thread(lambda: held.rf.fs.write_text("data/b", "x"))
    id_ = outside.waits(held.id)
    said = {"approval": id_, "decision": "deny", "reason": "not on a Friday"}
    assert decide(outside.port, "bert", outside.keys["bert-key"], **said)[0] == 200
    with pytest.raises(Denied, match=r"bert denied .*: not on a Friday"):
        making.result()


def test_a_hook_wakes_an_agent_that_sleeps_also_after_the_kernel_died(outside: Outside) -> None:
    scene = outside.scene
    text = """
from ringfence import agent
from ringfence.agent import Denied
with agent.boot() as rf:
    for _ in range(2):
        got = rf.messages.receive(from_="hook:ci")
        rf.state.put(f"builds/{got.json['build']}", got.sender_name)
    try:
        rf.fs.write_text("secret", "x")
    except Denied:
        rf.state.put("builds/denied", True)
"""
    agent = scene.submit(
        text,
        name="deploy",
        allow=['fs.*: "/workspace/**"', 'messages.receive: "**"', 'state.*: "builds/*"'],
        more="approvals: {linger: 100ms}\nwhen: [{action: fs.write, if: tainted, then: deny}]",
    )

    def asleep() -> bool:
        shown = scene.show(agent)
        return (shown["state"], shown["process"]) == ("sleeping", "none")

    def made() -> list[str]:
        return [step["action"] for step in scene.operator.steps(agent)]

    def give(build: int, message: str) -> tuple[int, dict[str, Any]]:
        body = json.dumps({"build": build}).encode()
        path = f"/v1/hooks/ci/agents/{agent}"
        headers = {
            "content-type": "application/json",
            **signed(outside.keys["ci-key"], body, message=message),
        }
        return post_to(outside.port, path, body, headers)

    eventually(asleep, f"it does not sleep: {scene.show(agent)}")
    status, first = give(1, "msg_1")
    assert (status, first["repeated"]) == (200, False)
    eventually(lambda: "state.put" in made() and asleep(), f"it was not woken: {made()}")
    # The next one is taken, and the kernel dies at once: it is there all the same, and once.
    assert give(2, "msg_2")[0] == 200
    scene.kernel.kill()
    scene.kernel.start()
    status, again = give(2, "msg_2")
    assert (status, again["repeated"]) == (200, True)
    scene.await_end(agent)
    assert made() == ["messages.receive", "state.put"] * 2 + ["fs.write", "state.put"]
    assert scene.operator.ask("PolicyShow", agent=agent)["tainted"].startswith("a message from `hook:ci`")
    assert scene.operator.ask("Status")["callback"]["hooks"] == ["ci"]


def test_what_was_sent_when_the_kernel_died_is_sent_again_with_the_same_id(outside: Outside) -> None:
    scene = outside.scene
    agent = scene.submit("raise SystemExit(3)", more="restart: {policy: never}")
    scene.operator.wait(agent)
    eventually(lambda: len(outside.target.deliveries("/hold")) == 1, "the receiver was not told")
    scene.kernel.kill()
    outside.target.go()
    scene.kernel.start()
    eventually(lambda: len(outside.target.deliveries("/hold")) == 2, "it was not told again")
    first, second = outside.target.deliveries("/hold")
    assert first["headers"]["webhook-id"] == second["headers"]["webhook-id"]
    assert first["body"] == second["body"]
    assert genuine(outside.keys["chat-key"], first)
    assert genuine(outside.keys["chat-key"], second)
    told = json.loads(first["body"])
    assert (told["type"], told["data"]["agent"]) == ("agent.failed", agent)
    eventually(lambda: outside.status()["slow"]["waiting"] == 0, "what was delivered still waits")


def test_a_receiver_that_is_dead_hurts_nobody_and_shows(outside: Outside) -> None:
    held = outside.scene.hold(ask=[WRITE])
    making = held.rf.thread(lambda: held.rf.fs.write_text(f"data/{TOKEN}", "x"))
    id_ = outside.waits(held.id)
    eventually(lambda: outside.types(id_) == ["approval.asked"], "the living receiver was not told")
    # A secret that an agent has come to know and put where a person looks goes no further.
    assert outside.told(id_)[0]["data"]["resource"] == "/workspace/data/[redacted]"
    eventually(lambda: bool(outside.status()["dead"]["error"]), "its failure does not show")
    dead = outside.status()["dead"]
    assert dead["waiting"] >= 1
    assert dead["failing_since"] is not None
    shown = console("status", "--data", str(outside.scene.kernel.data))
    assert shown.returncode == 1
    assert "webhook" in shown.stdout
    assert "can't be reached" in shown.stdout
    assert decide(outside.port, "anna", outside.keys["anna-key"], approval=id_, decision="approve")[0] == 200
    making.result()
    # A kernel file without it takes it, and what waits for it, away.
    config = outside.scene.kernel.config
    config.write_text("".join(line for line in config.read_text().splitlines(True) if "dead:" not in line))
    outside.scene.operator.ask("Reload")
    assert sorted(outside.status()) == ["chat", "slow"]
    assert outside.scene.sql("select count(*) from outbox where webhook = 'dead'") == [(0,)]
